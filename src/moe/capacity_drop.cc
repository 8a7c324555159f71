// See capacity_drop.h.
#include "moe/capacity_drop.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "transport/status_message.h"

namespace argosy {

using transport::AllGather;
using transport::StatusMessage;

namespace {

constexpr auto kCountBytes = static_cast<int64_t>(sizeof(int64_t));

platform::Deadline deadline_of(const Group& group) {
  return platform::Deadline::after(group.step_deadline());
}

}  // namespace

Result<std::unique_ptr<CapacityDrop>> CapacityDrop::create(Group& group, const CapacitySpec& spec,
                                                           int64_t num_experts, int64_t top_k) {
  std::unique_ptr<CapacityDrop> drop(new CapacityDrop(group, spec, num_experts, top_k));
  ARGOSY_ASSIGN_OR_RETURN(
      drop->statuses_,
      AllGather::create(group.endpoint(),
                        static_cast<int64_t>(sizeof(StatusMessage)) + num_experts * kCountBytes,
                        deadline_of(group)));
  const bool has_bins = spec.policy == CapacityPolicy::kWeight ||
                        spec.choice_order == ChoiceOrder::kAllFirstChoicesFirst;
  const int64_t counts = num_experts * (has_bins ? CapacityCut::kBins : 1);
  ARGOSY_ASSIGN_OR_RETURN(
      drop->counts_, AllGather::create(group.endpoint(), counts * kCountBytes, deadline_of(group)));
  return drop;
}

Status CapacityDrop::gather_counts(const std::vector<int64_t>& mine) {
  ARGOSY_RETURN_IF_ERROR(counts_->issue(std::as_bytes(std::span(mine))));
  return counts_->wait(deadline_of(group_), "choices of experts with a capacity");
}

Status CapacityDrop::drop(const Routing& routing, int64_t num_tokens, Routing* kept) {
  const bool is_shared = spec_.scope == CapacityScope::kGroup;
  ARGOSY_ASSIGN_OR_RETURN(CapacityCut cut,
                          CapacityCut::create(spec_, num_experts_, top_k_,
                                              is_shared ? num_tokens : routing.num_valid_tokens));
  std::vector<int64_t> mine;
  while (!cut.is_done()) {
    ARGOSY_RETURN_IF_ERROR(cut.histogram(routing, &mine));
    if (is_shared)
      ARGOSY_RETURN_IF_ERROR(transport::reduce_sum(*counts_, mine, deadline_of(group_)));
    ARGOSY_RETURN_IF_ERROR(cut.refine(mine));
  }
  ARGOSY_RETURN_IF_ERROR(cut.count_ties(routing, &mine));
  std::vector<int64_t> before(mine.size(), 0);
  if (is_shared) {
    ARGOSY_RETURN_IF_ERROR(gather_counts(mine));
    for (int rank = 0; rank < group_.rank(); ++rank) {
      std::memcpy(mine.data(), counts_->from(rank).data(), mine.size() * sizeof(int64_t));
      for (size_t e = 0; e < mine.size(); ++e) before[e] += mine[e];
    }
  }
  return cut.apply(routing, before, kept);
}

Status CapacityDrop::run(const Status& local, const Routing& routing, Routing* kept,
                         std::vector<int64_t>* assigned) {
  const auto num_experts = static_cast<size_t>(num_experts_);
  std::vector<std::byte> message(sizeof(StatusMessage) + num_experts * sizeof(int64_t));
  const StatusMessage status =
      transport::to_message(local, local.ok() ? routing.num_valid_tokens : 0);
  std::memcpy(message.data(), &status, sizeof(status));
  if (local.ok()) {
    std::memcpy(message.data() + sizeof(status), routing.counts.data(),
                num_experts * sizeof(int64_t));
  }
  ARGOSY_RETURN_IF_ERROR(statuses_->issue(message));
  ARGOSY_RETURN_IF_ERROR(statuses_->wait(deadline_of(group_), "statuses of routing"));
  assigned->assign(num_experts, 0);
  int64_t num_tokens = 0;
  for (int rank = 0; rank < group_.num_ranks(); ++rank) {
    const std::span<const std::byte> bytes = statuses_->from(rank);
    ARGOSY_RETURN_IF_ERROR(transport::status_of(bytes, "rank", rank));
    num_tokens += transport::value_of(bytes);
    for (size_t e = 0; e < num_experts; ++e) {
      int64_t count = 0;
      std::memcpy(&count, bytes.data() + sizeof(StatusMessage) + e * sizeof(count), sizeof(count));
      (*assigned)[e] += count;
    }
  }
  Status done = drop(routing, num_tokens, kept);
  // Past the statuses a failure is this rank's alone: nobody waits for it.
  if (!done.ok()) group_.abort(done);
  return done;
}

}  // namespace argosy
