// The layer over ranks equals the naive layer bit for bit: any R, threads, level, budget,
// alignment, mask.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "argosy/moe.h"
#include "moe/layer_cases.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::LayerCase;
using testing::Matrix;
using testing::naive_bytes;
using testing::NaiveExpert;
using testing::NaiveLayer;
using testing::run_group;

struct RunSetup {
  int num_ranks = 1;
  int threads = 1;
  Level level = Level::kGeneric;
  int64_t budget_rows = 100000;
  int64_t alignment = 1;
  int repeats = 1;
};

MoeOptions options_of(const NaiveLayer& layer, const RunSetup& setup) {
  MoeOptions options;
  options.hidden_dtype = layer.dtype;
  options.receive_budget_bytes = setup.budget_rows * layer.hidden * size_of(layer.dtype);
  options.group_alignment = setup.alignment;
  return options;
}

GroupOptions group_options(const NaiveLayer& layer, const RunSetup& setup) {
  GroupOptions options;
  options.dot_order = layer.order;
  options.level = setup.level;
  options.threads_per_rank = setup.threads;
  return options;
}

void apply(const GroupOptions& from, GroupOptions* to) {
  to->dot_order = from.dot_order;
  to->level = from.level;
  to->threads_per_rank = from.threads_per_rank;
}

// The bytes of the output, in global token order.
std::vector<std::byte> run_layer(const NaiveLayer& layer, const Matrix& hidden, const uint8_t* mask,
                                 const RunSetup& setup) {
  const Tensor input = testing::to_tensor(hidden, layer.dtype);
  Tensor output = std::move(Tensor::zeros(layer.dtype, {hidden.rows, layer.hidden})).value();
  const GroupOptions wanted = group_options(layer, setup);
  run_group(
      setup.num_ranks,
      [&](Group& group) {
        Result<MoeWeights> weights =
            testing::weights_for_rank(layer, group.rank(), group.num_ranks());
        ASSERT_TRUE(weights.has_value()) << weights.error().to_string();
        Result<std::unique_ptr<MoeLayer>> moe =
            MoeLayer::create(group, layer.router, std::move(*weights), options_of(layer, setup));
        ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
        const int64_t first = owned_begin(hidden.rows, group.num_ranks(), group.rank());
        const int64_t count = owned_begin(hidden.rows, group.num_ranks(), group.rank() + 1) - first;
        for (int repeat = 0; repeat < setup.repeats; ++repeat) {
          MoeReport report;
          const Status status = (*moe)->forward(input.view().rows(first, count),
                                                mask == nullptr ? nullptr : mask + first,
                                                output.view().rows(first, count), &report);
          ASSERT_TRUE(status.ok()) << status.to_string();
          int64_t rows = 0;
          for (const int64_t n : report.rows_per_expert) rows += n;
          int64_t by_rank = 0;
          for (const int64_t n : report.rows_per_rank) by_rank += n;
          EXPECT_EQ(rows, by_rank);
        }
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) { apply(wanted, &options); });
  const std::span<const std::byte> bytes = output.bytes();
  return {bytes.begin(), bytes.end()};
}

class LayerBits : public ::testing::TestWithParam<LayerCase> {};

TEST_P(LayerBits, EqualTheNaiveLayerForAnySetup) {
  const LayerCase param = GetParam();
  const NaiveLayer layer = testing::layer_of(param);
  std::mt19937_64 random(5);
  const Matrix hidden =
      testing::random_matrix(random, 45, layer.hidden, 1.0f, param.dtype == DType::kBF16);
  const std::vector<std::byte> want = naive_bytes(layer, hidden, nullptr);
  for (const int ranks : {1, 2, 3, 4, 7, 8, 16}) {
    EXPECT_EQ(run_layer(layer, hidden, nullptr, {.num_ranks = ranks}), want) << ranks;
  }
  for (const RunSetup& setup : {
           RunSetup{.num_ranks = 1, .threads = 2, .level = Level::kReference},
           RunSetup{.num_ranks = 3, .threads = 2, .repeats = 3},
           RunSetup{.num_ranks = 4, .level = Level::kReference, .budget_rows = 7},
           RunSetup{.num_ranks = 2, .budget_rows = 1},
           RunSetup{.num_ranks = 3, .threads = 2, .budget_rows = 16, .alignment = 16, .repeats = 2},
           RunSetup{.num_ranks = 7, .alignment = 32},
       }) {
    EXPECT_EQ(run_layer(layer, hidden, nullptr, setup), want)
        << setup.num_ranks << " ranks, budget " << setup.budget_rows << ", alignment "
        << setup.alignment;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, LayerBits,
    ::testing::Values(LayerCase{DType::kBF16, DotOrder::kAmx, true, false},
                      LayerCase{DType::kBF16, DotOrder::kVdpbf16, true, true},
                      LayerCase{DType::kBF16, DotOrder::kVdpbf16, false, false},
                      LayerCase{DType::kF32, DotOrder::kVdpbf16, true, false},
                      LayerCase{DType::kF32, DotOrder::kVdpbf16, true, true},
                      LayerCase{DType::kBF16, DotOrder::kAmx, false, false, true},
                      LayerCase{DType::kBF16, DotOrder::kVdpbf16, false, false, true},
                      LayerCase{DType::kF32, DotOrder::kAmx, false, false, true}));

// Every level that this machine has gives the bits of the naive layer.
TEST(Layer, LevelsDoNotChangeBits) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const DotOrder order : {DotOrder::kAmx, DotOrder::kVdpbf16}) {
      const NaiveLayer layer = testing::random_gpt_oss_layer(17, dtype, order, 5, 2, 70, 33);
      std::mt19937_64 random(7);
      const Matrix hidden = testing::random_matrix(random, 40, 70, 1.0f, dtype == DType::kBF16);
      const std::vector<std::byte> want = naive_bytes(layer, hidden, nullptr);
      for (const Level level : built_levels()) {
        if (!resolve_level(level).has_value()) continue;
        EXPECT_EQ(run_layer(layer, hidden, nullptr, {.num_ranks = 2, .level = level}), want)
            << name_of(level);
      }
    }
  }
}

// C244: zero weights, a down bias of 1 in every expert: each counts with its expert's weight, once, so the row is 1,
// not 2, for any number of ranks and rounds.
TEST(Layer, TheDownBiasIsWeightedOncePerExpert) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    NaiveLayer layer = testing::random_gpt_oss_layer(3, dtype, DotOrder::kVdpbf16, 4, 2, 1, 3);
    layer.gate = {4, 1, {0.0f, 0.0f, 0.0f, 0.0f}};
    // Softmax over the two chosen: 0.7 and 0.3.
    layer.gate_bias = {0.0f, std::log(7.0f / 3.0f), -9.0f, -9.0f};
    if (dtype == DType::kBF16)
      layer.gate_bias[1] = BFloat16::from_float(layer.gate_bias[1]).to_float();
    for (NaiveExpert& expert : layer.experts) {
      for (Matrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        std::fill(matrix->values.begin(), matrix->values.end(), 0.0f);
      }
      expert.down_bias = {1.0f};
    }
    const Matrix hidden{2, 1, {1.0f, -3.0f}};
    for (const int ranks : {1, 2, 3}) {
      for (const int64_t budget_rows : {1, 100}) {
        const std::vector<std::byte> bytes =
            run_layer(layer, hidden, nullptr, {.num_ranks = ranks, .budget_rows = budget_rows});
        EXPECT_EQ(bytes, naive_bytes(layer, hidden, nullptr));
        for (int64_t token = 0; token < 2; ++token) {
          float value = 0;
          if (dtype == DType::kF32) {
            std::memcpy(&value, bytes.data() + token * 4, 4);
          } else {
            BFloat16 narrow;
            std::memcpy(&narrow, bytes.data() + token * 2, 2);
            value = narrow.to_float();
          }
          EXPECT_NEAR(value, 1.0f, dtype == DType::kF32 ? 1e-6f : 1e-2f) << ranks;
        }
      }
    }
  }
}

void expect_masked_rows_unread(const NaiveLayer& layer) {
  std::mt19937_64 random(6);
  Matrix hidden = testing::random_matrix(random, 23, 16, 1.0f, true);
  std::vector<uint8_t> mask(23, 1);
  for (const size_t token : {0u, 1u, 7u, 11u, 12u, 22u}) mask[token] = 0;
  const std::vector<std::byte> want = naive_bytes(layer, hidden, mask.data());
  for (int64_t token = 0; token < 23; ++token) {
    if (mask[static_cast<size_t>(token)] != 0) continue;
    for (int64_t i = 0; i < 16; ++i) {
      hidden.values[static_cast<size_t>(token * 16 + i)] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  for (const int ranks : {1, 2, 5}) {
    EXPECT_EQ(run_layer(layer, hidden, mask.data(), {.num_ranks = ranks}), want) << ranks;
  }
}

// C002: masked rows hold NaN, are never read, and change nothing of the others.
TEST(Layer, MaskedRowsAreNeverRead) {
  expect_masked_rows_unread(
      testing::random_layer(3, DType::kBF16, DotOrder::kAmx, 6, 2, 16, 8, true, true));
  expect_masked_rows_unread(
      testing::random_gpt_oss_layer(3, DType::kBF16, DotOrder::kAmx, 6, 2, 16, 8));
}

// C081, C083, C198: no tokens at all; fewer tokens than ranks; fewer experts than ranks.
TEST(Layer, FewTokensAndFewExperts) {
  const NaiveLayer layer =
      testing::random_layer(8, DType::kBF16, DotOrder::kVdpbf16, 2, 1, 8, 4, false, false);
  std::mt19937_64 random(9);
  for (const int64_t tokens : {0, 1, 2, 5}) {
    const Matrix hidden = testing::random_matrix(random, tokens, 8, 1.0f, true);
    const std::vector<std::byte> want = naive_bytes(layer, hidden, nullptr);
    for (const int ranks : {1, 4, 7}) {
      EXPECT_EQ(run_layer(layer, hidden, nullptr, {.num_ranks = ranks}), want)
          << tokens << " on " << ranks;
    }
  }
}

// C139: a NaN in a live row comes out of that row and of no other.
TEST(Layer, ALiveNaNReachesItsOwnRowOnly) {
  NaiveLayer layer =
      testing::random_layer(8, DType::kBF16, DotOrder::kVdpbf16, 4, 2, 8, 4, false, false);
  std::mt19937_64 random(9);
  const Matrix hidden = testing::random_matrix(random, 20, 8, 1.0f, true);
  const Matrix clean = testing::naive_forward(layer, hidden, nullptr);
  layer.experts[2].down.values[5] = std::numeric_limits<float>::quiet_NaN();
  const Matrix want = testing::naive_forward(layer, hidden, nullptr);
  const std::vector<std::byte> bytes = run_layer(layer, hidden, nullptr, {.num_ranks = 3});
  int64_t poisoned = 0;
  for (size_t i = 0; i < want.values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * 2, 2);
    if (std::isnan(want.values[i])) {
      EXPECT_EQ(bits, 0x7FC0);
      ++poisoned;
    } else {
      EXPECT_EQ(bits, BFloat16::from_float(clean.values[i]).bits);
    }
  }
  EXPECT_GT(poisoned, 0);
  EXPECT_LT(poisoned, 20 * 8);
}

// K04, C034, C035: identity experts (silu(128) * 1 / 128 = 1): the factor acts exactly once.
TEST(Layer, TheScalingFactorActsExactlyOnce) {
  for (const bool bf16 : {false, true}) {
    NaiveLayer layer;
    layer.router = std::move(router_preset("softmax_pre", 1, 1)).value();
    layer.router.normalise = Choice::kYes;
    layer.router.normalise_single = Choice::kYes;
    layer.router.routed_scaling_factor = 1.5f;
    layer.dtype = bf16 ? DType::kBF16 : DType::kF32;
    layer.hidden = 1;
    layer.intermediate = 1;
    layer.gate = {1, 1, {0.25f}};
    layer.experts = {{{1, 1, {128.0f}}, {1, 1, {1.0f}}, {1, 1, {0.0078125f}}}};
    const Matrix hidden{1, 1, {1.0f}};
    for (const int64_t budget_rows : {1, 100}) {
      const std::vector<std::byte> bytes =
          run_layer(layer, hidden, nullptr, {.num_ranks = 2, .budget_rows = budget_rows});
      float value = 0;
      if (bf16) {
        BFloat16 narrow;
        std::memcpy(&narrow, bytes.data(), 2);
        value = narrow.to_float();
      } else {
        std::memcpy(&value, bytes.data(), 4);
      }
      EXPECT_EQ(value, 1.5f);
    }
  }
}

// C034: experts that square, K = 2, factor 2.5, weights that sum to 1: 2.5 x^2 on every path.
TEST(Layer, EqualExpertsGiveTheFactorOnce) {
  NaiveLayer layer;
  layer.router = std::move(router_preset("softmax_pre", 4, 2)).value();
  layer.router.normalise = Choice::kYes;
  layer.router.routed_scaling_factor = 2.5f;
  layer.dtype = DType::kF32;
  layer.hidden = 1;
  layer.intermediate = 1;
  layer.gate = {4, 1, {0.5f, -0.25f, 0.125f, 0.75f}};
  // silu(128 x) * x / 128 = x^2 for these x: the sigmoid has reached 1.
  const NaiveExpert square = {{1, 1, {128.0f}}, {1, 1, {1.0f}}, {1, 1, {0.0078125f}}};
  layer.experts.assign(4, square);
  const Matrix hidden{3, 1, {1.0f, 2.0f, 4.0f}};
  for (const int ranks : {1, 2, 3}) {
    for (const int64_t budget_rows : {1, 100}) {
      const std::vector<std::byte> bytes =
          run_layer(layer, hidden, nullptr, {.num_ranks = ranks, .budget_rows = budget_rows});
      for (size_t token = 0; token < 3; ++token) {
        float value = 0;
        std::memcpy(&value, bytes.data() + token * 4, 4);
        const float square_of_x = hidden.values[token] * hidden.values[token];
        EXPECT_NEAR(value, 2.5f * square_of_x, 1e-6f * square_of_x) << ranks << " " << budget_rows;
      }
    }
  }
}

// C083, C090, C091: nobody anywhere in a row; a rank whose experts get nothing; tokens that go nowhere.
TEST(Layer, NobodyAnywhereInARow) {
  const NaiveLayer layer =
      testing::random_layer(15, DType::kF32, DotOrder::kAmx, 4, 2, 6, 5, false, false);
  std::mt19937_64 random(2);
  const Matrix hidden = testing::random_matrix(random, 3, 6, 1.0f, false);
  const Tensor input = testing::to_tensor(hidden, DType::kF32);
  const std::vector<int32_t> ids = {-1, 1, 0, -1, -1, -1};
  const std::vector<float> values = {9.0f, 0.5f, 0.25f, 9.0f, 9.0f, 9.0f};
  run_group(2, [&](Group& group) {
    Result<MoeWeights> weights = testing::weights_for_rank(layer, group.rank(), 2);
    Result<std::unique_ptr<MoeLayer>> moe =
        MoeLayer::create(group, layer.router, std::move(*weights), options_of(layer, {}));
    ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
    Tensor output = std::move(Tensor::zeros(DType::kF32, {3, 6})).value();
    std::memset(output.view().data, 0xFF, static_cast<size_t>(output.num_bytes()));
    // Rank 1 owns experts 2 and 3: it gets nothing, and has no tokens itself.
    const int64_t tokens = group.rank() == 0 ? 3 : 0;
    MoeReport report;
    const Status status = (*moe)->forward_routed(
        input.view().rows(0, tokens), ConstTensorView(ids.data(), DType::kI32, {tokens, 2}),
        ConstTensorView(values.data(), DType::kF32, {tokens, 2}), output.view().rows(0, tokens),
        &report);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(report.rows_per_expert, (std::vector<int64_t>{1, 1, 0, 0}));
    EXPECT_EQ(report.rows_per_rank, (std::vector<int64_t>{2, 0}));
    for (int64_t token = 0; token < tokens; ++token) {
      const std::vector<float> want = testing::naive_token(
          layer, hidden.row(token), ids.data() + token * 2, values.data() + token * 2);
      for (size_t i = 0; i < 6; ++i) {
        EXPECT_EQ(output.view().as<float>()[static_cast<size_t>(token) * 6 + i], want[i]) << token;
      }
    }
    ASSERT_TRUE(group.barrier().ok());
  });
}

TEST(Layer, RoutedFromOutsideEqualsOwnRouting) {
  const NaiveLayer layer =
      testing::random_layer(12, DType::kBF16, DotOrder::kAmx, 7, 3, 24, 8, true, false);
  std::mt19937_64 random(1);
  const Matrix hidden = testing::random_matrix(random, 18, 24, 1.0f, true);
  const Tensor input = testing::to_tensor(hidden, DType::kBF16);
  run_group(
      3,
      [&](Group& group) {
        Result<MoeWeights> weights = testing::weights_for_rank(layer, group.rank(), 3);
        Result<std::unique_ptr<MoeLayer>> moe =
            MoeLayer::create(group, layer.router, std::move(*weights), options_of(layer, {}));
        ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
        const ConstTensorView mine = input.view().rows(group.rank() * 6, 6);
        Tensor own = std::move(Tensor::zeros(DType::kBF16, {6, 24})).value();
        Tensor given = std::move(Tensor::zeros(DType::kBF16, {6, 24})).value();
        ASSERT_TRUE((*moe)->forward(mine, nullptr, own.view(), nullptr).ok());
        const Routing routing = (*moe)->routing();
        const ConstTensorView ids(routing.topk_idx.data(), DType::kI32, {6, 3});
        const ConstTensorView values(routing.topk_weights.values.data(), DType::kF32, {6, 3});
        ASSERT_TRUE((*moe)->forward_routed(mine, ids, values, given.view(), nullptr).ok());
        EXPECT_TRUE(std::equal(own.bytes().begin(), own.bytes().end(), given.bytes().begin()));
        ASSERT_TRUE(group.barrier().ok());
      },
      [](GroupOptions& options) { options.dot_order = DotOrder::kAmx; });
}

// K26: nothing of a strided view's gaps is read or written.
TEST(Layer, StridedHiddenAndOutput) {
  const NaiveLayer layer =
      testing::random_layer(14, DType::kF32, DotOrder::kAmx, 4, 2, 6, 5, true, false);
  std::mt19937_64 random(2);
  const Matrix hidden = testing::random_matrix(random, 10, 6, 1.0f, false);
  const Matrix want = testing::naive_forward(layer, hidden, nullptr);
  run_group(2, [&](Group& group) {
    Result<MoeWeights> weights = testing::weights_for_rank(layer, group.rank(), 2);
    Result<std::unique_ptr<MoeLayer>> moe =
        MoeLayer::create(group, layer.router, std::move(*weights), options_of(layer, {}));
    ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
    std::vector<float> wide(5 * 13, std::numeric_limits<float>::quiet_NaN());
    std::vector<float> out(5 * 9, -3.0f);
    for (int64_t i = 0; i < 5; ++i) {
      std::copy_n(hidden.row(group.rank() * 5 + i), 6, wide.begin() + i * 13);
    }
    ConstTensorView in_view(wide.data(), DType::kF32, {5, 6});
    in_view.strides[0] = 13;
    TensorView out_view(out.data(), DType::kF32, {5, 6});
    out_view.strides[0] = 9;
    ASSERT_TRUE((*moe)->forward(in_view, nullptr, out_view, nullptr).ok());
    for (int64_t i = 0; i < 5 * 9; ++i) {
      const float expected = i % 9 < 6 ? want.row(group.rank() * 5 + i / 9)[i % 9] : -3.0f;
      EXPECT_EQ(out[static_cast<size_t>(i)], expected) << i;
    }
    ASSERT_TRUE(group.barrier().ok());
  });
}

}  // namespace
}  // namespace argosy
