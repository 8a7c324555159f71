// What a MoeTape holds. Slots are those of the plan over all rounds. Test: tests/moe/backward_test.cc.
#pragma once

#include <vector>

#include "argosy/moe_backward.h"

namespace argosy {

struct MoeTape::State {
  TapePolicy policy;
  bool is_filled = false;
  bool has_gate = false;  // the layer's own routing, whose logits are there
  uint64_t layer = 0;     // which MoeLayer filled it
  int64_t num_slots = 0;  // S
  DispatchPlan plan;
  Routing routing;
  std::vector<uint8_t> mask;         // [T] or empty
  std::vector<int64_t> rank_tokens;  // [R]
  AlignedBuffer logits;              // fp32 [T, E]
  AlignedBuffer rows;                // [S, H]
  AlignedBuffer gate, up;            // fp32 [S, F]
  AlignedBuffer h;                   // [S, F]
  AlignedBuffer results;             // [S, H]

  const uint8_t* mask_or_null() const { return mask.empty() ? nullptr : mask.data(); }
};

}  // namespace argosy
