// Dispatch and combine alone, without experts, against a copy of the rows they carry.
//
// Floor: docs/perf/exchange.md. Test: tests/bench/bench_test.cc.
#include <algorithm>
#include <memory>
#include <utility>

#include "argosy/exchange.h"
#include "argosy/router.h"
#include "tools/bench/bench_case.h"
#include "tools/bench/random_data.h"
#include "tools/bench/rank_crew.h"

namespace argosy::tools::bench {
namespace {

struct ExchangeShape {
  int num_ranks = 4;
  int64_t num_tokens = 0;  // of each rank
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t hidden = 0;
};

// What one rank has.
struct Rank {
  std::unique_ptr<Exchange> exchange;
  Tensor hidden, output;
  Routing routing;
  Tensor topk_weights;
  CountsMatrix counts;
  DispatchPlan plan;
  ReceivedRows received;
  Tensor from, to;  // the yardstick's T*K rows
};

// What the check's expert e does to a row: exact in bf16, and another for its neighbours.
float factor_of(int64_t expert) { return static_cast<float>(1 << expert % 4); }

class ExchangeBench : public Bench {
 public:
  static Result<std::unique_ptr<Bench>> make(const BenchContext& context,
                                             const ExchangeShape& shape) {
    std::unique_ptr<ExchangeBench> bench(new ExchangeBench(shape));
    ARGOSY_ASSIGN_OR_RETURN(bench->crew_, RankCrew::create(context, shape.num_ranks, 1));
    ARGOSY_RETURN_IF_ERROR(bench->on_ranks(&ExchangeBench::make_rank));
    ARGOSY_RETURN_IF_ERROR(bench->on_ranks(&ExchangeBench::step_with_experts));
    ARGOSY_RETURN_IF_ERROR(bench->on_ranks(&ExchangeBench::check));
    return std::unique_ptr<Bench>(std::move(bench));
  }

  Result<Sample> sample() override {
    Sample sample;
    ARGOSY_ASSIGN_OR_RETURN(sample.limit_seconds,
                            crew_->run([this](Group& group) { return copy_rows(group); }));
    ARGOSY_ASSIGN_OR_RETURN(sample.seconds,
                            crew_->run([this](Group& group) { return step(group, false); }));
    return sample;
  }

 private:
  explicit ExchangeBench(const ExchangeShape& shape)
      : shape_(shape), ranks_(static_cast<size_t>(shape.num_ranks)) {}

  Rank& rank_of(const Group& group) { return ranks_[static_cast<size_t>(group.rank())]; }

  Status on_ranks(Status (ExchangeBench::*body)(Group&)) {
    return crew_->run([&](Group& group) { return (this->*body)(group); }).error();
  }

  Status make_rank(Group& group) {
    Rank& rank = rank_of(group);
    const auto seed = static_cast<uint64_t>(group.rank()) + 1;
    ExchangeOptions options;
    options.dtype = DType::kBF16;
    options.hidden = shape_.hidden;
    options.num_experts = shape_.num_experts;
    options.top_k = shape_.top_k;
    ARGOSY_ASSIGN_OR_RETURN(rank.exchange, Exchange::create(group, options));
    ARGOSY_ASSIGN_OR_RETURN(rank.hidden,
                            normal_tensor({shape_.num_tokens, shape_.hidden}, 1.0, seed));
    ARGOSY_ASSIGN_OR_RETURN(rank.output,
                            Tensor::zeros(DType::kBF16, {shape_.num_tokens, shape_.hidden}));
    ARGOSY_ASSIGN_OR_RETURN(
        RandomRouting random,
        random_routing(shape_.num_tokens, shape_.num_experts, shape_.top_k, seed + 50));
    rank.routing = to_routing(random, shape_.num_experts);
    rank.topk_weights = std::move(random.topk_weights);
    const int64_t num_rows = shape_.num_tokens * shape_.top_k;
    ARGOSY_ASSIGN_OR_RETURN(rank.from, normal_tensor({num_rows, shape_.hidden}, 1.0, seed + 90));
    ARGOSY_ASSIGN_OR_RETURN(rank.to, Tensor::zeros(DType::kBF16, {num_rows, shape_.hidden}));
    return {};
  }

  // The limit: every rank copies its rows once, one by one, by plain stores.
  Status copy_rows(Group& group) {
    Rank& rank = rank_of(group);
    const ConstTensorView from = std::as_const(rank.from).view();
    const TensorView to = rank.to.view();
    const int64_t row_bytes = shape_.hidden * size_of(DType::kBF16);
    for (int64_t row = 0; row < from.dim(0); ++row) {
      copy_by_plain_stores(to.row(row), from.row(row), row_bytes);
    }
    return {};
  }

  // Counts, plan, dispatch and combine: all that a user waits for but the experts. What these have
  // left as results stays as it is unless `with_experts`.
  Status step(Group& group, bool with_experts) {
    Rank& rank = rank_of(group);
    Exchange& exchange = *rank.exchange;
    ARGOSY_RETURN_IF_ERROR(exchange.issue_counts(Status(), rank.routing));
    ARGOSY_RETURN_IF_ERROR(exchange.wait_counts(&rank.counts));
    ARGOSY_RETURN_IF_ERROR(exchange.plan(rank.routing, rank.counts, &rank.plan));
    const CombineInput input{rank.topk_weights.view(), {}, nullptr, {}, {}, nullptr};
    for (int64_t round = 0; round < rank.plan.num_rounds; ++round) {
      ARGOSY_RETURN_IF_ERROR(
          exchange.issue_dispatch(rank.plan, round, std::as_const(rank.hidden).view()));
      ARGOSY_RETURN_IF_ERROR(exchange.wait_dispatch(rank.plan, round, &rank.received));
      if (with_experts) scale_rows(group);
      ARGOSY_RETURN_IF_ERROR(exchange.issue_combine(rank.plan, round));
      ARGOSY_RETURN_IF_ERROR(exchange.wait_combine(rank.plan, round, input, rank.output.view()));
    }
    return {};
  }

  Status step_with_experts(Group& group) { return step(group, true); }

  void scale_rows(Group& group) {
    const Rank& rank = rank_of(group);
    const int64_t first = rank.exchange->placement().begin(group.rank());
    const TensorView results = rank.exchange->results();
    for (size_t local = 0; local < rank.received.group_sizes.size(); ++local) {
      const float factor = factor_of(first + static_cast<int64_t>(local));
      for (int64_t i = 0; i < rank.received.group_sizes[local]; ++i) {
        const int64_t row = rank.received.group_offsets[local] + i;
        const auto* const in = reinterpret_cast<const BFloat16*>(rank.received.rows.row(row));
        auto* const out = reinterpret_cast<BFloat16*>(results.row(row));
        for (int64_t h = 0; h < shape_.hidden; ++h) {
          out[h] = BFloat16::from_float(in[h].to_float() * factor);
        }
      }
    }
  }

  // A row at another place, of another token or from another expert shows.
  Status check(Group& group) {
    const Rank& rank = rank_of(group);
    const auto* const hidden = rank.hidden.view().as<BFloat16>();
    const auto* const output = rank.output.view().as<BFloat16>();
    for (int64_t token = 0; token < shape_.num_tokens; ++token) {
      float factor = 0;
      for (int64_t k = 0; k < shape_.top_k; ++k) {
        const auto at = static_cast<size_t>(token * shape_.top_k + k);
        factor += rank.routing.topk_weights.values[at] * factor_of(rank.routing.topk_idx[at]);
      }
      for (int64_t h = 0; h < shape_.hidden; h += std::max<int64_t>(1, shape_.hidden / 16)) {
        const int64_t at = token * shape_.hidden + h;
        ARGOSY_RETURN_IF_ERROR(check_near(static_cast<double>(output[at].to_float()),
                                          static_cast<double>(hidden[at].to_float() * factor),
                                          "an output of the exchange"));
      }
    }
    return {};
  }

  const ExchangeShape shape_;
  std::unique_ptr<RankCrew> crew_;
  std::vector<Rank> ranks_;
};

}  // namespace

std::vector<BenchCase> exchange_cases(const BenchSizes& sizes) {
  ExchangeShape shape{4, 1024, 256, 8, 7168};
  if (sizes.quick) shape = {4, 12, 16, 4, 96};
  return {{"exchange_throughput",
           {{"T", shape.num_tokens},
            {"E", shape.num_experts},
            {"K", shape.top_k},
            {"H", shape.hidden},
            {"R", shape.num_ranks},
            {"threads", 1}},
           "each rank copies its T*K rows once, row by row, plain stores",
           Goals::same(1 / 1.15),
           [=](const BenchContext& context) { return ExchangeBench::make(context, shape); }}};
}

}  // namespace argosy::tools::bench
