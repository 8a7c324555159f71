// The canonical dot products: golden bits of both orders, the VDPBF16PS instruction where the CPU
// has it, and single sums worked out by hand that tell each order from its neighbours.
#include "numeric/dot.h"

#include <gtest/gtest.h>
#include <immintrin.h>

#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "argosy/cpu.h"
#include "platform/cpu_detect.h"
#include "platform/float_env.h"
#include "support/float_cases.h"
#include "support/golden_file.h"

namespace argosy::numeric {
namespace {

using testing::bits_of;
using testing::kAllValues;
using testing::random_bf16;
using testing::random_f32;
using testing::Values;

std::vector<BFloat16> rounded(std::initializer_list<float> values) {
  std::vector<BFloat16> out;
  for (const float value : values) out.push_back(BFloat16::from_float(value));
  return out;
}

using BF16Dot = float (*)(std::span<const BFloat16>, std::span<const BFloat16>);

TEST(Dot, GoldenBitsOfBothOrders) {
  const testing::GoldenFile golden("golden/dot_orders.safetensors");
  int num_outputs = 0;
  for (const auto& [name, entry] : golden.header().items()) {
    if (!name.ends_with(".x")) continue;
    const std::string set = name.substr(0, name.size() - 2);
    const auto x = golden.read<BFloat16>(name);
    const auto w = golden.read<BFloat16>(set + ".w");
    const auto k = static_cast<size_t>(golden.shape(name)[1]);
    for (const auto& [order, dot] : {std::pair<const char*, BF16Dot>{".amx", dot_amx},
                                     std::pair<const char*, BF16Dot>{".vdpbf16", dot_vdpbf16}}) {
      const auto want = golden.read<float>(set + order);
      ASSERT_EQ(want.size(), 8u * 16u);
      for (size_t i = 0; i < want.size(); ++i) {
        const std::span row(x.data() + i / 16 * k, k);
        const std::span column(w.data() + i % 16 * k, k);
        ASSERT_EQ(bits_of(dot(row, column)), bits_of(want[i])) << set << order << " output " << i;
        ++num_outputs;
      }
    }
  }
  EXPECT_EQ(num_outputs, 4 * 10 * 2 * 128);
}

__attribute__((target("avx512f,avx512bf16"))) void vdpbf16(const BFloat16* x, const BFloat16* w,
                                                           float* acc) {
  const __m512i x_bits = _mm512_loadu_si512(x);
  const __m512i w_bits = _mm512_loadu_si512(w);
  __m512bh x_pairs, w_pairs;
  std::memcpy(&x_pairs, &x_bits, sizeof(x_pairs));
  std::memcpy(&w_pairs, &w_bits, sizeof(w_pairs));
  _mm512_storeu_ps(acc, _mm512_dpbf16_ps(_mm512_loadu_ps(acc), x_pairs, w_pairs));
}

// 16 dot products of length k at once: lane i is x[i] . w[i], each row-major [16, k].
void expect_instruction_agrees(const std::vector<BFloat16>& x, const std::vector<BFloat16>& w,
                               size_t k) {
  float acc[16] = {};
  for (size_t pair = 0; pair < k; pair += 2) {
    BFloat16 x_pair[32] = {}, w_pair[32] = {};
    for (size_t lane = 0; lane < 16; ++lane) {
      for (size_t i = pair; i < std::min(pair + 2, k); ++i) {
        x_pair[lane * 2 + i - pair] = x[lane * k + i];
        w_pair[lane * 2 + i - pair] = w[lane * k + i];
      }
    }
    vdpbf16(x_pair, w_pair, acc);
  }
  for (size_t lane = 0; lane < 16; ++lane) {
    const float got =
        dot_vdpbf16(std::span(x).subspan(lane * k, k), std::span(w).subspan(lane * k, k));
    ASSERT_EQ(bits_of(got), bits_of(finish_dot(acc[lane]))) << "k " << k << " lane " << lane;
  }
}

TEST(Dot, TheInstructionItselfGivesTheVdpbf16Order) {
  if (!platform::cpu_features().avx512_bf16) GTEST_SKIP() << "no VDPBF16PS: 0 outputs compared";
  std::mt19937 rng(20240611);
  int num_outputs = 0;
  for (const Values values : kAllValues) {
    for (const size_t k : {1, 2, 3, 31, 32, 33, 64, 127, 130, 515}) {
      for (int repeat = 0; repeat < 20; ++repeat) {
        SCOPED_TRACE(testing::name_of(values));
        const auto x = random_bf16(rng, values, 16 * k);
        const auto w = random_bf16(rng, values, 16 * k);
        expect_instruction_agrees(x, w, k);
        num_outputs += 16;
      }
    }
  }
  RecordProperty("outputs_compared", num_outputs);
}

TEST(Dot, OrdersAreTheirOwn) {
  // VDPBF16PS adds the odd product first: 2^24 + 1 loses the 1, then - 2^24 leaves 0. TDPBF16PS
  // keeps the even chain apart: -2^24 + 2^24 = 0 there, and 1 in the odd chain survives.
  const auto x = rounded({1, 1, 1, 1});
  const auto w = rounded({-0x1p24f, 1, 0x1p24f, 0});
  EXPECT_EQ(dot_vdpbf16(x, w), 0.0f + (0x1p24f + (1.0f - 0x1p24f)));
  EXPECT_EQ(dot_amx(x, w), 1.0f);
  const auto odd_first = rounded({-0x1p24f, 0x1p24f, 0, 1});
  EXPECT_EQ(dot_vdpbf16(rounded({1, 1}), rounded({1, -0x1p24f})), 1.0f - 0x1p24f);
  EXPECT_EQ(dot_vdpbf16(x, odd_first), 1.0f);
}

TEST(Dot, AmxBlocksAre32Long) {
  // Element 32 opens a new block: its 1 meets the total, 2^24, and is lost. In one block it would
  // meet the even chain, 0.
  std::vector<BFloat16> x(33, BFloat16::from_float(1));
  std::vector<BFloat16> w(33);
  w[1] = BFloat16::from_float(0x1p24f);
  w[32] = BFloat16::from_float(1);
  EXPECT_EQ(dot_amx(x, w), 0x1p24f);
  w[32] = {};
  w[0] = BFloat16::from_float(3);
  EXPECT_EQ(dot_amx(x, w), 0x1p24f + 4.0f) << "3 + 2^24 rounds to even once";
}

TEST(Dot, F32ChainIsFusedAndAscending) {
  const float a = 1.0f + 0x1p-12f;  // a * a = 1 + 2^-11 + 2^-24
  EXPECT_EQ(dot_f32(std::vector<float>{-1, a}, std::vector<float>{1, a}), 0x1p-11f + 0x1p-24f);
  EXPECT_EQ(dot_f32(std::vector<float>{1, 0x1p24f, -0x1p24f}, std::vector<float>{1, 1, 1}), 0.0f);
  EXPECT_EQ(dot_f32(std::vector<float>{0x1p24f, -0x1p24f, 1}, std::vector<float>{1, 1, 1}), 1.0f);
}

TEST(Dot, F32WidensBf16Weights) {
  std::mt19937 rng(7);
  for (const Values values : kAllValues) {
    const auto x = random_f32(rng, values, 97);
    const auto w = random_bf16(rng, values, 97);
    std::vector<float> wide;
    for (const BFloat16 value : w) wide.push_back(value.to_float());
    EXPECT_EQ(bits_of(dot_f32(x, w)), bits_of(dot_f32(x, wide)));
  }
}

TEST(Dot, DenormalsCountAsZero) {
  const std::vector<float> one = {1}, half = {0.5f}, big = {0x1p100f};
  const std::vector<float> denormal = {0x1p-127f}, smallest = {0x1p-126f};
  EXPECT_EQ(bits_of(dot_f32(denormal, big)), 0u) << "denormal input";
  EXPECT_EQ(bits_of(dot_f32(smallest, half)), 0u) << "result underflows";
  EXPECT_EQ(bits_of(dot_f32(smallest, std::vector<float>{-0.5f})), 0u) << "no -0 comes out";
  EXPECT_EQ(dot_f32(smallest, one), 0x1p-126f);
  const std::vector<BFloat16> tiny = {BFloat16{0x0040}}, large = rounded({0x1p100f});
  EXPECT_EQ(bits_of(dot_amx(tiny, large)), 0u);
  EXPECT_EQ(bits_of(dot_vdpbf16(tiny, large)), 0u);
}

TEST(Dot, ZerosNaNsAndInfinities) {
  const float inf = std::numeric_limits<float>::infinity();
  struct Row {
    std::vector<float> x, w;
    uint32_t want;
  };
  const Row rows[] = {
      {{}, {}, 0},
      {{-0.0f}, {1}, 0},
      {{inf}, {2}, 0x7F800000u},
      {{inf}, {-2}, 0xFF800000u},
      {{inf}, {0}, kCanonicalNaN},
      {{inf, inf}, {1, -1}, kCanonicalNaN},
      {{std::bit_cast<float>(0xFFC12345u)}, {1}, kCanonicalNaN},
      {{std::bit_cast<float>(0x7F810000u)}, {1}, kCanonicalNaN},
  };
  for (const Row& row : rows) {
    std::vector<BFloat16> x, w;
    for (const float value : row.x) x.push_back({static_cast<uint16_t>(bits_of(value) >> 16)});
    for (const float value : row.w) w.push_back({static_cast<uint16_t>(bits_of(value) >> 16)});
    EXPECT_EQ(bits_of(dot_f32(row.x, row.w)), row.want);
    EXPECT_EQ(bits_of(dot_amx(x, w)), row.want);
    EXPECT_EQ(bits_of(dot_vdpbf16(x, w)), row.want);
  }
}

TEST(Dot, TheCallersEnvironmentNeitherMattersNorChanges) {
  std::mt19937 rng(11);
  const auto x = random_bf16(rng, Values::kTiny, 130);
  const auto w = random_bf16(rng, Values::kWide, 130);
  const auto f = random_f32(rng, Values::kWide, 130);
  const uint32_t want[] = {bits_of(dot_amx(x, w)), bits_of(dot_vdpbf16(x, w)),
                           bits_of(dot_f32(f, w))};
  const unsigned saved = _mm_getcsr();
  for (const unsigned csr : {0x1F80u, 0x1F80u | 0x8040u, 0x1F80u | 0x2000u, 0x1F80u | 0x6000u}) {
    _mm_setcsr(csr);
    const uint32_t got[] = {bits_of(dot_amx(x, w)), bits_of(dot_vdpbf16(x, w)),
                            bits_of(dot_f32(f, w))};
    const unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    EXPECT_EQ(after, csr);
    EXPECT_TRUE(std::equal(got, got + 3, want)) << std::hex << csr;
  }
}

}  // namespace
}  // namespace argosy::numeric
