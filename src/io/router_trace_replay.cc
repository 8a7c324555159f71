// The replay of a router trace: loads per layer, expert and rank, nothing else. Test:
// tests/io/router_trace_test.cc.
#include <algorithm>
#include <limits>
#include <numeric>

#include "argosy/plan.h"
#include "argosy/router_trace.h"
#include "base/error.h"

namespace argosy {
namespace {

// layers x (experts + ranks), and experts: what a file of a few bytes may claim, 32 MiB of counts.
constexpr int64_t kMaxLoads = int64_t{1} << 22;
constexpr int64_t kMaxExperts = int64_t{1} << 16;

// Records by layer, then step.
std::vector<const TraceRecord*> in_order(const RouterTrace& trace) {
  std::vector<const TraceRecord*> order;
  for (const TraceRecord& record : trace.records) order.push_back(&record);
  std::stable_sort(order.begin(), order.end(), [](const TraceRecord* a, const TraceRecord* b) {
    return a->layer != b->layer ? a->layer < b->layer : a->step < b->step;
  });
  return order;
}

std::vector<int64_t> rank_loads_of(const std::vector<int64_t>& counts, int num_ranks) {
  const Placement placement{static_cast<int64_t>(counts.size()), num_ranks, 0};
  std::vector<int64_t> loads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    loads.push_back(std::accumulate(counts.begin() + placement.begin(rank),
                                    counts.begin() + placement.begin(rank + 1), int64_t{0}));
  }
  return loads;
}

// Largest by mean; 0 when nothing is loaded.
double peak_of(const std::vector<int64_t>& loads) {
  const int64_t sum = std::accumulate(loads.begin(), loads.end(), int64_t{0});
  if (sum == 0) return 0;
  const int64_t most = *std::max_element(loads.begin(), loads.end());
  return static_cast<double>(most) * static_cast<double>(loads.size()) / static_cast<double>(sum);
}

// Adds up one layer step by step.
class LayerReplay {
 public:
  LayerReplay(int64_t layer, int64_t num_experts, int num_ranks)
      : num_ranks_(num_ranks), step_counts_(static_cast<size_t>(num_experts)) {
    load_.layer = layer;
    load_.counts.resize(static_cast<size_t>(num_experts));
  }

  void add(const RouterTrace& trace, const TraceRecord& record) {
    if (load_.num_steps == 0 || record.step != step_) {
      end_step();
      step_ = record.step;
      ++load_.num_steps;
    }
    load_.num_tokens += record.num_tokens;
    const auto first = static_cast<size_t>(record.first_token * trace.top_k);
    const auto count = static_cast<size_t>(record.num_tokens * trace.top_k);
    for (size_t i = first; i < first + count; ++i) {
      if (trace.topk_idx[i] >= 0) ++step_counts_[static_cast<size_t>(trace.topk_idx[i])];
    }
  }

  TraceLayerLoad finish() {
    end_step();
    if (num_loaded_steps_ > 0) {
      load_.expert_peak = expert_peaks_ / static_cast<double>(num_loaded_steps_);
      load_.rank_peak = rank_peaks_ / static_cast<double>(num_loaded_steps_);
    }
    load_.rank_loads = rank_loads_of(load_.counts, num_ranks_);
    return std::move(load_);
  }

 private:
  void end_step() {
    const double peak = peak_of(step_counts_);
    if (peak == 0) return;
    ++num_loaded_steps_;
    expert_peaks_ += peak;
    rank_peaks_ += peak_of(rank_loads_of(step_counts_, num_ranks_));
    for (size_t e = 0; e < step_counts_.size(); ++e) load_.counts[e] += step_counts_[e];
    std::fill(step_counts_.begin(), step_counts_.end(), 0);
  }

  int num_ranks_;
  std::vector<int64_t> step_counts_;
  TraceLayerLoad load_;
  int64_t step_ = 0;
  int64_t num_loaded_steps_ = 0;
  double expert_peaks_ = 0;
  double rank_peaks_ = 0;
};

Result<int64_t> experts_of(const RouterTrace& trace, int64_t num_experts) {
  if (num_experts < 0 ||
      (num_experts > 0 && trace.num_experts > 0 && num_experts != trace.num_experts)) {
    return base::invalid("num_experts is {}, the router trace has {}", num_experts,
                         trace.num_experts);
  }
  int64_t highest = -1;
  for (const int32_t id : trace.topk_idx) highest = std::max(highest, int64_t{id});
  const int64_t said = std::max(num_experts, trace.num_experts);
  if (said == 0) return highest + 1;
  if (highest < said) return said;
  return base::invalid("num_experts is {}, but the router trace holds expert {}", said, highest);
}

}  // namespace

Result<std::vector<TraceLayerLoad>> replay_router_trace(const RouterTrace& trace,
                                                        int64_t num_experts, int num_ranks) {
  ARGOSY_RETURN_IF_ERROR(validate(trace));
  if (num_ranks < 1) return base::invalid("num_ranks is {}, expected at least 1", num_ranks);
  ARGOSY_ASSIGN_OR_RETURN(const int64_t experts, experts_of(trace, num_experts));
  if (experts > kMaxExperts) {
    return base::error(StatusCode::kUnsupported,
                       "router trace: {} experts, at most {} can be replayed", experts,
                       kMaxExperts);
  }
  const std::vector<const TraceRecord*> order = in_order(trace);
  int64_t num_layers = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || order[i]->layer != order[i - 1]->layer) ++num_layers;
  }
  if (num_layers > 0 && experts + num_ranks > kMaxLoads / num_layers) {
    return base::error(StatusCode::kUnsupported,
                       "router trace: {} layers of {} experts and {} ranks are more than {} loads",
                       num_layers, experts, num_ranks, kMaxLoads);
  }
  std::vector<TraceLayerLoad> layers;
  for (size_t i = 0; i < order.size();) {
    const int64_t layer = order[i]->layer;
    LayerReplay replay(layer, experts, num_ranks);
    for (; i < order.size() && order[i]->layer == layer; ++i) replay.add(trace, *order[i]);
    layers.push_back(replay.finish());
  }
  return layers;
}

}  // namespace argosy
