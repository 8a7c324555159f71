// Options, regions and sizes of latency mode: pure functions. Test: tests/exchange/latency_test.cc.
#include <algorithm>
#include <array>
#include <limits>

#include "base/error.h"
#include "exchange/latency_state.h"

namespace argosy {
namespace {

using base::invalid;

constexpr int kMaxRanks = 1024;  // of any group
constexpr int64_t kMaxTokens = int64_t{1} << 20;
static_assert(kMaxTokens <= static_cast<int64_t>(LatencyFlag::kCountMask));
constexpr int64_t kMaxInFlight = 8;
constexpr int64_t kMaxEntryValue = int64_t{1} << 16;  // experts of a rank, and top_k

int64_t whole_lines(int64_t bytes) {
  constexpr int64_t kLine = LatencyLayout::kLineBytes;
  return (bytes + kLine - 1) / kLine * kLine;
}

Status check_options(const LatencyOptions& options) {
  if (options.num_experts < 1 || options.num_experts > std::numeric_limits<int32_t>::max()) {
    return invalid("num_experts is {}, must be in [1, 2^31)", options.num_experts);
  }
  if (options.top_k < 1 || options.top_k > options.num_experts) {
    return invalid("top_k is {}, must be in [1, num_experts = {}]", options.top_k,
                   options.num_experts);
  }
  if (options.max_tokens < 1 || options.max_tokens > kMaxTokens) {
    return invalid("max_tokens is {}, must be in [1, 2^20]", options.max_tokens);
  }
  if (options.num_in_flight < 1 || options.num_in_flight > kMaxInFlight) {
    return invalid("num_in_flight is {}, must be in [1, {}]", options.num_in_flight, kMaxInFlight);
  }
  return {};
}

// The product; `what` and its factors are named when it does not fit.
Result<int64_t> product(const char* what, std::array<int64_t, 4> factors) {
  int64_t bytes = 1;
  for (const int64_t factor : factors) {
    if (!__builtin_mul_overflow(bytes, factor, &bytes)) continue;
    return invalid("{}: {} x {} x {} x {} bytes do not fit int64", what, factors[0], factors[1],
                   factors[2], factors[3]);
  }
  return bytes;
}

// A number beside every row, within its slot: in the header, and behind the result.
void add_numbers(int64_t entries_end, LatencyLayout* layout) {
  constexpr auto kNumberBytes = static_cast<int64_t>(sizeof(float));
  layout->numbers_at = entries_end;
  layout->header_bytes = whole_lines(entries_end + layout->max_entries * kNumberBytes);
  layout->result_number_at =
      (layout->result_bytes + kNumberBytes - 1) / kNumberBytes * kNumberBytes;
  layout->result_bytes = layout->result_number_at + kNumberBytes;
  layout->row_stride = whole_lines(layout->result_bytes);
}

}  // namespace

Result<LatencyLayout> latency_layout(const LatencyOptions& options, int num_ranks) {
  ARGOSY_RETURN_IF_ERROR(check_options(options));
  ARGOSY_ASSIGN_OR_RETURN(const PayloadLayout payload,
                          payload_layout(options.dtype, options.payload, options.hidden));
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    return invalid("num_ranks is {}, it can be 1 to {}", num_ranks, kMaxRanks);
  }
  // What a SlotEntry holds.
  if (options.top_k > kMaxEntryValue || (options.num_experts - 1) / num_ranks >= kMaxEntryValue) {
    return invalid("top_k {} and {} experts over {} ranks: at most {} each fit a slot",
                   options.top_k, options.num_experts, num_ranks, kMaxEntryValue);
  }
  LatencyLayout layout;
  layout.num_ranks = num_ranks;
  layout.max_tokens = options.max_tokens;
  layout.top_k = options.top_k;
  layout.push = options.return_path == ReturnPath::kPush;
  const int64_t most_local = (options.num_experts + num_ranks - 1) / num_ranks;
  layout.max_entries = std::min(options.top_k, most_local);
  const int64_t entries_end = static_cast<int64_t>(sizeof(SlotHeader)) +
                              layout.max_entries * static_cast<int64_t>(sizeof(SlotEntry));
  layout.header_bytes = whole_lines(entries_end);
  layout.result_bytes = options.hidden * size_of(options.dtype);
  layout.row_stride = whole_lines(layout.result_bytes);
  if (options.training) add_numbers(entries_end, &layout);
  layout.slot_bytes = layout.header_bytes + whole_lines(payload.num_bytes);

  const int64_t sets = options.num_in_flight;
  ExchangeSize& size = layout.size;
  size.round_rows = num_ranks * options.max_tokens;
  ARGOSY_ASSIGN_OR_RETURN(
      size.rows_bytes, product("slots", {sets, num_ranks, options.max_tokens, layout.slot_bytes}));
  // A rank's rows cannot exceed these: pull, each slot's entries; push, each own token's top-k.
  const int64_t rows_each = layout.push ? options.top_k : num_ranks * layout.max_entries;
  ARGOSY_ASSIGN_OR_RETURN(size.results_bytes, product("results", {sets, options.max_tokens,
                                                                  rows_each, layout.row_stride}));
  size.flags_bytes = sets * 2 * num_ranks * LatencyLayout::kLineBytes;
  size.counts_bytes = sets * num_ranks * static_cast<int64_t>(sizeof(Notice));
  size.total_bytes = size.flags_bytes + size.counts_bytes;
  if (__builtin_add_overflow(size.total_bytes, size.rows_bytes, &size.total_bytes) ||
      __builtin_add_overflow(size.total_bytes, size.results_bytes, &size.total_bytes)) {
    return invalid("slots of {} and results of {} bytes do not fit int64", size.rows_bytes,
                   size.results_bytes);
  }
  return layout;
}

Result<ExchangeSize> size_exchange(const LatencyOptions& options, int num_ranks) {
  ARGOSY_ASSIGN_OR_RETURN(const LatencyLayout layout, latency_layout(options, num_ranks));
  return layout.size;
}

}  // namespace argosy
