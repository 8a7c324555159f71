// See tape.h and argosy/moe_backward.h.
#include "moe/tape.h"

#include "argosy/moe.h"

namespace argosy {

MoeTape::MoeTape(const TapePolicy& policy) : state_(std::make_unique<State>()) {
  state_->policy = policy;
}
MoeTape::~MoeTape() = default;
MoeTape::MoeTape(MoeTape&&) noexcept = default;
MoeTape& MoeTape::operator=(MoeTape&&) noexcept = default;

const TapePolicy& MoeTape::policy() const { return state_->policy; }
const DispatchPlan& MoeTape::plan() const { return state_->plan; }
const Routing& MoeTape::routing() const { return state_->routing; }

int64_t MoeTape::num_bytes() const {
  const State& s = *state_;
  return s.logits.size_bytes() + s.rows.size_bytes() + s.gate.size_bytes() + s.up.size_bytes() +
         s.h.size_bytes() + s.results.size_bytes();
}

TapeSize size_tape(const TapePolicy& policy, const TapeShape& shape) {
  const int64_t element = size_of(shape.dtype);
  constexpr auto kF32 = static_cast<int64_t>(sizeof(float));
  const int64_t rows = shape.num_slots * shape.hidden * element;
  const int64_t preactivation = 2 * shape.num_slots * shape.intermediate * kF32;
  const int64_t h = shape.num_slots * shape.intermediate * element;
  const auto kept = [](Keep keep, int64_t bytes) { return keep == Keep::kSave ? bytes : 0; };
  const auto again = [](Keep keep, int64_t bytes) { return keep == Keep::kRecompute ? bytes : 0; };
  TapeSize size;
  size.tape_bytes = shape.num_tokens * shape.num_experts * kF32 + kept(policy.rows, rows) +
                    kept(policy.preactivation, preactivation) + kept(policy.h, h) +
                    kept(policy.results, rows);
  // Gradients of the expert rows, of h in fp32, of gate and up; the gradient of the router; what is made again.
  size.backward_bytes = rows + shape.num_slots * shape.intermediate * (kF32 + 2 * element) +
                        shape.num_tokens * (2 * shape.num_experts + 2 * shape.hidden) * kF32 +
                        again(policy.rows, rows) + again(policy.preactivation, preactivation) +
                        again(policy.h, h) + again(policy.results, rows);
  return size;
}

}  // namespace argosy
