// Gradients of weights and biases: every level against a twin, fp64, empty groups, the main
// gradient, what is refused.
//
// Mutations tried, each makes a test fail: an empty group left as it was, alpha and the main
// gradient by FMA, a chunk that starts from zero.
#include <cmath>

#include "gemm/backward_case.h"

namespace argosy {
namespace {

using testing::Arithmetic;
using testing::below;
using testing::bits_of;
using testing::expect_all_levels;
using testing::expect_error;
using testing::TestGroups;
using testing::TestMatrix;
using testing::Values;

constexpr Arithmetic kSameBothSides[] = {
    {DType::kBF16, DType::kBF16, DotOrder::kVdpbf16},
    {DType::kBF16, DType::kBF16, DotOrder::kAmx},
    {DType::kF32, DType::kF32, DotOrder::kVdpbf16},
};

struct Case : testing::WgradOutput {
  Arithmetic arithmetic;
  TestMatrix d_y, x;

  Case(std::mt19937& rng, const Arithmetic& numbers, Values values, int64_t rows, int64_t cols,
       std::vector<int64_t> sizes)
      : WgradOutput(rng, values, rows, cols, std::move(sizes)),
        arithmetic(numbers),
        d_y(groups.random_rows(rng, values, numbers.rows, n)),
        x(groups.random_rows(rng, values, numbers.rows, k)) {}

  std::string text() const {
    return fmt::format("{} n {} k {} out {}{}{} sizes {}", arithmetic.text(), n, k,
                       argosy::name_of(out), accumulate ? " accumulate" : "",
                       alpha.empty() ? "" : " alpha", fmt::join(groups.sizes, " "));
  }
  RaggedRows ragged() const { return {d_y.view(), groups.offsets, groups.sizes}; }
  WeightGradientOptions options() const { return {alpha, accumulate}; }

  TestMatrix run(Level level, ThreadPool* pool = nullptr) const {
    TestMatrix gradient = main;
    const Status status =
        grouped_wgrad({.level = level, .dot_order = arithmetic.order, .pool = pool}, ragged(),
                      x.view(), options(), out_view(&gradient));
    EXPECT_TRUE(status.ok()) << status.to_string();
    return gradient;
  }

  std::vector<float> column(const TestMatrix& matrix, size_t g, int64_t c) const {
    std::vector<float> values;
    for (int64_t r = 0; r < groups.sizes[g]; ++r) {
      values.push_back(matrix.get(groups.offsets[g] + r, c));
    }
    return values;
  }

  TestMatrix expected() const {
    return of_sums([this](size_t g, int64_t i, int64_t j) {
      return testing::twin_dot(arithmetic.rows, arithmetic.order, column(d_y, g, i),
                               column(x, g, j));
    });
  }
};

TEST(Wgrad, EveryLevelGivesTheTwinsBits) {
  constexpr uint32_t kSeed = 20241105;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(3);
  constexpr int64_t kSizes[] = {1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 65, 97};
  constexpr int64_t kRows[] = {1, 2, 3, 31, 32, 33, 64, 65, 70};
  for (const Arithmetic& arithmetic : kSameBothSides) {
    for (int round = 0; round < 32; ++round) {
      const Values values = testing::kAllValues[static_cast<size_t>(round % 4)];
      const int64_t n = kSizes[static_cast<size_t>(below(rng, 12))];
      const int64_t k = kSizes[static_cast<size_t>(below(rng, 12))];
      const Case one(rng, arithmetic, values, n, k,
                     {0, kRows[below(rng, 9)], 0, kRows[below(rng, 9)]});
      expect_all_levels(one, pool.get());
      if (HasFatalFailure()) return;
    }
  }
}

// Groups of more than a chunk of 1024 rows beside shorter ones; more columns of d_y than a tile;
// more panels than one goes over at a time.
TEST(Wgrad, ChunksContinueOneChain) {
  constexpr uint32_t kSeed = 20241106;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(2);
  for (const Arithmetic& arithmetic : kSameBothSides) {
    expect_all_levels(Case(rng, arithmetic, Values::kWide, 7, 35, {1030, 5, 2111}), pool.get());
    expect_all_levels(Case(rng, arithmetic, Values::kOrdinary, 3, 600, {1025}), pool.get());
    expect_all_levels(Case(rng, arithmetic, Values::kOrdinary, 300, 33, {9}), pool.get());
  }
}

// C132: sizes [2, 0, 3, 0], the output pre-filled with NaN, NaN for the empty groups' alpha.
TEST(Wgrad, EmptyGroupsGiveZeroOrLeaveTheMainGradient) {
  std::mt19937 rng(3);
  for (const Arithmetic& arithmetic : kSameBothSides) {
    Case one(rng, arithmetic, Values::kOrdinary, 20, 18, {2, 0, 3, 0});
    one.out = DType::kF32;
    one.main = TestMatrix(DType::kF32, 4 * 21, 18);
    one.alpha = {1.0f, NAN, 1.0f, NAN};
    for (const bool accumulate : {false, true}) {
      one.accumulate = accumulate;
      for (const Level level : testing::usable_levels()) {
        const TestMatrix got = one.run(level);
        for (const int64_t g : {1, 3}) {
          for (int64_t i = 0; i < 20; ++i) {
            for (int64_t j = 0; j < 18; ++j) {
              const uint32_t bits = bits_of(got.get(g * 21 + i, j));
              ASSERT_EQ(bits, accumulate ? 0xFFFFFFFFu : 0u) << name_of(level);
            }
          }
        }
      }
    }
  }
}

// alpha = 3 and a main gradient of 1 over products of small integers.
TEST(Wgrad, ByHand) {
  const std::vector<float> d_y = {1, 2, 10, 20}, x = {1, 2, 3, 4, 5, 6};  // [2, 2], [2, 3]
  const std::vector<int64_t> offsets = {0}, sizes = {2};
  const std::vector<float> alpha = {3};
  for (const Level level : testing::usable_levels()) {
    std::vector<float> out(6, 1.0f);
    ASSERT_TRUE(grouped_wgrad({.level = level},
                              {ConstTensorView(d_y.data(), DType::kF32, {2, 2}), offsets, sizes},
                              ConstTensorView(x.data(), DType::kF32, {2, 3}), {alpha, true},
                              TensorView(out.data(), DType::kF32, {1, 2, 3}))
                    .ok());
    // Row n: 1 + 3 * (d_y[0][n] x[0] + d_y[1][n] x[1]).
    EXPECT_EQ(out, (std::vector<float>{124, 157, 190, 247, 313, 379})) << name_of(level);
  }
}

TEST(Wgrad, AgreesWithFp64) {
  constexpr uint32_t kSeed = 20241107;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  for (const Arithmetic& arithmetic : kSameBothSides) {
    Case one(rng, arithmetic, Values::kOrdinary, 40, 50, {70, 3});
    one.out = DType::kF32;
    one.main = TestMatrix(DType::kF32, 2 * 41, 50);
    one.accumulate = false;
    one.alpha.clear();
    const TestMatrix got = one.run(testing::usable_levels().back());
    for (size_t g = 0; g < 2; ++g) {
      for (int64_t i = 0; i < one.n; ++i) {
        for (int64_t j = 0; j < one.k; ++j) {
          double want = 0, size = 0;
          for (int64_t r = 0; r < one.groups.sizes[g]; ++r) {
            const int64_t row = one.groups.offsets[g] + r;
            const double term = double{one.d_y.get(row, i)} * double{one.x.get(row, j)};
            want += term;
            size += std::fabs(term);
          }
          const double bound = 2 * static_cast<double>(one.groups.sizes[g] + 2) * 0x1p-24 * size;
          const int64_t at = static_cast<int64_t>(g) * 41 + i;
          ASSERT_NEAR(double{got.get(at, j)}, want, bound) << one.text();
        }
      }
    }
  }
}

// A gradient larger than caches is streamed where its lines allow it; a row of 1041 ends in a part
// of a line.
TEST(Wgrad, LargeGradientsGiveTheSameBits) {
  constexpr uint32_t kSeed = 20241109;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  constexpr int64_t kN = 1030, kK = 1041, kStride = 1056;
  const TestGroups groups(rng, {3});
  const TestMatrix d_y = groups.random_rows(rng, Values::kSpecial, DType::kBF16, kN);
  const TestMatrix x = groups.random_rows(rng, Values::kSpecial, DType::kBF16, kK);
  const auto run = [&](Level level) {
    Tensor gradient = Tensor::zeros(DType::kF32, {1, kN, kStride}).value();
    std::memset(gradient.view().data, 0xA5, static_cast<size_t>(gradient.num_bytes()));
    TensorView out = gradient.view();
    out.shape[2] = kK;
    const Status status =
        grouped_wgrad({.level = level, .dot_order = DotOrder::kVdpbf16},
                      {d_y.view(), groups.offsets, groups.sizes}, x.view(), {}, out);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return gradient;
  };
  const Tensor want = run(Level::kReference);
  for (const Level level : testing::usable_levels()) {
    const Tensor got = run(level);
    ASSERT_EQ(std::memcmp(got.bytes().data(), want.bytes().data(), want.bytes().size()), 0)
        << name_of(level);
  }
}

// Streamed sums that alpha makes denormal, beside a group that is only moved: products flush denormals, gradients keep them.
TEST(Wgrad, LargeGradientsKeepDenormals) {
  constexpr int64_t kN = 1024, kK = 544, kRows = 2;
  const std::vector<int64_t> sizes = {kRows, kRows}, offsets = {0, kRows};
  const std::vector<BFloat16> d_y(2 * kRows * kN, BFloat16::from_float(1.5f));
  const std::vector<BFloat16> x(2 * kRows * kK, BFloat16::from_float(0x1p-60f));
  const std::vector<float> alpha = {0x1p-80f, 1.0f};
  for (const Level level : testing::usable_levels()) {
    Tensor out = Tensor::zeros(DType::kF32, {2, kN, kK}).value();
    ASSERT_GE(out.num_bytes(), int64_t{4} << 20);
    const Status status = grouped_wgrad(
        {.level = level, .dot_order = DotOrder::kVdpbf16},
        {ConstTensorView(d_y.data(), DType::kBF16, {2 * kRows, kN}), offsets, sizes},
        ConstTensorView(x.data(), DType::kBF16, {2 * kRows, kK}), {.alpha = alpha}, out.view());
    ASSERT_TRUE(status.ok()) << status.to_string();
    const auto* const got = reinterpret_cast<const float*>(out.bytes().data());
    for (int64_t i = 0; i < kN * kK; ++i) {
      ASSERT_EQ(got[i], 0x3p-140f) << name_of(level) << " " << i;  // a denormal
      ASSERT_EQ(got[kN * kK + i], 0x3p-60f) << name_of(level) << " " << i;
    }
  }
}

// Two halves of a batch accumulate: the second run starts from dirty rooms and a dirty output
// (C136).
TEST(Wgrad, ASecondStepGivesTheSameBits) {
  std::mt19937 rng(5);
  Case one(rng, kSameBothSides[0], Values::kOrdinary, 50, 70, {40, 0, 90});
  one.accumulate = false;
  const TestMatrix first = one.run(testing::usable_levels().back());
  Case dirty(rng, kSameBothSides[0], Values::kSpecial, 90, 99, {200});
  (void)dirty.run(testing::usable_levels().back());
  one.main = first;
  EXPECT_TRUE(one.run(testing::usable_levels().back()).bytes() == first.bytes());
}

TEST(BiasGradient, RowOrderAlphaAndMainGradient) {
  constexpr uint32_t kSeed = 20241108;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(3);
  for (int round = 0; round < 60; ++round) {
    const Values values = testing::kAllValues[static_cast<size_t>(round % 4)];
    const DType dtype = round % 3 == 0 ? DType::kF32 : DType::kBF16;
    const DType out = round % 5 == 0 ? DType::kBF16 : DType::kF32;
    const int64_t n = round % 7 == 0 ? 1100 : 1 + below(rng, 40);
    const TestGroups groups(rng, {below(rng, 9), 0, below(rng, 70)});
    const TestMatrix d_y = groups.random_rows(rng, values, dtype, n);
    const bool accumulate = rng() % 2 == 0;
    std::vector<float> alpha;
    if (rng() % 2 == 0)
      alpha = {0.5f, NAN, std::bit_cast<float>(testing::random_bits(rng, values))};
    TestMatrix main(out, 3, n, 2);
    if (accumulate) main.fill(rng, values, 0, 3);
    TestMatrix want = main;
    for (int64_t g = 0; g < 3; ++g) {
      const auto at = static_cast<size_t>(g);
      if (groups.sizes[at] == 0 && accumulate) continue;
      for (int64_t c = 0; c < n; ++c) {
        volatile float sum = 0;
        for (int64_t r = 0; r < groups.sizes[at]; ++r) {
          sum = sum + d_y.get(groups.offsets[at] + r, c);
        }
        if (!alpha.empty() && groups.sizes[at] > 0) sum = alpha[at] * sum;
        want.set(g, c, accumulate ? main.get(g, c) + sum : sum);
      }
    }
    for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), pool.get()}) {
      TestMatrix got = main;
      const Status status = grouped_bias_gradient({.level = Level::kGeneric, .pool = threads},
                                                  {d_y.view(), groups.offsets, groups.sizes},
                                                  {alpha, accumulate}, got.view());
      ASSERT_TRUE(status.ok()) << status.to_string();
      ASSERT_TRUE(got.bytes() == want.bytes()) << "round " << round;
    }
  }
}

TEST(Wgrad, RefusesWhatDoesNotFit) {
  std::mt19937 rng(8);
  Case one(rng, kSameBothSides[0], Values::kOrdinary, 6, 5, {3, 2});
  one.alpha.clear();
  const GemmOptions options{.level = Level::kGeneric, .dot_order = DotOrder::kAmx};
  const StatusCode kInvalid = StatusCode::kInvalidArgument;
  TestMatrix gradient = one.main;
  const TensorView out = one.out_view(&gradient);
  const auto call = [&](const RaggedRows& d_y, const ConstTensorView& x, const TensorView& to,
                        std::span<const float> alpha = {}) {
    return grouped_wgrad(options, d_y, x, {alpha, false}, to);
  };

  const TestMatrix f32(DType::kF32, one.groups.num_rows, 5);
  expect_error(call(one.ragged(), f32.view(), out), kInvalid, {"x is F32", "d_y is BF16"});
  const TestMatrix longer(DType::kBF16, one.groups.num_rows + 1, 5);
  expect_error(call(one.ragged(), longer.view(), out), kInvalid, {"number of rows must be equal"});
  TensorView wrong = out;
  wrong.shape[2] = 4;
  expect_error(call(one.ragged(), one.x.view(), wrong), kInvalid, {"out is", "expected 5 columns"});
  wrong = out;
  wrong.shape[1] = 5;
  expect_error(call(one.ragged(), one.x.view(), wrong), kInvalid, {"ask for [2, 6, 5]"});
  wrong = out;
  wrong.shape[0] = 1;
  expect_error(call(one.ragged(), one.x.view(), wrong), kInvalid, {"2 sizes"});
  wrong = out;
  wrong.num_dims = 2;
  expect_error(call(one.ragged(), one.x.view(), wrong), kInvalid, {"expected 3 dims"});
  wrong = out;
  wrong.dtype = DType::kF64;
  expect_error(call(one.ragged(), one.x.view(), wrong), kInvalid, {"F64"});
  wrong = out;
  wrong.strides[0] = wrong.strides[1];
  expect_error(call(one.ragged(), one.x.view(), wrong), kInvalid, {"matrices overlap"});
  wrong = out;
  wrong.strides[1] = 3;
  expect_error(call(one.ragged(), one.x.view(), wrong), kInvalid, {"rows overlap"});
  const std::vector<float> three = {1, 2, 3};
  expect_error(call(one.ragged(), one.x.view(), out, three), kInvalid,
               {"alpha has 3 values for 2 groups"});
  TestMatrix shared = one.x;
  TensorView inside(shared.view().data, DType::kBF16, {2, 6, 5});
  inside.strides[0] = inside.strides[1] = 0;
  expect_error(call(one.ragged(), std::as_const(shared).view(), inside), kInvalid, {"overlap"});
  expect_error(grouped_wgrad({.level = Level::kGeneric}, one.ragged(), one.x.view(), {}, out),
               kInvalid, {"dot_order is auto"});
  expect_error(grouped_bias_gradient(options, one.ragged(), {three, false}, out), kInvalid,
               {"expected 2 dims"});
}

}  // namespace
}  // namespace argosy
