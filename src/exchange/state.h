// The insides of an Exchange: windows, flags, epochs. Shared by counts, dispatch and combine.
//
// Flags are 64-bit words in the flags window, one cache line each, [kind][peer]: the word of (kind,
// peer) is written by that peer only and holds a sequence = epoch << 24 | (round + 1), which only
// grows.
//
//   rows      from a source: its rows of that round are in my receive buffer
//   results   from an owner: its results of that round may be read
//   consumed  from an owner: it has read my rows of that round, its buffer may be overwritten
//   pulled    from a home rank: it has read my results of that round
//
// Between calls the count exchange stands for `consumed` and `pulled`: a rank sends its counts only
// after it is through with the call before. Only pairs with rows raise or wait for flags.
#pragma once

#include <memory>
#include <vector>

#include "argosy/exchange.h"
#include "exchange/weighted_sum.h"
#include "transport/collectives.h"
#include "transport/endpoint.h"

namespace argosy {

enum class FlagKind { kRows = 0, kResults, kConsumed, kPulled, kCount };

inline constexpr int64_t kFlagBytes = 64;
inline constexpr int kRoundBits = 24;

// Where in the sequence of calls this rank stands; calls out of order are refused.
enum class Step {
  kIdle,
  kCountsIssued,
  kReuseIssued,
  kCountsDone,
  kDispatchIssued,
  kDispatchDone,
  kCombineIssued
};

struct Exchange::State {
  State(Group& the_group, const ExchangeOptions& the_options)
      : group(the_group), options(the_options) {}

  Group& group;
  ExchangeOptions options;
  ExchangeSize size;
  Placement placement;
  int64_t row_bytes = 0;  // of results
  PayloadLayout payload;
  int64_t payload_stride = 0;  // of received rows

  transport::Window rows;
  transport::Window results;
  transport::Window flags;
  transport::Window row_numbers;     // training: beside the received rows
  transport::Window result_numbers;  // and beside the results
  std::unique_ptr<transport::AllGather> statuses;
  std::unique_ptr<transport::AllGather> counts;
  std::vector<std::byte> counts_message;

  uint64_t epoch = 0;  // number of count exchanges issued
  Step step = Step::kIdle;
  int64_t next_round = 0;

  // Scratch, grown once.
  std::vector<int64_t> own_counts;
  std::vector<int64_t> send_rows, recv_rows, only_rows;
  std::vector<transport::WaitItem> waits;
  AlignedBuffer returned;               // [T, K, H] results of a call of several rounds
  std::vector<float> returned_numbers;  // [T, K]
  SumScratch sum_scratch;
  AlignedBuffer encoded;           // [threads, payload_stride] of a quantised payload
  std::vector<int64_t> waited_ns;  // [R]
  ExchangeStats stats;

  int rank() const { return group.rank(); }
  int num_ranks() const { return group.num_ranks(); }
  platform::Deadline deadline() const { return platform::Deadline::after(group.step_deadline()); }

  uint64_t sequence(int64_t round) const {
    return (epoch << kRoundBits) | static_cast<uint64_t>(round + 1);
  }
  int64_t flag_offset(FlagKind kind, int peer) const {
    return (static_cast<int64_t>(kind) * num_ranks() + peer) * kFlagBytes;
  }

  void note_wait(int peer, int64_t ns) {
    if (ns >= 0 && peer != rank()) stats.waits[static_cast<size_t>(peer)].add(ns);
  }

  // Raises my word of `kind` at every peer with rows in `per_peer`.
  void raise(FlagKind kind, int64_t round, const std::vector<int64_t>& per_peer);
  // Waits for the words of `kind` from every peer with rows in `per_peer`.
  Status wait(FlagKind kind, int64_t round, const std::vector<int64_t>& per_peer, const char* what);
  // Waits for the results of a round; of several rounds, brings them home. address_of() then knows where each lies.
  Status bring_results(const DispatchPlan& plan, int64_t round);
  const std::byte* address_of(const DispatchPlan& plan, size_t at) const;
  float number_of(const DispatchPlan& plan, size_t at) const;

  // kStalePlan unless the plan is this exchange's.
  Status check_shape(const DispatchPlan& plan, const char* call) const;
  // kStalePlan or kInvalidArgument unless the plan is this exchange's and the call is due.
  Status check_call(const DispatchPlan& plan, int64_t round, Step due, const char* call) const;
};

}  // namespace argosy
