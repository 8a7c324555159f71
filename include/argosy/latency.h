// Dispatch and combine in latency mode: rows go into fixed slots without asking (contract 3).
//
// For decode: few tokens a rank. The place of a row follows from who sends it and which of its tokens for that
// peer it is, so no counts are exchanged; flags carry an epoch and a count, so there is no barrier and nothing to reset.
// Rows, their order and all bits are those of Exchange for the same payload. Several calls may be in flight, each by
//
//   issue_dispatch, wait_dispatch, (experts), issue_combine, wait_combine
//
// and calls on one LatencyExchange are issued in one order on every rank. Protocol: docs/architecture.md. Floor:
// docs/perf/latency.md. Test: tests/exchange/latency_test.cc, latency_schedule_test.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "argosy/exchange.h"
#include "argosy/exchange_stats.h"
#include "argosy/group.h"
#include "argosy/payload.h"
#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

// How expert rows come home.
enum class ReturnPath : uint8_t {
  kPull,  // they stay where the expert wrote them, and the home rank reads them there: each byte moves once
  kPush,  // the expert writes them into K*M return slots of the home rank
};

struct LatencyOptions {
  DType dtype = DType::kUnset;                // of the rows: kBF16 or kF32
  int64_t hidden = 0;                         // row width H, >= 1
  int64_t num_experts = 0;                    // E, >= 1
  int64_t top_k = 0;                          // K, >= 1
  int64_t max_tokens = 0;                     // M, of one rank and call; 1 to 2^20
  BlockFormat payload = BlockFormat::kUnset;  // of dispatch; kUnset: rows as they are
  ReturnPath return_path = ReturnPath::kPull;
  int64_t num_in_flight = 2;  // calls that may be under way at once, 1 to 8
  // Training: every row has a number beside it in both directions, in the same slot and behind the same flag.
  bool training = false;
};

// What a LatencyExchange takes of symmetric memory on each rank; creation uses this function too. Of ExchangeSize,
// round_rows is R*M, rows_bytes the slots, results_bytes the expert rows (pull: R*M*min(K, L)) or return slots (push: K*M),
// counts_bytes the notices of failed ranks; all of them for num_in_flight calls. The numbers of training lie in the slots and
// beside the results, so rows_bytes and results_bytes have them.
// Errors: kInvalidArgument naming the option; kUnsupported (payload).
Result<ExchangeSize> size_exchange(const LatencyOptions& options, int num_ranks);

// What a rank says with its rows.
struct DispatchNote {
  bool more = false;  // tokens are left that a further call will bring
  // No rows: this rank wants the call done another way. All ranks learn it, and the call is over.
  bool decline = false;
  const float* numbers = nullptr;  // [T, K] dense, one beside every row, or null; training only
  // What must be the same on every rank, in words, of which at most 240 bytes count. Where they differ, also where some
  // ranks give none, the call is an error on every rank, with both.
  std::string_view same = {};
  // Which layer the rows belong to, the same number on every rank. Rows of another one: kDisagree, and the group is aborted.
  uint16_t context = 0;
};

// Received rows of one call, expert-major: by local expert, source rank, source token. Reused without allocating.
struct LatencyRows {
  std::vector<int64_t> group_offsets;  // [L + 1]
  std::vector<int64_t> group_sizes;    // [L]
  // [S] encoded by payload(), 4-byte aligned; valid until issue_combine. Rows of this rank that travel as they are
  // lie where `hidden` has them.
  std::vector<const std::byte*> rows;
  std::vector<std::byte*> results;  // [S] where the expert of that row writes [H] of dtype
  // [S] beside the rows; training only, unspecified where none was sent
  std::vector<float> numbers;
  std::vector<float*> result_numbers;  // [S] beside the results; training only
  std::vector<int32_t> source_rank;    // [S]
  std::vector<int32_t> source_token;   // [S]
  bool more = false;                   // some rank has tokens left
  bool declined = false;               // some rank declined: no rows
};

class LatencyExchange {
 public:
  // Collective: yes. Blocks: at most the group's step_deadline. The group must outlive it. Errors: kDisagree names the
  // option; kInvalidArgument; kUnsupported; kOutOfMemory (bytes).
  static Result<std::unique_ptr<LatencyExchange>> create(Group& group,
                                                         const LatencyOptions& options);
  ~LatencyExchange();

  const LatencyOptions& options() const;
  const ExchangeSize& size() const;
  const PayloadLayout& payload() const;
  const Placement& placement() const;
  uint64_t group_id() const;

  // Sends this rank's rows and returns the number of the call. A routing that breaks contract 1.8, more than max_tokens
  // tokens, a wrong shape, or a `local` that is not ok is sent as an error that every rank gets from wait_dispatch; nothing
  // else moves then.
  //
  // Collective: yes. Blocks: not for peers that finished the call num_in_flight before; else at most step_deadline.
  // in   routing  top_k and num_experts as created; not read when `local` is an error
  // in   hidden   [T, H] of dtype, unit stride in H; unchanged until issue_combine
  // Errors, of this rank alone: kInvalidArgument when num_in_flight calls are under way; those of a wait.
  Result<uint64_t> issue_dispatch(const Status& local, const Routing& routing,
                                  const ConstTensorView& hidden, const DispatchNote& note = {});
  // True when wait_dispatch would not block. Never blocks.
  bool dispatch_arrived(uint64_t call) const;
  // Blocks: at most step_deadline. Errors: the first failing rank's status, or kInvalidArgument where DispatchNote::same differs,
  // the same on every rank; the call is over then and the group stays usable. kInvalidArgument (order of calls);
  // kCorruptData for what no rank sends; kTimeout, kPeerLost, kAborted.
  Status wait_dispatch(uint64_t call, LatencyRows* rows);

  // Says that the results are written. Blocks: no.
  Status issue_combine(uint64_t call);
  bool results_arrived(uint64_t call) const;
  // The weighted sums (contract 3.5), in top-k order, -1 entries add nothing.
  //
  // out  output  [T, H] of dtype, unit stride in H; must not overlap any input
  // Blocks: at most step_deadline.
  Status wait_combine(uint64_t call, const CombineInput& input, const TensorView& output);
  // In place of wait_combine: the rows themselves and the numbers beside them. Valid until issue_dispatch of the call
  // num_in_flight later.
  Status wait_returned(uint64_t call, ReturnedRows* returned);

  // Of this rank, since creation. Kept at two clock readings and a few additions a wait.
  const ExchangeStats& stats() const;

  struct State;  // internal: src/exchange/latency_state.h

 private:
  explicit LatencyExchange(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace argosy
