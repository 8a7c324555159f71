// Gradients of rows: every level against a twin that never sees packed weights, against fp64, and
// what is refused.
//
// Mutations tried, each makes a test fail: up before gate in the chain, a half block not cleared, a
// chunk that starts from zero.
#include <cmath>

#include "gemm/backward_case.h"

namespace argosy {
namespace {

using testing::Arithmetic;
using testing::below;
using testing::expect_all_levels;
using testing::expect_error;
using testing::kArithmetics;
using testing::TestGroups;
using testing::TestMatrix;
using testing::Values;

// One random dgrad. `up` is used where the weights are gate_up.
struct Case {
  Arithmetic arithmetic;
  bool is_gate_up;
  int64_t n, k;
  TestGroups groups;
  TestMatrix d_first, d_up;
  std::vector<TestMatrix> first, up;  // [n, k] per group
  PackedWeights packed;
  DType out;

  Case(std::mt19937& rng, const Arithmetic& numbers, bool gate_up, Values values, int64_t rows_of_w,
       int64_t cols_of_w, std::vector<int64_t> sizes)
      : arithmetic(numbers),
        is_gate_up(gate_up),
        n(rows_of_w),
        k(cols_of_w),
        groups(rng, std::move(sizes)),
        d_first(groups.random_rows(rng, values, numbers.rows, n)),
        d_up(groups.random_rows(rng, values, numbers.rows, n)),
        out(numbers.rows == DType::kF32 || rng() % 2 == 0 ? DType::kF32 : DType::kBF16) {
    const auto num_groups = static_cast<int64_t>(groups.sizes.size());
    const auto kind = gate_up ? PackedWeights::Kind::kGateUp : PackedWeights::Kind::kPlain;
    packed = PackedWeights::create(kind, numbers.weights, num_groups, n, k).value();
    for (int64_t g = 0; g < num_groups; ++g) {
      for (std::vector<TestMatrix>* matrices : {&first, &up}) {
        matrices->emplace_back(numbers.weights, n, k);
        matrices->back().fill(rng, values, 0, n);
      }
      const ConstTensorView w = std::as_const(first.back()).view();
      const Status status = gate_up ? packed.set_group(g, w, std::as_const(up.back()).view())
                                    : packed.set_group(g, w);
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }

  std::string text() const {
    return fmt::format("{} {} n {} k {} out {} sizes {}", arithmetic.text(),
                       is_gate_up ? "gate_up" : "plain", n, k, argosy::name_of(out),
                       fmt::join(groups.sizes, " "));
  }

  RaggedRows ragged() const { return {d_first.view(), groups.offsets, groups.sizes}; }

  TestMatrix run(Level level, ThreadPool* pool = nullptr) const {
    TestMatrix d_x(out, groups.num_rows, k, 1);
    const GemmOptions options{.level = level, .dot_order = arithmetic.order, .pool = pool};
    const Status status = is_gate_up
                              ? grouped_dgrad(options, ragged(), d_up.view(), packed, d_x.view())
                              : grouped_dgrad(options, ragged(), packed, d_x.view());
    EXPECT_TRUE(status.ok()) << status.to_string();
    return d_x;
  }

  // Each operand's n, then zeros to a multiple of 32.
  void append(const TestMatrix& d, const TestMatrix& w, int64_t row, int64_t column,
              std::vector<float>* x, std::vector<float>* y) const {
    for (int64_t i = 0; i < n; ++i) {
      x->push_back(d.get(row, i));
      y->push_back(w.get(i, column));
    }
    x->resize((x->size() + 31) / 32 * 32);
    y->resize(x->size());
  }

  TestMatrix expected() const {
    TestMatrix d_x(out, groups.num_rows, k, 1);
    groups.for_each_row([&](size_t g, int64_t row) {
      for (int64_t column = 0; column < k; ++column) {
        std::vector<float> x, w;
        append(d_first, first[g], row, column, &x, &w);
        if (is_gate_up) append(d_up, up[g], row, column, &x, &w);
        d_x.set(row, column, testing::twin_dot(arithmetic.rows, arithmetic.order, x, w));
      }
    });
    return d_x;
  }
};

TEST(Dgrad, EveryLevelGivesTheTwinsBits) {
  constexpr uint32_t kSeed = 20241101;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(3);
  constexpr int64_t kSizes[] = {1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 65, 97};
  for (const Arithmetic& arithmetic : kArithmetics) {
    for (const bool gate_up : {false, true}) {
      for (int round = 0; round < 24; ++round) {
        const Values values = testing::kAllValues[static_cast<size_t>(round % 4)];
        const int64_t n = kSizes[static_cast<size_t>(below(rng, 12))];
        const int64_t k = kSizes[static_cast<size_t>(below(rng, 12))];
        const Case one(rng, arithmetic, gate_up, values, n, k,
                       {below(rng, 6), 0, below(rng, 40), 1});
        expect_all_levels(one, pool.get());
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Contractions of several chunks of 1024, with many rows and few; rows of several tiles.
TEST(Dgrad, ChunksContinueOneChain) {
  constexpr uint32_t kSeed = 20241102;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(2);
  for (const Arithmetic& arithmetic : kArithmetics) {
    expect_all_levels(Case(rng, arithmetic, false, Values::kWide, 1057, 33, {5, 14}), pool.get());
    expect_all_levels(Case(rng, arithmetic, true, Values::kOrdinary, 1039, 7, {3}), pool.get());
    expect_all_levels(Case(rng, arithmetic, true, Values::kOrdinary, 40, 65, {270}), pool.get());
  }
}

TEST(Dgrad, LargeGradientsGiveTheSameBits) {
  constexpr uint32_t kSeed = 20261130;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  for (const bool gate_up : {false, true}) {
    const Case one(rng, kArithmetics[0], gate_up, Values::kSpecial, 5, 1041, {0, 700, 330});
    testing::expect_levels_agree([&](Level level, ThreadPool* pool) {
      TensorView d_x;
      const Tensor all = testing::large_output(one.groups.num_rows, one.k, &d_x);
      const GemmOptions options{.level = level, .dot_order = one.arithmetic.order, .pool = pool};
      const Status status =
          gate_up ? grouped_dgrad(options, one.ragged(), one.d_up.view(), one.packed, d_x)
                  : grouped_dgrad(options, one.ragged(), one.packed, d_x);
      EXPECT_TRUE(status.ok()) << status.to_string();
      return std::vector<std::byte>(all.bytes().begin(), all.bytes().end());
    });
  }
}

// The order does not depend on how many rows there are, nor on the layout: exact integers, by hand.
TEST(Dgrad, ByHand) {
  const std::vector<float> gate = {1, 2, 3, 4}, up = {5, 6, 7, 8};  // [2, 2]
  PackedWeights w =
      PackedWeights::create(PackedWeights::Kind::kGateUp, DType::kF32, 1, 2, 2).value();
  ASSERT_TRUE(w.set_group(0, ConstTensorView(gate.data(), DType::kF32, {2, 2}),
                          ConstTensorView(up.data(), DType::kF32, {2, 2}))
                  .ok());
  const std::vector<float> d_gate = {1, 10}, d_up = {100, 1000};
  std::vector<float> d_x(2);
  const std::vector<int64_t> offsets = {0}, sizes = {1};
  for (const Level level : testing::usable_levels()) {
    ASSERT_TRUE(grouped_dgrad({.level = level},
                              {ConstTensorView(d_gate.data(), DType::kF32, {1, 2}), offsets, sizes},
                              ConstTensorView(d_up.data(), DType::kF32, {1, 2}), w,
                              TensorView(d_x.data(), DType::kF32, {1, 2}))
                    .ok());
    // 1 * 1 + 10 * 3 + 100 * 5 + 1000 * 7, and the second column.
    EXPECT_EQ(d_x, (std::vector<float>{7531, 8642})) << name_of(level);
  }
}

TEST(Dgrad, AgreesWithFp64) {
  constexpr uint32_t kSeed = 20241103;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  for (const Arithmetic& arithmetic : kArithmetics) {
    Case one(rng, arithmetic, true, Values::kOrdinary, 75, 40, {9, 30});
    one.out = DType::kF32;
    const TestMatrix got = one.run(testing::usable_levels().back());
    one.groups.for_each_row([&](size_t g, int64_t row) {
      for (int64_t column = 0; column < one.k; ++column) {
        double want = 0, size = 0;
        for (int64_t i = 0; i < one.n; ++i) {
          for (const auto& [d, w] :
               {std::pair{&one.d_first, &one.first[g]}, std::pair{&one.d_up, &one.up[g]}}) {
            const double term = double{d->get(row, i)} * double{w->get(i, column)};
            want += term;
            size += std::fabs(term);
          }
        }
        const double bound = 2 * static_cast<double>(2 * one.n + 2) * 0x1p-24 * size;
        ASSERT_NEAR(double{got.get(row, column)}, want, bound) << one.text();
      }
    });
  }
}

// A true NaN in a live row reaches its own row, and only that (C139).
TEST(Dgrad, NaNStaysInItsRow) {
  std::mt19937 rng(7);
  Case one(rng, kArithmetics[0], false, Values::kOrdinary, 33, 40, {20});
  one.d_first.set(one.groups.offsets[0] + 3, 32, NAN);
  for (const Level level : testing::usable_levels()) {
    const TestMatrix got = one.run(level);
    one.groups.for_each_row([&](size_t, int64_t row) {
      const bool is_hit = row == one.groups.offsets[0] + 3;
      for (int64_t c = 0; c < one.k; ++c) {
        ASSERT_EQ(std::isnan(got.get(row, c)), is_hit) << name_of(level) << " row " << row;
      }
    });
  }
}

TEST(Dgrad, RefusesWhatDoesNotFit) {
  std::mt19937 rng(8);
  const Case plain(rng, kArithmetics[0], false, Values::kOrdinary, 6, 5, {3, 2});
  const Case gate_up(rng, kArithmetics[0], true, Values::kOrdinary, 6, 5, {3, 2});
  const Case f32(rng, kArithmetics[3], false, Values::kOrdinary, 6, 5, {3, 2});
  const GemmOptions options{.level = Level::kGeneric, .dot_order = DotOrder::kAmx};
  TestMatrix d_x(DType::kF32, plain.groups.num_rows, 5);
  const StatusCode kInvalid = StatusCode::kInvalidArgument;

  const TestMatrix wide(DType::kBF16, plain.groups.num_rows, 7);
  expect_error(grouped_dgrad(options, {wide.view(), plain.groups.offsets, plain.groups.sizes},
                             plain.packed, d_x.view()),
               kInvalid, {"d_y is BF16 [", "expected 6 columns"});
  TestMatrix narrow(DType::kF32, plain.groups.num_rows, 4);
  expect_error(grouped_dgrad(options, plain.ragged(), plain.packed, narrow.view()), kInvalid,
               {"d_x is F32 [", "expected 5 columns"});
  TestMatrix longer(DType::kF32, plain.groups.num_rows + 1, 5);
  expect_error(grouped_dgrad(options, plain.ragged(), plain.packed, longer.view()), kInvalid,
               {"number of rows must be equal"});
  expect_error(grouped_dgrad(options, gate_up.ragged(), gate_up.packed, d_x.view()), kInvalid,
               {"the weights are gate_up"});
  expect_error(grouped_dgrad(options, plain.ragged(), plain.d_up.view(), plain.packed, d_x.view()),
               kInvalid, {"the weights are plain"});
  const TestMatrix other(DType::kF32, gate_up.groups.num_rows, 6);
  TestMatrix other_x(DType::kF32, gate_up.groups.num_rows, 5);
  expect_error(
      grouped_dgrad(options, gate_up.ragged(), other.view(), gate_up.packed, other_x.view()),
      kInvalid, {"d_up is F32", "d_gate is BF16"});
  TestMatrix rounded(DType::kBF16, f32.groups.num_rows, 5);
  expect_error(grouped_dgrad(options, f32.ragged(), f32.packed, rounded.view()), kInvalid,
               {"d_x is BF16", "F32"});
  expect_error(grouped_dgrad({.level = Level::kGeneric}, plain.ragged(), plain.packed, d_x.view()),
               kInvalid, {"dot_order is auto"});
  const std::vector<int64_t> too_long = {3, 200};
  expect_error(grouped_dgrad(options, {plain.d_first.view(), plain.groups.offsets, too_long},
                             plain.packed, d_x.view()),
               kInvalid, {"group 1", "size 200"});
  const PackedWeights coded =
      PackedWeights::create_quantised(PackedWeights::Kind::kPlain, BlockFormat::kMxfp8, 2, 6, 5)
          .value();
  expect_error(grouped_dgrad(options, plain.ragged(), coded, d_x.view()), StatusCode::kUnsupported,
               {"mxfp8"});
  TestMatrix shared = plain.d_first;
  TensorView inside(shared.view().data, DType::kBF16, {plain.groups.num_rows, 5});
  expect_error(grouped_dgrad(options, {shared.view(), plain.groups.offsets, plain.groups.sizes},
                             plain.packed, inside),
               kInvalid, {"overlaps"});
}

}  // namespace
}  // namespace argosy
