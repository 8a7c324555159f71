// Gradients of weights of quantised operands: every level against a definition written here from
// contract 4.3 and 5, what transpose_quantise gives against fp64, empty groups, rows outside them,
// what is refused.
//
// Mutations tried, each makes a test fail: a chunk that starts from zero, scales counted from the
// buffer's start, e8m0 scales multiplied in fp32, codes past a group's end left over.
#include <cmath>
#include <numeric>

#include "gemm/backward_case.h"
#include "gemm/quantised_rows_case.h"

namespace argosy {
namespace {

using testing::below;
using testing::code_of;
using testing::expect_all_levels;
using testing::expect_error;
using testing::TestGroups;
using testing::TestMatrix;
using testing::Values;

constexpr BlockFormat kFormats[] = {BlockFormat::kMxfp8, BlockFormat::kMxfp8Ceil};
constexpr DotOrder kOrders[] = {DotOrder::kVdpbf16, DotOrder::kAmx};

// Random codes and scales of [lines, S] with groups of columns; what belongs to no group is NaN.
QuantisedTensor random_columns(std::mt19937& rng, BlockFormat format, const TestGroups& groups,
                               int64_t lines, Values values) {
  const QuantisedLayout layout = quantised_layout(format, lines, groups.num_rows,
                                                  {groups.offsets, groups.sizes}, GroupAxis::kCols)
                                     .value();
  QuantisedTensor tensor = std::move(QuantisedTensor::create(layout)).value();
  const QuantisedTensor drawn =
      testing::random_quantised(rng, format, lines, groups.num_rows, values);
  const QuantisedView view = tensor.view();
  std::memset(view.codes.data, 0x7F, static_cast<size_t>(view.codes.num_elements()));
  for (int64_t line = 0; line < lines; ++line) {
    for (size_t g = 0; g < groups.sizes.size(); ++g) {
      std::copy_n(drawn.view().codes.row(line) + groups.offsets[g], groups.sizes[g],
                  view.codes.row(line) + groups.offsets[g]);
    }
  }
  for (int64_t i = 0; i < view.scales.num_elements(); ++i) {
    const uint32_t bits = testing::random_bits(rng, values) & 0x7FFFFFFFu;
    const bool is_nan = values == Values::kSpecial && rng() % 64 == 0;
    view.scales.as<uint8_t>()[i] = is_nan ? kE8M0NaN : static_cast<uint8_t>(bits >> 23 & 0xFE);
  }
  if (values != Values::kOrdinary) testing::stretch_scales(rng, view);
  return tensor;
}

struct Case : testing::WgradOutput {
  DotOrder order;
  QuantisedTensor d_y, x;

  Case(std::mt19937& rng, DotOrder dot_order, Values values, int64_t rows, int64_t cols,
       std::vector<int64_t> sizes)
      : WgradOutput(rng, values, rows, cols, std::move(sizes)),
        order(dot_order),
        d_y(random_columns(rng, kFormats[rng() % 2], groups, n, values)),
        x(random_columns(rng, kFormats[rng() % 2], groups, k, values)) {}

  std::string text() const {
    return fmt::format("order {} n {} k {} out {}{}{} sizes {}", argosy::name_of(order), n, k,
                       argosy::name_of(out), accumulate ? " accumulate" : "",
                       alpha.empty() ? "" : " alpha", fmt::join(groups.sizes, " "));
  }
  RaggedQuantisedColumns columns() const { return {d_y.view(), groups.offsets, groups.sizes}; }

  TestMatrix run(Level level, ThreadPool* pool = nullptr) const {
    TestMatrix gradient = main;
    const Status status =
        grouped_wgrad({.level = level, .dot_order = order, .pool = pool}, columns(), x.view(),
                      {alpha, accumulate}, out_view(&gradient));
    EXPECT_TRUE(status.ok()) << status.to_string();
    return gradient;
  }

  // Line `line` of a side at row `row` of group g.
  testing::OneScale scale_at(const QuantisedTensor& side, size_t g, int64_t line,
                             int64_t row) const {
    int64_t block = row / 32;
    for (size_t before = 0; before < g; ++before) block += (groups.sizes[before] + 31) / 32;
    const ConstTensorView& scales = side.view().scales;
    const uint8_t code = scales.as<uint8_t>()[line * scales.dim(1) + block];
    return {.value = decode_e8m0(code), .exponent = int{code} - 127};
  }

  __attribute__((noinline)) float flushed_sum(size_t g, int64_t i, int64_t j) const {
    const int64_t size = groups.sizes[g];
    const auto product = [&](int64_t row, float chain) {
      if (row >= size) return chain;
      const int64_t at = groups.offsets[g] + row;
      return std::fma(code_of(d_y.view(), i, at), code_of(x.view(), j, at), chain);
    };
    float acc = 0;
    for (int64_t first = 0; first < size; first += 32) {
      float partial = 0, even = 0, odd = 0;
      for (int64_t row = first; row < first + 32; row += 2) {
        partial = product(row, product(row + 1, partial));
        even = product(row, even);
        odd = product(row + 1, odd);
      }
      if (order == DotOrder::kAmx) partial = even + odd;
      acc = testing::added(partial, scale_at(d_y, g, i, first), scale_at(x, g, j, first), acc);
    }
    return acc + 0.0f;
  }

  float sum(size_t g, int64_t i, int64_t j) const {
    const platform::ScopedFloatEnv flush(platform::Denormals::kFlush);
    return flushed_sum(g, i, j);
  }

  TestMatrix expected() const {
    return of_sums([this](size_t g, int64_t i, int64_t j) { return sum(g, i, j); });
  }
};

TEST(QuantisedWgrad, EveryLevelGivesTheDefinitionsBits) {
  constexpr uint32_t kSeed = 20261130;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(3);
  constexpr int64_t kSizes[] = {1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 65, 97};
  constexpr int64_t kRows[] = {1, 2, 3, 31, 32, 33, 64, 65, 70};
  for (const DotOrder order : kOrders) {
    for (int round = 0; round < 32; ++round) {
      const Values values = testing::kAllValues[static_cast<size_t>(round % 4)];
      const int64_t n = kSizes[static_cast<size_t>(below(rng, 12))];
      const int64_t k = kSizes[static_cast<size_t>(below(rng, 12))];
      const Case one(rng, order, values, n, k, {0, kRows[below(rng, 9)], 0, kRows[below(rng, 9)]});
      expect_all_levels(one, pool.get());
      if (HasFatalFailure()) return;
    }
  }
}

// Groups of more than a chunk of 1024 rows beside shorter ones; more lines of d_y than a tile; more
// panels than one goes over at a time.
TEST(QuantisedWgrad, ChunksContinueOneChain) {
  constexpr uint32_t kSeed = 20261131;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(2);
  for (const DotOrder order : kOrders) {
    expect_all_levels(Case(rng, order, Values::kWide, 7, 35, {1030, 5, 2111}), pool.get());
    expect_all_levels(Case(rng, order, Values::kOrdinary, 3, 600, {1025}), pool.get());
    expect_all_levels(Case(rng, order, Values::kOrdinary, 600, 33, {9}), pool.get());
  }
}

// The pre-filled output of empty groups, and NaN for their alpha.
TEST(QuantisedWgrad, EmptyGroupsGiveZeroOrLeaveTheMainGradient) {
  std::mt19937 rng(3);
  Case one(rng, DotOrder::kVdpbf16, Values::kOrdinary, 20, 18, {2, 0, 3, 0});
  one.out = DType::kF32;
  one.main = TestMatrix(DType::kF32, 4 * 21, 18);
  one.alpha = {1.0f, NAN, 1.0f, NAN};
  for (const bool accumulate : {false, true}) {
    one.accumulate = accumulate;
    for (const Level level : testing::usable_levels()) {
      const TestMatrix got = one.run(level);
      for (const int64_t row : {1 * 21 + 5, 3 * 21 + 19}) {
        ASSERT_EQ(testing::bits_of(got.get(row, 17)), accumulate ? 0xFFFFFFFFu : 0u);
      }
    }
  }
}

// What transpose_quantise makes of bf16 rows: the product of the dequantised matrices in fp64.
TEST(QuantisedWgrad, AgreesWithFp64OfWhatDequantises) {
  constexpr uint32_t kSeed = 20261132;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  constexpr int64_t kN = 40, kK = 50;
  const TestGroups groups(rng, {70, 0, 3});
  const RowGroups ragged{groups.offsets, groups.sizes};
  struct Side {
    QuantisedTensor codes;
    TestMatrix values;
  };
  const auto side = [&](int64_t lines) {
    const TestMatrix rows = groups.random_rows(rng, Values::kOrdinary, DType::kBF16, lines);
    Side made{std::move(QuantisedTensor::create(quantised_layout(BlockFormat::kMxfp8, lines,
                                                                 groups.num_rows, ragged,
                                                                 GroupAxis::kCols)
                                                    .value()))
                  .value(),
              TestMatrix(DType::kF32, lines, groups.num_rows)};
    EXPECT_TRUE(transpose_quantise({}, rows.view(), made.codes.view(), ragged).ok());
    EXPECT_TRUE(dequantise({}, std::as_const(made.codes).view(), made.values.view(), ragged,
                           GroupAxis::kCols)
                    .ok());
    return made;
  };
  const Side d_y = side(kN), x = side(kK);
  std::vector<float> out(static_cast<size_t>(3 * kN * kK), NAN);
  const GemmOptions options{.level = testing::usable_levels().back(),
                            .dot_order = DotOrder::kVdpbf16};
  ASSERT_TRUE(grouped_wgrad(options, {d_y.codes.view(), groups.offsets, groups.sizes},
                            x.codes.view(), {}, TensorView(out.data(), DType::kF32, {3, kN, kK}))
                  .ok());
  for (size_t g = 0; g < 3; ++g) {
    for (int64_t i = 0; i < kN; ++i) {
      for (int64_t j = 0; j < kK; ++j) {
        double want = 0, size = 0;
        for (int64_t r = groups.offsets[g]; r < groups.offsets[g] + groups.sizes[g]; ++r) {
          const double term = double{d_y.values.get(i, r)} * double{x.values.get(j, r)};
          want += term;
          size += std::fabs(term);
        }
        const double bound = 2 * static_cast<double>(groups.sizes[g] + 2) * 0x1p-24 * size;
        ASSERT_NEAR(double{out[(g * kN + static_cast<size_t>(i)) * kK + static_cast<size_t>(j)]},
                    want, bound);
      }
    }
  }
}

// One group of two rows, by hand: codes 1 and 2 times 2^-1, by 4 and 8 times 2^3.
TEST(QuantisedWgrad, ByHand) {
  const std::vector<uint8_t> d_y = {0x38, 0x40}, x = {0x48, 0x50};
  const std::vector<uint8_t> d_y_scale = {126}, x_scale = {130};
  const std::vector<int64_t> offsets = {0}, sizes = {2};
  const auto view = [](const std::vector<uint8_t>& codes, const std::vector<uint8_t>& scales) {
    ConstQuantisedView made;
    made.format = BlockFormat::kMxfp8;
    made.rows = 1;
    made.cols = 2;
    made.codes = ConstTensorView(codes.data(), DType::kE4M3, {1, 2});
    made.scales = ConstTensorView(scales.data(), DType::kE8M0, {1, 1});
    return made;
  };
  const std::vector<float> alpha = {3};
  for (const Level level : testing::usable_levels()) {
    float out = 1;
    ASSERT_TRUE(grouped_wgrad({.level = level, .dot_order = DotOrder::kAmx},
                              {view(d_y, d_y_scale), offsets, sizes}, view(x, x_scale),
                              {alpha, true}, TensorView(&out, DType::kF32, {1, 1, 1}))
                    .ok());
    EXPECT_EQ(out, 1 + 3 * (1 * 4 + 2 * 8) * 4.0f) << name_of(level);
  }
}

TEST(QuantisedWgrad, RefusesWhatDoesNotFit) {
  std::mt19937 rng(8);
  Case one(rng, DotOrder::kAmx, Values::kOrdinary, 6, 5, {3, 2});
  const GemmOptions options{.level = Level::kGeneric, .dot_order = DotOrder::kAmx};
  const StatusCode kInvalid = StatusCode::kInvalidArgument;
  TestMatrix gradient = one.main;
  const TensorView out = one.out_view(&gradient);
  const auto call = [&](const RaggedQuantisedColumns& d_y, const ConstQuantisedView& x) {
    return grouped_wgrad(options, d_y, x, {}, out);
  };
  ConstQuantisedView wrong = one.x.view();
  wrong.format = BlockFormat::kMxfp4;
  expect_error(call(one.columns(), wrong), StatusCode::kUnsupported, {"x is mxfp4"});
  wrong.format = BlockFormat::kE4M3Row128;
  expect_error(call(one.columns(), wrong), StatusCode::kUnsupported, {"x is e4m3_1x128"});
  wrong.format = BlockFormat::kUnset;
  expect_error(call(one.columns(), wrong), kInvalid, {"x needs a format"});
  wrong = one.x.view();
  wrong.cols += 1;
  expect_error(call(one.columns(), wrong), kInvalid, {"number must be equal"});
  wrong = one.x.view();
  wrong.scales.shape[1] -= 1;
  expect_error(call(one.columns(), wrong), kInvalid, {"x: scales is", "expected"});
  RaggedQuantisedColumns d_y = one.columns();
  d_y.columns.codes.shape[0] = 4;
  expect_error(call(d_y, one.x.view()), kInvalid, {"d_y: codes is"});
  d_y = one.columns();
  d_y.sizes = d_y.sizes.first(1);
  expect_error(call(d_y, one.x.view()), kInvalid, {"1 sizes"});
  TensorView other = out;
  other.shape[1] = 4;
  expect_error(grouped_wgrad(options, one.columns(), one.x.view(), {}, other), kInvalid,
               {"ask for [2, 6, 5]"});
  expect_error(grouped_wgrad({.level = Level::kGeneric}, one.columns(), one.x.view(), {}, out),
               kInvalid, {"dot_order is auto"});
}

}  // namespace
}  // namespace argosy
