// MXCSR belongs to the caller (contract 4.5): with FTZ and DAZ set, or another rounding, the
// training side of the router gives the same bits and leaves the register as it was.
#include <gtest/gtest.h>
#include <immintrin.h>

#include <random>

#include "argosy/balance_loss.h"
#include "argosy/bias_update.h"
#include "argosy/capacity.h"
#include "argosy/router_backward.h"
#include "router/router_testing.h"

namespace argosy::test {
namespace {

constexpr int64_t kTokens = 20;
constexpr int64_t kExperts = 16;
constexpr int64_t kTopK = 4;

// Everything that is computed, one number after the other.
struct Outcome {
  std::vector<float> values;
  std::vector<double> sums;

  TensorView take(std::initializer_list<int64_t> dims, size_t at) {
    return TensorView(values.data() + at, DType::kF32, dims);
  }
};

struct Inputs {
  Batch batch;
  Routing routing;
  std::vector<float> d_weights;
  std::vector<float> hidden;
  std::vector<float> gate;
};

Inputs draw_inputs() {
  std::mt19937_64 random(1201);
  Inputs in;
  in.batch.spec = spec_of("sigmoid", kExperts, kTopK);
  in.batch.logits = normal_logits(random, kTokens * kExperts, 20.0f);
  in.routing = route_ok(in.batch);
  in.d_weights = normal_logits(random, kTokens * kTopK, 1e-38f);  // gradients are denormal
  in.hidden = normal_logits(random, kTokens * 8, 1.0f);
  in.gate = normal_logits(random, kExperts * 8, 1.0f);
  return in;
}

void run(const Inputs& in, Outcome* out) {
  const RouterSpec& spec = in.batch.spec;
  BalanceInput balance;
  balance.rows.logits = ConstTensorView(in.batch.logits.data(), DType::kF32, {kTokens, kExperts});
  balance.routing = &in.routing;
  out->values.assign(4000, 0.0f);
  const TensorView d_route = out->take({kTokens, kExperts}, 0);
  const TensorView d_aux = out->take({kTokens, kExperts}, 400);
  const TensorView d_z = out->take({kTokens, kExperts}, 800);
  const ConstTensorView d_topk(in.d_weights.data(), DType::kF32, {kTokens, kTopK});
  ASSERT_TRUE(
      route_backward(spec, balance.rows, in.routing, d_topk, GradientMode::kWrite, nullptr, d_route)
          .ok());
  BalanceSums sums;
  ASSERT_TRUE(balance_sums(spec, balance, nullptr, &sums).ok());
  BalanceSums twice = sums;
  ASSERT_TRUE(add_sums(sums, &twice).ok());
  const AuxLossSpec aux = {1e-37, LossScale::kMegatron, 0};
  ASSERT_TRUE(
      aux_loss_backward(spec, aux, balance, sums, 1.0, GradientMode::kWrite, nullptr, d_aux).ok());
  const Result<ZLossSums> z = z_loss_sums(spec, balance.rows, nullptr);
  ASSERT_TRUE(z.has_value());
  ASSERT_TRUE(z_loss_backward(spec, 1e-38, balance.rows, z->num_tokens, 1.0, GradientMode::kWrite,
                              nullptr, d_z)
                  .ok());
  out->sums = twice.score_sums;
  out->sums.push_back(*aux_loss(spec, aux, twice));
  out->sums.push_back(z->sum);
  GateGradients gradients;
  gradients.d_hidden = out->take({kTokens, 8}, 1200);
  gradients.d_gate = out->take({kExperts, 8}, 1400);
  gradients.d_gate_bias = out->take({kExperts}, 1600);
  ASSERT_TRUE(gate_backward(ConstTensorView(in.hidden.data(), DType::kF32, {kTokens, 8}),
                            ConstTensorView(in.gate.data(), DType::kF32, {kExperts, 8}), d_route,
                            nullptr, gradients)
                  .ok());
  const std::span<float> bias(out->values.data() + 1700, kExperts);
  ASSERT_TRUE(update_selection_bias({1e-39f, true}, in.routing.counts, bias).ok());
  CapacitySpec capacity;
  capacity.factor_num = 1;
  capacity.factor_den = 2;
  capacity.policy = CapacityPolicy::kWeight;
  capacity.renormalise = Choice::kYes;
  const Routing* routing = &in.routing;
  std::vector<Routing> kept;
  std::vector<int64_t> places;
  ASSERT_TRUE(apply_capacity(capacity, {&routing, 1}, &kept, &places).ok());
  const TensorView d_kept = out->take({kTokens, kTopK}, 1800);
  ASSERT_TRUE(capacity_backward(capacity, in.routing, kept[0], d_topk, d_kept).ok());
  out->values.insert(out->values.end(), kept[0].topk_weights.values.begin(),
                     kept[0].topk_weights.values.end());
}

TEST(CallerEnv, ChangesNoBitAndIsRestored) {
  const Inputs in = draw_inputs();
  Outcome want;
  run(in, &want);
  const unsigned before = _mm_getcsr();
  for (const unsigned bits : {0x8040u, 0x2000u, 0x6000u}) {  // FTZ and DAZ; round down; to zero
    Outcome got;
    _mm_setcsr(before | bits);
    run(in, &got);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after & 0xFFC0u, (before | bits) & 0xFFC0u) << "all but the sticky flags";
    EXPECT_TRUE(same_bits(got.values, want.values)) << bits;
    EXPECT_EQ(got.sums, want.sums) << bits;
  }
}

}  // namespace
}  // namespace argosy::test
