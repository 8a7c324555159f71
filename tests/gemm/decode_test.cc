// Every decoder against the value of every code, in every place of a block.
//
// Mutations tried, each makes a test fail: a denormal's table entry changed, NaN left as 480, the sign dropped.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "argosy/number_formats.h"
#include "gemm/kernels.h"
#include "platform/cpu_detect.h"

namespace argosy::gemm {
namespace {

struct Build {
  const char* name;
  const Decoders* decoders;
};

std::vector<Build> builds() {
  std::vector<Build> all = {{"base", &base_decoders()}};
  const CpuInfo& cpu = **cpu_info();
  if (cpu.has(Level::kAvx2)) all.push_back({"avx2", &avx2_decoders()});
  if (cpu.has(Level::kAvx512) && platform::cpu_features().avx512_vbmi) {
    all.push_back({"vbmi", &vbmi_decoders()});
  }
  return all;
}

// Bits of the bf16 that a code stands for, every NaN alike.
uint16_t bits_of(float value) { return BFloat16::from_float(value).bits; }
uint16_t canonical(BFloat16 value) { return bits_of(value.to_float()); }

// Puts code first + i into the i-th place of a block, and reads all of them back.
void expect_decoded(const Build& build, BlockFormat format, int first) {
  const CodedLayout layout = coded_layout(format);
  const ElementFormat element = info_of(format).element;
  const int mask = layout.is_e2m1 ? 0xF : 0xFF;
  // An exact heap block: the sanitizer sees a read past its end.
  const std::unique_ptr<std::byte[]> codes(new std::byte[static_cast<size_t>(layout.code_bytes)]());
  const auto code_of = [&](int64_t k, int64_t column) {
    return static_cast<uint8_t>((first + k * kPanelColumns + column * 7) & mask);
  };
  for (int64_t k = 0; k < kBlockK; ++k) {
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const CodePlace place = code_place(layout, k, c);
      codes[static_cast<size_t>(place.byte - layout.scale_bytes)] |= std::byte{code_of(k, c)}
                                                                     << place.shift;
    }
  }
  alignas(64) std::byte block[kDecodedBlockBytes];
  (layout.is_e2m1 ? build.decoders->e2m1 : build.decoders->e4m3)(codes.get(), block);
  for (int64_t k = 0; k < kBlockK; ++k) {
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const uint8_t code = code_of(k, c);
      ASSERT_EQ(canonical(bf16_at(block, k, c)), bits_of(decode_element(element, code)))
          << build.name << " " << name_of(format) << " code " << int{code} << " k " << k
          << " column " << c;
    }
  }
}

TEST(Decode, EveryCodeInEveryPlace) {
  for (const Build& build : builds()) {
    for (int first = 0; first < 256; ++first) {
      expect_decoded(build, BlockFormat::kMxfp8, first);
      expect_decoded(build, BlockFormat::kMxfp4, first);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Decode, LevelsChooseWhatTheyMayUse) {
  EXPECT_EQ(&decoders_for(Level::kReference), &base_decoders());
  EXPECT_EQ(&decoders_for(Level::kGeneric), &base_decoders());
  EXPECT_EQ(&decoders_for(Level::kAvx2), &avx2_decoders());
  const bool vbmi = platform::cpu_features().avx512_vbmi && platform::cpu_features().gfni;
  for (const Level level : {Level::kAvx512, Level::kAvx512Bf16, Level::kAmx}) {
    EXPECT_EQ(&decoders_for(level), vbmi ? &vbmi_decoders() : &avx2_decoders());
  }
}

}  // namespace
}  // namespace argosy::gemm
