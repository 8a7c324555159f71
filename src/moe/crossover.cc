// See crossover.h. Experts take the same time in both modes, so only the exchange is measured.
#include "moe/crossover.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "argosy/tensor.h"
#include "platform/clock.h"
#include "transport/collectives.h"

namespace argosy {
namespace {

constexpr int kRepeats = 7;
// No further number of tokens is tried when the slowest rank has measured for so long.
constexpr double kMostSeconds = 0.5;

// What the answer depends on. The rank is part of it: ranks that are threads of one process must all measure, or none.
using Key =
    std::tuple<uint64_t, int, int64_t, int64_t, int64_t, int64_t, int, int, int64_t, int64_t>;

struct Known {
  std::mutex mutex;
  std::map<Key, int64_t> crossovers;  // guarded by mutex
};
Known& known() {
  static Known instance;
  return instance;
}

Key key_of(const Group& group, const ExchangeOptions& throughput, const LatencyOptions& options) {
  return {group.id(),
          group.rank(),
          options.hidden,
          options.num_experts,
          options.top_k,
          options.max_tokens,
          static_cast<int>(options.payload),
          static_cast<int>(options.dtype) * 2 + static_cast<int>(options.return_path),
          throughput.receive_budget_bytes,
          throughput.max_receive_rows};
}

// Tokens spread evenly over experts and ranks, each rank's on its own.
Routing even_routing(const LatencyOptions& options, int rank, int64_t num_tokens) {
  Routing routing;
  routing.num_tokens = routing.num_valid_tokens = num_tokens;
  routing.num_experts = options.num_experts;
  routing.top_k = options.top_k;
  routing.counts.assign(static_cast<size_t>(options.num_experts), 0);
  const int64_t step = std::max<int64_t>(1, options.num_experts / options.top_k);
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t first = (token * 7 + int64_t{rank} * 3) % options.num_experts;
    for (int64_t k = 0; k < options.top_k; ++k) {
      const int64_t expert = (first + k * step) % options.num_experts;
      routing.topk_idx.push_back(static_cast<int32_t>(expert));
      ++routing.counts[static_cast<size_t>(expert)];
    }
  }
  routing.topk_weights.values.assign(routing.topk_idx.size(), 0.0f);
  return routing;
}

// One rank's calls of both modes on the same tokens. Results are whatever the buffers hold.
class Trial {
 public:
  Trial(Exchange& throughput, LatencyExchange& latency, int rank, int64_t num_tokens)
      : throughput_(throughput),
        latency_(latency),
        routing_(even_routing(latency.options(), rank, num_tokens)) {}

  Status prepare() {
    const LatencyOptions& options = latency_.options();
    ARGOSY_ASSIGN_OR_RETURN(hidden_,
                            Tensor::zeros(options.dtype, {routing_.num_tokens, options.hidden}));
    ARGOSY_ASSIGN_OR_RETURN(output_,
                            Tensor::zeros(options.dtype, {routing_.num_tokens, options.hidden}));
    input_.topk_weights = ConstTensorView(routing_.topk_weights.values.data(), DType::kF32,
                                          {routing_.num_tokens, routing_.top_k});
    return {};
  }

  Status in_latency_mode() {
    ARGOSY_ASSIGN_OR_RETURN(const uint64_t call,
                            latency_.issue_dispatch({}, routing_, std::as_const(hidden_).view()));
    ARGOSY_RETURN_IF_ERROR(latency_.wait_dispatch(call, &slots_));
    ARGOSY_RETURN_IF_ERROR(latency_.issue_combine(call));
    return latency_.wait_combine(call, input_, output_.view());
  }

  Status in_throughput_mode() {
    ARGOSY_RETURN_IF_ERROR(throughput_.issue_counts({}, routing_));
    ARGOSY_RETURN_IF_ERROR(throughput_.wait_counts(&counts_));
    ARGOSY_RETURN_IF_ERROR(throughput_.plan(routing_, counts_, &plan_));
    for (int64_t round = 0; round < plan_.num_rounds; ++round) {
      ARGOSY_RETURN_IF_ERROR(
          throughput_.issue_dispatch(plan_, round, std::as_const(hidden_).view()));
      ARGOSY_RETURN_IF_ERROR(throughput_.wait_dispatch(plan_, round, &rows_));
      ARGOSY_RETURN_IF_ERROR(throughput_.issue_combine(plan_, round));
      ARGOSY_RETURN_IF_ERROR(throughput_.wait_combine(plan_, round, input_, output_.view()));
    }
    return {};
  }

 private:
  Exchange& throughput_;
  LatencyExchange& latency_;
  const Routing routing_;
  Tensor hidden_, output_;
  CombineInput input_;
  LatencyRows slots_;
  CountsMatrix counts_;
  DispatchPlan plan_;
  ReceivedRows rows_;
};

struct Times {
  double latency = std::numeric_limits<double>::infinity();
  double throughput = std::numeric_limits<double>::infinity();
  double elapsed = 0;  // since the first measurement
};

// Least times of this rank. A failure here fails for the others too: calls are exchanges.
Result<Times> measure(Group& group, Exchange& throughput, LatencyExchange& latency,
                      int64_t num_tokens) {
  Trial trial(throughput, latency, group.rank(), num_tokens);
  ARGOSY_RETURN_IF_ERROR(trial.prepare());
  Times times;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    ARGOSY_RETURN_IF_ERROR(group.barrier());
    const double begin = platform::now_seconds();
    ARGOSY_RETURN_IF_ERROR(trial.in_latency_mode());
    const double middle = platform::now_seconds();
    ARGOSY_RETURN_IF_ERROR(group.barrier());
    const double again = platform::now_seconds();
    ARGOSY_RETURN_IF_ERROR(trial.in_throughput_mode());
    const double end = platform::now_seconds();
    times.latency = std::min(times.latency, middle - begin);
    times.throughput = std::min(times.throughput, end - again);
  }
  return times;
}

// The slowest rank's times, the same numbers on every rank.
Result<Times> slowest(Group& group, transport::AllGather& gather, const Times& mine) {
  ARGOSY_RETURN_IF_ERROR(gather.issue(std::as_bytes(std::span(&mine, 1))));
  ARGOSY_RETURN_IF_ERROR(
      gather.wait(platform::Deadline::after(group.step_deadline()), "times of the modes"));
  Times all{0, 0, 0};
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    Times times;
    const std::span<const std::byte> bytes = gather.from(rank);
    std::memcpy(&times, bytes.data(), std::min(bytes.size(), sizeof(times)));
    all.latency = std::max(all.latency, times.latency);
    all.throughput = std::max(all.throughput, times.throughput);
    all.elapsed = std::max(all.elapsed, times.elapsed);
  }
  return all;
}

}  // namespace

Result<int64_t> find_crossover(Group& group, Exchange& throughput, LatencyExchange& latency) {
  const Key key = key_of(group, throughput.options(), latency.options());
  {
    const std::lock_guard lock(known().mutex);
    const auto at = known().crossovers.find(key);
    if (at != known().crossovers.end()) return at->second;
  }
  ARGOSY_ASSIGN_OR_RETURN(
      const std::unique_ptr<transport::AllGather> gather,
      transport::AllGather::create(group.endpoint(), sizeof(Times),
                                   platform::Deadline::after(group.step_deadline())));
  int64_t best = 0;
  const double begin = platform::now_seconds();
  const int64_t most = latency.options().max_tokens;
  for (int64_t tokens = 1; tokens <= most;
       tokens = tokens < most ? std::min(most, tokens * 2) : most + 1) {
    Result<Times> mine = measure(group, throughput, latency, tokens);
    // More than the caller's cap on received rows allows, on every rank alike.
    if (mine.error().code() == StatusCode::kCapacity) break;
    ARGOSY_RETURN_IF_ERROR(mine.error());
    mine->elapsed = platform::now_seconds() - begin;
    ARGOSY_ASSIGN_OR_RETURN(const Times all, slowest(group, *gather, *mine));
    if (all.latency > all.throughput) break;
    best = tokens;
    if (all.elapsed > kMostSeconds) break;
  }
  const std::lock_guard lock(known().mutex);
  known().crossovers[key] = best;
  return best;
}

}  // namespace argosy
