// Choice of the best experts of one row: falling selection score, ties to the lowest id, after the
// group limit (contract 1.4, 1.5). Integer keys only, so MXCSR does not matter. Test:
// tests/router/top_k_test.cc.
#pragma once

#include <cstdint>
#include <optional>

#include "argosy/router.h"
#include "router/kernel.h"

namespace argosy::router {

// Rises with the score and, for equal scores (-0 equals +0), falls with the id. No two ids share a
// key, and none is 0. Preconditions: score is no NaN, 0 <= id < 2^32 - 1.
uint64_t selection_key(float score, int64_t id);
int64_t id_of_key(uint64_t key);

// Keeps the k largest of the keys offered. O(1) amortised for each, whatever their order:
// candidates gather in a buffer of twice k, and when it is full only its k best stay.
class TopK {
 public:
  static int64_t buffer_size(int64_t k) { return 2 * k + 16; }
  // `buffer` holds buffer_size(k) keys and outlives this.
  TopK(uint64_t* buffer, int64_t k) : buffer_(buffer), k_(k) {}

  void offer(uint64_t key) {
    if (key <= threshold_) return;
    buffer_[count_++] = key;
    if (count_ == buffer_size(k_)) compact();
  }

  // Sorts; the k largest keys (all of them if fewer were offered) are then at the front, falling.
  // Returns how many there are.
  int64_t finish();

 private:
  void compact();

  uint64_t* buffer_;
  int64_t k_;
  int64_t count_ = 0;
  uint64_t threshold_ = 0;
};

// How many experts of a group its score sums up.
int64_t experts_per_group_score(const RouterSpec& spec);

// What Kernel::select takes of a spec; nothing where only select_experts() will do: top_k or num_groups above
// kSelectMostTopK, or groups so small that whole vectors of them waste more than they save.
std::optional<SelectRules> select_rules(const RouterSpec& spec);

// Scratch of select_experts: keys of buffer_size() of the larger of top_k and
// experts_per_group_score(), group_keys of buffer_size(keep_groups).
struct SelectScratch {
  uint64_t* keys;
  uint64_t* group_keys;
};

// The top_k experts by selection score [num_experts] within the kept groups. Refused groups are
// left out, which is a mask of -inf that no finite or overflown score can tie with. Precondition:
// validate(spec).ok().
void select_experts(const RouterSpec& spec, const float* selection, const SelectScratch& scratch,
                    int32_t* topk_idx);

}  // namespace argosy::router
