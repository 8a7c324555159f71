// Bad input to the layer: the same typed error on every rank, nothing moved, the group goes on.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "argosy/moe.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::Matrix;
using testing::NaiveExpert;
using testing::NaiveLayer;
using testing::run_group;

NaiveLayer small_layer() {
  return testing::random_layer(20, DType::kBF16, DotOrder::kVdpbf16, 6, 2, 8, 4, true, false);
}

MoeOptions small_options() {
  MoeOptions options;
  options.hidden_dtype = DType::kBF16;
  options.receive_budget_bytes = 1 << 16;
  return options;
}

// One rank's call, as good arguments that `spoil` may change.
struct Call {
  Tensor hidden;
  Tensor output;
  ConstTensorView hidden_view;
  TensorView output_view;
};

// Spoils rank 1's call of 3; all ranks must see `code` and the words; a good call then works.
void expect_everywhere(const std::function<void(Call*)>& spoil, StatusCode code,
                       std::initializer_list<const char*> words, int64_t max_receive_rows = -1) {
  const NaiveLayer layer = small_layer();
  run_group(3, [&](Group& group) {
    Result<MoeWeights> weights = testing::weights_for_rank(layer, group.rank(), 3);
    MoeOptions options = small_options();
    options.max_receive_rows = max_receive_rows;
    Result<std::unique_ptr<MoeLayer>> moe =
        MoeLayer::create(group, layer.router, std::move(*weights), options);
    ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
    std::mt19937_64 random(static_cast<uint64_t>(group.rank()));
    Call call;
    call.hidden =
        testing::to_tensor(testing::random_matrix(random, 4, 8, 1.0f, true), DType::kBF16);
    call.output = std::move(Tensor::zeros(DType::kBF16, {4, 8})).value();
    call.hidden_view = call.hidden.view();
    call.output_view = call.output.view();
    if (group.rank() == 1) spoil(&call);
    const Status status = (*moe)->forward(call.hidden_view, nullptr, call.output_view, nullptr);
    EXPECT_EQ(status.code(), code) << status.to_string();
    for (const char* word : words) {
      EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    }
    const Tensor good = std::move(Tensor::zeros(DType::kBF16, {1, 8})).value();
    Tensor out = std::move(Tensor::zeros(DType::kBF16, {1, 8})).value();
    const Status after = (*moe)->forward(good.view(), nullptr, out.view(), nullptr);
    EXPECT_TRUE(after.ok()) << after.to_string();
    ASSERT_TRUE(group.barrier().ok());
  });
}

TEST(LayerErrors, NonFiniteLogits) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    expect_everywhere(
        [bad](Call* call) {
          call->hidden.view().as<BFloat16>()[2 * 8 + 3] = BFloat16::from_float(bad);
        },
        StatusCode::kNonFinite, {"rank 1", "2"});
  }
}

TEST(LayerErrors, WrongShapesAndDtypes) {
  expect_everywhere([](Call* call) { call->hidden_view.shape[1] = 7; },
                    StatusCode::kInvalidArgument, {"rank 1", "[4, 7]", "[4, 8]"});
  expect_everywhere([](Call* call) { call->hidden_view.dtype = DType::kF16; },
                    StatusCode::kInvalidArgument, {"rank 1", "F16", "BF16"});
  expect_everywhere([](Call* call) { call->hidden_view.strides[1] = 2; },
                    StatusCode::kInvalidArgument, {"rank 1", "strides"});
  expect_everywhere([](Call* call) { call->output_view.shape[0] = 3; },
                    StatusCode::kInvalidArgument, {"rank 1", "[3, 8]"});
  expect_everywhere([](Call* call) { call->output_view.data = nullptr; },
                    StatusCode::kInvalidArgument, {"rank 1", "output", "no data"});
  expect_everywhere([](Call* call) { call->hidden_view.data = nullptr; },
                    StatusCode::kInvalidArgument, {"rank 1", "hidden", "no data"});
  for (const int64_t stride : {0, 3, -8}) {
    expect_everywhere([stride](Call* call) { call->output_view.strides[0] = stride; },
                      StatusCode::kInvalidArgument, {"rank 1", "overlap"});
  }
  expect_everywhere([](Call* call) { call->output_view = call->hidden.view(); },
                    StatusCode::kInvalidArgument, {"rank 1", "overlaps"});
}

TEST(LayerErrors, HardCap) {
  expect_everywhere([](Call*) {}, StatusCode::kCapacity, {"max_receive_rows is 7", "rank "}, 7);
}

TEST(LayerErrors, IdsFromOutside) {
  const NaiveLayer layer = small_layer();
  run_group(2, [&](Group& group) {
    Result<MoeWeights> weights = testing::weights_for_rank(layer, group.rank(), 2);
    Result<std::unique_ptr<MoeLayer>> moe =
        MoeLayer::create(group, layer.router, std::move(*weights), small_options());
    ASSERT_TRUE(moe.has_value());
    const Tensor hidden = std::move(Tensor::zeros(DType::kBF16, {2, 8})).value();
    Tensor output = std::move(Tensor::zeros(DType::kBF16, {2, 8})).value();
    std::vector<int32_t> ids = {0, 1, 2, -1};
    if (group.rank() == 1) ids[2] = 6;
    const std::vector<float> values(4, 0.5f);
    const std::vector<int64_t> wide(4, 1);
    const ConstTensorView weights_view(values.data(), DType::kF32, {2, 2});
    const auto call = [&](const ConstTensorView& ids_view) {
      return (*moe)->forward_routed(hidden.view(), ids_view, weights_view, output.view(), nullptr);
    };
    Status status = call(ConstTensorView(ids.data(), DType::kI32, {2, 2}));
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("6"), std::string::npos) << status.message();
    // C094: int64 ids are refused by name, never reinterpreted.
    status = call(ConstTensorView(wide.data(), DType::kI64, {2, 2}));
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("I64"), std::string::npos) << status.message();
    const ConstTensorView nothing(static_cast<const void*>(nullptr), DType::kF32, {2, 2});
    status = (*moe)->forward_routed(hidden.view(), ConstTensorView(ids.data(), DType::kI32, {2, 2}),
                                    nothing, output.view(), nullptr);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("without data"), std::string::npos) << status.message();
    ids[2] = 3;
    EXPECT_TRUE(call(ConstTensorView(ids.data(), DType::kI32, {2, 2})).ok());
    ASSERT_TRUE(group.barrier().ok());
  });
}

// Ranks that disagree on any setting of the layer.
TEST(LayerErrors, DisagreementIsNamed) {
  struct Row {
    const char* field;
    std::function<void(NaiveLayer*, MoeOptions*)> change;
  };
  const std::vector<Row> rows = {
      {"router.routed_scaling_factor",
       [](NaiveLayer* layer, MoeOptions*) { layer->router.routed_scaling_factor = 1.0f; }},
      {"gate digest", [](NaiveLayer* layer, MoeOptions*) { layer->gate.values[3] += 1.0f; }},
      {"selection_bias digest",
       [](NaiveLayer* layer, MoeOptions*) { layer->selection_bias[0] += 1.0f; }},
      {"hidden_dtype",
       [](NaiveLayer*, MoeOptions* options) { options->hidden_dtype = DType::kF32; }},
      {"receive_budget_bytes",
       [](NaiveLayer*, MoeOptions* options) { options->receive_budget_bytes *= 2; }},
      {"shared_intermediate", [](NaiveLayer* layer, MoeOptions*) { layer->shared.clear(); }},
      {"layer.activation",
       [](NaiveLayer* layer, MoeOptions*) {
         layer->activation.kind = ActivationKind::kClampedSwiGlu;
       }},
      {"layer.expert_biases",
       [](NaiveLayer* layer, MoeOptions*) {
         for (NaiveExpert& expert : layer->experts) {
           expert.gate_bias.assign(4, 0.0f);
           expert.up_bias.assign(4, 0.0f);
           expert.down_bias.assign(8, 0.0f);
         }
       }},
      {"layer.check", [](NaiveLayer* layer, MoeOptions*) { layer->router.num_groups = 4; }},
  };
  for (const Row& row : rows) {
    run_group(3, [&](Group& group) {
      NaiveLayer layer = small_layer();
      MoeOptions options = small_options();
      if (group.rank() == 2) row.change(&layer, &options);
      Result<MoeWeights> weights = testing::weights_for_rank(layer, group.rank(), 3);
      ASSERT_TRUE(weights.has_value());
      const Result<std::unique_ptr<MoeLayer>> moe =
          MoeLayer::create(group, layer.router, std::move(*weights), options);
      ASSERT_FALSE(moe.has_value()) << row.field;
      if (std::string(row.field) == "layer.check" && group.rank() == 2) {
        EXPECT_EQ(moe.error().code(), StatusCode::kInvalidArgument) << moe.error().to_string();
        return;
      }
      EXPECT_EQ(moe.error().code(), StatusCode::kDisagree) << moe.error().to_string();
      EXPECT_NE(moe.error().message().find(row.field), std::string::npos) << moe.error().message();
    });
  }
}

// An exchange made elsewhere must be this group's and keep the layer's promises.
TEST(LayerErrors, GivenExchangesMustFit) {
  const NaiveLayer layer = small_layer();
  std::unique_ptr<Group> stranger;
  GroupOptions alone;
  stranger = std::move(Group::join(alone)).value();
  run_group(1, [&](Group& group) {
    ExchangeOptions fitting;
    fitting.dtype = DType::kBF16;
    fitting.hidden = 8;
    fitting.num_experts = 6;
    fitting.top_k = 2;
    fitting.receive_budget_bytes = small_options().receive_budget_bytes;
    const auto create = [&](Group& owner, const ExchangeOptions& exchange) {
      MoeOptions options = small_options();
      options.max_receive_rows = 40;
      options.exchange = std::move(Exchange::create(owner, exchange)).value();
      MoeWeights weights = std::move(testing::weights_for_rank(layer, 0, 1)).value();
      return MoeLayer::create(group, layer.router, std::move(weights), options).error().to_string();
    };
    EXPECT_NE(create(group, fitting).find("max_receive_rows -1, the layer needs 40"),
              std::string::npos);
    fitting.max_receive_rows = 40;
    EXPECT_EQ(create(group, fitting), "Ok");
    EXPECT_NE(create(*stranger, fitting).find("group id"), std::string::npos);
    fitting.group_alignment = 4;
    EXPECT_NE(create(group, fitting).find("group_alignment 4"), std::string::npos);
  });
}

// Two ranks that swap their experts would compute nonsense.
TEST(LayerErrors, WeightsOfAnotherRank) {
  const NaiveLayer layer = small_layer();
  run_group(2, [&](Group& group) {
    MoeWeights weights = std::move(testing::weights_for_rank(layer, 1 - group.rank(), 2)).value();
    const Status status =
        MoeLayer::create(group, layer.router, std::move(weights), small_options()).error();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_NE(status.message().find("owns those from"), std::string::npos);
  });
}

TEST(LayerErrors, WeightsThatDoNotFit) {
  const auto create = [](const std::function<void(NaiveLayer*, MoeWeights*)>& change) {
    NaiveLayer layer = small_layer();
    Status status;
    run_group(1, [&](Group& group) {
      MoeWeights weights = std::move(testing::weights_for_rank(layer, 0, 1)).value();
      change(&layer, &weights);
      status = MoeLayer::create(group, layer.router, std::move(weights), small_options()).error();
    });
    return status.to_string();
  };
  EXPECT_EQ(create([](NaiveLayer*, MoeWeights*) {}), "Ok");
  EXPECT_NE(
      create([](NaiveLayer*, MoeWeights* w) { w->selection_bias = Tensor(); }).find("missing"),
      std::string::npos);
  EXPECT_NE(create([](NaiveLayer* l, MoeWeights*) { l->router.num_experts = 8; }).find("[6, 8]"),
            std::string::npos);
  EXPECT_NE(
      create([](NaiveLayer*, MoeWeights* w) { std::swap(w->gate_up, w->down); }).find("gate_up"),
      std::string::npos);
  EXPECT_NE(create([](NaiveLayer*, MoeWeights* w) {
              w->shared_gate = std::move(Tensor::zeros(DType::kBF16, {2, 8})).value();
            }).find("shared_gate"),
            std::string::npos);
  EXPECT_NE(create([](NaiveLayer*, MoeWeights* w) {
              w->activation = {ActivationKind::kClampedSwiGlu, -1.0f, 1.0f};
            }).find("limit of clamped_swiglu is -1"),
            std::string::npos);
}

}  // namespace
}  // namespace argosy
