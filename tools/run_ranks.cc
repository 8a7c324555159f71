// See run_ranks.h. Test: tests/cli/run_test.cc, tests/cli/table_test.cc.
#include "tools/run_ranks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <latch>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "argosy/checkpoint.h"
#include "argosy/exchange.h"
#include "argosy/group.h"
#include "argosy/plan.h"

namespace argosy::tools {
namespace {

// Runs body(rank) on one thread per rank and joins them. All or none start: a rank that came alone
// would wait its whole deadline for the others.
template <typename Body>
Status on_every_rank(int num_ranks, const Body& body) {
  std::latch gate(1);
  bool go = true;  // written before the gate opens, read after
  std::vector<std::thread> threads;
  std::string refusal;
  for (int rank = 0; rank < num_ranks && go; ++rank) {
    try {
      threads.emplace_back([&, rank] {
        gate.wait();
        if (go) body(rank);
      });
    } catch (const std::system_error& error) {
      go = false;
      refusal = fmt::format("the system refused the thread of rank {} of {}: {}", rank, num_ranks,
                            error.what());
    }
  }
  gate.count_down();
  for (std::thread& thread : threads) thread.join();
  return go ? Status() : Status(StatusCode::kOutOfMemory, refusal);
}

struct RankState {
  Status status;
  std::optional<MoeWeights> weights;
  int64_t weight_bytes_read = 0;
  MoeReport report;
  std::vector<StageTimes> seconds;  // [repeat]
  DotOrder dot_order = DotOrder::kAuto;
  Level level = Level::kGeneric;
  std::string transport;
};

Status load_rank(const RunRanksOptions& options, int rank, RankState* state) {
  ARGOSY_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(options.model_dir));
  ARGOSY_ASSIGN_OR_RETURN(MoeWeights weights,
                          load_moe_weights(checkpoint, options.layer, rank, options.num_ranks));
  state->weights = std::move(weights);
  state->weight_bytes_read = checkpoint.bytes_read();
  return Status();
}

GroupOptions group_options(const RunRanksOptions& options, int rank,
                           const std::shared_ptr<InprocWorld>& world) {
  GroupOptions group;
  group.rank = rank;
  group.num_ranks = options.num_ranks;
  group.inproc = world;
  group.dot_order = options.dot_order;
  group.level = options.level;
  group.threads_per_rank = options.threads_per_rank;
  if (options.deadline.has_value()) {
    group.startup_deadline = *options.deadline;
    group.step_deadline = *options.deadline;
  }
  return group;
}

// The rank's share of tokens and the places its results go to.
struct Share {
  int64_t first = 0;
  ConstTensorView hidden;
  TensorView output;
  int32_t* topk_idx = nullptr;
  float* topk_weights = nullptr;
};

Status run_in_group(const RunRanksOptions& options, const RouterSpec& router, Group& group,
                    const Share& share, Progress& progress, RankState* state) {
  state->dot_order = group.dot_order();
  state->level = group.level();
  state->transport = group.transport_name();
  MoeOptions moe;
  moe.hidden_dtype = share.hidden.dtype;
  if (options.receive_budget_bytes.has_value()) {
    moe.receive_budget_bytes = *options.receive_budget_bytes;
  }
  MoeWeights weights = std::move(*state->weights);
  state->weights.reset();
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<MoeLayer> layer,
                          MoeLayer::create(group, router, std::move(weights), moe));
  for (int64_t i = 0; i < options.repeat; ++i) {
    ARGOSY_RETURN_IF_ERROR(layer->forward(share.hidden, nullptr, share.output, &state->report));
    state->seconds.push_back(state->report.seconds);
    if (group.rank() == 0) progress.step();
  }
  const Routing& routing = layer->routing();
  std::copy(routing.topk_idx.begin(), routing.topk_idx.end(), share.topk_idx);
  std::copy(routing.topk_weights.values.begin(), routing.topk_weights.values.end(),
            share.topk_weights);
  return Status();
}

Status run_rank(const RunRanksOptions& options, const RouterSpec& router, int rank,
                const std::shared_ptr<InprocWorld>& world, const Share& share, Progress& progress,
                RankState* state) {
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<Group> group,
                          Group::join(group_options(options, rank, world)));
  Status status = run_in_group(options, router, *group, share, progress, state);
  // Peers may still wait for this rank: the group must end for them as well.
  if (!status.ok()) group->abort(status);
  return status;
}

Status merged(const std::vector<RankState>& ranks) {
  std::vector<Status> statuses;
  for (const RankState& rank : ranks) statuses.push_back(rank.status);
  return merge_rank_errors(statuses);
}

constexpr double StageTimes::*kStages[] = {
    &StageTimes::route,   &StageTimes::counts, &StageTimes::dispatch, &StageTimes::experts,
    &StageTimes::combine, &StageTimes::shared, &StageTimes::total};

void gather(const RunRanksOptions& options, std::vector<RankState>& ranks, RanksResult* result) {
  result->dot_order = ranks[0].dot_order;
  result->level = ranks[0].level;
  result->transport = ranks[0].transport;
  result->slowest_rank_seconds.resize(static_cast<size_t>(options.repeat));
  for (RankState& rank : ranks) {
    result->weight_bytes_read.push_back(rank.weight_bytes_read);
    for (size_t i = 0; i < rank.seconds.size(); ++i) {
      for (double StageTimes::*const stage : kStages) {
        double& slowest = result->slowest_rank_seconds[i].*stage;
        slowest = std::max(slowest, rank.seconds[i].*stage);
      }
    }
    result->reports.push_back(std::move(rank.report));
  }
}

// How near an error is to its cause; lower comes first.
int distance_from_cause(StatusCode code) {
  switch (code) {
    case StatusCode::kAborted:
      return 3;
    case StatusCode::kTimeout:
      return 2;
    case StatusCode::kPeerLost:
      return 1;
    default:
      return 0;
  }
}

struct SharedMessage {
  Status status;
  std::vector<int> ranks;
};

std::string said_by(const SharedMessage& group) {
  return fmt::format("rank{} {}", group.ranks.size() > 1 ? "s" : "", fmt::join(group.ranks, ", "));
}

}  // namespace

Status merge_rank_errors(std::span<const Status> statuses) {
  std::vector<SharedMessage> groups;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    const Status& status = statuses[rank];
    if (status.ok()) continue;
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const SharedMessage& group) {
      return group.status.to_string() == status.to_string();
    });
    if (same == groups.end()) {
      groups.push_back({status, {static_cast<int>(rank)}});
    } else {
      same->ranks.push_back(static_cast<int>(rank));
    }
  }
  if (groups.empty()) return Status();
  // A rank that was aborted by one that is listed anyway has nothing to add.
  const auto is_echo = [&](const SharedMessage& group) {
    return group.status.code() == StatusCode::kAborted &&
           std::any_of(groups.begin(), groups.end(), [&](const SharedMessage& other) {
             return other.status.code() != StatusCode::kAborted &&
                    group.status.message().find(other.status.message()) != std::string::npos;
           });
  };
  std::vector<SharedMessage> own;
  std::copy_if(groups.begin(), groups.end(), std::back_inserter(own),
               [&](const SharedMessage& group) { return !is_echo(group); });
  groups = std::move(own);
  std::stable_sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
    return distance_from_cause(a.status.code()) < distance_from_cause(b.status.code());
  });
  const SharedMessage& root = groups.front();
  if (root.ranks.size() == statuses.size()) return root.status;
  std::string message = fmt::format("{}: {}", said_by(root), root.status.message());
  constexpr size_t kMostGroups = 5;
  for (size_t i = 1; i < std::min(groups.size(), kMostGroups); ++i) {
    message += fmt::format("\n  then {}: {}", said_by(groups[i]), groups[i].status.message());
  }
  if (groups.size() > kMostGroups) {
    message += fmt::format("\n  and {} more messages", groups.size() - kMostGroups);
  }
  return Status(root.status.code(), message);
}

Result<RanksResult> run_ranks(const RunRanksOptions& options, const ModelConfig& config,
                              const ConstTensorView& hidden, Progress& progress) {
  // Found here once, not by every rank in a race.
  ExchangeOptions exchange{hidden.dtype, config.hidden, config.router.num_experts,
                           config.router.top_k};
  exchange.receive_budget_bytes =
      options.receive_budget_bytes.value_or(exchange.receive_budget_bytes);
  ARGOSY_RETURN_IF_ERROR(size_exchange(exchange, options.num_ranks).error());
  std::vector<RankState> ranks(static_cast<size_t>(options.num_ranks));
  const auto state_of = [&](int rank) -> RankState& { return ranks[static_cast<size_t>(rank)]; };
  progress.begin("load", options.num_ranks);
  ARGOSY_RETURN_IF_ERROR(on_every_rank(options.num_ranks, [&](int rank) {
    state_of(rank).status = load_rank(options, rank, &state_of(rank));
    progress.step();
  }));
  // Loading ends before anyone joins: a checkpoint that one rank cannot read then costs no
  // deadline.
  ARGOSY_RETURN_IF_ERROR(merged(ranks));

  const int64_t num_tokens = hidden.dim(0);
  const int64_t top_k = config.router.top_k;
  RanksResult result;
  ARGOSY_ASSIGN_OR_RETURN(result.output, Tensor::zeros(hidden.dtype, {num_tokens, config.hidden}));
  ARGOSY_ASSIGN_OR_RETURN(result.topk_idx, Tensor::zeros(DType::kI32, {num_tokens, top_k}));
  ARGOSY_ASSIGN_OR_RETURN(result.topk_weights, Tensor::zeros(DType::kF32, {num_tokens, top_k}));
  ARGOSY_ASSIGN_OR_RETURN(const std::shared_ptr<InprocWorld> world,
                          InprocWorld::create(options.num_ranks));
  progress.begin("run", options.repeat);
  ARGOSY_RETURN_IF_ERROR(on_every_rank(options.num_ranks, [&](int rank) {
    Share share;
    share.first = owned_begin(num_tokens, options.num_ranks, rank);
    const int64_t count = owned_begin(num_tokens, options.num_ranks, rank + 1) - share.first;
    share.hidden = hidden.rows(share.first, count);
    share.output = result.output.view().rows(share.first, count);
    share.topk_idx = result.topk_idx.view().as<int32_t>() + share.first * top_k;
    share.topk_weights = result.topk_weights.view().as<float>() + share.first * top_k;
    state_of(rank).status =
        run_rank(options, config.router, rank, world, share, progress, &state_of(rank));
  }));
  ARGOSY_RETURN_IF_ERROR(merged(ranks));
  gather(options, ranks, &result);
  return result;
}

}  // namespace argosy::tools
