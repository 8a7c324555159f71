// See latency_work.h. Test: tests/bench/latency_work_test.cc.
#include "tools/bench/latency_work.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>

#include "argosy/exchange.h"
#include "argosy/latency.h"
#include "tools/bench/bench_case.h"
#include "tools/bench/random_data.h"
#include "tools/bench/shared_region.h"

namespace argosy::tools::bench {
namespace {

constexpr int64_t kLineBytes = 64;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Which tokens go to which rank, once each; and which (token, k), for the way home.
struct Traffic {
  std::vector<std::vector<int64_t>> tokens_to;  // [R][rows]
  std::vector<std::vector<int64_t>> ids_from;   // [R][rows] token * K + k
};

Traffic traffic_of(const LatencyShape& shape, const Routing& routing) {
  Traffic traffic;
  traffic.tokens_to.resize(static_cast<size_t>(shape.num_ranks));
  traffic.ids_from.resize(static_cast<size_t>(shape.num_ranks));
  const Placement placement{shape.num_experts, shape.num_ranks, 0};
  for (int64_t id = 0; id < shape.num_tokens * shape.top_k; ++id) {
    const int32_t expert = routing.topk_idx[static_cast<size_t>(id)];
    const auto owner = static_cast<size_t>(placement.owner(expert));
    std::vector<int64_t>& tokens = traffic.tokens_to[owner];
    if (tokens.empty() || tokens.back() != id / shape.top_k) tokens.push_back(id / shape.top_k);
    traffic.ids_from[owner].push_back(id);
  }
  return traffic;
}

// The floor: each rank's flags and rows lie in a region that all have mapped.
class Yardstick {
 public:
  static Result<Yardstick> create(Group& group, const LatencyShape& shape,
                                  const PayloadLayout& payload, const std::string& name) {
    Yardstick made(group, shape, payload);
    ARGOSY_ASSIGN_OR_RETURN(const Routing routing, latency_routing(shape, group.rank()));
    made.traffic_ = traffic_of(shape, routing);
    const int64_t rows_bytes = shape.num_ranks * made.dispatch_bytes();
    const int64_t home_bytes = shape.num_ranks * made.home_bytes();
    ARGOSY_ASSIGN_OR_RETURN(
        made.region_,
        SharedRegion::open(name, made.flag_bytes() + shape.num_ranks * (rows_bytes + home_bytes)));
    ARGOSY_ASSIGN_OR_RETURN(made.rows_, normal_tensor({shape.num_tokens, shape.hidden}, 1.0,
                                                      static_cast<uint64_t>(group.rank()) + 7));
    ARGOSY_ASSIGN_OR_RETURN(
        made.home_, Tensor::zeros(DType::kBF16, {shape.num_tokens * shape.top_k, shape.hidden}));
    // Peers' expert rows, as those left them: real data.
    for (int home = 0; home < shape.num_ranks; ++home) {
      for (int64_t i = 0; i < shape.num_tokens * shape.top_k; ++i) {
        std::memcpy(made.expert_row(group.rank(), home, i),
                    made.rows_.view().row(i % shape.num_tokens),
                    static_cast<size_t>(made.row_bytes()));
      }
    }
    return made;
  }

  // Rows to every rank that has an expert of the token, then the flags.
  void dispatch() {
    const int rank = group_.rank();
    for (int i = 1; i < shape_.num_ranks; ++i) {
      const int peer = (rank + i) % shape_.num_ranks;
      const std::vector<int64_t>& tokens = traffic_.tokens_to[static_cast<size_t>(peer)];
      for (size_t at = 0; at < tokens.size(); ++at) {
        // Of a quantised row only its bytes count: any will do.
        std::memcpy(dispatched_row(peer, rank, static_cast<int64_t>(at)),
                    rows_.view().row(tokens[at]), static_cast<size_t>(payload_.num_bytes));
      }
    }
    exchange_flags();
  }

  // The flags, then the rows that other ranks' experts have made.
  void combine() {
    exchange_flags();
    for (int i = 1; i < shape_.num_ranks; ++i) {
      const int owner = (group_.rank() + i) % shape_.num_ranks;
      const std::vector<int64_t>& ids = traffic_.ids_from[static_cast<size_t>(owner)];
      for (size_t at = 0; at < ids.size(); ++at) {
        std::memcpy(home_.view().row(ids[at]),
                    expert_row(owner, group_.rank(), static_cast<int64_t>(at)),
                    static_cast<size_t>(row_bytes()));
      }
    }
  }

 private:
  Yardstick(Group& group, const LatencyShape& shape, const PayloadLayout& payload)
      : group_(group), shape_(shape), payload_(payload) {}

  int64_t row_bytes() const { return shape_.hidden * size_of(DType::kBF16); }
  int64_t flag_bytes() const { return int64_t{shape_.num_ranks} * shape_.num_ranks * kLineBytes; }
  int64_t dispatch_bytes() const { return shape_.num_tokens * row_bytes(); }
  int64_t home_bytes() const { return shape_.num_tokens * shape_.top_k * row_bytes(); }

  std::byte* dispatched_row(int at, int source, int64_t index) const {
    return region_.data() + flag_bytes() +
           (int64_t{at} * shape_.num_ranks + source) * dispatch_bytes() + index * row_bytes();
  }
  std::byte* expert_row(int owner, int home, int64_t index) const {
    return region_.data() + flag_bytes() +
           int64_t{shape_.num_ranks} * shape_.num_ranks * dispatch_bytes() +
           (int64_t{owner} * shape_.num_ranks + home) * home_bytes() + index * row_bytes();
  }
  std::atomic_ref<uint64_t> flag(int at, int source) const {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(
        region_.data() + (int64_t{at} * shape_.num_ranks + source) * kLineBytes));
  }

  void exchange_flags() {
    ++epoch_;
    // Release and acquire, a pair: the rows before the flag are there.
    for (int peer = 0; peer < shape_.num_ranks; ++peer) {
      flag(peer, group_.rank()).store(epoch_, std::memory_order_release);
    }
    for (int peer = 0; peer < shape_.num_ranks; ++peer) {
      while (flag(group_.rank(), peer).load(std::memory_order_acquire) < epoch_) sched_yield();
    }
  }

  Group& group_;
  LatencyShape shape_;
  PayloadLayout payload_;
  Traffic traffic_;
  SharedRegion region_;
  Tensor rows_, home_;
  uint64_t epoch_ = 0;
};

// One rank's buffers and exchanges.
class LatencyRank {
 public:
  static Result<std::unique_ptr<LatencyRank>> create(Group& group, const LatencyShape& shape,
                                                     const std::string& region) {
    ARGOSY_ASSIGN_OR_RETURN(const PayloadLayout payload,
                            payload_layout(DType::kBF16, shape.payload, shape.hidden));
    ARGOSY_ASSIGN_OR_RETURN(Yardstick yardstick, Yardstick::create(group, shape, payload, region));
    std::unique_ptr<LatencyRank> made(new LatencyRank(group, shape, std::move(yardstick)));
    ARGOSY_RETURN_IF_ERROR(made->prepare());
    return made;
  }

  Status step(LatencySubject subject, LatencyPhase phase) {
    if (subject == kFloor) {
      phase == kDispatchPhase ? yardstick_.dispatch() : yardstick_.combine();
      return {};
    }
    if (subject == kLatencyMode) return phase == kDispatchPhase ? dispatch() : combine();
    return phase == kDispatchPhase ? throughput_dispatch() : throughput_combine();
  }

  // Experts that pass rows on: a token's sum is its row times the sum of its weights. Rows of results stay for the
  // calls that are timed.
  Status check() {
    ARGOSY_RETURN_IF_ERROR(dispatch());
    for (size_t i = 0; i < received_.rows.size(); ++i) {
      decode_payload(latency_->payload(), received_.rows[i], received_.results[i]);
    }
    ARGOSY_RETURN_IF_ERROR(combine());
    ARGOSY_RETURN_IF_ERROR(check_sums(latency_->payload().is_quantised() ? 0.07 : 0.0));
    ARGOSY_RETURN_IF_ERROR(throughput_dispatch());
    const TensorView results = throughput_->results();
    for (size_t group = 0; group < rows_.group_sizes.size(); ++group) {
      const int64_t first = rows_.group_offsets[group];
      for (int64_t row = first; row < first + rows_.group_sizes[group]; ++row) {
        std::memcpy(results.row(row), rows_.rows.row(row),
                    static_cast<size_t>(shape_.hidden * size_of(DType::kBF16)));
      }
    }
    ARGOSY_RETURN_IF_ERROR(throughput_combine());
    return check_sums(0.0);
  }

 private:
  LatencyRank(Group& group, const LatencyShape& shape, Yardstick yardstick)
      : group_(group), shape_(shape), yardstick_(std::move(yardstick)) {}

  Status prepare() {
    const auto seed = static_cast<uint64_t>(group_.rank()) + 1;
    ARGOSY_ASSIGN_OR_RETURN(routing_, latency_routing(shape_, group_.rank()));
    ARGOSY_ASSIGN_OR_RETURN(hidden_, normal_tensor({shape_.num_tokens, shape_.hidden}, 1.0, seed));
    ARGOSY_ASSIGN_OR_RETURN(output_,
                            Tensor::zeros(DType::kBF16, {shape_.num_tokens, shape_.hidden}));
    LatencyOptions options;
    options.dtype = DType::kBF16;
    options.hidden = shape_.hidden;
    options.num_experts = shape_.num_experts;
    options.top_k = shape_.top_k;
    options.max_tokens = shape_.num_tokens;
    options.num_in_flight = 1;
    options.payload = shape_.payload;
    options.return_path = shape_.push ? ReturnPath::kPush : ReturnPath::kPull;
    ARGOSY_ASSIGN_OR_RETURN(latency_, LatencyExchange::create(group_, options));
    ExchangeOptions throughput;
    throughput.dtype = DType::kBF16;
    throughput.hidden = shape_.hidden;
    throughput.num_experts = shape_.num_experts;
    throughput.top_k = shape_.top_k;
    ARGOSY_ASSIGN_OR_RETURN(throughput_, Exchange::create(group_, throughput));
    input_.topk_weights = ConstTensorView(routing_.topk_weights.values.data(), DType::kF32,
                                          {shape_.num_tokens, shape_.top_k});
    return {};
  }

  Status dispatch() {
    ARGOSY_ASSIGN_OR_RETURN(call_,
                            latency_->issue_dispatch({}, routing_, std::as_const(hidden_).view()));
    return latency_->wait_dispatch(call_, &received_);
  }
  Status combine() {
    ARGOSY_RETURN_IF_ERROR(latency_->issue_combine(call_));
    return latency_->wait_combine(call_, input_, output_.view());
  }

  Status throughput_dispatch() {
    ARGOSY_RETURN_IF_ERROR(throughput_->issue_counts({}, routing_));
    ARGOSY_RETURN_IF_ERROR(throughput_->wait_counts(&counts_));
    ARGOSY_RETURN_IF_ERROR(throughput_->plan(routing_, counts_, &plan_));
    ARGOSY_RETURN_IF_ERROR(throughput_->issue_dispatch(plan_, 0, std::as_const(hidden_).view()));
    return throughput_->wait_dispatch(plan_, 0, &rows_);
  }
  Status throughput_combine() {
    ARGOSY_RETURN_IF_ERROR(throughput_->issue_combine(plan_, 0));
    return throughput_->wait_combine(plan_, 0, input_, output_.view());
  }

  Status check_sums(double more) const {
    const auto* const hidden = hidden_.view().as<BFloat16>();
    const auto* const output = output_.view().as<BFloat16>();
    for (int64_t token = 0; token < shape_.num_tokens; ++token) {
      float weight = 0;
      for (int64_t k = 0; k < shape_.top_k; ++k) {
        weight += routing_.topk_weights.values[static_cast<size_t>(token * shape_.top_k + k)];
      }
      for (int64_t h = 0; h < shape_.hidden; h += std::max<int64_t>(1, shape_.hidden / 16)) {
        const int64_t at = token * shape_.hidden + h;
        const double got = static_cast<double>(output[at].to_float());
        const double want = static_cast<double>(hidden[at].to_float() * weight);
        if (std::abs(got - want) <= more * (std::abs(want) + 0.1)) continue;
        ARGOSY_RETURN_IF_ERROR(check_near(got, want, "an output of the exchange"));
      }
    }
    return {};
  }

  Group& group_;
  const LatencyShape shape_;
  Yardstick yardstick_;
  Routing routing_;
  Tensor hidden_, output_;
  CombineInput input_;
  std::unique_ptr<LatencyExchange> latency_;
  uint64_t call_ = 0;
  LatencyRows received_;
  std::unique_ptr<Exchange> throughput_;
  CountsMatrix counts_;
  DispatchPlan plan_;
  ReceivedRows rows_;
};

// [iteration][subject][phase][begin, end]
using Stamps = std::vector<double>;

size_t stamp_at(int64_t iteration, int subject, int phase) {
  return static_cast<size_t>(((iteration * kNumSubjects + subject) * kNumPhases + phase) * 2);
}

// One call, its phases each after a barrier. stamps: null while warming up.
Status stamp_call(Group& group, LatencyRank& rank, int subject, int64_t iteration, Stamps* stamps) {
  for (int phase = 0; phase < kNumPhases; ++phase) {
    ARGOSY_RETURN_IF_ERROR(group.barrier());
    const double begin = now_seconds();
    ARGOSY_RETURN_IF_ERROR(
        rank.step(static_cast<LatencySubject>(subject), static_cast<LatencyPhase>(phase)));
    const double end = now_seconds();
    if (stamps == nullptr) continue;
    double* const at = stamps->data() + stamp_at(iteration, subject, phase);
    at[0] = begin;
    at[1] = end;
  }
  return {};
}

// The subjects take turns of some calls each. The first call of a turn is not counted: it finds the caches as another
// subject left them, which a decoder that makes one call after the other, and MPI's run, never does.
Status stamp(Group& group, LatencyRank& rank, int64_t iterations, Stamps* stamps) {
  constexpr int64_t kTurn = 8;
  for (int64_t first = 0; first < iterations; first += kTurn) {
    for (int subject = 0; subject < kNumSubjects; ++subject) {
      ARGOSY_RETURN_IF_ERROR(stamp_call(group, rank, subject, first, nullptr));
      for (int64_t i = first; i < std::min(iterations, first + kTurn); ++i) {
        ARGOSY_RETURN_IF_ERROR(stamp_call(group, rank, subject, i, stamps));
      }
    }
  }
  return {};
}

LatencyTimes merge(const std::vector<std::vector<std::byte>>& all, int64_t iterations) {
  LatencyTimes times;
  for (int64_t i = 0; i < iterations; ++i) {
    for (int subject = 0; subject < kNumSubjects; ++subject) {
      for (int phase = 0; phase < kNumPhases; ++phase) {
        double begin = 1e300;
        double end = 0;
        for (const std::vector<std::byte>& rank : all) {
          double pair[2];
          std::memcpy(pair, rank.data() + stamp_at(i, subject, phase) * sizeof(double),
                      sizeof(pair));
          begin = std::min(begin, pair[0]);
          end = std::max(end, pair[1]);
        }
        times.seconds[static_cast<size_t>(subject)][static_cast<size_t>(phase)].push_back(end -
                                                                                          begin);
      }
    }
  }
  return times;
}

}  // namespace

Result<Routing> latency_routing(const LatencyShape& shape, int rank) {
  ARGOSY_ASSIGN_OR_RETURN(const RandomRouting random,
                          random_routing(shape.num_tokens, shape.num_experts, shape.top_k,
                                         static_cast<uint64_t>(rank) + 51));
  return to_routing(random, shape.num_experts);
}

Result<LatencyTimes> time_latency(Group& group, const LatencyShape& shape, int64_t iterations,
                                  const std::string& region) {
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<LatencyRank> rank,
                          LatencyRank::create(group, shape, region));
  ARGOSY_RETURN_IF_ERROR(group.barrier());
  if (group.rank() == 0) SharedRegion::remove(region);
  ARGOSY_RETURN_IF_ERROR(rank->check());
  Stamps stamps(stamp_at(iterations, 0, 0));
  // Warm-up: pages touched, caches and threads awake.
  ARGOSY_RETURN_IF_ERROR(stamp(group, *rank, std::min<int64_t>(iterations, 3), &stamps));
  ARGOSY_RETURN_IF_ERROR(stamp(group, *rank, iterations, &stamps));
  std::vector<std::vector<std::byte>> all;
  const bool is_root = group.rank() == 0;
  ARGOSY_RETURN_IF_ERROR(
      group.gather(0, std::as_bytes(std::span(stamps)), is_root ? &all : nullptr));
  ARGOSY_RETURN_IF_ERROR(group.barrier());  // nobody leaves while a peer may still read its rows
  return is_root ? merge(all, iterations) : LatencyTimes();
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const auto last = static_cast<double>(values.size() - 1);
  return values[static_cast<size_t>(std::lround(q * last))];
}

}  // namespace argosy::tools::bench
