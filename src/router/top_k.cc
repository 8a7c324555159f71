// See top_k.h. Test: tests/router/top_k_test.cc.
#include "router/top_k.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace argosy::router {
namespace {

constexpr uint32_t kSignBit = 0x80000000u;

void offer_range(const float* selection, int64_t first, int64_t count, TopK* best) {
  for (int64_t i = first; i < first + count; ++i) best->offer(selection_key(selection[i], i));
}

float score_of_key(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>((ordered & kSignBit) != 0 ? ordered ^ kSignBit : ~ordered);
}

// The kept groups end up as the first keep_groups of group_keys.
void select_groups(const RouterSpec& spec, const float* selection, const SelectScratch& scratch) {
  const int64_t group_size = spec.num_experts / spec.num_groups;
  const int64_t num_summed = experts_per_group_score(spec);
  TopK best_groups(scratch.group_keys, spec.keep_groups);
  for (int64_t group = 0; group < spec.num_groups; ++group) {
    TopK best(scratch.keys, num_summed);
    offer_range(selection, group * group_size, group_size, &best);
    best.finish();
    // One rounding to fp32 at the end: the order is that of exact arithmetic to an ulp, for any
    // K/Kg.
    double sum = 0.0;
    for (int64_t i = 0; i < num_summed; ++i) {
      sum += static_cast<double>(score_of_key(scratch.keys[i]));
    }
    best_groups.offer(selection_key(static_cast<float>(sum), group));
  }
  best_groups.finish();
}

}  // namespace

uint64_t selection_key(float score, int64_t id) {
  uint32_t bits = std::bit_cast<uint32_t>(score);
  if ((bits << 1) == 0) bits = 0;
  const uint32_t ordered = (bits & kSignBit) != 0 ? ~bits : bits | kSignBit;
  return (uint64_t{ordered} << 32) | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}

int64_t id_of_key(uint64_t key) { return 0xFFFFFFFFu - static_cast<uint32_t>(key); }

void TopK::compact() {
  std::nth_element(buffer_, buffer_ + k_ - 1, buffer_ + count_, std::greater<>());
  threshold_ = buffer_[k_ - 1];
  count_ = k_;
}

int64_t TopK::finish() {
  if (count_ > k_) compact();
  std::sort(buffer_, buffer_ + count_, std::greater<>());
  return count_;
}

int64_t experts_per_group_score(const RouterSpec& spec) {
  switch (spec.group_score) {
    case GroupScore::kSumOfBestTwo:
      return std::min<int64_t>(2, spec.num_experts / spec.num_groups);
    case GroupScore::kSumOfBestKPerGroup:
      return spec.top_k / spec.keep_groups;
    case GroupScore::kMax:
    case GroupScore::kUnset:
      break;
  }
  return 1;
}

std::optional<SelectRules> select_rules(const RouterSpec& spec) {
  SelectRules rules;
  rules.top_k = spec.top_k;
  if (spec.keep_groups < spec.num_groups) {
    rules.num_groups = spec.num_groups;
    rules.keep_groups = spec.keep_groups;
    rules.num_summed = experts_per_group_score(spec);
  }
  rules.group_size = spec.num_experts / rules.num_groups;
  rules.group_stride = (rules.group_size + 7) / 8 * 8;
  if (rules.top_k > kSelectMostTopK || rules.num_groups > kSelectMostTopK ||
      rules.num_groups * rules.group_stride > 2 * spec.num_experts + kSelectMostTopK) {
    return std::nullopt;
  }
  return rules;
}

void select_experts(const RouterSpec& spec, const float* selection, const SelectScratch& scratch,
                    int32_t* topk_idx) {
  if (spec.keep_groups == spec.num_groups) {
    TopK best(scratch.keys, spec.top_k);
    offer_range(selection, 0, spec.num_experts, &best);
    best.finish();
  } else {
    select_groups(spec, selection, scratch);
    const int64_t group_size = spec.num_experts / spec.num_groups;
    TopK best(scratch.keys, spec.top_k);
    for (int64_t i = 0; i < spec.keep_groups; ++i) {
      const int64_t group = id_of_key(scratch.group_keys[i]);
      offer_range(selection, group * group_size, group_size, &best);
    }
    best.finish();
  }
  for (int64_t k = 0; k < spec.top_k; ++k) {
    topk_idx[k] = static_cast<int32_t>(id_of_key(scratch.keys[k]));
  }
}

}  // namespace argosy::router
