// See token_rows.h. Test: tests/router/backward_test.cc.
#include "router/token_rows.h"

#include "router/lanes.h"

namespace argosy::router {
namespace {

bool is_finite_row(const float* row, int64_t count) {
  constexpr uint32_t kExponent = 0x7F800000u;
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found |= static_cast<uint32_t>((std::bit_cast<uint32_t>(row[i]) & kExponent) == kExponent);
  }
  return found == 0;
}

Status check_finite(const TokenRows& rows, ThreadPool* pool) {
  std::atomic<int64_t> first_bad{rows.num_tokens()};
  for_rows(pool, rows.num_tokens(), [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      if (rows.is_masked(token) || is_finite_row(rows.row(token), rows.num_experts())) continue;
      // Relaxed: parallel_for makes what its tasks wrote visible when it returns.
      int64_t seen = first_bad.load(std::memory_order_relaxed);
      while (token < seen &&
             !first_bad.compare_exchange_weak(seen, token, std::memory_order_relaxed)) {
      }
      break;
    }
  });
  const int64_t token = first_bad.load(std::memory_order_relaxed);
  if (token == rows.num_tokens()) return {};
  int64_t expert = 0;
  while (is_finite_row(rows.row(token) + expert, 1)) ++expert;
  return base::error(StatusCode::kNonFinite, "logits[{}, {}] is {} (token {} of {}, expert {})",
                     token, expert, rows.row(token)[expert], token, rows.num_tokens(), expert);
}

// The row of a valid token is a choice of K distinct experts.
Status check_choice(const RouterSpec& spec, const Routing& routing, int64_t token) {
  const int32_t* row = routing.topk_idx.data() + token * spec.top_k;
  for (int64_t k = 0; k < spec.top_k; ++k) {
    if (row[k] < 0 || row[k] >= spec.num_experts) {
      return base::invalid(
          "topk_idx[{}, {}] is {}, but token {} is valid: expected 0 to {} (the routing before any "
          "drop)",
          token, k, row[k], token, spec.num_experts - 1);
    }
    if (std::find(row, row + k, row[k]) != row + k) {
      return base::invalid("topk_idx[{}, {}] names expert {} a second time in the row of token {}",
                           token, k, row[k], token);
    }
  }
  return {};
}

}  // namespace

RowKind TokenRows::kind(int64_t token) const {
  if (is_masked(token)) return RowKind::kMasked;
  return is_finite_row(row(token), num_experts_) ? RowKind::kOrdinary : RowKind::kReplaced;
}

Status check_rows(const RouterSpec& spec, const RouterInput& input, ThreadPool* pool) {
  ARGOSY_RETURN_IF_ERROR(validate(spec));
  const ConstTensorView& logits = input.logits;
  if (logits.dtype != DType::kF32 || logits.num_dims != 2 || logits.dim(0) < 0 ||
      logits.dim(1) != spec.num_experts || (logits.dim(1) > 1 && logits.stride(1) != 1)) {
    return base::invalid("logits are {}, expected F32 [tokens, {}] with stride 1 over experts",
                         describe(logits), spec.num_experts);
  }
  if (logits.dim(0) > 0 && logits.data == nullptr) {
    return base::invalid("logits {} have no data", describe(logits));
  }
  if (spec.on_nonfinite != OnNonfinite::kError) return {};
  return check_finite(TokenRows(spec, input), pool);
}

Status check_routing(const RouterSpec& spec, const RouterInput& input, const Routing& routing) {
  const TokenRows rows(spec, input);
  const auto num_ids = static_cast<size_t>(rows.num_tokens()) * static_cast<size_t>(spec.top_k);
  if (routing.num_tokens != rows.num_tokens() || routing.num_experts != spec.num_experts ||
      routing.top_k != spec.top_k || routing.topk_idx.size() != num_ids) {
    return base::invalid(
        "routing has {} tokens, {} experts, top_k {} and {} ids; expected {}, {}, {} and {}",
        routing.num_tokens, routing.num_experts, routing.top_k, routing.topk_idx.size(),
        rows.num_tokens(), spec.num_experts, spec.top_k, num_ids);
  }
  for (int64_t token = 0; token < rows.num_tokens(); ++token) {
    if (!rows.is_masked(token)) ARGOSY_RETURN_IF_ERROR(check_choice(spec, routing, token));
  }
  return {};
}

ChosenTerms terms_of(ScoreFunction function) {
  if (function == ScoreFunction::kSigmoid) return kernel().sigmoid_terms;
  if (function == ScoreFunction::kSqrtSoftplus) return kernel().sqrt_softplus_terms;
  return kernel().softmax_terms;
}

ScoreSlopes slopes_of(ScoreFunction function) {
  if (function == ScoreFunction::kSigmoid) return gradient_kernel().sigmoid_slopes;
  if (function == ScoreFunction::kSqrtSoftplus) return gradient_kernel().sqrt_softplus_slopes;
  return nullptr;
}

Status check_d_logits(const ConstTensorView& logits, const TensorView& d_logits) {
  if (d_logits.dtype == DType::kF32 && d_logits.num_dims == 2 && d_logits.is_dense() &&
      d_logits.dim(0) == logits.dim(0) && d_logits.dim(1) == logits.dim(1) &&
      (d_logits.dim(0) == 0 || d_logits.data != nullptr)) {
    return {};
  }
  return base::invalid("d_logits are {}, expected dense F32 [{}, {}]", describe(d_logits),
                       logits.dim(0), logits.dim(1));
}

void through_shares(const double* share, const double* grad, int64_t count, double* out) {
  const double base = grad[std::max_element(share, share + count) - share];
  for (int64_t i = 0; i < count; ++i) out[i] = share[i] * (grad[i] - base);
  const double mean = sum_lanes(out, count);
  for (int64_t i = 0; i < count; ++i) out[i] -= share[i] * mean;
}

void put_zero_row(GradientMode mode, int64_t num_experts, float* row) {
  if (mode == GradientMode::kWrite) std::fill(row, row + num_experts, 0.0f);
}

}  // namespace argosy::router
