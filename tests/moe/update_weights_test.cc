// A layer whose weights change between calls: the bits of a layer made with the new ones; a tape filled before is stale; a change
// that fails or does not fit is every rank's error until one succeeds.
#include <gtest/gtest.h>

#include <cstring>

#include "argosy/moe.h"
#include "moe/layer_cases.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::layer_of;
using testing::NaiveLayer;
using testing::run_group;

void copy(const Tensor& from, Tensor* to) {
  if (from.empty()) return;
  ASSERT_EQ(from.num_bytes(), to->num_bytes());
  std::memcpy(to->view().data, from.view().data, static_cast<size_t>(from.num_bytes()));
}

// Writes the values of `layer` into weights of the same shapes, group by group.
Status repack(const NaiveLayer& layer, int rank, int num_ranks, MoeWeights* weights) {
  Result<MoeWeights> wanted = testing::weights_for_rank(layer, rank, num_ranks);
  copy(wanted->gate, &weights->gate);
  copy(wanted->gate_bias, &weights->gate_bias);
  copy(wanted->selection_bias, &weights->selection_bias);
  copy(wanted->shared_gate, &weights->shared_gate);
  const Placement placement{layer.router.num_experts, num_ranks, 0};
  const auto set = [&](const testing::NaiveExpert& expert, int64_t group, PackedWeights* gate_up,
                       PackedWeights* down) -> Status {
    ARGOSY_RETURN_IF_ERROR(gate_up->set_group(group,
                                              testing::to_tensor(expert.gate, layer.dtype).view(),
                                              testing::to_tensor(expert.up, layer.dtype).view()));
    ARGOSY_RETURN_IF_ERROR(
        down->set_group(group, testing::to_tensor(expert.down, layer.dtype).view()));
    if (expert.down_bias.empty()) return {};
    return testing::pack_biases(expert, group, layer.dtype, gate_up, down);
  };
  for (int64_t i = 0; i < placement.num_local(rank); ++i) {
    ARGOSY_RETURN_IF_ERROR(set(layer.experts[static_cast<size_t>(placement.begin(rank) + i)], i,
                               &weights->gate_up, &weights->down));
  }
  if (layer.shared.empty()) return {};
  return set(layer.shared[0], 0, &weights->shared_gate_up, &weights->shared_down);
}

// The same sizes as layer_of(), other values.
NaiveLayer other_layer_of(const testing::LayerCase& param) {
  return param.gpt_oss ? testing::random_gpt_oss_layer(77, param.dtype, param.order, 9, 3, 37, 19)
                       : testing::random_layer(77, param.dtype, param.order, 9, 3, 37, 19,
                                               param.shared, param.shared_gate);
}

class UpdateWeights : public ::testing::TestWithParam<testing::LayerCase> {};

TEST_P(UpdateWeights, GivesTheBitsOfALayerMadeWithThem) {
  const NaiveLayer before = layer_of(GetParam()), after = other_layer_of(GetParam());
  std::mt19937_64 random(3);
  const testing::Matrix hidden =
      testing::random_matrix(random, 24, before.hidden, 1.0f, before.dtype == DType::kBF16);
  const Tensor input = testing::to_tensor(hidden, before.dtype);
  const std::vector<std::byte> want = testing::naive_bytes(after, hidden, nullptr);
  for (const int num_ranks : {1, 3}) {
    std::vector<std::vector<std::byte>> outputs(static_cast<size_t>(num_ranks));
    run_group(
        num_ranks,
        [&](Group& group) {
          MoeOptions options;
          options.hidden_dtype = before.dtype;
          options.training = true;
          auto moe = MoeLayer::create(
              group, before.router,
              std::move(*testing::weights_for_rank(before, group.rank(), num_ranks)), options);
          ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
          const int64_t count = 24 / num_ranks;
          const ConstTensorView x = input.view().rows(group.rank() * count, count);
          Tensor output = std::move(*Tensor::zeros(before.dtype, {count, before.hidden}));
          MoeTape tape;
          ASSERT_TRUE((*moe)->forward_train(x, nullptr, output.view(), &tape, nullptr).ok());
          const Status updated = (*moe)->update_weights([&](MoeWeights& weights) {
            return repack(after, group.rank(), num_ranks, &weights);
          });
          ASSERT_TRUE(updated.ok()) << updated.to_string();
          const Status stale = (*moe)->backward(tape, x, x, {}, {});
          EXPECT_EQ(stale.code(), StatusCode::kStalePlan);
          EXPECT_NE(stale.message().find("updated 1 times"), std::string::npos);
          ASSERT_TRUE((*moe)->forward_train(x, nullptr, output.view(), &tape, nullptr).ok());
          ASSERT_TRUE((*moe)->backward(tape, x, x, {}, {}).ok());
          outputs[static_cast<size_t>(group.rank())] = {output.bytes().begin(),
                                                        output.bytes().end()};
          ASSERT_TRUE(group.barrier().ok());
        },
        [&](GroupOptions& options) { options.dot_order = before.order; });
    std::vector<std::byte> got;
    for (const auto& part : outputs) got.insert(got.end(), part.begin(), part.end());
    EXPECT_TRUE(got == want) << num_ranks;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, UpdateWeights,
    ::testing::Values(testing::LayerCase{DType::kBF16, DotOrder::kVdpbf16, true, true},
                      testing::LayerCase{DType::kF32, DotOrder::kVdpbf16, true, false},
                      testing::LayerCase{DType::kBF16, DotOrder::kVdpbf16, false, false, true}));

// Trained in MXFP8, the copies in both directions change with the weights: output and gradients of a layer made with the new
// ones.
TEST(UpdateWeights, QuantisedCopiesFollow) {
  const NaiveLayer before = layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true});
  const NaiveLayer after = other_layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true});
  std::mt19937_64 random(3);
  const Tensor input =
      testing::to_tensor(testing::random_matrix(random, 12, 37, 1.0f, true), DType::kBF16);
  struct Step {
    std::vector<BFloat16> output, d_hidden;
    std::vector<float> d_down;
  };
  run_group(2, [&](Group& group) {
    MoeOptions options;
    options.hidden_dtype = DType::kBF16;
    options.training = true;
    options.training_format = BlockFormat::kMxfp8;
    const auto make = [&](const NaiveLayer& layer) {
      return std::move(*MoeLayer::create(
          group, layer.router, std::move(*testing::weights_for_rank(layer, group.rank(), 2)),
          options));
    };
    const auto step = [&](MoeLayer& layer) {
      constexpr int64_t kTokens = 6;
      const ConstTensorView x = input.view().rows(group.rank() * kTokens, kTokens);
      const int64_t local = Placement{9, 2, 0}.num_local(group.rank());
      Step made;
      made.output.resize(kTokens * 37);
      made.d_hidden.resize(kTokens * 37);
      made.d_down.resize(static_cast<size_t>(local * 37 * 19));
      MoeTape tape;
      MoeGradients gradients;
      gradients.d_hidden = TensorView(made.d_hidden.data(), DType::kBF16, {kTokens, 37});
      gradients.d_expert_down = TensorView(made.d_down.data(), DType::kF32, {local, 37, 19});
      Status status = layer.forward_train(
          x, nullptr, TensorView(made.output.data(), DType::kBF16, {kTokens, 37}), &tape, nullptr);
      EXPECT_TRUE(status.ok()) << status.to_string();
      status = layer.backward(tape, x, x, {}, gradients);
      EXPECT_TRUE(status.ok()) << status.to_string();
      return made;
    };
    const auto same = [](const auto& a, const auto& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    const std::unique_ptr<MoeLayer> changed = make(before), fresh = make(after);
    const Step old = step(*changed), want = step(*fresh);
    EXPECT_FALSE(same(old.output, want.output));
    const Status updated = changed->update_weights(
        [&](MoeWeights& weights) { return repack(after, group.rank(), 2, &weights); });
    ASSERT_TRUE(updated.ok()) << updated.to_string();
    const Step got = step(*changed);
    EXPECT_TRUE(same(got.output, want.output));
    EXPECT_TRUE(same(got.d_hidden, want.d_hidden));
    EXPECT_TRUE(same(got.d_down, want.d_down));
    ASSERT_TRUE(group.barrier().ok());
  });
}

TEST(UpdateWeights, AFailedChangeIsEveryRanksErrorUntilOneSucceeds) {
  const NaiveLayer layer = layer_of({DType::kF32, DotOrder::kVdpbf16, false, false});
  std::mt19937_64 random(3);
  const Tensor input =
      testing::to_tensor(testing::random_matrix(random, 2, layer.hidden, 1.0f, false), layer.dtype);
  run_group(2, [&](Group& group) {
    MoeOptions options;
    options.hidden_dtype = layer.dtype;
    auto moe =
        MoeLayer::create(group, layer.router,
                         std::move(*testing::weights_for_rank(layer, group.rank(), 2)), options);
    ASSERT_TRUE(moe.has_value());
    Tensor output = std::move(*Tensor::zeros(layer.dtype, {1, layer.hidden}));
    const auto forward = [&] {
      return (*moe)->forward(input.view().rows(group.rank(), 1), nullptr, output.view(), nullptr);
    };
    const auto expect_refused = [&](const Status& own, StatusCode code, const char* text) {
      EXPECT_EQ(own.code(), group.rank() == 1 ? code : StatusCode::kOk) << own.to_string();
      const Status status = forward();
      EXPECT_EQ(status.code(), code) << status.to_string();
      EXPECT_NE(status.message().find("rank 1: the last update_weights failed"), std::string::npos)
          << status.to_string();
      EXPECT_NE(status.message().find(text), std::string::npos) << status.to_string();
    };
    expect_refused((*moe)->update_weights([&](MoeWeights&) {
      return group.rank() == 1 ? Status(StatusCode::kIo, "the disk is full") : Status();
    }),
                   StatusCode::kIo, "the disk is full");
    EXPECT_TRUE((*moe)->update_weights([](MoeWeights&) { return Status(); }).ok());
    EXPECT_TRUE(forward().ok());
    expect_refused((*moe)->update_weights([&](MoeWeights& weights) -> Status {
      if (group.rank() != 1) return {};
      ARGOSY_ASSIGN_OR_RETURN(weights.down,
                              PackedWeights::create(PackedWeights::Kind::kPlain, DType::kBF16,
                                                    weights.down.num_groups(), 37, 19));
      return {};
    }),
                   StatusCode::kInvalidArgument, "packed weights 1 were F32");
    ASSERT_TRUE(group.barrier().ok());
  });
}

}  // namespace
}  // namespace argosy
