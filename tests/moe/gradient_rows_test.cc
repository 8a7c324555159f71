// Every build of the row arithmetic of backward against scalar steps written out here; bit for bit.
//
// Mutations tried, each makes a test fail: the chains of dot added 1, 2, 4, 8 apart; `last` added to the start as well; a NaN left
// as it comes, of fp32 and of dot.
#include "moe/gradient_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "argosy/bfloat16.h"
#include "platform/float_env.h"

namespace argosy {
namespace {

// Floats of every exponent, with zeros, denormals, Inf and NaN among them; or such as make finite sums.
std::vector<float> draw(std::mt19937_64& random, int64_t n, bool is_special) {
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) {
    const uint64_t word = random();
    value =
        std::ldexp(static_cast<float>(word % 1000) / 500.0f - 1.0f, static_cast<int>(word >> 60));
    if (is_special && (word >> 40 & 3) == 0)
      value = std::bit_cast<float>(static_cast<uint32_t>(word));
  }
  return values;
}

// A row of bf16 or fp32 at an odd address of elements.
class Row {
 public:
  Row(DType dtype, std::vector<float> values)
      : dtype_(dtype), values_(std::move(values)), bytes_((values_.size() + 2) * 4) {
    for (size_t i = 0; i < values_.size(); ++i) {
      if (dtype == DType::kF32) {
        std::memcpy(data() + i * 4, &values_[i], 4);
        continue;
      }
      const BFloat16 rounded = BFloat16::from_float(values_[i]);
      std::memcpy(data() + i * 2, &rounded, 2);
      values_[i] = rounded.to_float();
    }
  }
  std::byte* data() { return bytes_.data() + size_of(dtype_); }
  float operator[](int64_t i) const { return values_[static_cast<size_t>(i)]; }
  // What is stored now, as bits; one more than the row has.
  std::vector<uint32_t> stored() {
    std::vector<uint32_t> all;
    for (size_t i = 0; i <= values_.size(); ++i) {
      uint32_t word = 0;
      std::memcpy(&word, data() + i * static_cast<size_t>(size_of(dtype_)),
                  static_cast<size_t>(size_of(dtype_)));
      all.push_back(word);
    }
    return all;
  }

 private:
  DType dtype_;
  std::vector<float> values_;
  std::vector<std::byte> bytes_;
};

uint32_t rounded(DType dtype, float value) {
  if (dtype == DType::kBF16) return BFloat16::from_float(value).bits;
  return std::isnan(value) ? 0x7FC00000u : std::bit_cast<uint32_t>(value);
}

double scalar_dot(const Row& a, const Row& b, int64_t n) {
  double chains[16] = {};
  for (int64_t i = 0; i < n; ++i) {
    chains[i % 16] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  for (int half : {8, 4, 2, 1}) {
    for (int i = 0; i < half; ++i) chains[i] += chains[i + half];
  }
  return chains[0];
}

class GradientRows : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!cpu_info().value()->has(build().level)) GTEST_SKIP() << "this CPU lacks the level";
  }
  static const GradientRowBuild& build() {
    return gradient_row_builds()[static_cast<size_t>(GetParam())];
  }

  // body(dtype, n, special) for rows of many lengths; denormals kept, as the callers do.
  template <typename Body>
  static void for_rows(const Body& body) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      for (const int64_t n : {0, 1, 15, 16, 17, 31, 33, 64, 100, 511, 512, 513, 1040}) {
        for (const bool special : {false, true}) {
          SCOPED_TRACE(std::string(name_of(dtype)) + " n " + std::to_string(n) +
                       (special ? " special" : ""));
          body(dtype, n, special);
        }
      }
    }
  }
};

// C246: rows of K experts, weighed and summed: against fp64 the error is one bf16 rounding whatever K is.
TEST_P(GradientRows, ErrorDoesNotGrowWithK) {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  std::mt19937_64 random(7);
  constexpr int64_t kN = 512;
  constexpr double kHalfUlp = 1.0 / 256;  // of bf16, of a number next above a power of two
  for (const int64_t k : {1, 2, 8}) {
    std::vector<Row> rows;
    std::vector<const std::byte*> addresses;
    for (int64_t i = 0; i < k; ++i) rows.emplace_back(DType::kBF16, draw(random, kN, false));
    for (Row& row : rows) addresses.push_back(row.data());
    Row out(DType::kBF16, draw(random, kN, false));
    const std::vector<float> last(kN, 0.0f);
    SumRowsArgs args;
    args.last = last.data();
    args.rows = addresses.data();
    args.num_rows = k;
    args.n = kN;
    args.out = out.data();
    build().of(DType::kBF16).sum(args);
    const std::vector<uint32_t> stored = out.stored();
    for (int64_t i = 0; i < kN; ++i) {
      double exact = 0, largest = 0;
      for (const Row& row : rows) {
        exact += static_cast<double>(row[i]);
        largest = std::max(largest, std::fabs(static_cast<double>(row[i])));
      }
      const auto got =
          static_cast<double>(std::bit_cast<float>(stored[static_cast<size_t>(i)] << 16));
      // fp32 additions beside it: K of the largest.
      EXPECT_LE(std::fabs(got - exact),
                std::fabs(exact) * kHalfUlp + static_cast<double>(k) * largest * 0x1p-24)
          << "K " << k << " column " << i;
    }
  }
}

TEST_P(GradientRows, ScaleRoundsOnce) {
  std::mt19937_64 random(1);
  for_rows([&](DType dtype, int64_t n, bool special) {
    Row x(dtype, draw(random, n, special)), out(dtype, draw(random, n, false));
    const float weight = draw(random, 1, special)[0];
    std::vector<uint32_t> want = out.stored();
    for (int64_t i = 0; i < n; ++i) want[static_cast<size_t>(i)] = rounded(dtype, weight * x[i]);
    build().of(dtype).scale(x.data(), weight, n, out.data());
    EXPECT_EQ(out.stored(), want);
  });
}

TEST_P(GradientRows, DotAddsSixteenChains) {
  std::mt19937_64 random(2);
  for_rows([&](DType dtype, int64_t n, bool special) {
    Row a(dtype, draw(random, n, special)), b(dtype, draw(random, n, special));
    const double want = scalar_dot(a, b, n);
    const double got = build().of(dtype).dot(a.data(), b.data(), n);
    const auto bits = std::isnan(want) ? 0x7FF8000000000000u : std::bit_cast<uint64_t>(want);
    EXPECT_EQ(std::bit_cast<uint64_t>(got), bits) << want;
  });
}

TEST_P(GradientRows, SumGoesByRankOfRowsAndEndsWithLast) {
  std::mt19937_64 random(3);
  for_rows([&](DType dtype, int64_t n, bool special) {
    for (const bool has_shared : {false, true}) {
      std::vector<Row> rows;
      for (int k = 0; k < 4; ++k) rows.emplace_back(dtype, draw(random, n, special));
      Row shared(DType::kF32, draw(random, n, special)),
          last(DType::kF32, draw(random, n, special));
      Row out(dtype, draw(random, n, false));
      const std::byte* const addresses[] = {rows[0].data(), rows[1].data(), nullptr,
                                            rows[3].data()};
      std::vector<uint32_t> want = out.stored();
      for (int64_t i = 0; i < n; ++i) {
        float sum = has_shared ? shared[i] : 0.0f;
        for (const size_t k : {0, 1, 3}) sum += rows[k][i];
        want[static_cast<size_t>(i)] = rounded(dtype, sum + last[i]);
      }
      build().of(dtype).sum(
          {.shared = has_shared ? reinterpret_cast<const float*>(shared.data()) : nullptr,
           .last = reinterpret_cast<const float*>(last.data()),
           .rows = addresses,
           .num_rows = 4,
           .n = n,
           .out = out.data()});
      EXPECT_EQ(out.stored(), want);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Builds, GradientRows, ::testing::Range(0, 3));

}  // namespace
}  // namespace argosy
