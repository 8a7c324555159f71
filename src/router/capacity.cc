// Capacity by a radix search: each round looks at one more byte of the key of every undecided
// assignment, and exact sums over ranks say in which bin an expert's last place lies. Test:
// tests/router/capacity_test.cc.
#include "argosy/capacity.h"

#include <bit>
#include <limits>
#include <stdexcept>

#include "base/error.h"
#include "platform/float_env.h"
#include "router/token_rows.h"

namespace argosy {
namespace {

using base::invalid;
__extension__ using Wide = unsigned __int128;

constexpr int64_t kMax32 = std::numeric_limits<int32_t>::max();
constexpr int kWeightBytes = 4;

// Bytes that hold K - 1.
int bytes_of_choice(const CapacitySpec& spec, int64_t top_k) {
  if (spec.choice_order == ChoiceOrder::kInterleaved) return 0;
  return (static_cast<int>(std::bit_width(static_cast<uint64_t>(top_k - 1))) + 7) / 8;
}

template <typename T>
Status assign(size_t count, std::vector<T>* values) {
  try {
    values->assign(count, T{});
  } catch (const std::exception&) {  // bad_alloc or length_error
    return base::error(StatusCode::kOutOfMemory, "no memory for {} numbers", count);
  }
  return {};
}

Status copy(const Routing& from, Routing* to) {
  try {
    *to = from;
  } catch (const std::exception&) {
    return base::error(StatusCode::kOutOfMemory, "no memory for a routing of {} tokens",
                       from.num_tokens);
  }
  return {};
}

struct RowSums {
  double all = 0.0;
  double kept = 0.0;
  bool lost = false;

  // The weights of this row change.
  bool takes_over(const CapacitySpec& spec) const {
    return spec.renormalise == Choice::kYes && lost && kept > 0.0;
  }
};

RowSums sums_of_row(const Routing& routing, const Routing& kept, int64_t token) {
  RowSums sums;
  for (int64_t k = 0; k < routing.top_k; ++k) {
    const auto at = static_cast<size_t>(token * routing.top_k + k);
    if (routing.topk_idx[at] < 0) continue;
    const auto weight = static_cast<double>(routing.topk_weights.values[at]);
    sums.all += weight;
    if (kept.topk_idx[at] < 0) {
      sums.lost = true;
    } else {
      sums.kept += weight;
    }
  }
  return sums;
}

// Zero where dropped; what is left takes over where the spec says so.
[[gnu::noinline]] void set_weights(const CapacitySpec& spec, const Routing& routing,
                                   Routing* kept) {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    const RowSums sums = sums_of_row(routing, *kept, token);
    for (int64_t k = 0; k < routing.top_k; ++k) {
      const auto at = static_cast<size_t>(token * routing.top_k + k);
      float& weight = kept->topk_weights.values[at];
      if (kept->topk_idx[at] < 0) {
        weight = 0.0f;
      } else if (sums.takes_over(spec)) {
        weight = static_cast<float>(static_cast<double>(weight) * sums.all / sums.kept);
      }
    }
  }
}

// w'_k = w_k all / kept: through w_k, through `all` (the dropped ones too) and through `kept`.
void row_backward(const Routing& routing, const Routing& kept, const RowSums& sums, int64_t token,
                  const float* d_kept, float* d_weights) {
  const int64_t first = token * routing.top_k;
  double dot = 0.0;
  for (int64_t at = first; at < first + routing.top_k; ++at) {
    const auto i = static_cast<size_t>(at);
    if (kept.topk_idx[i] < 0) continue;
    dot += static_cast<double>(d_kept[at]) * static_cast<double>(routing.topk_weights.values[i]);
  }
  const double ratio = sums.all / sums.kept;
  for (int64_t at = first; at < first + routing.top_k; ++at) {
    const auto i = static_cast<size_t>(at);
    double gradient = 0.0;
    if (routing.topk_idx[i] >= 0) gradient = dot / sums.kept;
    if (kept.topk_idx[i] >= 0) {
      gradient += ratio * (static_cast<double>(d_kept[at]) - dot / sums.kept);
    }
    router::put_gradient(GradientMode::kWrite, gradient, d_weights + at);
  }
}

[[gnu::noinline]] void rows_backward(const CapacitySpec& spec, const Routing& routing,
                                     const Routing& kept, const float* d_kept, float* d_weights) {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    const RowSums sums = sums_of_row(routing, kept, token);
    if (sums.takes_over(spec)) {
      row_backward(routing, kept, sums, token, d_kept, d_weights);
      continue;
    }
    for (int64_t at = token * routing.top_k; at < (token + 1) * routing.top_k; ++at) {
      const bool stays = kept.topk_idx[static_cast<size_t>(at)] >= 0;
      router::put_gradient(GradientMode::kWrite, stays ? static_cast<double>(d_kept[at]) : 0.0,
                           d_weights + at);
    }
  }
}

Status check_weights_view(const ConstTensorView& view, std::string_view name,
                          const Routing& routing) {
  if (view.dtype == DType::kF32 && view.num_dims == 2 && view.dim(0) == routing.num_tokens &&
      view.dim(1) == routing.top_k && view.is_dense() &&
      (view.dim(0) == 0 || view.data != nullptr)) {
    return {};
  }
  return invalid("{} are {}, expected dense F32 [{}, {}]", name, describe(view), routing.num_tokens,
                 routing.top_k);
}

// num_tokens x top_k == size, for sizes that come from a caller and could overflow.
bool is_product(int64_t num_tokens, int64_t top_k, size_t size) {
  const auto count = static_cast<int64_t>(size);
  return top_k >= 1 && count % top_k == 0 && count / top_k == num_tokens;
}

// `kept` is `routing` with some ids replaced by -1.
Status check_kept(const Routing& routing, const Routing& kept) {
  const size_t count = routing.topk_idx.size();
  if (kept.num_tokens != routing.num_tokens || kept.top_k != routing.top_k ||
      !is_product(routing.num_tokens, routing.top_k, count) || kept.topk_idx.size() != count ||
      routing.topk_weights.values.size() != count) {
    return invalid("kept has {} tokens, top_k {} and {} ids; routing has {}, {} and {}",
                   kept.num_tokens, kept.top_k, kept.topk_idx.size(), routing.num_tokens,
                   routing.top_k, routing.topk_idx.size());
  }
  for (size_t i = 0; i < count; ++i) {
    if (kept.topk_idx[i] != -1 && kept.topk_idx[i] != routing.topk_idx[i]) {
      return invalid("kept id {} is {}, in routing it is {}", i, kept.topk_idx[i],
                     routing.topk_idx[i]);
    }
  }
  return {};
}

// One scope: `ranks` in order compete for the same places.
Status run_scope(const CapacitySpec& spec, std::span<const Routing* const> ranks, Routing* kept,
                 int64_t* capacity) {
  int64_t num_tokens = 0;
  for (const Routing* routing : ranks) num_tokens += routing->num_valid_tokens;
  ARGOSY_ASSIGN_OR_RETURN(CapacityCut cut, CapacityCut::create(spec, ranks[0]->num_experts,
                                                               ranks[0]->top_k, num_tokens));
  std::vector<int64_t> mine;
  std::vector<int64_t> all;
  const auto add = [&] {
    for (size_t i = 0; i < all.size(); ++i) all[i] += mine[i];
  };
  while (!cut.is_done()) {
    ARGOSY_RETURN_IF_ERROR(cut.histogram(*ranks[0], &all));
    for (const Routing* routing : ranks.subspan(1)) {
      ARGOSY_RETURN_IF_ERROR(cut.histogram(*routing, &mine));
      add();
    }
    ARGOSY_RETURN_IF_ERROR(cut.refine(all));
  }
  ARGOSY_RETURN_IF_ERROR(assign(static_cast<size_t>(ranks[0]->num_experts), &all));
  for (size_t r = 0; r < ranks.size(); ++r) {
    ARGOSY_RETURN_IF_ERROR(cut.count_ties(*ranks[r], &mine));
    ARGOSY_RETURN_IF_ERROR(cut.apply(*ranks[r], all, kept + r));
    add();
    capacity[r] = cut.capacity();
  }
  return {};
}

}  // namespace

Status validate(const CapacitySpec& spec) {
  if (spec.factor_num < 1 || spec.factor_num > kMax32 || spec.factor_den < 1 ||
      spec.factor_den > kMax32) {
    return invalid("capacity factor is {}/{}, expected both in 1 to {}", spec.factor_num,
                   spec.factor_den, kMax32);
  }
  if (spec.policy != CapacityPolicy::kPosition && spec.policy != CapacityPolicy::kWeight) {
    return invalid("capacity policy is {}, expected position or weight",
                   spec.policy == CapacityPolicy::kUnset ? "unset" : "unknown");
  }
  if (spec.scope != CapacityScope::kGroup && spec.scope != CapacityScope::kRank) {
    return invalid("capacity scope is unknown, expected group or rank");
  }
  if (spec.choice_order != ChoiceOrder::kInterleaved &&
      spec.choice_order != ChoiceOrder::kAllFirstChoicesFirst) {
    return invalid("choice_order is unknown, expected interleaved or all first choices first");
  }
  if (spec.renormalise != Choice::kNo && spec.renormalise != Choice::kYes) {
    return invalid("renormalise is unset");
  }
  return {};
}

Result<int64_t> expert_capacity(const CapacitySpec& spec, int64_t num_experts, int64_t top_k,
                                int64_t num_tokens) {
  ARGOSY_RETURN_IF_ERROR(validate(spec));
  if (num_experts < 1 || num_experts > kMax32 || top_k < 1 || top_k > num_experts ||
      num_tokens < 0) {
    return invalid("no capacity for {} tokens, top_k {} and {} experts", num_tokens, top_k,
                   num_experts);
  }
  // Below 2^63 x 2^31 x 2^31.
  const Wide above =
      static_cast<Wide>(num_tokens) * static_cast<Wide>(top_k) * static_cast<Wide>(spec.factor_num);
  const Wide below = static_cast<Wide>(num_experts) * static_cast<Wide>(spec.factor_den);
  const Wide capacity = (above + below - 1) / below;
  return capacity < static_cast<Wide>(num_tokens) ? static_cast<int64_t>(capacity) : num_tokens;
}

Result<CapacityCut> CapacityCut::create(const CapacitySpec& spec, int64_t num_experts,
                                        int64_t top_k, int64_t num_tokens) {
  CapacityCut cut;
  ARGOSY_ASSIGN_OR_RETURN(cut.capacity_, expert_capacity(spec, num_experts, top_k, num_tokens));
  cut.spec_ = spec;
  cut.num_experts_ = num_experts;
  cut.top_k_ = top_k;
  cut.num_bytes_ = bytes_of_choice(spec, top_k);
  if (spec.policy == CapacityPolicy::kWeight) cut.num_bytes_ += kWeightBytes;
  ARGOSY_RETURN_IF_ERROR(assign(static_cast<size_t>(num_experts), &cut.border_));
  ARGOSY_RETURN_IF_ERROR(assign(static_cast<size_t>(num_experts), &cut.num_places_));
  for (int64_t& places : cut.num_places_) places = cut.capacity_;
  return cut;
}

uint64_t CapacityCut::key(const Routing& routing, int64_t at) const {
  uint64_t key = 0;
  if (spec_.choice_order == ChoiceOrder::kAllFirstChoicesFirst) {
    key = static_cast<uint64_t>(top_k_ - 1 - at % top_k_);
  }
  if (spec_.policy != CapacityPolicy::kWeight) return key;
  const auto bits = std::bit_cast<uint32_t>(routing.topk_weights.values[static_cast<size_t>(at)]);
  return key << 32 | (bits & 0x7FFFFFFFu);  // check() leaves -0 as the only sign
}

Status CapacityCut::check(const Routing& routing) const {
  const size_t count = routing.topk_idx.size();
  if (routing.num_experts != num_experts_ || routing.top_k != top_k_ ||
      !is_product(routing.num_tokens, top_k_, count) ||
      routing.topk_weights.values.size() != count) {
    return invalid(
        "routing has {} tokens, {} experts, top_k {}, {} ids and {} weights; expected {} experts "
        "and top_k {}",
        routing.num_tokens, routing.num_experts, routing.top_k, routing.topk_idx.size(),
        routing.topk_weights.values.size(), num_experts_, top_k_);
  }
  for (size_t i = 0; i < count; ++i) {
    const int64_t expert = routing.topk_idx[i];
    if (expert < -1 || expert >= num_experts_) {
      return invalid("topk_idx[{}, {}] is {}, expected -1 or 0 to {}",
                     i / static_cast<size_t>(top_k_), i % static_cast<size_t>(top_k_), expert,
                     num_experts_ - 1);
    }
    const float weight = routing.topk_weights.values[i];
    if (expert >= 0 && spec_.policy == CapacityPolicy::kWeight &&
        !(weight >= 0.0f && weight <= std::numeric_limits<float>::max())) {
      return invalid("topk_weights[{}, {}] is {}, expected finite and not negative",
                     i / static_cast<size_t>(top_k_), i % static_cast<size_t>(top_k_), weight);
    }
  }
  return {};
}

Status CapacityCut::histogram(const Routing& routing, std::vector<int64_t>* bins) const {
  if (is_done()) return invalid("the cut is done, no further histogram is asked for");
  ARGOSY_RETURN_IF_ERROR(check(routing));
  ARGOSY_RETURN_IF_ERROR(assign(static_cast<size_t>(num_experts_ * kBins), bins));
  const int shift = 8 * (num_bytes_ - 1);
  for (int64_t at = 0; at < routing.num_tokens * top_k_; ++at) {
    const int64_t expert = routing.topk_idx[static_cast<size_t>(at)];
    if (expert < 0) continue;
    const uint64_t seen = key(routing, at) >> shift;
    if (seen >> 8 != border_[static_cast<size_t>(expert)]) continue;
    ++(*bins)[static_cast<size_t>(expert * kBins + static_cast<int64_t>(seen & 0xFF))];
  }
  return {};
}

Status CapacityCut::refine(std::span<const int64_t> bins) {
  if (is_done()) return invalid("the cut is done");
  if (static_cast<int64_t>(bins.size()) != num_experts_ * kBins) {
    return invalid("{} bins, expected {} x {}", bins.size(), num_experts_, kBins);
  }
  for (size_t i = 0; i < bins.size(); ++i) {
    if (bins[i] < 0) return invalid("bin {} is {}", i, bins[i]);
  }
  for (int64_t expert = 0; expert < num_experts_; ++expert) {
    const auto at = static_cast<size_t>(expert);
    int64_t bin = kBins - 1;
    while (bin > 0 && bins[at * kBins + static_cast<size_t>(bin)] <= num_places_[at]) {
      num_places_[at] -= bins[at * kBins + static_cast<size_t>(bin)];
      --bin;
    }
    border_[at] = border_[at] << 8 | static_cast<uint64_t>(bin);
  }
  --num_bytes_;
  return {};
}

Status CapacityCut::count_ties(const Routing& routing, std::vector<int64_t>* ties) const {
  if (!is_done()) return invalid("the cut needs {} more rounds", num_bytes_);
  ARGOSY_RETURN_IF_ERROR(check(routing));
  ARGOSY_RETURN_IF_ERROR(assign(static_cast<size_t>(num_experts_), ties));
  for (int64_t at = 0; at < routing.num_tokens * top_k_; ++at) {
    const int64_t expert = routing.topk_idx[static_cast<size_t>(at)];
    if (expert < 0) continue;
    if (key(routing, at) == border_[static_cast<size_t>(expert)]) {
      ++(*ties)[static_cast<size_t>(expert)];
    }
  }
  return {};
}

Status CapacityCut::apply(const Routing& routing, std::span<const int64_t> ties_before,
                          Routing* kept) const {
  if (!is_done()) return invalid("the cut needs {} more rounds", num_bytes_);
  if (kept == nullptr || kept == &routing) return invalid("kept must be another routing");
  ARGOSY_RETURN_IF_ERROR(check(routing));
  if (static_cast<int64_t>(ties_before.size()) != num_experts_) {
    return invalid("ties_before has {} numbers, expected {}", ties_before.size(), num_experts_);
  }
  std::vector<int64_t> used;
  ARGOSY_RETURN_IF_ERROR(assign(ties_before.size(), &used));
  ARGOSY_RETURN_IF_ERROR(copy(routing, kept));
  ARGOSY_RETURN_IF_ERROR(assign(ties_before.size(), &kept->counts));
  for (int64_t at = 0; at < routing.num_tokens * top_k_; ++at) {
    int32_t& id = kept->topk_idx[static_cast<size_t>(at)];
    if (id < 0) continue;
    const auto expert = static_cast<size_t>(id);
    const uint64_t seen = key(routing, at);
    bool stays = seen > border_[expert];
    if (seen == border_[expert]) {
      stays = used[expert] < num_places_[expert] - ties_before[expert];
      ++used[expert];
    }
    if (stays) {
      ++kept->counts[expert];
    } else {
      id = -1;
    }
  }
  set_weights(spec_, routing, kept);
  return {};
}

Status apply_capacity(const CapacitySpec& spec, std::span<const Routing* const> ranks,
                      std::vector<Routing>* kept, std::vector<int64_t>* capacity) {
  ARGOSY_RETURN_IF_ERROR(validate(spec));
  if (kept == nullptr || capacity == nullptr) return invalid("an output is null");
  for (const Routing* routing : ranks) {
    if (routing == nullptr) return invalid("a routing is null");
    if (routing->num_valid_tokens < 0 || routing->num_valid_tokens > routing->num_tokens) {
      return invalid("{} valid tokens of {}", routing->num_valid_tokens, routing->num_tokens);
    }
  }
  ARGOSY_RETURN_IF_ERROR(assign(ranks.size(), kept));
  ARGOSY_RETURN_IF_ERROR(assign(ranks.size(), capacity));
  if (ranks.empty()) return {};
  if (spec.scope == CapacityScope::kGroup) {
    return run_scope(spec, ranks, kept->data(), capacity->data());
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    ARGOSY_RETURN_IF_ERROR(
        run_scope(spec, ranks.subspan(r, 1), kept->data() + r, capacity->data() + r));
  }
  return {};
}

Status capacity_backward(const CapacitySpec& spec, const Routing& routing, const Routing& kept,
                         const ConstTensorView& d_kept_weights, const TensorView& d_topk_weights) {
  ARGOSY_RETURN_IF_ERROR(validate(spec));
  ARGOSY_RETURN_IF_ERROR(check_kept(routing, kept));
  ARGOSY_RETURN_IF_ERROR(check_weights_view(d_kept_weights, "d_kept_weights", routing));
  ARGOSY_RETURN_IF_ERROR(check_weights_view(d_topk_weights, "d_topk_weights", routing));
  rows_backward(spec, routing, kept, d_kept_weights.as<float>(), d_topk_weights.as<float>());
  return {};
}

}  // namespace argosy
