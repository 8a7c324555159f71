// Losses of a pipeline: layers lie on stages, tokens come in micro-batches, and the shares of both are added up in fp32.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "argosy/balance_loss.h"
#include "argosy/bfloat16.h"
#include "router/router_testing.h"

namespace argosy::test {
namespace {

constexpr int64_t kTokens = 200, kExperts = 64, kLayers = 8;

// Sums of the tokens [first, first + count) of one layer.
BalanceSums sums_of(const Batch& layer, int64_t first, int64_t count) {
  Batch part = layer;
  part.logits.assign(layer.logits.begin() + first * kExperts,
                     layer.logits.begin() + (first + count) * kExperts);
  const Routing routing = route_ok(part);
  BalanceInput input;
  input.rows.logits = ConstTensorView(part.logits.data(), DType::kF32, {count, kExperts});
  input.routing = &routing;
  BalanceSums sums;
  EXPECT_TRUE(balance_sums(part.spec, input, nullptr, &sums).ok());
  return sums;
}

// The whole loss: what a stage's layers give for one micro-batch after the other, then the stages.
template <typename Round>
float loss_of(const std::vector<Batch>& layers, int64_t num_stages, int64_t num_micro_batches,
              const Round& round) {
  float whole = 0;
  for (int64_t stage = 0; stage < num_stages; ++stage) {
    float own = 0;
    for (int64_t l = stage * kLayers / num_stages; l < (stage + 1) * kLayers / num_stages; ++l) {
      const Batch& layer = layers[static_cast<size_t>(l)];
      std::vector<BalanceSums> parts;
      BalanceSums totals;
      for (int64_t m = 0; m < num_micro_batches; ++m) {
        const int64_t first = kTokens * m / num_micro_batches;
        parts.push_back(sums_of(layer, first, kTokens * (m + 1) / num_micro_batches - first));
        EXPECT_TRUE(add_sums(parts.back(), &totals).ok());
      }
      for (const BalanceSums& part : parts) {
        BalanceSums share = totals;
        share.score_sums = part.score_sums;
        own = round(own + static_cast<float>(*aux_loss(layer.spec, {0.01}, share)));
      }
    }
    whole = round(whole + own);
  }
  return whole;
}

// Case C058: 64 experts, logits as bf16 gives them, 1, 2 and 4 stages: one number to 1e-6, which sums in bf16 miss by far.
TEST(PipelineLoss, IsOneNumberForAnyStagesAndMicroBatches) {
  std::mt19937_64 random(58);
  std::vector<Batch> layers;
  double want = 0;
  for (int64_t l = 0; l < kLayers; ++l) {
    Batch layer;
    layer.spec = spec_of("softmax_pre", kExperts, 8);
    layer.logits = normal_logits(random, kTokens * kExperts, 2.0f);
    for (float& logit : layer.logits) logit = BFloat16::from_float(logit).to_float();
    want += *aux_loss(layer.spec, {0.01}, sums_of(layer, 0, kTokens));
    layers.push_back(std::move(layer));
  }
  double off_in_bf16 = 0;
  for (const int64_t num_stages : {1, 2, 4}) {
    for (const int64_t num_micro_batches : {1, 3, 4}) {
      const float loss = loss_of(layers, num_stages, num_micro_batches, [](float x) { return x; });
      EXPECT_NEAR(loss, want, 1e-6 * want) << num_stages << " " << num_micro_batches;
      const float low = loss_of(layers, num_stages, num_micro_batches,
                                [](float x) { return BFloat16::from_float(x).to_float(); });
      off_in_bf16 = std::max(off_in_bf16, std::abs(low - want));
    }
  }
  EXPECT_GT(off_in_bf16, 1e-4 * want);
}

}  // namespace
}  // namespace argosy::test
