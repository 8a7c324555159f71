// Dispatch and combine in throughput mode: counts first, then every row straight to its exact
// place.
//
// One Exchange holds the buffers and flags of one exchange at a time; several may be in flight on a
// group by making several. Every step has an issue half and a wait half (contract 3.9). The calls
// of one step sequence, on every rank:
//
//   issue_counts, wait_counts, make_plan,
//   then for every round: issue_dispatch, wait_dispatch, (experts), issue_combine, wait_combine.
//
// Rows are pushed: a row is read once and written to all its places at a peer. Results are pulled
// by the token's home rank, which sums them in top-k order. No barrier: flags carry epoch and
// round, and a buffer is reused only after its readers have said so. Protocol:
// docs/architecture.md. Test: tests/exchange/.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "argosy/exchange_stats.h"
#include "argosy/group.h"
#include "argosy/payload.h"
#include "argosy/plan.h"
#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

struct ExchangeOptions {
  DType dtype = DType::kUnset;  // of the rows, both ways: kBF16 or kF32
  int64_t hidden = 0;           // row width H, >= 1
  int64_t num_experts = 0;      // E, >= 1
  int64_t top_k = 0;            // K, >= 1
  // Bytes of the buffer of received rows (the buffer of results has the same size). Demand above it
  // runs in rounds. At least one aligned row.
  int64_t receive_budget_bytes = 256ll << 20;
  int64_t max_receive_rows = -1;              // hard cap per rank and call; -1 = none
  int64_t group_alignment = 1;                // groups start at multiples of this many rows
  BlockFormat payload = BlockFormat::kUnset;  // of dispatch; kUnset: rows as they are
  // Training: plans may be used again without a count exchange, and every row has a number beside it in both directions.
  bool training = false;
  bool numbers = false;  // a number beside every row on its way out, without training too

  bool has_numbers() const { return training || numbers; }
};

// What an Exchange takes of symmetric memory on each rank; planning and creation use this one
// function.
struct ExchangeSize {
  int64_t round_rows = 0;     // rows of one buffer
  int64_t rows_bytes = 0;     // received rows, as they travel
  int64_t results_bytes = 0;  // expert rows on their way home
  int64_t flags_bytes = 0;
  int64_t counts_bytes = 0;
  int64_t numbers_bytes = 0;  // beside the rows, and statuses of training
  int64_t total_bytes = 0;
};
// Errors: kInvalidArgument naming the option.
Result<ExchangeSize> size_exchange(const ExchangeOptions& options, int num_ranks);

// Received rows of one round, expert-major. Valid until issue_combine of that round.
struct ReceivedRows {
  // [round_rows, H]; of a quantised payload U8 [round_rows, bytes from row to row], each encoded by Exchange::payload().
  // Rows outside the groups are unspecified.
  ConstTensorView rows;
  std::vector<int64_t> group_offsets;  // [L] first row of each local expert's group
  std::vector<int64_t> group_sizes;    // [L]
  const float* numbers =
      nullptr;  // [round_rows] beside the rows; null without training and numbers
};

// Results of one call at the token's home rank. Valid until the next issue_counts or issue_reuse (latency mode:
// LatencyExchange::wait_returned).
struct ReturnedRows {
  std::vector<const std::byte*> rows;  // [T, K] expert rows [H], null where nobody has one
  std::vector<float> numbers;          // [T, K] beside them; 0 where nobody has one
};

// What a token's sum starts from: acc = shared * shared_scale, or 0; + residual; + bias.
struct CombineInput {
  ConstTensorView topk_weights;         // fp32 [T, K], dense
  ConstTensorView shared;               // [T, H] rows of the exchange's dtype, or unset
  const float* shared_scale = nullptr;  // [T], or null = 1
  ConstTensorView residual;             // [T, H] of the exchange's dtype, or unset
  ConstTensorView bias;                 // fp32 [H], or unset
  const uint8_t* mask = nullptr;        // [T], 1 = valid; the output row of a masked token is zero
};

class Exchange {
 public:
  // Collective: yes. Blocks: at most the group's step_deadline. The group must outlive it. Errors:
  // kDisagree names the option; kInvalidArgument; kOutOfMemory (bytes).
  static Result<std::unique_ptr<Exchange>> create(Group& group, const ExchangeOptions& options);
  ~Exchange();

  const ExchangeOptions& options() const;
  const ExchangeSize& size() const;
  const Placement& placement() const;
  const PayloadLayout& payload() const;
  uint64_t group_id() const;
  // Of this rank, since creation.
  const ExchangeStats& stats() const;
  // Held beside the windows: rows of calls of several rounds, one encoded row a thread.
  int64_t scratch_bytes() const;

  // Sends this rank's counts and status to everybody. A routing that breaks contract 1.8 (expert
  // out of range, twice in a row) or a `local` that is not ok is sent as an error that every rank
  // gets from wait_counts; no row moves then.
  //
  // Collective: yes. Blocks: no.
  // in   routing  top_k and num_experts as created; not read when `local` is an error
  //      same     what must be the same on every rank, in words, of which at most 240 bytes count
  Status issue_counts(const Status& local, const Routing& routing, std::string_view same = {});
  // Blocks: at most step_deadline. Errors: the first failing rank's status, or kInvalidArgument where `same` differs,
  // the same text on every rank (the group stays usable); kTimeout, kPeerLost, kAborted.
  Status wait_counts(CountsMatrix* counts);

  // In place of the count exchange where a plan is used again, as backward does: says that this rank is through with the
  // call before, and how it fares. training only; every rank uses the plan of one call. Also after wait_counts, for what a
  // rank finds out only then.
  //
  // Collective: yes. Blocks: no. Errors: kInvalidArgument (order of calls), kStalePlan.
  // in   same  what must be the same on every rank, in words; of these at most 240 bytes count
  Status issue_reuse(const Status& local, const DispatchPlan& plan, std::string_view same = {});
  // Blocks: at most step_deadline. Errors, the same on every rank (the group stays usable): the first failing rank's status;
  // kInvalidArgument where `same` differs, with both. Those of a wait.
  Status wait_reuse();

  // make_plan with this exchange's options.
  Status plan(const Routing& routing, const CountsMatrix& counts, DispatchPlan* plan) const;

  // Pushes this rank's rows of one round, quantised on the way where the payload is. Rounds rise from 0.
  //
  // Blocks: at most step_deadline, for the peers' buffers when round > 0.
  // in   hidden  [T, H] of the exchange's dtype, unit stride in H; may be reused on return
  // Errors: kStalePlan; kInvalidArgument (shape, dtype, order of calls).
  // in   numbers [T, K] dense, one beside every row, or null; where the exchange has them
  Status issue_dispatch(const DispatchPlan& plan, int64_t round, const ConstTensorView& hidden,
                        const float* numbers = nullptr);
  // Blocks until every row of this round for this rank is here. *rows is reused without allocating.
  Status wait_dispatch(const DispatchPlan& plan, int64_t round, ReceivedRows* rows);

  // Where the expert of a received row writes its result: the same row of [round_rows, H].
  TensorView results() const;
  // And a number beside it, [round_rows]; null unless training.
  float* result_numbers() const;

  // Says that the results of this round are written. Blocks: no.
  Status issue_combine(const DispatchPlan& plan, int64_t round);
  // Fetches this rank's results of the round; in the last round writes the weighted sums
  // (contract 3.5): fp32, fma over k ascending, one final rounding. -1 entries add nothing.
  //
  // out  output  [T, H] of the exchange's dtype, unit stride in H; must not overlap any input
  // Blocks: at most step_deadline. Allocates: only in calls of several rounds, when T grows.
  Status wait_combine(const DispatchPlan& plan, int64_t round, const CombineInput& input,
                      const TensorView& output);
  // In place of wait_combine: the rows themselves and the numbers beside them. Complete after the last round.
  Status wait_returned(const DispatchPlan& plan, int64_t round, ReturnedRows* returned);

 public:
  struct State;  // internal: src/exchange/state.h

 private:
  explicit Exchange(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace argosy
