// Capacity: at most C assignments an expert, the others dropped (contract 2.4). Never used unless a
// caller asks: Argosy is dropless.
//
// C = ceil(T K num / (E den)) in integers, 1 <= C <= T, T the valid tokens of the scope; without
// tokens C = 0. Which assignments survive is a function of all assignments of the scope in global
// token order alone: any split over ranks keeps the same ones. A dropped assignment is -1 with
// weight 0 in the routing that comes out; a token that loses all K passes by the residual only.
// Losses and the backward of routing go on with the routing before the drop. Test:
// tests/router/capacity_test.cc.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

enum class CapacityPolicy {
  kUnset,
  kPosition,  // the first tokens in global token order
  kWeight,    // the largest weights, ties to the first token
};

// Whose tokens C counts, and who competes for it.
enum class CapacityScope {
  kGroup,  // all ranks' tokens
  kRank,   // each rank's own, as most systems do: depends on the split
};

// When second and further choices compete.
enum class ChoiceOrder {
  kInterleaved,           // with the first ones
  kAllFirstChoicesFirst,  // choice k of any token before choice k + 1 of any other (GShard)
};

struct CapacitySpec {
  int64_t factor_num = 0;  // num and den of the capacity factor, each in [1, 2^31)
  int64_t factor_den = 1;
  CapacityPolicy policy = CapacityPolicy::kUnset;
  CapacityScope scope = CapacityScope::kGroup;
  ChoiceOrder choice_order = ChoiceOrder::kInterleaved;
  // The kept weights of a token take over the sum of the dropped ones, in their ratio. Tokens that
  // lost nothing, or whose kept weights are all 0, keep their bits.
  Choice renormalise = Choice::kNo;
};

// kInvalidArgument names the rule: factor outside [1, 2^31), policy or any other field not a value
// of its type.
Status validate(const CapacitySpec& spec);

// C for T = num_tokens valid tokens. Errors: validate(); a size that is negative or no count.
Result<int64_t> expert_capacity(const CapacitySpec& spec, int64_t num_experts, int64_t top_k,
                                int64_t num_tokens);

// The drop for all ranks of a scope at once.
//
// in   ranks     the routings, in rank order: their tokens one after the other are the global order
// out  kept      one for each rank: topk_idx with -1, weights with 0 at what was dropped; counts
//                are the kept assignments; num_valid_tokens as before
// out  capacity  [R] the C that each rank's tokens were held to
// Errors: validate(); kInvalidArgument for routings that do not fit together, ids outside [-1, E),
// with kWeight a weight that is negative or not finite; kOutOfMemory. Outputs are then unspecified.
Status apply_capacity(const CapacitySpec& spec, std::span<const Routing* const> ranks,
                      std::vector<Routing>* kept, std::vector<int64_t>* capacity);

// The same when each rank holds its own tokens only; every rank calls in this order:
//
//   cut = CapacityCut::create(..., valid tokens of all ranks)
//   while (!cut.is_done()) { cut.histogram(mine, &bins); sum bins over ranks; cut.refine(bins); }
//   cut.count_ties(mine, &ties); before = sum of the ties of all lower ranks
//   cut.apply(mine, before, &kept)
//
// One round for each byte of what is compared: none for kPosition, four for kWeight, one more (for
// K > 256 two, ...) for kAllFirstChoicesFirst with K > 1. Sums are int64 and exact, so no order of
// reduction matters. For CapacityScope::kRank: own tokens, own bins, `before` all zero.
class CapacityCut {
 public:
  static constexpr int64_t kBins = 256;

  static Result<CapacityCut> create(const CapacitySpec& spec, int64_t num_experts, int64_t top_k,
                                    int64_t num_tokens);

  int64_t capacity() const { return capacity_; }
  bool is_done() const { return num_bytes_ == 0; }

  // out  bins  [E, kBins] of this rank's assignments that are still undecided
  Status histogram(const Routing& routing, std::vector<int64_t>* bins) const;
  // in   bins  [E, kBins] summed over the ranks of the scope
  Status refine(std::span<const int64_t> bins);
  // out  ties  [E] of this rank's assignments on the border. Precondition: is_done().
  Status count_ties(const Routing& routing, std::vector<int64_t>* ties) const;
  // in   ties_before  [E] ties of all tokens before this rank's
  Status apply(const Routing& routing, std::span<const int64_t> ties_before, Routing* kept) const;

 private:
  CapacityCut() = default;
  Status check(const Routing& routing) const;
  // What is compared: a larger key survives, equal ones by token order.
  uint64_t key(const Routing& routing, int64_t at) const;

  CapacitySpec spec_;
  int64_t num_experts_ = 0;
  int64_t top_k_ = 0;
  int64_t capacity_ = 0;
  int num_bytes_ = 0;                // of the key that are still to be looked at
  std::vector<uint64_t> border_;     // [E] key >> (8 * num_bytes_) of the last that may stay
  std::vector<int64_t> num_places_;  // [E] for the assignments at the border
};

// d_topk_weights of the routing before the drop, from those of the routing after it. The choice of
// what is dropped has no gradient.
//
// in   d_kept_weights   fp32 [T, K] dense; entries at dropped or masked ones are never read
// out  d_topk_weights   fp32 [T, K] dense; may be the same memory
// Errors: kInvalidArgument for shapes and for a `kept` that is not from `routing`.
Status capacity_backward(const CapacitySpec& spec, const Routing& routing, const Routing& kept,
                         const ConstTensorView& d_kept_weights, const TensorView& d_topk_weights);

}  // namespace argosy
