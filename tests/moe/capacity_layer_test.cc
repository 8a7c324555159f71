// A layer with a capacity: the drop of CapacityCut over any number of ranks, forward and backward; a factor that drops nothing
// changes nothing; errors that every rank sees.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "argosy/capacity.h"
#include "argosy/moe.h"
#include "argosy/router_backward.h"
#include "moe/layer_cases.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::layer_of;
using testing::Matrix;
using testing::NaiveLayer;
using testing::run_group;

constexpr int64_t kTokens = 45;

CapacitySpec spec_of(int64_t num, int64_t den, CapacityPolicy policy,
                     ChoiceOrder order = ChoiceOrder::kInterleaved,
                     Choice renormalise = Choice::kNo) {
  CapacitySpec spec;
  spec.factor_num = num;
  spec.factor_den = den;
  spec.policy = policy;
  spec.choice_order = order;
  spec.renormalise = renormalise;
  return spec;
}

Matrix rows_of(const NaiveLayer& layer, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  return testing::random_matrix(random, count, layer.hidden, 1.0f, layer.dtype == DType::kBF16);
}

// What a step with a capacity gives, over all ranks.
struct Step {
  std::vector<std::byte> output, d_hidden;
  std::vector<float> d_gate, d_expert_up, d_topk_weights;
  std::vector<int64_t> assigned, kept;
  int64_t num_dropped = 0;

  bool operator==(const Step&) const = default;
};

template <typename T>
void append(const std::vector<T>& more, std::vector<T>* to) {
  to->insert(to->end(), more.begin(), more.end());
}

Step run_step(const NaiveLayer& layer, const std::optional<CapacitySpec>& capacity, int num_ranks,
              const uint8_t* mask = nullptr, int64_t budget_rows = 100000) {
  const Tensor input = testing::to_tensor(rows_of(layer, kTokens, 5), layer.dtype);
  const Tensor d_out = testing::to_tensor(rows_of(layer, kTokens, 6), layer.dtype);
  const int64_t h = layer.hidden, f = layer.intermediate, row_bytes = h * size_of(layer.dtype);
  std::vector<Step> ranks(static_cast<size_t>(num_ranks));
  run_group(
      num_ranks,
      [&](Group& group) {
        MoeOptions options;
        options.hidden_dtype = layer.dtype;
        options.training = true;
        options.capacity = capacity;
        options.receive_budget_bytes = budget_rows * row_bytes;
        auto moe = MoeLayer::create(
            group, layer.router,
            std::move(*testing::weights_for_rank(layer, group.rank(), num_ranks)), options);
        ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
        const int64_t first = owned_begin(kTokens, num_ranks, group.rank());
        const int64_t count = owned_begin(kTokens, num_ranks, group.rank() + 1) - first;
        const Placement placement{layer.router.num_experts, num_ranks, 0};
        const int64_t num_local = placement.num_local(group.rank());
        Step& mine = ranks[static_cast<size_t>(group.rank())];
        for (int step = 0; step < 2; ++step) {  // the second on dirty buffers
          mine.output.assign(static_cast<size_t>(count * row_bytes), std::byte{0xFF});
          mine.d_hidden = mine.output;
          mine.d_gate.assign(static_cast<size_t>(layer.router.num_experts * h), std::nanf(""));
          mine.d_expert_up.assign(static_cast<size_t>(num_local * f * h), std::nanf(""));
          mine.d_topk_weights.assign(static_cast<size_t>(count * layer.router.top_k),
                                     std::nanf(""));
          MoeGradients g;
          g.d_hidden = TensorView(mine.d_hidden.data(), layer.dtype, {count, h});
          g.d_gate = TensorView(mine.d_gate.data(), DType::kF32, {layer.router.num_experts, h});
          g.d_expert_up = TensorView(mine.d_expert_up.data(), DType::kF32, {num_local, f, h});
          g.d_topk_weights =
              TensorView(mine.d_topk_weights.data(), DType::kF32, {count, layer.router.top_k});
          const ConstTensorView x = input.view().rows(first, count);
          MoeTape tape;
          MoeReport report;
          Status status = (*moe)->forward_train(
              x, mask == nullptr ? nullptr : mask + first,
              TensorView(mine.output.data(), layer.dtype, {count, h}), &tape, &report);
          ASSERT_TRUE(status.ok()) << status.to_string();
          status = (*moe)->backward(tape, x, d_out.view().rows(first, count), {}, g);
          ASSERT_TRUE(status.ok()) << status.to_string();
          mine.assigned = report.assigned_per_expert;
          mine.kept = report.rows_per_expert;
          mine.num_dropped = report.num_dropped;
        }
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) { options.dot_order = layer.order; });
  Step all = ranks[0];
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    EXPECT_EQ(ranks[rank].d_gate, all.d_gate);
    EXPECT_EQ(ranks[rank].assigned, all.assigned);
    EXPECT_EQ(ranks[rank].num_dropped, all.num_dropped);
    append(ranks[rank].output, &all.output);
    append(ranks[rank].d_hidden, &all.d_hidden);
    append(ranks[rank].d_expert_up, &all.d_expert_up);
    append(ranks[rank].d_topk_weights, &all.d_topk_weights);
  }
  return all;
}

int64_t sum_of(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

class CapacityLayer : public ::testing::TestWithParam<testing::LayerCase> {};

TEST_P(CapacityLayer, DropsTheSameForAnyRanks) {
  const NaiveLayer layer = layer_of(GetParam());
  for (const CapacitySpec& spec :
       {spec_of(3, 4, CapacityPolicy::kPosition), spec_of(3, 4, CapacityPolicy::kWeight),
        spec_of(1, 2, CapacityPolicy::kWeight, ChoiceOrder::kAllFirstChoicesFirst, Choice::kYes),
        spec_of(1, 100, CapacityPolicy::kPosition, ChoiceOrder::kAllFirstChoicesFirst)}) {
    const Step want = run_step(layer, spec, 1);
    const int64_t most =
        *expert_capacity(spec, layer.router.num_experts, layer.router.top_k, kTokens);
    EXPECT_EQ(sum_of(want.assigned), kTokens * layer.router.top_k);
    EXPECT_EQ(want.num_dropped, sum_of(want.assigned) - sum_of(want.kept));
    EXPECT_GT(want.num_dropped, 0);
    for (size_t e = 0; e < want.kept.size(); ++e) {
      EXPECT_EQ(want.kept[e], std::min(most, want.assigned[e]));
    }
    for (const int num_ranks : {2, 3, 4, 8}) {
      EXPECT_TRUE(run_step(layer, spec, num_ranks) == want) << num_ranks;
    }
    EXPECT_TRUE(run_step(layer, spec, 3, nullptr, 5) == want);  // in rounds
  }
}

TEST_P(CapacityLayer, AHugeFactorIsDropless) {
  const NaiveLayer layer = layer_of(GetParam());
  Step want = run_step(layer, std::nullopt, 2);
  EXPECT_TRUE(want.assigned.empty());
  want.assigned = want.kept;
  EXPECT_TRUE(run_step(layer, spec_of(1000, 1, CapacityPolicy::kWeight), 2) == want);
}

TEST_P(CapacityLayer, MaskedTokensTakeNoPlace) {
  const NaiveLayer layer = layer_of(GetParam());
  std::vector<uint8_t> mask(kTokens, 1);
  for (size_t token = 0; token < mask.size(); token += 4) mask[token] = 0;
  const CapacitySpec spec = spec_of(3, 4, CapacityPolicy::kPosition);
  const Step want = run_step(layer, spec, 1, mask.data());
  EXPECT_EQ(sum_of(want.assigned), (kTokens - 12) * layer.router.top_k);
  EXPECT_TRUE(run_step(layer, spec, 4, mask.data()) == want);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CapacityLayer,
    ::testing::Values(testing::LayerCase{DType::kBF16, DotOrder::kVdpbf16, true, true},
                      testing::LayerCase{DType::kF32, DotOrder::kVdpbf16, false, false}));

// Against the pieces: the layer's output is that of the kept routing, and the gate's gradient goes through the weights before
// the drop.
TEST(CapacityLayer, IsThePublicPiecesOneByOne) {
  const NaiveLayer layer = layer_of({DType::kF32, DotOrder::kVdpbf16, false, false});
  const CapacitySpec spec =
      spec_of(3, 4, CapacityPolicy::kWeight, ChoiceOrder::kInterleaved, Choice::kYes);
  const Step got = run_step(layer, spec, 3);
  const Tensor input = testing::to_tensor(rows_of(layer, kTokens, 5), layer.dtype);
  const Tensor d_out = testing::to_tensor(rows_of(layer, kTokens, 6), layer.dtype);
  run_group(1, [&](Group& group) {
    MoeOptions options;
    options.hidden_dtype = layer.dtype;
    auto moe = MoeLayer::create(group, layer.router,
                                std::move(*testing::weights_for_rank(layer, 0, 1)), options);
    ASSERT_TRUE(moe.has_value());
    const int64_t e = layer.router.num_experts, k = layer.router.top_k;
    Tensor logits = std::move(*Tensor::zeros(DType::kF32, {kTokens, e}));
    const Tensor gate = testing::to_tensor(layer.gate, layer.dtype);
    const Tensor bias = testing::to_vector(layer.selection_bias, DType::kF32);
    ASSERT_TRUE(gate_logits(input.view(), gate.view(), {}, nullptr, logits.view()).ok());
    Routing routing;
    const RouterInput rows{logits.view(), bias.view(), nullptr};
    ASSERT_TRUE(route(layer.router, rows, nullptr, &routing).ok());
    std::vector<Routing> kept;
    std::vector<int64_t> most;
    const Routing* const all = &routing;
    ASSERT_TRUE(apply_capacity(spec, std::span(&all, 1), &kept, &most).ok());
    Tensor output = std::move(*Tensor::zeros(layer.dtype, {kTokens, layer.hidden}));
    ASSERT_TRUE(
        (*moe)
            ->forward_routed(
                input.view(), ConstTensorView(kept[0].topk_idx.data(), DType::kI32, {kTokens, k}),
                ConstTensorView(kept[0].topk_weights.values.data(), DType::kF32, {kTokens, k}),
                output.view(), nullptr)
            .ok());
    EXPECT_TRUE(std::equal(got.output.begin(), got.output.end(), output.bytes().begin(),
                           output.bytes().end()));
    Tensor d_weights = std::move(*Tensor::zeros(DType::kF32, {kTokens, k}));
    const ConstTensorView d_kept(got.d_topk_weights.data(), DType::kF32, {kTokens, k});
    ASSERT_TRUE(capacity_backward(spec, routing, kept[0], d_kept, d_weights.view()).ok());
    Tensor d_logits = std::move(*Tensor::zeros(DType::kF32, {kTokens, e}));
    ASSERT_TRUE(route_backward(layer.router, rows, routing, d_weights.view(), GradientMode::kWrite,
                               nullptr, d_logits.view())
                    .ok());
    std::vector<float> d_gate(static_cast<size_t>(e * layer.hidden));
    GateGradients gradients;
    gradients.d_gate = TensorView(d_gate.data(), DType::kF32, {e, layer.hidden});
    ASSERT_TRUE(gate_backward(input.view(), {}, d_logits.view(), nullptr, gradients).ok());
    EXPECT_EQ(got.d_gate, d_gate);
  });
}

TEST(CapacityLayer, BadInputIsEveryRanksErrorAndTheGroupGoesOn) {
  const NaiveLayer layer = layer_of({DType::kF32, DotOrder::kVdpbf16, false, false});
  Matrix bad = rows_of(layer, 6, 5);
  bad.values[static_cast<size_t>(4 * layer.hidden)] = std::nanf("");
  const Tensor good_rows = testing::to_tensor(rows_of(layer, 6, 5), layer.dtype);
  const Tensor bad_rows = testing::to_tensor(bad, layer.dtype);
  run_group(2, [&](Group& group) {
    const auto create = [&](const MoeOptions& options) {
      return MoeLayer::create(
          group, layer.router,
          std::move(*testing::weights_for_rank(layer, group.rank(), group.num_ranks())), options);
    };
    MoeOptions options;
    options.hidden_dtype = layer.dtype;
    options.capacity = spec_of(1, 1, CapacityPolicy::kPosition);
    auto moe = create(options);
    ASSERT_TRUE(moe.has_value());
    Tensor output = std::move(*Tensor::zeros(layer.dtype, {3, layer.hidden}));
    const int64_t first = group.rank() * 3;
    const Status status =
        (*moe)->forward(bad_rows.view().rows(first, 3), nullptr, output.view(), nullptr);
    EXPECT_EQ(status.code(), StatusCode::kNonFinite) << status.to_string();
    EXPECT_NE(status.message().find("rank 1: "), std::string::npos) << status.to_string();
    EXPECT_TRUE(
        (*moe)->forward(good_rows.view().rows(first, 3), nullptr, output.view(), nullptr).ok());
    // A routing from outside is taken as it is.
    std::vector<int32_t> ids(9, -1);
    std::vector<float> weights(9, 1.0f);
    for (size_t token = 0; token < 3; ++token) ids[3 * token] = 7;
    MoeReport report;
    ASSERT_TRUE((*moe)
                    ->forward_routed(good_rows.view().rows(first, 3),
                                     ConstTensorView(ids.data(), DType::kI32, {3, 3}),
                                     ConstTensorView(weights.data(), DType::kF32, {3, 3}),
                                     output.view(), &report)
                    .ok());
    EXPECT_EQ(report.rows_per_expert[7], 6);
    EXPECT_EQ(report.num_dropped, 0);
    EXPECT_EQ((*moe)->assigned().topk_idx, ids);

    options.capacity->factor_num = 1 + group.rank();
    Result<std::unique_ptr<MoeLayer>> refused = create(options);
    EXPECT_EQ(refused.error().code(), StatusCode::kDisagree);
    EXPECT_NE(refused.error().message().find("layer.capacity"), std::string::npos);
    options.capacity->factor_num = 0;
    EXPECT_EQ(create(options).error().code(), StatusCode::kInvalidArgument);
    options.capacity->factor_num = 1;
    options.mode = MoeMode::kLatency;
    EXPECT_EQ(create(options).error().code(), StatusCode::kUnsupported);
  });
}

}  // namespace
}  // namespace argosy
