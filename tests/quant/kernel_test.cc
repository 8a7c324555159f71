// Every kernel that this CPU can run against the one for any x86-64, which block_test holds against the naive twin: levels
// alone do not reach those that need a feature beside their level.
#include "quant/kernel.h"

#include <gtest/gtest.h>

#include "quant/quant_cases.h"
#include "quant/scales.h"

namespace argosy::testing {
namespace {

using namespace quant;

constexpr uint32_t kSeed = 99;
constexpr int64_t kLengths[] = {1,   31,  32,  64,   127,  128,  192,
                                500, 512, 544, 1024, 1056, 2048, 4100};

struct Row {
  std::vector<uint8_t> codes, decoded_bf16, decoded_f32, e8m0;
  std::vector<uint32_t> amax;
  std::vector<float> scales;
  friend bool operator==(const Row& a, const Row& b) {
    return a.codes == b.codes && a.decoded_bf16 == b.decoded_bf16 &&
           a.decoded_f32 == b.decoded_f32 && a.e8m0 == b.e8m0 && a.amax == b.amax;
  }
};

Row run(const Kernel& kernel, BlockFormat format, const QuantiseOptions& options,
        const Stored& values, int64_t n, bool stream) {
  const ScaleRule rule = rule_of(format, options);
  const int64_t block = rule.info.block_cols, num_blocks = (n + block - 1) / block;
  const bool bf16 = values.view.dtype == DType::kBF16;
  Row row;
  row.amax.resize(static_cast<size_t>(num_blocks));
  AmaxArgs amax{values.view.data, n, block, row.amax.data()};
  bf16 ? kernel.amax_bf16(amax) : kernel.amax_f32(amax);
  std::vector<float> factors(row.amax.size());
  row.e8m0.resize(row.amax.size() * 4);
  store_scales(kernel, rule, 0.01f, row.amax.data(), num_blocks,
               reinterpret_cast<std::byte*>(row.e8m0.data()), factors.data());
  Result<Tensor> codes = Tensor::zeros(DType::kU8, {n + 64});  // 64-byte lines, to stream to
  EncodeArgs encode;
  encode.x = values.view.data;
  encode.n = n;
  encode.block = block;
  encode.scales = factors.data();
  encode.reciprocal = rule.info.scale_dtype == DType::kE8M0;
  encode.amax = rule.info.scale_dtype == DType::kF32 ? row.amax.data() : nullptr;
  encode.element = rule.info.element;
  encode.nan_overflow = options.overflow == Overflow::kNaN;
  encode.stream = stream;
  encode.codes = codes->view().as<uint8_t>();
  bf16 ? kernel.encode_bf16(encode) : kernel.encode_f32(encode);
  row.codes.assign(encode.codes, encode.codes + n + 64);
  DecodeArgs decode;
  decode.codes = encode.codes;
  decode.n = n;
  decode.block = block;
  load_scales(kernel, rule.info, 0.01f, reinterpret_cast<const std::byte*>(row.e8m0.data()),
              num_blocks, false, factors.data());
  decode.scales = factors.data();
  decode.power_of_two = encode.reciprocal;
  decode.element = encode.element;
  decode.stream = stream;
  Result<Tensor> out = Tensor::zeros(DType::kF32, {n + 64});
  decode.out = out->view().data;
  kernel.decode_bf16(decode);
  const auto* const bytes = out->view().as<uint8_t>();
  row.decoded_bf16.assign(bytes, bytes + 2 * n);
  kernel.decode_f32(decode);
  row.decoded_f32.assign(bytes, bytes + 4 * n);
  return row;
}

TEST(Kernel, AllGiveTheSameBytes) {
  std::mt19937 rng(kSeed);
  const Kernel& base = *kernels().front();
  for (int round = 0; round < 12; ++round) {
    for (const int64_t n : kLengths) {
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        const Stored values(case_values(rng, 1, n, dtype, round % 2 == 0), 1, n, n, dtype);
        for (const BlockFormat format : kAllFormats) {
          QuantiseOptions options;
          if (round % 3 == 0) options.overflow = Overflow::kNaN;
          if (round % 4 == 1) options.zero_block_code = 0;
          if (round % 5 == 2) options.e8m0_rule = E8M0Rule::kFloor;
          const Row want = run(base, format, options, values, n, false);
          for (size_t k = 0; k < kernels().size(); ++k) {
            for (const bool stream : {false, true}) {
              ASSERT_EQ(run(*kernels()[k], format, options, values, n, stream), want)
                  << "kernel " << k << " " << name_of(format) << " " << name_of(dtype) << " n " << n
                  << " round " << round << " seed " << kSeed;
            }
          }
        }
      }
    }
  }
}

// Values whose quotients lie on and next to every midpoint between codes, two ulps to both sides, of either sign, none above
// `most`; zeros up to whole blocks. Every midpoint has 16 values of its own: a kernel that divides a whole vector where it
// sees one midpoint must see each.
std::vector<float> around_midpoints(float scale, float most, int64_t block, std::mt19937& rng) {
  std::vector<float> values;
  for (uint8_t code = 0; code < 0x7E; ++code) {
    const double below = decode_element(ElementFormat::kE4M3, code);
    const double above = decode_element(ElementFormat::kE4M3, static_cast<uint8_t>(code + 1));
    const auto at = std::bit_cast<int32_t>(static_cast<float>((below + above) / 2 * scale));
    for (int32_t word = std::max(at - 2, 0); word <= at + 2; ++word) {
      const float value = std::bit_cast<float>(word);
      if (value <= most) values.push_back(rng() % 2 == 0 ? value : -value);
    }
    values.resize((values.size() + 15) / 16 * 16, 0.0f);
  }
  const auto size = static_cast<size_t>(block);
  values.resize((values.size() + size - 1) / size * size, 0.0f);
  return values;
}

void expect_equal_codes(EncodeArgs args) {
  std::vector<uint8_t> want(static_cast<size_t>(args.n)), got(want.size());
  args.codes = want.data();
  kernels().front()->encode_f32(args);
  args.codes = got.data();
  for (const Kernel* const kernel : kernels()) {
    kernel->encode_f32(args);
    ASSERT_EQ(got, want) << "block " << args.block << " scale " << args.scales[0] << " seed "
                         << kSeed;
  }
}

// Scales of all exponents, e4m3's denormals among the midpoints.
TEST(Kernel, MidpointsOfEveryCodeAtEveryScale) {
  std::mt19937 rng(kSeed);
  constexpr int64_t kBlock = 128;
  for (uint32_t field = 0; field < 255; ++field) {
    const uint32_t amax = field << 23 | (static_cast<uint32_t>(rng()) & 0x7FFFFF);
    float scale = 0;
    kernels().front()->scales_f32({&amax, 1, &scale});
    std::vector<float> values = around_midpoints(scale, std::bit_cast<float>(amax), kBlock, rng);
    const std::vector<uint32_t> amaxes(values.size() / kBlock, amax);
    std::vector<float> scales(amaxes.size(), scale);
    EncodeArgs args;
    args.x = reinterpret_cast<const std::byte*>(values.data());
    args.n = static_cast<int64_t>(values.size());
    args.block = kBlock;
    args.scales = scales.data();
    args.amax = amaxes.data();
    expect_equal_codes(args);

    const float power = std::bit_cast<float>(std::clamp(field, 1u, 246u) << 23);
    values = around_midpoints(power, 511 * power, kBlock, rng);
    args.x = reinterpret_cast<const std::byte*>(values.data());
    args.n = static_cast<int64_t>(values.size());
    args.reciprocal = true;
    args.amax = nullptr;
    for (const int64_t block : {int64_t{32}, kBlock}) {
      scales.assign(static_cast<size_t>(args.n / block), 1 / power);
      args.block = block;
      args.scales = scales.data();
      expect_equal_codes(args);
    }
  }
}

// All pairs of codes and exponents of the scale.
TEST(Kernel, EveryCodeAtEveryScale) {
  std::vector<uint8_t> codes(512);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  for (uint32_t field = 0; field < 256; ++field) {
    for (const uint32_t mantissa : {0u, 0x123456u, 0x7FFFFFu}) {
      const std::vector<float> scales(16, std::bit_cast<float>(field << 23 | mantissa));
      for (const int64_t block : {32, 128}) {
        DecodeArgs args;
        args.codes = codes.data();
        args.n = 512;
        args.block = block;
        args.scales = scales.data();
        args.power_of_two = mantissa == 0 && field != 0 && field != 255;
        std::vector<uint32_t> want(512), got(512);
        for (void (*Kernel::*decode)(const DecodeArgs&) :
             {&Kernel::decode_bf16, &Kernel::decode_f32}) {
          args.out = reinterpret_cast<std::byte*>(want.data());
          (kernels().front()->*decode)(args);
          for (const Kernel* const kernel : kernels()) {
            args.out = reinterpret_cast<std::byte*>(got.data());
            (kernel->*decode)(args);
            ASSERT_EQ(got, want) << field << " " << mantissa << " block " << block;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace argosy::testing
