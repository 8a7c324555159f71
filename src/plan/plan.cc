// Counts -> offsets -> slots. Pure functions; every rank computes the same layout from the same
// counts, so no second exchange is needed. Main invariant: the slots of all ranks' rows at one
// destination are disjoint and fill its groups without gaps. Test: tests/plan/plan_test.cc.
#include "argosy/plan.h"

#include <algorithm>
#include <string_view>

#include "base/error.h"

namespace argosy {
namespace {

using base::invalid;

Status check_options(const PlanOptions& options, int num_ranks) {
  if (options.rank < 0 || options.rank >= num_ranks) {
    return invalid("rank {} is outside [0, {})", options.rank, num_ranks);
  }
  if (options.group_alignment < 1) {
    return invalid("group_alignment is {}, must be at least 1", options.group_alignment);
  }
  if (options.round_rows < 1 || options.round_rows % options.group_alignment != 0) {
    return invalid("round_rows is {}, must be a positive multiple of group_alignment {}",
                   options.round_rows, options.group_alignment);
  }
  if (options.max_receive_rows < -1) {
    return invalid("max_receive_rows is {}, must be -1 (none) or at least 0",
                   options.max_receive_rows);
  }
  return {};
}

Status check_shapes(const Routing& routing, const CountsMatrix& counts, const Placement& placement,
                    int rank) {
  const int64_t num_experts = placement.num_experts;
  if (placement.num_ranks < 1 || num_experts < 1) {
    return invalid("placement has {} ranks and {} experts, both must be at least 1",
                   placement.num_ranks, num_experts);
  }
  if (counts.num_ranks != placement.num_ranks || counts.num_experts != num_experts) {
    return invalid("counts are for {} ranks and {} experts, the placement for {} and {}",
                   counts.num_ranks, counts.num_experts, placement.num_ranks, num_experts);
  }
  const auto num_ranks = static_cast<size_t>(counts.num_ranks);
  if (counts.counts.size() != num_ranks * static_cast<size_t>(num_experts) ||
      counts.num_tokens.size() != num_ranks) {
    return invalid("counts hold {} entries and {} token counts, want {} and {}",
                   counts.counts.size(), counts.num_tokens.size(),
                   num_ranks * static_cast<size_t>(num_experts), num_ranks);
  }
  if (routing.num_experts != num_experts) {
    return invalid("routing has {} experts, the placement {}", routing.num_experts, num_experts);
  }
  if (routing.num_tokens < 0 || routing.top_k < 1 ||
      routing.topk_idx.size() != static_cast<size_t>(routing.num_tokens * routing.top_k)) {
    return invalid("routing has {} ids for {} tokens and top_k {}", routing.topk_idx.size(),
                   routing.num_tokens, routing.top_k);
  }
  if (counts.num_tokens[static_cast<size_t>(rank)] != routing.num_tokens) {
    return invalid("counts say {} tokens on rank {}, the routing has {}",
                   counts.num_tokens[static_cast<size_t>(rank)], rank, routing.num_tokens);
  }
  return {};
}

Status add_checked(int64_t value, int64_t* sum) {
  if (value < 0 || __builtin_add_overflow(*sum, value, sum)) {
    return invalid("row counts overflow: {} more rows do not fit int64", value);
  }
  return {};
}

// Lays out every rank's receive space. For each expert: group start, then this rank's first slot.
Status lay_out(const CountsMatrix& counts, const Placement& placement, const PlanOptions& options,
               DispatchPlan* plan) {
  const int num_ranks = placement.num_ranks;
  const auto ranks = static_cast<size_t>(num_ranks);
  const int64_t local = placement.num_local(options.rank);
  plan->receive_rows.assign(ranks, 0);
  plan->receive_slots.assign(ranks, 0);
  plan->send_slots.assign(static_cast<size_t>(placement.num_experts), 0);
  plan->send_rows.assign(static_cast<size_t>(placement.num_experts), 0);
  plan->group_sizes.assign(static_cast<size_t>(local), 0);
  plan->group_offsets.assign(static_cast<size_t>(local + 1), 0);
  plan->source_rows.assign(static_cast<size_t>(local) * ranks, 0);

  for (int dest = 0; dest < num_ranks; ++dest) {
    int64_t rows = 0;
    int64_t slots = 0;
    const int64_t first = placement.begin(dest);
    for (int64_t expert = first; expert < placement.begin(dest + 1); ++expert) {
      int64_t size = 0;
      for (int source = 0; source < num_ranks; ++source) {
        const int64_t count = counts.at(source, expert);
        if (source == options.rank) plan->send_slots[static_cast<size_t>(expert)] = slots + size;
        ARGOSY_RETURN_IF_ERROR(add_checked(count, &size));
        if (dest == options.rank) {
          plan->source_rows[static_cast<size_t>((expert - first) * num_ranks + source)] = count;
        }
      }
      if (dest == options.rank) {
        plan->group_sizes[static_cast<size_t>(expert - first)] = size;
        plan->group_offsets[static_cast<size_t>(expert - first)] = slots;
      }
      ARGOSY_RETURN_IF_ERROR(add_checked(size, &rows));
      ARGOSY_RETURN_IF_ERROR(add_checked(options.group_alignment - 1, &size));
      ARGOSY_RETURN_IF_ERROR(
          add_checked(size / options.group_alignment * options.group_alignment, &slots));
    }
    plan->receive_rows[static_cast<size_t>(dest)] = rows;
    plan->receive_slots[static_cast<size_t>(dest)] = slots;
  }
  plan->group_offsets[static_cast<size_t>(local)] =
      plan->receive_slots[static_cast<size_t>(options.rank)];
  return {};
}

Status check_capacity(const DispatchPlan& plan, int64_t max_receive_rows) {
  if (max_receive_rows < 0) return {};
  for (size_t rank = 0; rank < plan.receive_rows.size(); ++rank) {
    if (plan.receive_rows[rank] > max_receive_rows) {
      return base::error(StatusCode::kCapacity,
                         "rank {} would receive {} rows, max_receive_rows is {}; nothing was moved",
                         rank, plan.receive_rows[rank], max_receive_rows);
    }
  }
  return {};
}

// [num_experts], the calling thread's: an owner asked for once per (token, k) costs some divisions.
std::span<const int32_t> owners_of(const Placement& placement) {
  thread_local std::vector<int32_t> owners;
  owners.resize(static_cast<size_t>(placement.num_experts));
  for (int rank = 0; rank < placement.num_ranks; ++rank) {
    std::fill(owners.begin() + placement.begin(rank), owners.begin() + placement.begin(rank + 1),
              rank);
  }
  return owners;
}

// Gives every (token, k) its destination. Tokens rise, so rows of one expert lie in token order.
Status assign_slots(const Routing& routing, const Placement& placement, DispatchPlan* plan) {
  const auto total = routing.topk_idx.size();
  const std::span<const int32_t> owners = owners_of(placement);
  plan->topk_idx.assign(routing.topk_idx.begin(), routing.topk_idx.end());
  plan->dest_rank.assign(total, -1);
  plan->dest_slot.assign(total, -1);
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    for (int64_t k = 0; k < routing.top_k; ++k) {
      const auto at = static_cast<size_t>(token * routing.top_k + k);
      const int32_t expert = routing.topk_idx[at];
      if (expert == -1) continue;
      if (expert < 0 || expert >= placement.num_experts) {
        return invalid("topk_idx[{}, {}] is {}, outside [0, {}) and not -1", token, k, expert,
                       placement.num_experts);
      }
      for (int64_t before = 0; before < k; ++before) {
        if (routing.topk_idx[static_cast<size_t>(token * routing.top_k + before)] == expert) {
          return invalid("topk_idx[{}, {}] and [{}, {}] are both expert {}", token, before, token,
                         k, expert);
        }
      }
      const auto to = static_cast<size_t>(expert);
      plan->dest_rank[at] = owners[to];
      plan->dest_slot[at] = plan->send_slots[to] + plan->send_rows[to]++;
    }
  }
  return {};
}

// What was assigned must be what the counts told every rank.
Status check_assigned(const CountsMatrix& counts, const DispatchPlan& plan) {
  for (int64_t expert = 0; expert < counts.num_experts; ++expert) {
    const int64_t assigned = plan.send_rows[static_cast<size_t>(expert)];
    if (assigned != counts.at(plan.rank, expert)) {
      return invalid("routing sends {} rows of rank {} to expert {}, the counts say {}", assigned,
                     plan.rank, expert, counts.at(plan.rank, expert));
    }
  }
  return {};
}

void count_leaving(DispatchPlan* plan) {
  plan->rows_leaving = 0;
  plan->rows_leaving_dedup = 0;
  for (int64_t token = 0; token < plan->num_tokens; ++token) {
    const auto row = static_cast<size_t>(token * plan->top_k);
    for (size_t k = row; k < row + static_cast<size_t>(plan->top_k); ++k) {
      if (plan->dest_rank[k] < 0 || plan->dest_rank[k] == plan->rank) continue;
      ++plan->rows_leaving;
      bool sent = false;
      for (size_t before = row; before < k && !sent; ++before) {
        sent = plan->dest_rank[before] == plan->dest_rank[k] &&
               (plan->num_rounds == 1 || plan->dest_slot[before] / plan->round_rows ==
                                             plan->dest_slot[k] / plan->round_rows);
      }
      if (!sent) ++plan->rows_leaving_dedup;
    }
  }
}

// Rows of the slot run [begin, begin + rows) that lie in the round's window.
int64_t rows_in_round(const DispatchPlan& plan, int64_t round, int64_t begin, int64_t rows) {
  // Counted from the window: the end of the last one may not fit int64.
  const int64_t first = begin - round * plan.round_rows;
  const int64_t from = std::max<int64_t>(first, 0);
  const int64_t to = std::min(first + rows, plan.round_rows);
  return std::max<int64_t>(0, to - from);
}

}  // namespace

int64_t owned_begin(int64_t num_items, int num_ranks, int rank) {
  // floor(rank * N / R) without forming rank * N: N = q R + r.
  const int64_t quotient = num_items / num_ranks;
  const int64_t remainder = num_items % num_ranks;
  return quotient * rank + remainder * rank / num_ranks;
}

int Placement::owner(int64_t expert) const {
  // The last rank whose first expert is not above `expert`.
  int low = 0;
  int high = num_ranks - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (begin(middle) <= expert) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

Status make_plan(const Routing& routing, const CountsMatrix& counts, const Placement& placement,
                 const PlanOptions& options, DispatchPlan* plan) {
  ARGOSY_RETURN_IF_ERROR(check_options(options, placement.num_ranks));
  ARGOSY_RETURN_IF_ERROR(check_shapes(routing, counts, placement, options.rank));
  plan->version = DispatchPlan::kVersion;
  plan->group_id = options.group_id;
  plan->placement_epoch = placement.epoch;
  plan->num_ranks = placement.num_ranks;
  plan->rank = options.rank;
  plan->num_tokens = routing.num_tokens;
  plan->num_experts = placement.num_experts;
  plan->top_k = routing.top_k;
  plan->group_alignment = options.group_alignment;
  plan->round_rows = options.round_rows;
  ARGOSY_RETURN_IF_ERROR(lay_out(counts, placement, options, plan));
  ARGOSY_RETURN_IF_ERROR(check_capacity(*plan, options.max_receive_rows));
  ARGOSY_RETURN_IF_ERROR(assign_slots(routing, placement, plan));
  ARGOSY_RETURN_IF_ERROR(check_assigned(counts, *plan));
  const int64_t most = *std::max_element(plan->receive_slots.begin(), plan->receive_slots.end());
  plan->num_rounds =
      std::max<int64_t>(1, most / plan->round_rows + (most % plan->round_rows != 0 ? 1 : 0));
  count_leaving(plan);
  return {};
}

Status check_plan(const DispatchPlan& plan, uint64_t group_id, int rank, int num_ranks,
                  uint64_t placement_epoch) {
  const auto stale = [](std::string_view field, auto have, auto want) {
    return base::error(StatusCode::kStalePlan, "plan has {} {}, this call needs {}", field, have,
                       want);
  };
  if (plan.version != DispatchPlan::kVersion) {
    return stale("version", plan.version, DispatchPlan::kVersion);
  }
  if (plan.group_id != group_id) return stale("group id", plan.group_id, group_id);
  if (plan.num_ranks != num_ranks) return stale("num_ranks", plan.num_ranks, num_ranks);
  if (plan.rank != rank) return stale("rank", plan.rank, rank);
  if (plan.placement_epoch != placement_epoch) {
    return stale("placement epoch", plan.placement_epoch, placement_epoch);
  }
  return {};
}

void round_groups(const DispatchPlan& plan, int64_t round, std::vector<int64_t>* group_offsets,
                  std::vector<int64_t>* group_sizes) {
  const auto local = plan.group_sizes.size();
  group_offsets->resize(local);
  group_sizes->resize(local);
  const int64_t window_begin = round * plan.round_rows;
  for (size_t group = 0; group < local; ++group) {
    const int64_t begin = plan.group_offsets[group];
    (*group_sizes)[group] = rows_in_round(plan, round, begin, plan.group_sizes[group]);
    (*group_offsets)[group] = std::clamp<int64_t>(begin - window_begin, 0, plan.round_rows);
  }
}

void round_traffic(const DispatchPlan& plan, int64_t round, std::vector<int64_t>* send_rows,
                   std::vector<int64_t>* recv_rows) {
  const auto ranks = static_cast<size_t>(plan.num_ranks);
  send_rows->assign(ranks, 0);
  recv_rows->assign(ranks, 0);
  for (int dest = 0; dest < plan.num_ranks; ++dest) {
    const int64_t end = owned_begin(plan.num_experts, plan.num_ranks, dest + 1);
    for (int64_t expert = owned_begin(plan.num_experts, plan.num_ranks, dest); expert < end;
         ++expert) {
      const auto at = static_cast<size_t>(expert);
      (*send_rows)[static_cast<size_t>(dest)] +=
          rows_in_round(plan, round, plan.send_slots[at], plan.send_rows[at]);
    }
  }
  for (size_t group = 0; group < plan.group_sizes.size(); ++group) {
    int64_t slot = plan.group_offsets[group];
    for (size_t source = 0; source < ranks; ++source) {
      const int64_t rows = plan.source_rows[group * ranks + source];
      (*recv_rows)[source] += rows_in_round(plan, round, slot, rows);
      slot += rows;
    }
  }
}

}  // namespace argosy
