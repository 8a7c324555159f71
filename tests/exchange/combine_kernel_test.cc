// Every build of the combine kernel against scalar steps written out here; bit for bit.
#include "exchange/combine_kernel.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "argosy/bfloat16.h"
#include "platform/copy.h"

namespace argosy {
namespace {

// Floats of every exponent, with zeros, denormals, Inf and NaN among them.
std::vector<float> draw(std::mt19937_64& random, int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) {
    const uint64_t word = random();
    value = std::bit_cast<float>(static_cast<uint32_t>(word));
    if (word >> 62 == 0) value = std::ldexp(static_cast<float>(word % 1000) / 500.0f - 1.0f, 3);
  }
  return values;
}

uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }

// bf16 or fp32 rows of one case, as floats and as the bytes the kernel reads. A guard follows every row.
struct Rows {
  std::vector<std::vector<float>> values;
  std::vector<std::vector<std::byte>> bytes;

  template <typename T>
  static Rows draw_rows(std::mt19937_64& random, int64_t num_rows, int64_t n) {
    Rows rows;
    for (int64_t i = 0; i < num_rows; ++i) {
      std::vector<float> values = draw(random, n);
      // Odd addresses of rows: nothing is promised about alignment but the element's.
      std::vector<std::byte> bytes((static_cast<size_t>(n) + 1) * sizeof(T));
      auto* const at = reinterpret_cast<T*>(bytes.data()) + 1;
      for (size_t c = 0; c < values.size(); ++c) {
        if constexpr (std::is_same_v<T, BFloat16>) {
          at[c] = BFloat16::from_float(values[c]);
          values[c] = at[c].to_float();
        } else {
          at[c] = values[c];
        }
      }
      rows.values.push_back(std::move(values));
      rows.bytes.push_back(std::move(bytes));
    }
    return rows;
  }
};

class CombineKernelTest : public ::testing::TestWithParam<const CombineKernel*> {
 protected:
  void SetUp() override {
    if (!cpu_info().value()->has(GetParam()->level)) GTEST_SKIP() << "this CPU lacks the level";
  }
  template <typename T>
  static void call(const CombineArgs& args) {
    (std::is_same_v<T, BFloat16> ? GetParam()->combine_bf16 : GetParam()->combine_f32)(args);
  }
};

template <typename T>
float rounded(float value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return BFloat16::from_float(value).to_float();
  } else {
    return std::isnan(value) ? std::bit_cast<float>(0x7FC00000u) : value;
  }
}

struct Parts {
  bool shared = false, residual = false, bias = false;
};

// The kernel against contract 3.5 written out, one column after the other; a guard behind the output.
template <typename T>
void expect_scalar_steps(void (*call)(const CombineArgs&), std::mt19937_64& random, int64_t n,
                         int64_t num_rows, const Parts& parts) {
  const Rows rows = Rows::draw_rows<T>(random, num_rows, n);
  const Rows extra = Rows::draw_rows<T>(random, 2, n);
  const std::vector<float> bias = draw(random, n);
  const std::vector<float> weights = draw(random, num_rows);
  std::vector<const std::byte*> addresses;
  for (const std::vector<std::byte>& bytes : rows.bytes) {
    addresses.push_back(bytes.data() + sizeof(T));
  }
  CombineArgs args;
  args.rows = addresses.data();
  args.weights = weights.data();
  args.num_rows = num_rows;
  args.next_rows = addresses.data();
  args.num_next = num_rows;
  if (parts.shared) args.shared = extra.bytes[0].data() + sizeof(T);
  args.shared_scale = 0.75f;
  if (parts.residual) args.residual = extra.bytes[1].data() + sizeof(T);
  if (parts.bias) args.bias = bias.data();
  args.n = n;
  // Anywhere, and past the caches where whole lines are.
  constexpr size_t kLine = 64 / sizeof(T);
  for (const bool stream : {false, true}) {
    std::vector<T> out(static_cast<size_t>(n) + 2 * kLine, T{});
    std::memset(static_cast<void*>(out.data()), 0x5A, out.size() * sizeof(T));
    size_t lead = 1;
    while (stream && reinterpret_cast<uintptr_t>(out.data() + lead) % 64 != 0) ++lead;
    args.out = reinterpret_cast<std::byte*>(out.data() + lead);
    args.stream = stream;
    call(args);
    platform::finish_streaming();
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      float acc = parts.shared ? extra.values[0][i] * 0.75f : 0.0f;
      if (parts.residual) acc += extra.values[1][i];
      if (parts.bias) acc += bias[i];
      for (size_t k = 0; k < rows.values.size(); ++k) {
        acc = std::fma(weights[k], rows.values[k][i], acc);
      }
      float have = 0;
      if constexpr (std::is_same_v<T, BFloat16>) {
        have = out[lead + i].to_float();
      } else {
        have = out[lead + i];
      }
      ASSERT_EQ(bits(have), bits(rounded<T>(acc))) << "column " << i << " of " << n;
    }
    const auto* const guard = reinterpret_cast<const unsigned char*>(out.data());
    for (size_t i = 0; i < sizeof(T); ++i) {
      ASSERT_EQ(guard[(lead - 1) * sizeof(T) + i], 0x5A);
      ASSERT_EQ(guard[(lead + static_cast<size_t>(n)) * sizeof(T) + i], 0x5A) << n;
    }
  }
}

TEST_P(CombineKernelTest, EqualsScalarSteps) {
  std::mt19937_64 random(11);
  for (const int64_t n : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 129, 257, 513, 1100}) {
    for (const int64_t num_rows : {0, 1, 2, 3, 8, 17}) {
      for (const Parts& parts : {Parts{}, Parts{true, false, false}, Parts{false, true, false},
                                 Parts{false, false, true}, Parts{true, true, true}}) {
        SCOPED_TRACE(::testing::Message()
                     << num_rows << " rows, " << parts.shared << parts.residual << parts.bias);
        ASSERT_NO_FATAL_FAILURE(
            expect_scalar_steps<BFloat16>(call<BFloat16>, random, n, num_rows, parts));
        ASSERT_NO_FATAL_FAILURE(
            expect_scalar_steps<float>(call<float>, random, n, num_rows, parts));
      }
    }
  }
}

// K25, C245: eight bf16 rows, 256 and seven times 1, weights 1: 263 in fp32, rounded once to 264.
TEST_P(CombineKernelTest, SumsInFp32AndRoundsOnce) {
  std::vector<BFloat16> rows(8, BFloat16::from_float(1.0f));
  rows[0] = BFloat16::from_float(256.0f);
  const std::vector<float> weights(8, 1.0f);
  std::vector<const std::byte*> addresses;
  for (const BFloat16& row : rows) addresses.push_back(reinterpret_cast<const std::byte*>(&row));
  BFloat16 out;
  CombineArgs args;
  args.rows = addresses.data();
  args.weights = weights.data();
  args.num_rows = 8;
  args.n = 1;
  args.out = reinterpret_cast<std::byte*>(&out);
  call<BFloat16>(args);
  EXPECT_EQ(out.to_float(), 264.0f);
}

INSTANTIATE_TEST_SUITE_P(Levels, CombineKernelTest,
                         ::testing::ValuesIn(combine_kernels().begin(), combine_kernels().end()),
                         [](const auto& kernel) {
                           const bool is_half = kernel.param == &kCombineKernelHalfWidth;
                           return std::string(name_of(kernel.param->level)) +
                                  (is_half ? "_half_width" : "");
                         });

}  // namespace
}  // namespace argosy
