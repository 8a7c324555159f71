// See exact_row.h. Test: tests/router/exact_row_test.cc.
#include "router/exact_row.h"

#include <algorithm>
#include <limits>

#include "router/lanes.h"
#include "router/top_k.h"

namespace argosy::router {
namespace {

// The factor acts on the fp32 weight; on a denormal one before rounding, or the rounding would grow
// with it.
float scaled_weight(double exact, float factor) {
  const auto weight = static_cast<float>(exact);
  if (weight >= std::numeric_limits<float>::min()) return weight * factor;
  return static_cast<float>(exact * static_cast<double>(factor));
}

int64_t whole_vectors(int64_t count) { return (count + 7) / 8 * 8; }

}  // namespace

ExactRow::Scratch ExactRow::lay_out(std::byte* base, int64_t* bytes) const {
  Scratch scratch;
  int64_t used = 0;
  const auto take = [&](auto** array, int64_t count) {
    using Element = std::remove_pointer_t<std::remove_pointer_t<decltype(array)>>;
    *array = base == nullptr ? nullptr : reinterpret_cast<Element*>(base + used);
    used += count * static_cast<int64_t>(sizeof(Element));
  };
  const int64_t top_k = whole_vectors(spec_.top_k);
  take(&scratch.exact, chunk_);
  take(&scratch.terms, top_k);
  take(&scratch.chosen_exact, top_k);
  take(&scratch.keys, TopK::buffer_size(std::max(spec_.top_k, experts_per_group_score(spec_))));
  const bool has_limit = spec_.keep_groups < spec_.num_groups;
  take(&scratch.group_keys, has_limit ? TopK::buffer_size(spec_.keep_groups) : 0);
  take(&scratch.scores, chunk_);
  take(&scratch.selection, bias_ == nullptr ? 0 : chunk_);
  take(&scratch.chosen, top_k);
  take(&scratch.chosen_scores, top_k);
  const int64_t padded = rules_.has_value() ? rules_->num_groups * rules_->group_stride : 0;
  take(&scratch.orders, std::max(spec_.num_experts, padded));
  if (bytes != nullptr) *bytes = used;
  return scratch;
}

ExactRow::ExactRow(const RoutePath& path, const RouterSpec& spec, const float* bias,
                   bool normalised)
    : kernel_(*path.kernel),
      spec_(spec),
      bias_(bias),
      normalised_(normalised),
      chunk_(spec.num_experts) {
  terms_ = kernel_.softmax_terms;
  if (spec.score_function == ScoreFunction::kSigmoid) {
    scores_ = kernel_.sigmoid_scores;
    terms_ = kernel_.sigmoid_terms;
  } else if (spec.score_function == ScoreFunction::kSqrtSoftplus) {
    scores_ = kernel_.sqrt_softplus_scores;
    terms_ = kernel_.sqrt_softplus_terms;
  }
  if (path.select) rules_ = select_rules(spec);
  if (scratch_bytes() > kMostScratchBytes) chunk_ = std::min(spec.num_experts, kScoreChunk);
}

int64_t ExactRow::scratch_bytes() const {
  int64_t bytes = 0;
  lay_out(nullptr, &bytes);
  return bytes;
}

// `count` logits from `first` on.
const float* ExactRow::logits_of(const float* logits, int64_t first, int64_t count,
                                 const Scratch& scratch) const {
  if (logits != nullptr) return logits + first;
  std::fill_n(scratch.scores, count, 0.0f);
  return scratch.scores;
}

ExactRow::Whole ExactRow::whole_of(const float* logits, const Scratch& scratch) const {
  Whole whole;
  if (spec_.score_function != ScoreFunction::kSoftmax) return whole;
  const int64_t num_experts = spec_.num_experts;
  if (num_experts <= chunk_) {
    kernel_.softmax_scores(logits_of(logits, 0, num_experts, scratch), num_experts, scratch.exact,
                           scratch.scores);
    whole.has_scores = true;
    return whole;
  }
  if (logits != nullptr) whole.peak = static_cast<double>(kernel_.largest(logits, num_experts));
  LaneSum sum;
  for (int64_t first = 0; first < num_experts; first += chunk_) {
    const int64_t count = std::min(chunk_, num_experts - first);
    kernel_.softmax_powers(logits_of(logits, first, count, scratch), count, whole.peak,
                           scratch.exact, &sum);
  }
  whole.sum = total(sum);
  return whole;
}

// Of `count` logits of a row; they may be scratch.scores itself.
const float* ExactRow::scores_of(const float* logits, int64_t count, const Whole& whole,
                                 const Scratch& scratch) const {
  if (scores_ != nullptr) {
    scores_(logits, count, scratch.exact, scratch.scores);
    return scratch.scores;
  }
  if (spec_.score_function != ScoreFunction::kSoftmax) return logits;
  LaneSum unused;
  kernel_.softmax_powers(logits, count, whole.peak, scratch.exact, &unused);
  kernel_.quotients(scratch.exact, count, whole.sum, scratch.scores);
  return scratch.scores;
}

// Selection scores of the experts [first, first + count).
const float* ExactRow::selection_of(const float* logits, int64_t first, int64_t count,
                                    const Whole& whole, const Scratch& scratch) const {
  const float* const scores =
      whole.has_scores ? scratch.scores
                       : scores_of(logits_of(logits, first, count, scratch), count, whole, scratch);
  if (bias_ == nullptr) return scores;
  for (int64_t i = 0; i < count; ++i) scratch.selection[i] = scores[i] + bias_[first + i];
  return scratch.selection;
}

void ExactRow::choose(const float* logits, const Whole& whole, const Scratch& scratch,
                      int32_t* topk_idx) const {
  const int64_t num_experts = spec_.num_experts;
  if (rules_.has_value()) {
    for (int64_t first = 0; first < num_experts; first += chunk_) {
      const int64_t count = std::min(chunk_, num_experts - first);
      const float* const selection = selection_of(logits, first, count, whole, scratch);
      kernel_.order(*rules_, selection, first, count, scratch.orders);
    }
    if (kernel_.select(*rules_, scratch.orders, topk_idx)) return;
  }
  auto* const all = reinterpret_cast<float*>(scratch.orders);
  for (int64_t first = 0; first < num_experts; first += chunk_) {
    const int64_t count = std::min(chunk_, num_experts - first);
    std::copy_n(selection_of(logits, first, count, whole, scratch), count, all + first);
  }
  select_experts(spec_, all, {scratch.keys, scratch.group_keys}, topk_idx);
}

// Logits of the chosen, and their scores where weights are made of them.
void ExactRow::gather(const float* logits, const Whole& whole, const int32_t* topk_idx,
                      const Scratch& scratch) const {
  const int64_t top_k = spec_.top_k;
  for (int64_t k = 0; k < top_k; ++k) {
    scratch.chosen[k] = logits == nullptr ? 0.0f : logits[topk_idx[k]];
  }
  if (spec_.score_function == ScoreFunction::kSoftmaxTopK) return;
  if (chunk_ >= spec_.num_experts) {
    for (int64_t k = 0; k < top_k; ++k) {
      scratch.chosen_exact[k] = scratch.exact[topk_idx[k]];
      scratch.chosen_scores[k] = scratch.scores[topk_idx[k]];
    }
    return;
  }
  for (int64_t k = top_k; k < whole_vectors(top_k); ++k) scratch.chosen[k] = scratch.chosen[0];
  Scratch of_chosen = scratch;
  of_chosen.exact = scratch.chosen_exact;
  of_chosen.scores = scratch.chosen_scores;
  scores_of(scratch.chosen, whole_vectors(top_k), whole, of_chosen);
}

void ExactRow::weigh(const Scratch& scratch, float* weights) const {
  const int64_t top_k = spec_.top_k;
  const float factor = spec_.routed_scaling_factor;
  const bool reference = spec_.weight_norm == WeightNorm::kReference;
  if (!normalised_) {
    for (int64_t k = 0; k < top_k; ++k) {
      weights[k] = scaled_weight(scratch.chosen_exact[k], factor);
    }
    return;
  }
  // Of a normalised softmax the sum over all experts cancels.
  const bool cancels = spec_.score_function == ScoreFunction::kSoftmaxTopK ||
                       (spec_.score_function == ScoreFunction::kSoftmax && !reference);
  const float* const scores = scratch.chosen_scores;
  if (!cancels && (reference || *std::min_element(scores, scores + top_k) >= 0x1p-100f)) {
    const double sum = sum_lanes(scores, top_k) + (reference ? 1e-20 : 0.0);
    for (int64_t k = 0; k < top_k; ++k) {
      weights[k] = scaled_weight(static_cast<double>(scores[k]) / sum, factor);
    }
    return;
  }
  const double sum = terms_(scratch.chosen, top_k, scratch.terms);
  for (int64_t k = 0; k < top_k; ++k) weights[k] = scaled_weight(scratch.terms[k] / sum, factor);
}

void ExactRow::route(const float* logits, const Scratch& scratch, int32_t* topk_idx,
                     float* weights) const {
  const Whole whole = whole_of(logits, scratch);
  choose(logits, whole, scratch, topk_idx);
  gather(logits, whole, topk_idx, scratch);
  weigh(scratch, weights);
}

}  // namespace argosy::router
