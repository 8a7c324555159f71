// The count exchange: one all-gather carries every rank's counts and status word, so that a bad
// input on one rank is the same typed error on all, before a row moves (contract 1.6, 1.8). Test:
// tests/exchange/counts_test.cc.
#include "exchange/counts.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "exchange/state.h"
#include "transport/status_message.h"

namespace argosy {
namespace {

using transport::StatusMessage;

// The rules of contract 1.8 on a routing that is about to be sent.
Status check_routing(const Routing& routing, const ExchangeOptions& options) {
  if (routing.num_experts != options.num_experts || routing.top_k != options.top_k) {
    return base::invalid("routing has {} experts and top_k {}, the exchange {} and {}",
                         routing.num_experts, routing.top_k, options.num_experts, options.top_k);
  }
  if (routing.num_tokens < 0 ||
      routing.topk_idx.size() != static_cast<size_t>(routing.num_tokens * routing.top_k)) {
    return base::invalid("routing has {} ids for {} tokens of top_k {}", routing.topk_idx.size(),
                         routing.num_tokens, routing.top_k);
  }
  if (routing.counts.size() != static_cast<size_t>(options.num_experts)) {
    return base::invalid("routing has counts for {} experts, the exchange {}",
                         routing.counts.size(), options.num_experts);
  }
  return {};
}

Status status_of_rank(std::span<const std::byte> message, int rank) {
  return transport::status_of(message, "rank", rank);
}

// After status_of_rank() took every rank's message.
Status same_words(const transport::AllGather& gather, int num_ranks) {
  const std::string_view first = transport::words_of(gather.from(0));
  for (int rank = 1; rank < num_ranks; ++rank) {
    const std::string_view other = transport::words_of(gather.from(rank));
    if (other == first) continue;
    return base::invalid("rank {} has \"{}\", rank 0 \"{}\"", rank, other, first);
  }
  return {};
}

}  // namespace

int64_t counts_message_bytes(int64_t num_experts) {
  return static_cast<int64_t>(sizeof(StatusMessage)) +
         num_experts * static_cast<int64_t>(sizeof(int64_t));
}

Status Exchange::issue_counts(const Status& local, const Routing& routing, std::string_view same) {
  State& state = *state_;
  if (state.step != Step::kIdle && state.step != Step::kCountsDone) {
    // After a wait that failed: why the group is gone, not that a step was left out.
    ARGOSY_RETURN_IF_ERROR(state.group.health());
    return base::invalid("issue_counts while another exchange is under way (step {})",
                         static_cast<int>(state.step));
  }
  Status status = local.ok() ? check_routing(routing, state.options) : local;
  int64_t* counts = reinterpret_cast<int64_t*>(state.counts_message.data() + sizeof(StatusMessage));
  std::fill_n(counts, state.options.num_experts, 0);
  if (status.ok()) {
    const ConstTensorView ids(routing.topk_idx.data(), DType::kI32,
                              {routing.num_tokens, routing.top_k});
    status = count_topk(ids, state.options.num_experts, &state.own_counts);
    if (status.ok()) std::copy(state.own_counts.begin(), state.own_counts.end(), counts);
  }
  const StatusMessage header =
      transport::to_message(status, status.ok() ? routing.num_tokens : 0, same);
  std::memcpy(state.counts_message.data(), &header, sizeof(header));
  ++state.epoch;
  ++state.stats.num_calls;
  state.next_round = 0;
  state.step = Step::kCountsIssued;
  return state.counts->issue(state.counts_message);
}

Status Exchange::issue_reuse(const Status& local, const DispatchPlan& plan, std::string_view same) {
  State& state = *state_;
  if (!state.options.training) {
    return base::invalid("issue_reuse, but the exchange was not made for training");
  }
  if (state.step != Step::kIdle && state.step != Step::kCountsDone) {
    ARGOSY_RETURN_IF_ERROR(state.group.health());
    return base::invalid("issue_reuse while another exchange is under way (step {})",
                         static_cast<int>(state.step));
  }
  Status status = local;
  if (status.ok()) status = state.check_shape(plan, "issue_reuse");
  const StatusMessage header =
      transport::to_message(status, status.ok() ? plan.num_tokens : 0, same);
  ++state.epoch;
  if (state.step == Step::kIdle) ++state.stats.num_calls;  // else the call goes on
  state.next_round = 0;
  state.step = Step::kReuseIssued;
  return state.statuses->issue(std::as_bytes(std::span(&header, 1)));
}

Status Exchange::wait_reuse() {
  State& state = *state_;
  if (state.step != Step::kReuseIssued) {
    return base::invalid("wait_reuse without issue_reuse (step {})", static_cast<int>(state.step));
  }
  ARGOSY_RETURN_IF_ERROR(state.statuses->wait(state.deadline(), "statuses"));
  state.step = Step::kIdle;
  for (int rank = 0; rank < state.num_ranks(); ++rank) {
    ARGOSY_RETURN_IF_ERROR(status_of_rank(state.statuses->from(rank), rank));
  }
  ARGOSY_RETURN_IF_ERROR(same_words(*state.statuses, state.num_ranks()));
  state.step = Step::kCountsDone;
  return {};
}

Status Exchange::wait_counts(CountsMatrix* counts) {
  State& state = *state_;
  if (state.step != Step::kCountsIssued) {
    return base::invalid("wait_counts without issue_counts (step {})",
                         static_cast<int>(state.step));
  }
  const Status waited = state.counts->wait(state.deadline(), "counts", state.waited_ns);
  for (int peer = 0; peer < state.num_ranks(); ++peer) {
    state.note_wait(peer, state.waited_ns[static_cast<size_t>(peer)]);
  }
  ARGOSY_RETURN_IF_ERROR(waited);
  state.step = Step::kIdle;
  const int64_t num_experts = state.options.num_experts;
  counts->num_ranks = state.num_ranks();
  counts->num_experts = num_experts;
  counts->counts.resize(static_cast<size_t>(state.num_ranks() * num_experts));
  counts->num_tokens.resize(static_cast<size_t>(state.num_ranks()));
  for (int rank = 0; rank < state.num_ranks(); ++rank) {
    const std::span<const std::byte> message = state.counts->from(rank);
    ARGOSY_RETURN_IF_ERROR(status_of_rank(message, rank));
    counts->num_tokens[static_cast<size_t>(rank)] = transport::value_of(message);
    std::memcpy(counts->counts.data() + rank * num_experts, message.data() + sizeof(StatusMessage),
                static_cast<size_t>(num_experts) * sizeof(int64_t));
  }
  ARGOSY_RETURN_IF_ERROR(same_words(*state.counts, state.num_ranks()));
  state.step = Step::kCountsDone;
  return {};
}

}  // namespace argosy
