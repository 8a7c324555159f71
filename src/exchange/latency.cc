// Making a LatencyExchange, and what its two halves share: flags, waits, the order of calls. Test:
// tests/exchange/latency_test.cc.
#include "argosy/latency.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "exchange/latency_state.h"

namespace argosy {

using base::invalid;
using State = LatencyExchange::State;

Result<std::unique_ptr<State>> State::create(transport::Endpoint& endpoint, ThreadPool& pool,
                                             const LatencyOptions& options, uint64_t group_id,
                                             std::chrono::milliseconds step_deadline) {
  std::unique_ptr<State> state(new State(endpoint, pool, options, group_id, step_deadline));
  ARGOSY_ASSIGN_OR_RETURN(state->layout, latency_layout(options, endpoint.num_ranks()));
  ARGOSY_ASSIGN_OR_RETURN(state->payload,
                          payload_layout(options.dtype, options.payload, options.hidden));
  state->tag = payload_tag(state->payload);
  state->placement = Placement{options.num_experts, endpoint.num_ranks(), 0};
  const auto ranks = static_cast<size_t>(endpoint.num_ranks());
  const auto experts = static_cast<size_t>(options.num_experts);
  const auto local = static_cast<size_t>(state->placement.num_local(endpoint.rank()));
  state->owner.resize(experts);
  state->local_id.resize(experts);
  for (size_t expert = 0; expert < experts; ++expert) {
    const int rank = state->placement.owner(static_cast<int64_t>(expert));
    state->owner[expert] = rank;
    state->local_id[expert] =
        static_cast<int32_t>(static_cast<int64_t>(expert) - state->placement.begin(rank));
  }
  state->last_token.resize(ranks);
  state->waits.reserve(ranks);
  state->waited_ns.resize(ranks);
  state->next_place.resize(local);
  state->stats.tokens_received.resize(local);
  state->stats.waits.resize(ranks);
  state->sum_scratch.resize(pool.num_threads(), options.top_k);
  ARGOSY_RETURN_IF_ERROR(state->staging.reserve(pool.num_threads() * state->layout.slot_bytes));
  state->calls.resize(static_cast<size_t>(options.num_in_flight));
  for (Call& call : state->calls) {
    call.sent_slots.resize(ranks);
  }
  const ExchangeSize& size = state->layout.size;
  for (const auto& [window, bytes] : {std::pair{&state->slots, size.rows_bytes},
                                      {&state->results, size.results_bytes},
                                      {&state->notices, size.counts_bytes},
                                      {&state->flags, size.flags_bytes}}) {
    ARGOSY_ASSIGN_OR_RETURN(*window, endpoint.alloc(bytes, state->deadline()));
  }
  state->own_slots = endpoint.local_ptr(state->slots, 0);
  state->own_results = endpoint.local_ptr(state->results, 0);
  for (int peer = 0; peer < endpoint.num_ranks(); ++peer) {
    state->peer_results.push_back(
        peer == endpoint.rank() ? state->own_results : endpoint.peer_ptr(peer, state->results, 0));
  }
  return state;
}

State::~State() {
  for (const transport::Window window : {slots, results, notices, flags}) {
    if (window.id != 0) endpoint.free(window);
  }
}

Status State::check_call(uint64_t call_epoch, Step due, const char* name) const {
  if (call_epoch < 1 || call_epoch > last_epoch) {
    return invalid("{} of call {}, {} were issued", name, call_epoch, last_epoch);
  }
  const Call& call = call_of(call_epoch);
  if (call.epoch == call_epoch && call.step == due) return {};
  if (call.epoch == call_epoch && call.step != Step::kFree) {
    return invalid("{} of call {} is out of order: step {}, due {}", name, call_epoch,
                   static_cast<int>(call.step), static_cast<int>(due));
  }
  return invalid("{} of call {}, which is over", name, call_epoch);
}

void State::raise(LatencyLayout::Kind kind, const Call& call, uint64_t bits, bool counts) {
  for (int i = 0; i < num_ranks(); ++i) {
    // Own rows last: nobody waits for them.
    const int peer = (rank() + 1 + i) % num_ranks();
    const uint64_t count =
        counts ? static_cast<uint64_t>(call.sent_slots[static_cast<size_t>(peer)]) : 0;
    // Publishes what this rank put to the peer; pairs with the acquire of wait().
    endpoint.signal(peer, flags, layout.flag(set_of(call.epoch), kind, rank()),
                    LatencyFlag::of_epoch(call.epoch) | bits | count);
  }
}

Status State::wait(LatencyLayout::Kind kind, const Call& call, bool everybody, const char* what) {
  if (is_here(kind, call, everybody)) {
    // No clock is read for what need not be waited for.
    for (int peer = 0; peer < num_ranks(); ++peer) {
      if (peer != rank() && (everybody || call.sent_slots[static_cast<size_t>(peer)] > 0)) {
        stats.waits[static_cast<size_t>(peer)].add(0);
      }
    }
    return endpoint.health();
  }
  waits.clear();
  for (int peer = 0; peer < num_ranks(); ++peer) {
    const auto at = static_cast<size_t>(peer);
    if (!everybody && call.sent_slots[at] == 0) continue;
    waits.push_back({peer, layout.flag(set_of(call.epoch), kind, peer),
                     LatencyFlag::of_epoch(call.epoch), peer == rank() ? nullptr : &waited_ns[at]});
  }
  Status status = endpoint.wait_all(flags, waits, deadline(), what);
  for (const transport::WaitItem& item : waits) {
    if (item.waited_ns != nullptr && *item.waited_ns >= 0) {
      stats.waits[static_cast<size_t>(item.peer)].add(*item.waited_ns);
    }
  }
  return status;
}

bool State::arrived(uint64_t call_epoch, LatencyLayout::Kind kind) const {
  if (call_epoch < 1 || call_epoch > last_epoch) return false;
  const Call& call = call_of(call_epoch);
  if (call.epoch != call_epoch) return true;  // its place is another's: it is over
  return is_here(kind, call, kind == LatencyLayout::kRows);
}

bool State::is_here(LatencyLayout::Kind kind, const Call& call, bool everybody) const {
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (!everybody && call.sent_slots[static_cast<size_t>(peer)] == 0) continue;
    const uint64_t word =
        transport::load_word(own(flags, layout.flag(set_of(call.epoch), kind, peer)));
    if (word < LatencyFlag::of_epoch(call.epoch)) return false;
  }
  return true;
}

void State::finish_without_rows(Call* call) {
  raise(LatencyLayout::kDone, *call, 0, false);
  call->step = Step::kFree;
}

// Group, and the public door.

LatencyExchange::LatencyExchange(std::unique_ptr<State> state) : state_(std::move(state)) {}
LatencyExchange::~LatencyExchange() = default;

Result<std::unique_ptr<LatencyExchange>> LatencyExchange::create(Group& group,
                                                                 const LatencyOptions& options) {
  ARGOSY_RETURN_IF_ERROR(group.agree({
      {"latency.dtype", std::string(name_of(options.dtype))},
      {"latency.hidden", fmt::to_string(options.hidden)},
      {"latency.num_experts", fmt::to_string(options.num_experts)},
      {"latency.top_k", fmt::to_string(options.top_k)},
      {"latency.max_tokens", fmt::to_string(options.max_tokens)},
      {"latency.payload", options.payload == BlockFormat::kUnset
                              ? std::string("as it is")
                              : std::string(name_of(options.payload))},
      {"latency.return_path", options.return_path == ReturnPath::kPull ? "pull" : "push"},
      {"latency.num_in_flight", fmt::to_string(options.num_in_flight)},
      {"latency.training", options.training ? "yes" : "no"},
  }));
  ARGOSY_ASSIGN_OR_RETURN(
      std::unique_ptr<State> state,
      State::create(group.endpoint(), group.pool(), options, group.id(), group.step_deadline()));
  return std::unique_ptr<LatencyExchange>(new LatencyExchange(std::move(state)));
}

const LatencyOptions& LatencyExchange::options() const { return state_->options; }
const ExchangeSize& LatencyExchange::size() const { return state_->layout.size; }
const PayloadLayout& LatencyExchange::payload() const { return state_->payload; }
const Placement& LatencyExchange::placement() const { return state_->placement; }
uint64_t LatencyExchange::group_id() const { return state_->group_id; }
const ExchangeStats& LatencyExchange::stats() const { return state_->stats; }

Result<uint64_t> LatencyExchange::issue_dispatch(const Status& local, const Routing& routing,
                                                 const ConstTensorView& hidden,
                                                 const DispatchNote& note) {
  return state_->issue_dispatch(local, routing, hidden, note);
}
bool LatencyExchange::dispatch_arrived(uint64_t call) const {
  return state_->arrived(call, LatencyLayout::kRows);
}
Status LatencyExchange::wait_dispatch(uint64_t call, LatencyRows* rows) {
  return state_->wait_dispatch(call, rows);
}
Status LatencyExchange::issue_combine(uint64_t call) { return state_->issue_combine(call); }
bool LatencyExchange::results_arrived(uint64_t call) const {
  return state_->arrived(call, LatencyLayout::kDone);
}
Status LatencyExchange::wait_combine(uint64_t call, const CombineInput& input,
                                     const TensorView& output) {
  return state_->wait_combine(call, input, output);
}
Status LatencyExchange::wait_returned(uint64_t call, ReturnedRows* returned) {
  return state_->wait_returned(call, returned);
}

}  // namespace argosy
