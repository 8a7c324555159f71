// The plan of one exchange: which row goes where. A plain value made by pure functions
// (contract 3.1).
//
// Received rows are expert-major: by local expert, then source rank, then source token. Symbols: T
// tokens of this rank, E experts, K top_k, R ranks, L local experts. Slots are int64 row positions
// in a destination's receive space; the space may be larger than its buffer and is then filled in
// rounds of `round_rows` (contract 3.6). Test: tests/plan/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "argosy/router.h"
#include "argosy/status.h"

namespace argosy {

// First item of rank `rank` when `num_items` are owned contiguously by `num_ranks`:
// floor(rank*N/R).
int64_t owned_begin(int64_t num_items, int num_ranks, int rank);

// Which rank holds which expert: contiguous, uneven counts are normal, E < R too.
struct Placement {
  int64_t num_experts = 0;
  int num_ranks = 1;
  uint64_t epoch = 0;  // grows when experts move

  int64_t begin(int rank) const { return owned_begin(num_experts, num_ranks, rank); }
  int64_t num_local(int rank) const { return begin(rank + 1) - begin(rank); }
  int owner(int64_t expert) const;
};

// What the count exchange tells every rank about every rank.
struct CountsMatrix {
  int num_ranks = 0;
  int64_t num_experts = 0;
  std::vector<int64_t> counts;      // [R, E] valid (token, k) assignments of rank r to expert e
  std::vector<int64_t> num_tokens;  // [R]

  int64_t at(int rank, int64_t expert) const {
    return counts[static_cast<size_t>(rank * num_experts + expert)];
  }
};

struct PlanOptions {
  int rank = 0;
  uint64_t group_id = 0;
  int64_t group_alignment = 1;    // every expert's group starts at a multiple of this
  int64_t round_rows = 0;         // rows of a receive buffer; a multiple of group_alignment, >= 1
  int64_t max_receive_rows = -1;  // hard cap on any rank's rows; -1 = none
};

struct DispatchPlan {
  static constexpr uint32_t kVersion = 1;

  // Identity, checked on use.
  uint32_t version = 0;
  uint64_t group_id = 0;
  uint64_t placement_epoch = 0;
  int num_ranks = 0;
  int rank = 0;
  int64_t num_tokens = 0;   // T
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K
  int64_t group_alignment = 1;
  int64_t round_rows = 0;

  // Sending: the original routing and, for each (t, k), where its row goes.
  std::vector<int32_t> topk_idx;   // [T, K]; -1 = nobody
  std::vector<int32_t> dest_rank;  // [T, K]; -1 = nobody
  std::vector<int64_t> dest_slot;  // [T, K]; slot in dest_rank's receive space; -1 = nobody

  // Receiving, this rank's own slots.
  std::vector<int64_t> group_sizes;    // [L] real rows
  std::vector<int64_t> group_offsets;  // [L + 1], last = total with alignment
  std::vector<int64_t> source_rows;    // [L, R] rows of local expert l from source rank r

  // Every rank's receive space, so that all know the number of rounds without asking.
  std::vector<int64_t> receive_rows;   // [R] real rows
  std::vector<int64_t> receive_slots;  // [R] with alignment
  int64_t num_rounds = 0;              // max over ranks, at least 1

  // This rank's rows at each expert: a contiguous run of slots at the expert's owner.
  std::vector<int64_t> send_slots;  // [E] first slot
  std::vector<int64_t> send_rows;   // [E] rows

  // Bytes are rows x row bytes. Rows that leave this rank, all and with each token once per peer
  // and round.
  int64_t rows_leaving = 0;
  int64_t rows_leaving_dedup = 0;

  int64_t num_local_experts() const { return static_cast<int64_t>(group_sizes.size()); }
};

// Builds this rank's plan. Pure: the same inputs give the same plan anywhere. Reused, *plan does
// not allocate once grown.
//
// Errors: kInvalidArgument when routing, counts and placement do not fit together (names both
// values), for an expert out of range or twice in a row (token, position, value), for options out
// of range; kCapacity, the same on every rank, when a rank would receive more than
// max_receive_rows.
Status make_plan(const Routing& routing, const CountsMatrix& counts, const Placement& placement,
                 const PlanOptions& options, DispatchPlan* plan);

// kStalePlan, naming field, have and want, unless the plan belongs to this group, rank and
// placement.
Status check_plan(const DispatchPlan& plan, uint64_t group_id, int rank, int num_ranks,
                  uint64_t placement_epoch);

// The part of every local group that lies in round `round`: offsets in rows of the buffer and
// sizes, [L] each. Precondition: 0 <= round < num_rounds.
void round_groups(const DispatchPlan& plan, int64_t round, std::vector<int64_t>* group_offsets,
                  std::vector<int64_t>* group_sizes);

// Rows this rank sends to and gets from each rank in round `round`, [R] each; itself included. Only
// pairs with rows have work (contract 3.7).
void round_traffic(const DispatchPlan& plan, int64_t round, std::vector<int64_t>* send_rows,
                   std::vector<int64_t>* recv_rows);

// Bytes and back. parse_plan checks everything (contract 6.6): kCorruptData names what is wrong.
std::vector<std::byte> serialize_plan(const DispatchPlan& plan);
Result<DispatchPlan> parse_plan(std::span<const std::byte> bytes);

}  // namespace argosy
