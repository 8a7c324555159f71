// route_backward(): checks, then each token alone, in fp64: gradients of the weights, of the chosen
// scores' logarithms, of the logits. Test: tests/router/backward_test.cc.
#include <algorithm>

#include "argosy/router_backward.h"
#include "base/error.h"
#include "platform/float_env.h"
#include "router/gradient_kernel.h"
#include "router/kernel.h"
#include "router/lanes.h"
#include "router/token_rows.h"

namespace argosy {
namespace {

using router::RowKind;
using router::TokenRows;

constexpr double kReferenceEpsilon = 1e-20;  // contract 1.7

bool is_softmax(const RouterSpec& spec) { return spec.score_function == ScoreFunction::kSoftmax; }

// As route() decides it (contract 1.7).
bool is_normalised(const RouterSpec& spec) {
  if (spec.score_function == ScoreFunction::kSoftmaxTopK) return true;
  if (spec.normalise != Choice::kYes) return false;
  return spec.top_k > 1 || is_softmax(spec) || spec.normalise_single == Choice::kYes;
}

// What a token needs, in one buffer.
struct Scratch {
  double* share;   // [E]
  double* grad;    // [E]
  double* by_log;  // [E] derivatives in the logarithms of scores
  double* slope;   // [K]
  float* chosen;   // [K] logits
  float* unused;   // [E] scores rounded to fp32, which the kernel writes too

  static int64_t bytes(const RouterSpec& spec) {
    constexpr int64_t kPerExpert = 3 * sizeof(double) + sizeof(float);
    constexpr int64_t kPerChoice = sizeof(double) + sizeof(float);
    return spec.num_experts * kPerExpert + spec.top_k * kPerChoice;
  }

  Scratch(const RouterSpec& spec, std::byte* base)
      : share(reinterpret_cast<double*>(base)),
        grad(share + spec.num_experts),
        by_log(grad + spec.num_experts),
        slope(by_log + spec.num_experts),
        chosen(reinterpret_cast<float*>(slope + spec.top_k)),
        unused(chosen + spec.top_k) {}
};

class RouteBackward {
 public:
  RouteBackward(const RouterSpec& spec, const RouterInput& input, const Routing& routing,
                const float* d_topk_weights, GradientMode mode, float* d_logits)
      : spec_(spec),
        rows_(spec, input),
        topk_idx_(routing.topk_idx.data()),
        d_topk_weights_(d_topk_weights),
        mode_(mode),
        d_logits_(d_logits) {}

  // False when the thread's scratch cannot grow. Never inlined: arithmetic may not move across the
  // change of the floating-point environment.
  [[gnu::noinline]] bool run_rows(int64_t first, int64_t last) const {
    thread_local AlignedBuffer buffer;  // kept, so that a steady state does not allocate
    if (!buffer.reserve(Scratch::bytes(spec_)).ok()) return false;
    const Scratch scratch(spec_, buffer.data());
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    for (int64_t token = first; token < last; ++token) {
      float* d_row = d_logits_ + token * spec_.num_experts;
      if (rows_.kind(token) == RowKind::kOrdinary) {
        run_row(token, scratch, d_row);
      } else {
        router::put_zero_row(mode_, spec_.num_experts, d_row);
      }
    }
    return true;
  }

 private:
  bool is_reference() const {
    return spec_.weight_norm == WeightNorm::kReference && spec_.normalise == Choice::kYes &&
           spec_.score_function != ScoreFunction::kSoftmaxTopK;
  }

  void run_row(int64_t token, const Scratch& scratch, float* d_row) const {
    const float* logits = rows_.row(token);
    const int32_t* topk_idx = topk_idx_ + token * spec_.top_k;
    const bool normalised = is_normalised(spec_);
    if (is_softmax(spec_) && (!normalised || is_reference())) {
      run_probabilities(token, logits, topk_idx, scratch, d_row);
      return;
    }
    for (int64_t k = 0; k < spec_.top_k; ++k) {
      scratch.chosen[k] = logits[topk_idx[k]];
      scratch.grad[k] = gradient(token, k);
    }
    if (!normalised) {
      chosen_scores(scratch);
      for (int64_t k = 0; k < spec_.top_k; ++k) {
        scratch.by_log[k] = scratch.share[k] * scratch.grad[k];
      }
    } else if (is_reference()) {
      chosen_scores(scratch);
      through_reference(scratch);
    } else {
      chosen_shares(scratch);
      router::through_shares(scratch.share, scratch.grad, spec_.top_k, scratch.by_log);
    }
    multiply_slopes(scratch);
    router::put_zero_row(mode_, spec_.num_experts, d_row);
    for (int64_t k = 0; k < spec_.top_k; ++k) {
      router::put_gradient(mode_, scratch.by_log[k], d_row + topk_idx[k]);
    }
  }

  // A softmax over all E whose weights do not cancel its sum: a gradient reaches every expert.
  void run_probabilities(int64_t token, const float* logits, const int32_t* topk_idx,
                         const Scratch& scratch, float* d_row) const {
    const int64_t num_experts = spec_.num_experts;
    router::kernel().softmax_scores(logits, num_experts, scratch.share, scratch.unused);
    if (is_reference()) {
      put_reference_softmax(token, topk_idx, scratch, d_row);
      return;
    }
    std::fill(scratch.grad, scratch.grad + num_experts, 0.0);
    for (int64_t k = 0; k < spec_.top_k; ++k) scratch.grad[topk_idx[k]] = gradient(token, k);
    router::through_shares(scratch.share, scratch.grad, num_experts, scratch.by_log);
    for (int64_t e = 0; e < num_experts; ++e) {
      router::put_gradient(mode_, scratch.by_log[e], d_row + e);
    }
  }

  // Weights p / (sum of the chosen p + epsilon). What the chosen experts' derivatives sum to, which
  // the epsilon keeps from being 0, flows off all experts in the ratio of p.
  void put_reference_softmax(int64_t token, const int32_t* topk_idx, const Scratch& scratch,
                             float* d_row) const {
    double sum = kReferenceEpsilon;
    double mean = 0.0;
    for (int64_t k = 0; k < spec_.top_k; ++k) sum += scratch.share[topk_idx[k]];
    for (int64_t k = 0; k < spec_.top_k; ++k) {
      mean += scratch.share[topk_idx[k]] / sum * gradient(token, k);
    }
    const double leak = mean * kReferenceEpsilon / sum;
    std::fill(scratch.by_log, scratch.by_log + spec_.num_experts, 0.0);
    for (int64_t k = 0; k < spec_.top_k; ++k) {
      scratch.by_log[topk_idx[k]] = scratch.share[topk_idx[k]] / sum * (gradient(token, k) - mean);
    }
    for (int64_t e = 0; e < spec_.num_experts; ++e) {
      router::put_gradient(mode_, scratch.by_log[e] - scratch.share[e] * leak, d_row + e);
    }
  }

  // Of weight k before the factor.
  double gradient(int64_t token, int64_t k) const {
    return static_cast<double>(d_topk_weights_[token * spec_.top_k + k]) *
           static_cast<double>(spec_.routed_scaling_factor);
  }

  // share = the scores of the chosen experts (sigmoid and sqrt-softplus).
  void chosen_scores(const Scratch& scratch) const {
    const auto scores = spec_.score_function == ScoreFunction::kSigmoid
                            ? router::kernel().sigmoid_scores
                            : router::kernel().sqrt_softplus_scores;
    scores(scratch.chosen, spec_.top_k, scratch.share, scratch.unused);
  }

  // share = the exact normalised weights.
  void chosen_shares(const Scratch& scratch) const {
    const double sum =
        router::terms_of(spec_.score_function)(scratch.chosen, spec_.top_k, scratch.share);
    for (int64_t k = 0; k < spec_.top_k; ++k) scratch.share[k] /= sum;
  }

  // Weights s / (sum + epsilon), given s in share: they sum to a little less than 1.
  void through_reference(const Scratch& scratch) const {
    const double sum = router::sum_lanes(scratch.share, spec_.top_k) + kReferenceEpsilon;
    double mean = 0.0;
    for (int64_t k = 0; k < spec_.top_k; ++k) {
      scratch.share[k] /= sum;
      mean += scratch.share[k] * scratch.grad[k];
    }
    for (int64_t k = 0; k < spec_.top_k; ++k) {
      scratch.by_log[k] = scratch.share[k] * (scratch.grad[k] - mean);
    }
  }

  void multiply_slopes(const Scratch& scratch) const {
    const router::ScoreSlopes slopes = router::slopes_of(spec_.score_function);
    if (slopes == nullptr) return;
    slopes(scratch.chosen, spec_.top_k, scratch.slope);
    for (int64_t k = 0; k < spec_.top_k; ++k) scratch.by_log[k] *= scratch.slope[k];
  }

  const RouterSpec& spec_;
  TokenRows rows_;
  const int32_t* topk_idx_;
  const float* d_topk_weights_;
  GradientMode mode_;
  float* d_logits_;
};

Status check_d_weights(const RouterSpec& spec, const RouterInput& input,
                       const ConstTensorView& d_topk_weights) {
  const int64_t num_tokens = input.logits.dim(0);
  if (d_topk_weights.dtype == DType::kF32 && d_topk_weights.num_dims == 2 &&
      d_topk_weights.dim(0) == num_tokens && d_topk_weights.dim(1) == spec.top_k &&
      d_topk_weights.is_dense() && (num_tokens == 0 || d_topk_weights.data != nullptr)) {
    return {};
  }
  return base::invalid("d_topk_weights are {}, expected dense F32 [{}, {}]",
                       describe(d_topk_weights), num_tokens, spec.top_k);
}

}  // namespace

Status route_backward(const RouterSpec& spec, const RouterInput& input, const Routing& routing,
                      const ConstTensorView& d_topk_weights, GradientMode mode, ThreadPool* pool,
                      const TensorView& d_logits) {
  ARGOSY_RETURN_IF_ERROR(router::check_rows(spec, input, pool));
  ARGOSY_RETURN_IF_ERROR(router::check_routing(spec, input, routing));
  ARGOSY_RETURN_IF_ERROR(check_d_weights(spec, input, d_topk_weights));
  ARGOSY_RETURN_IF_ERROR(router::check_d_logits(input.logits, d_logits));
  const RouteBackward backward(spec, input, routing, d_topk_weights.as<float>(), mode,
                               d_logits.as<float>());
  return router::run_rows(
      pool, input.logits.dim(0), Scratch::bytes(spec),
      [&](int64_t first, int64_t last) { return backward.run_rows(first, last); });
}

}  // namespace argosy
