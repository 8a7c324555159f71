// The insides of a LatencyExchange: where everything lies, and the protocol over an Endpoint.
//
// Four windows, each cut by set = epoch % num_in_flight:
//
//   slots    [set][source][M]           a header and the row, written by the source
//   results  [set][home][M * min(K,L)]  pull: expert rows, by the slot they came in and their place in its header
//            [set][M * K]               push: return slots of this rank's own tokens, by token and k
//   notices  [set][source]              why a rank has no rows, or what must be the same on every rank
//   flags    [set][kind][peer]          one word and cache line each, written by that peer only
//
// A flag is epoch << 25 | bits: it only grows, and an old one is never taken for a new one. `rows` from a source carries
// the count of its slots; 0 rows differ from no flag. `done` from an owner says that its results are written, and that it
// has read my slots. So slots of epoch e may be written again, by epoch e + num_in_flight, once everybody's `done` of e is
// here; results of e are overwritten only after everybody's rows of e + num_in_flight came, which they sent when they had
// read them. No barrier, no reset. Test: tests/exchange/latency_schedule_test.cc, latency_model_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "argosy/latency.h"
#include "argosy/plan.h"
#include "argosy/thread_pool.h"
#include "exchange/weighted_sum.h"
#include "platform/clock.h"
#include "quant/payload_encoder.h"
#include "transport/endpoint.h"
#include "transport/status_message.h"

namespace argosy {

// One received row's expert, as the source wrote it.
struct SlotEntry {
  uint16_t expert = 0;  // local
  uint16_t k = 0;       // position in the token's top-k
};
// In front of every row, one cache line for top_k up to 10 (training: 5); followed by `num_entries` SlotEntry and, for
// training, from LatencyLayout::numbers_at on by as many fp32.
struct SlotHeader {
  uint64_t epoch = 0;
  uint64_t payload_tag = 0;
  int32_t token = 0;
  int16_t num_entries = 0;  // 1 to min(K, L)
  uint16_t context = 0;     // DispatchNote::context
};

// A rank's status, with the epoch of the call beside it.
using Notice = transport::StatusMessage;

// A flag word, and back.
struct LatencyFlag {
  static constexpr int kEpochShift = 25;
  static constexpr uint64_t kWords = 1u << 24;  // a notice of words came before
  static constexpr uint64_t kFailed = 1u << 23;
  static constexpr uint64_t kDeclined = 1u << 22;
  static constexpr uint64_t kMore = 1u << 21;
  static constexpr uint64_t kCountMask = kMore - 1;

  static uint64_t of_epoch(uint64_t epoch) { return epoch << kEpochShift; }
};

// Byte offsets; pure functions of the options.
struct LatencyLayout {
  int64_t num_ranks = 0, max_tokens = 0, top_k = 0;
  int64_t max_entries = 0;   // min(K, most local experts of any rank)
  int64_t header_bytes = 0;  // multiple of 64
  int64_t slot_bytes = 0;    // likewise
  int64_t row_stride = 0;    // of results, likewise
  int64_t result_bytes = 0;  // what travels home: a row and, for training, the number beside it
  // Training: where the numbers begin in a slot, and the one of a result in its place; else 0.
  int64_t numbers_at = 0, result_number_at = 0;
  bool push = false;
  ExchangeSize size;

  enum Kind { kRows = 0, kDone = 1 };
  static constexpr int64_t kLineBytes = 64;

  int64_t slot(int64_t set, int64_t source, int64_t index) const {
    return ((set * num_ranks + source) * max_tokens + index) * slot_bytes;
  }
  // pull: of the entry `entry` of slot `index` from `home`, at the owner.
  int64_t result(int64_t set, int64_t home, int64_t index, int64_t entry) const {
    return (((set * num_ranks + home) * max_tokens + index) * max_entries + entry) * row_stride;
  }
  // push: at the home rank.
  int64_t return_slot(int64_t set, int64_t token, int64_t k) const {
    return ((set * max_tokens + token) * top_k + k) * row_stride;
  }
  int64_t notice(int64_t set, int64_t source) const {
    return (set * num_ranks + source) * static_cast<int64_t>(sizeof(Notice));
  }
  int64_t flag(int64_t set, Kind kind, int64_t peer) const {
    return ((set * 2 + kind) * num_ranks + peer) * kLineBytes;
  }
};
Result<LatencyLayout> latency_layout(const LatencyOptions& options, int num_ranks);

struct LatencyExchange::State {
  // Collective: yes. `step_deadline`: of every wait.
  static Result<std::unique_ptr<State>> create(transport::Endpoint& endpoint, ThreadPool& pool,
                                               const LatencyOptions& options, uint64_t group_id,
                                               std::chrono::milliseconds step_deadline);
  ~State();

  Result<uint64_t> issue_dispatch(const Status& local, const Routing& routing,
                                  const ConstTensorView& hidden, const DispatchNote& note);
  bool arrived(uint64_t call, LatencyLayout::Kind kind) const;
  // False when the peers have not yet finished the call whose place the next one takes.
  bool can_issue() const;
  Status wait_dispatch(uint64_t call, LatencyRows* rows);
  Status issue_combine(uint64_t call);
  Status wait_combine(uint64_t call, const CombineInput& input, const TensorView& output);
  Status wait_returned(uint64_t call, ReturnedRows* returned);

  enum class Step { kFree, kDispatchIssued, kDispatchDone, kCombineIssued };
  // An expert row, and the number beside it, on its way to a return slot that stores do not reach.
  struct Parcel {
    int32_t home = 0;
    int64_t from = 0;  // in outbox
    int64_t to = 0;    // in the home's results window
  };
  // One call in flight.
  struct Call {
    uint64_t epoch = 0;
    Step step = Step::kFree;
    bool acknowledged = true;  // everybody's `done` of this epoch was seen
    bool failed = false;       // this rank sent a notice or declined
    int64_t num_tokens = 0;
    ConstTensorView hidden;
    const float* numbers = nullptr;  // [T, K], while rows are sent
    std::string same;                // what this rank said that all must share
    uint16_t context = 0;
    std::vector<int32_t> dest_rank;  // [T, K]; -1 = nobody
    std::vector<int64_t>
        result_at;  // [T, K] offset in the owner's results, or in the own return slots
    std::vector<int64_t> sent_slots;  // [R] slots sent to each rank
    std::vector<Parcel> parcels;
  };
  // One (slot, expert) of the rows that came, in the order of slots.
  struct Arrival {
    int32_t source, index, entry, token, expert, k;
  };

  int rank() const { return endpoint.rank(); }
  int num_ranks() const { return endpoint.num_ranks(); }
  int64_t set_of(uint64_t call) const {
    return static_cast<int64_t>(call % static_cast<uint64_t>(options.num_in_flight));
  }
  Call& call_of(uint64_t call) { return calls[static_cast<size_t>(set_of(call))]; }
  const Call& call_of(uint64_t call) const { return calls[static_cast<size_t>(set_of(call))]; }
  platform::Deadline deadline() const { return platform::Deadline::after(step_deadline); }
  std::byte* own(transport::Window window, int64_t offset) const {
    return endpoint.local_ptr(window, offset);
  }

  Status check_call(uint64_t call, Step due, const char* name) const;
  Status check_input(const Routing& routing, const ConstTensorView& hidden);
  // For the ids of this routing; grown, never shrunk. Errors: kOutOfMemory.
  Status make_room(const Routing& routing, Call* call);
  void number_slots(const Routing& routing, Call* call);
  int64_t write_header(const Call& call, const Routing& routing, int64_t token, size_t first,
                       std::byte* to) const;
  void push_token(const Call& call, const Routing& routing, int64_t token,
                  const quant::PayloadEncoder* encoder, std::byte* slot);
  void send_rows(const Call& call, const Routing& routing);
  void send_notice(const Call& call, const Status& status);
  // Of a source in this call; an empty one where it sent none.
  Notice notice_from(const Call& call, int source) const;
  Status verdict(const Call& call, int failing, bool words_differ) const;
  void raise(LatencyLayout::Kind kind, const Call& call, uint64_t bits, bool counts);
  // Whether the flags of everybody, or of the ranks that rows were sent to, are here.
  bool is_here(LatencyLayout::Kind kind, const Call& call, bool everybody) const;
  Status wait(LatencyLayout::Kind kind, const Call& call, bool everybody, const char* what);
  // Ends a call that brings no rows, for whatever reason.
  void finish_without_rows(Call* call);
  Status read_notices(Call* call, LatencyRows* rows, bool* is_over);
  Status read_slots(const Call& call, int source, int64_t count);
  Status sort_arrivals(Call* call, LatencyRows* rows);
  std::byte* result_address(Call* call, const Arrival& arrival);
  // Where the result of (token, k) = `at` is read by its home rank; null where nobody has one.
  const std::byte* returned_row(const Call& call, size_t at) const;
  Status corrupt(const Call& call, int source, int64_t index, const std::string& what);
  // Rows of another layer's call.
  Status mixed(const Call& call, int source, int context);

  transport::Endpoint& endpoint;
  ThreadPool& pool;
  const LatencyOptions options;
  const std::chrono::milliseconds step_deadline;
  const uint64_t group_id;
  LatencyLayout layout;
  PayloadLayout payload;
  uint64_t tag = 0;  // of the payload
  Placement placement;

  transport::Window slots, results, notices, flags;
  // Where they begin here, and the peers' results where loads and stores reach them, else null: looked up once.
  std::byte* own_slots = nullptr;
  std::byte* own_results = nullptr;
  std::vector<std::byte*> peer_results;  // [R]
  uint64_t last_epoch = 0;               // of the last call issued
  std::vector<Call> calls;               // [num_in_flight]
  ExchangeStats stats;

  // Scratch. What goes by tokens grows with them.
  std::vector<int32_t> owner, local_id;  // [E]
  std::vector<int64_t> own_counts;       // [E]
  std::vector<int32_t> slot_of;          // [T, K] slot at the owner; entry of it below
  std::vector<int32_t> entry_of;         // [T, K]
  std::vector<int64_t> last_token;       // [R] token whose slot was numbered last
  std::vector<transport::WaitItem> waits;
  std::vector<int64_t> waited_ns;   // [R]
  std::vector<Arrival> arrivals;    // up to R*M*max_entries
  std::vector<int64_t> next_place;  // [L]
  AlignedBuffer staging;            // [threads] a slot
  AlignedBuffer outbox;             // push without stores to peers: [R*M*max_entries] rows, grown
  SumScratch sum_scratch;

 private:
  State(transport::Endpoint& the_endpoint, ThreadPool& the_pool, const LatencyOptions& the_options,
        uint64_t the_group_id, std::chrono::milliseconds the_deadline)
      : endpoint(the_endpoint),
        pool(the_pool),
        options(the_options),
        step_deadline(the_deadline),
        group_id(the_group_id) {}
};

}  // namespace argosy
