// Making an Exchange: one sizing function, agreement, windows; and the flag helpers. Test:
// tests/exchange/.
#include "argosy/exchange.h"

#include <fmt/format.h>

#include <limits>

#include "base/error.h"
#include "exchange/counts.h"
#include "exchange/state.h"

namespace argosy {
namespace {

constexpr int kMaxRanks = 1024;  // of any group

using base::invalid;

Status check_options(const ExchangeOptions& options) {
  if (options.dtype != DType::kBF16 && options.dtype != DType::kF32) {
    return invalid("exchange dtype is {}, must be BF16 or F32", name_of(options.dtype));
  }
  if (options.hidden < 1 || options.hidden > std::numeric_limits<int32_t>::max()) {
    return invalid("hidden is {}, must be in [1, 2^31)", options.hidden);
  }
  if (options.num_experts < 1 || options.num_experts > std::numeric_limits<int32_t>::max()) {
    return invalid("num_experts is {}, must be in [1, 2^31)", options.num_experts);
  }
  if (options.top_k < 1 || options.top_k > options.num_experts) {
    return invalid("top_k is {}, must be in [1, num_experts = {}]", options.top_k,
                   options.num_experts);
  }
  if (options.group_alignment < 1 || options.group_alignment > (1 << 20)) {
    return invalid("group_alignment is {}, must be in [1, 2^20]", options.group_alignment);
  }
  if (options.max_receive_rows < -1) {
    return invalid("max_receive_rows is {}, must be -1 (none) or at least 0",
                   options.max_receive_rows);
  }
  return {};
}

// From one received row to the next. Rows as they are lie dense, like a matrix.
int64_t stride_of(const PayloadLayout& payload) {
  constexpr int64_t kLine = 64;
  if (!payload.is_quantised()) return payload.num_bytes;
  return (payload.num_bytes + kLine - 1) / kLine * kLine;
}

}  // namespace

Result<ExchangeSize> size_exchange(const ExchangeOptions& options, int num_ranks) {
  ARGOSY_RETURN_IF_ERROR(check_options(options));
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    return invalid("num_ranks is {}, it can be 1 to {}", num_ranks, kMaxRanks);
  }
  ARGOSY_ASSIGN_OR_RETURN(const PayloadLayout payload,
                          payload_layout(options.dtype, options.payload, options.hidden));
  const int64_t row_bytes = options.hidden * size_of(options.dtype);
  const int64_t step_bytes = row_bytes * options.group_alignment;
  if (options.receive_budget_bytes < step_bytes) {
    return invalid(
        "receive_budget_bytes is {}, one round needs at least {} (group_alignment {} rows of {} "
        "bytes)",
        options.receive_budget_bytes, step_bytes, options.group_alignment, row_bytes);
  }
  ExchangeSize size;
  size.round_rows = options.receive_budget_bytes / step_bytes * options.group_alignment;
  size.rows_bytes = size.round_rows * stride_of(payload);
  size.results_bytes = size.round_rows * row_bytes;
  size.flags_bytes = static_cast<int64_t>(FlagKind::kCount) * num_ranks * kFlagBytes;
  size.counts_bytes = counts_message_bytes(options.num_experts);
  const int64_t numbers_bytes = size.round_rows * static_cast<int64_t>(sizeof(float));
  if (options.has_numbers()) size.numbers_bytes += numbers_bytes;
  if (options.training) {
    size.numbers_bytes += numbers_bytes + int64_t{2} * num_ranks * counts_message_bytes(0);
  }
  size.total_bytes =
      size.flags_bytes + int64_t{2} * num_ranks * size.counts_bytes + size.numbers_bytes;
  if (__builtin_add_overflow(size.total_bytes, size.rows_bytes, &size.total_bytes) ||
      __builtin_add_overflow(size.total_bytes, size.results_bytes, &size.total_bytes)) {
    return invalid("receive_budget_bytes {} twice does not fit int64",
                   options.receive_budget_bytes);
  }
  return size;
}

Exchange::Exchange(std::unique_ptr<State> state) : state_(std::move(state)) {}

Exchange::~Exchange() {
  transport::Endpoint& endpoint = state_->group.endpoint();
  for (const transport::Window window : {state_->rows, state_->results, state_->flags,
                                         state_->row_numbers, state_->result_numbers}) {
    if (window.id != 0) endpoint.free(window);
  }
}

Result<std::unique_ptr<Exchange>> Exchange::create(Group& group, const ExchangeOptions& options) {
  ARGOSY_RETURN_IF_ERROR(group.agree({
      {"exchange.dtype", std::string(name_of(options.dtype))},
      {"exchange.hidden", fmt::to_string(options.hidden)},
      {"exchange.num_experts", fmt::to_string(options.num_experts)},
      {"exchange.top_k", fmt::to_string(options.top_k)},
      {"exchange.receive_budget_bytes", fmt::to_string(options.receive_budget_bytes)},
      {"exchange.max_receive_rows", fmt::to_string(options.max_receive_rows)},
      {"exchange.group_alignment", fmt::to_string(options.group_alignment)},
      {"exchange.training", options.training ? "yes" : "no"},
      {"exchange.numbers", options.numbers ? "yes" : "no"},
      {"exchange.payload", options.payload == BlockFormat::kUnset
                               ? std::string("as it is")
                               : std::string(name_of(options.payload))},
  }));
  auto state = std::make_unique<State>(group, options);
  ARGOSY_ASSIGN_OR_RETURN(state->size, size_exchange(options, group.num_ranks()));
  state->placement = Placement{options.num_experts, group.num_ranks(), 0};
  state->row_bytes = options.hidden * size_of(options.dtype);
  ARGOSY_ASSIGN_OR_RETURN(state->payload,
                          payload_layout(options.dtype, options.payload, options.hidden));
  state->payload_stride = stride_of(state->payload);
  State& inner = *state;
  std::unique_ptr<Exchange> exchange(
      new Exchange(std::move(state)));  // frees windows on failure below
  transport::Endpoint& endpoint = group.endpoint();
  ARGOSY_ASSIGN_OR_RETURN(inner.rows, endpoint.alloc(inner.size.rows_bytes, inner.deadline()));
  ARGOSY_ASSIGN_OR_RETURN(inner.results,
                          endpoint.alloc(inner.size.results_bytes, inner.deadline()));
  ARGOSY_ASSIGN_OR_RETURN(inner.flags, endpoint.alloc(inner.size.flags_bytes, inner.deadline()));
  ARGOSY_ASSIGN_OR_RETURN(inner.counts, transport::AllGather::create(
                                            endpoint, inner.size.counts_bytes, inner.deadline()));
  const int64_t bytes = inner.size.round_rows * static_cast<int64_t>(sizeof(float));
  if (options.has_numbers()) {
    ARGOSY_ASSIGN_OR_RETURN(inner.row_numbers, endpoint.alloc(bytes, inner.deadline()));
  }
  if (options.training) {
    ARGOSY_ASSIGN_OR_RETURN(inner.result_numbers, endpoint.alloc(bytes, inner.deadline()));
    ARGOSY_ASSIGN_OR_RETURN(
        inner.statuses,
        transport::AllGather::create(endpoint, counts_message_bytes(0), inner.deadline()));
  }
  inner.counts_message.resize(static_cast<size_t>(inner.size.counts_bytes));
  inner.waits.reserve(static_cast<size_t>(group.num_ranks()));
  inner.sum_scratch.resize(group.pool().num_threads(), options.top_k);
  if (inner.payload.is_quantised()) {
    ARGOSY_RETURN_IF_ERROR(
        inner.encoded.reserve(group.pool().num_threads() * inner.payload_stride));
  }
  inner.waited_ns.resize(static_cast<size_t>(group.num_ranks()));
  inner.stats.waits.resize(static_cast<size_t>(group.num_ranks()));
  inner.stats.tokens_received.resize(static_cast<size_t>(inner.placement.num_local(group.rank())));
  return exchange;
}

const ExchangeOptions& Exchange::options() const { return state_->options; }
const ExchangeSize& Exchange::size() const { return state_->size; }
const Placement& Exchange::placement() const { return state_->placement; }
const PayloadLayout& Exchange::payload() const { return state_->payload; }
const ExchangeStats& Exchange::stats() const { return state_->stats; }
int64_t Exchange::scratch_bytes() const {
  return state_->returned.size_bytes() + state_->encoded.size_bytes();
}
uint64_t Exchange::group_id() const { return state_->group.id(); }

Status Exchange::plan(const Routing& routing, const CountsMatrix& counts,
                      DispatchPlan* plan) const {
  PlanOptions options;
  options.rank = state_->rank();
  options.group_id = state_->group.id();
  options.group_alignment = state_->options.group_alignment;
  options.round_rows = state_->size.round_rows;
  options.max_receive_rows = state_->options.max_receive_rows;
  return make_plan(routing, counts, state_->placement, options, plan);
}

TensorView Exchange::results() const {
  return {state_->group.endpoint().local_ptr(state_->results, 0),
          state_->options.dtype,
          {state_->size.round_rows, state_->options.hidden}};
}

float* Exchange::result_numbers() const {
  if (!state_->options.training) return nullptr;
  return reinterpret_cast<float*>(state_->group.endpoint().local_ptr(state_->result_numbers, 0));
}

void Exchange::State::raise(FlagKind kind, int64_t round, const std::vector<int64_t>& per_peer) {
  transport::Endpoint& endpoint = group.endpoint();
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (per_peer[static_cast<size_t>(peer)] == 0) continue;
    // Publishes what this rank wrote before; pairs with the acquire of wait() at the peer.
    endpoint.signal(peer, flags, flag_offset(kind, rank()), sequence(round));
  }
}

Status Exchange::State::wait(FlagKind kind, int64_t round, const std::vector<int64_t>& per_peer,
                             const char* what) {
  waits.clear();
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (per_peer[static_cast<size_t>(peer)] == 0) continue;
    waits.push_back(
        {peer, flag_offset(kind, peer), sequence(round), &waited_ns[static_cast<size_t>(peer)]});
  }
  if (waits.empty()) return group.health();
  Status status = group.endpoint().wait_all(flags, waits, deadline(), what);
  for (const transport::WaitItem& item : waits) note_wait(item.peer, *item.waited_ns);
  return status;
}

Status Exchange::State::check_shape(const DispatchPlan& plan, const char* call) const {
  ARGOSY_RETURN_IF_ERROR(check_plan(plan, group.id(), rank(), num_ranks(), placement.epoch));
  const auto stale = [call](const char* field, int64_t have, int64_t want) {
    return base::error(StatusCode::kStalePlan, "{}: plan has {} {}, the exchange {}", call, field,
                       have, want);
  };
  if (plan.num_experts != options.num_experts) {
    return stale("num_experts", plan.num_experts, options.num_experts);
  }
  if (plan.top_k != options.top_k) return stale("top_k", plan.top_k, options.top_k);
  if (plan.round_rows != size.round_rows)
    return stale("round_rows", plan.round_rows, size.round_rows);
  if (plan.num_rounds >= (int64_t{1} << kRoundBits)) {
    return invalid(
        "{}: the plan has {} rounds, at most 2^{} fit; raise receive_budget_bytes (now {})", call,
        plan.num_rounds, kRoundBits, options.receive_budget_bytes);
  }
  return {};
}

Status Exchange::State::check_call(const DispatchPlan& plan, int64_t round, Step due,
                                   const char* call) const {
  ARGOSY_RETURN_IF_ERROR(check_shape(plan, call));
  if (step != due || round != next_round || round >= plan.num_rounds) {
    return invalid("{} of round {} is out of order: step {} (due {}), next round {} of {}", call,
                   round, static_cast<int>(step), static_cast<int>(due), next_round,
                   plan.num_rounds);
  }
  return {};
}

}  // namespace argosy
