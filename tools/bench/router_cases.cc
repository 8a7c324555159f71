// The router alone, logits given: a DeepSeek-V3 layer and a softmax of 128, against reading the logits.
//
// Calls walk sets of logits that no cache holds, so that they come from DRAM, where the floor reads.
// Floors: docs/perf/router.md. Test: tests/bench/bench_test.cc.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <utility>

#include "argosy/pinning.h"
#include "argosy/router.h"
#include "tools/bench/bench_case.h"
#include "tools/bench/floor.h"

namespace argosy::tools::bench {
namespace {

constexpr int64_t kSetBytes = 64 << 20;  // of all sets of a case

struct RouterShape {
  std::string_view preset;
  int64_t num_tokens = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t num_groups = 1;
  int64_t keep_groups = 1;
};

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Status wrong(int64_t token, const std::string& what) {
  return {StatusCode::kInternal, fmt::format("token {}: {}", token, what)};
}

class RouterWork {
 public:
  static Result<RouterWork> create(const RouterShape& shape, int num_threads, int64_t num_sets) {
    RouterWork work;
    ARGOSY_ASSIGN_OR_RETURN(work.spec_,
                            router_preset(shape.preset, shape.num_experts, shape.top_k));
    work.spec_.num_groups = shape.num_groups;
    work.spec_.keep_groups = shape.keep_groups;
    ARGOSY_ASSIGN_OR_RETURN(work.pool_, ThreadPool::create(num_threads));
    pin_threads(*work.pool_, 0);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int64_t set = 0; set < num_sets; ++set) {
      ARGOSY_ASSIGN_OR_RETURN(Tensor logits,
                              Tensor::zeros(DType::kF32, {shape.num_tokens, shape.num_experts}));
      auto* const values = logits.view().as<float>();
      // Rows of the first set, each moved on by some experts: normal values are dear to draw.
      const int64_t size = shape.num_tokens * shape.num_experts;
      for (int64_t i = 0; i < size; ++i) {
        values[i] =
            set == 0 ? normal(random) : work.sets_[0].view().as<float>()[(i + 37 * set) % size];
      }
      work.sets_.push_back(std::move(logits));
    }
    if (work.spec_.selection_bias == Choice::kYes) {
      ARGOSY_ASSIGN_OR_RETURN(work.bias_, Tensor::zeros(DType::kF32, {shape.num_experts}));
      auto* const values = work.bias_.view().as<float>();
      for (int64_t i = 0; i < shape.num_experts; ++i) values[i] = 0.05f * normal(random);
    }
    ARGOSY_ASSIGN_OR_RETURN([[maybe_unused]] const double seconds, work.run());
    ARGOSY_RETURN_IF_ERROR(work.check());
    return work;
  }

  // One call with the next set of logits; its seconds.
  Result<double> run() {
    RouterInput input;
    input.logits = std::as_const(sets_[next_set_]).view();
    if (spec_.selection_bias == Choice::kYes) input.selection_bias = std::as_const(bias_).view();
    next_set_ = (next_set_ + 1) % sets_.size();
    const double begin = now_seconds();
    ARGOSY_RETURN_IF_ERROR(
        route(spec_, input, pool_->num_threads() > 1 ? pool_.get() : nullptr, &routing_));
    return now_seconds() - begin;
  }

  double logit_bytes() const { return 4.0 * static_cast<double>(sets_[0].view().num_elements()); }

 private:
  RouterWork() = default;

  // Some tokens of the first set against fp64.
  Status check() const {
    const int64_t step = std::max<int64_t>(1, routing_.num_tokens / 64);
    for (int64_t token = 0; token < routing_.num_tokens; token += step) {
      ARGOSY_RETURN_IF_ERROR(check_token(token));
    }
    return {};
  }

  Status check_token(int64_t token) const {
    const auto num_experts = static_cast<size_t>(spec_.num_experts);
    const float* const z = sets_[0].view().as<float>() + token * spec_.num_experts;
    std::vector<double> scores(num_experts), selection(num_experts);
    const bool sigmoid = spec_.score_function == ScoreFunction::kSigmoid;
    for (size_t i = 0; i < num_experts; ++i) {
      const auto wide = static_cast<double>(z[i]);
      scores[i] = sigmoid ? 1.0 / (1.0 + std::exp(-wide)) : std::exp(wide);
      selection[i] = scores[i];
      if (spec_.selection_bias == Choice::kYes) {
        selection[i] += static_cast<double>(bias_.view().as<float>()[i]);
      }
    }
    refuse_groups(&selection);
    std::vector<double> falling = selection;
    std::sort(falling.rbegin(), falling.rend());
    const int32_t* const ids = routing_.topk_idx.data() + token * spec_.top_k;
    const float* const weights = routing_.topk_weights.values.data() + token * spec_.top_k;
    double sum = 0.0;
    for (int64_t k = 0; k < spec_.top_k; ++k) sum += scores[static_cast<size_t>(ids[k])];
    for (int64_t k = 0; k < spec_.top_k; ++k) {
      const auto id = static_cast<size_t>(ids[k]);
      const double best = falling[static_cast<size_t>(k)];
      if (!(std::fabs(selection[id] - best) <= 1e-6 * (1.0 + std::fabs(best)))) {
        return wrong(token, fmt::format("choice {} is expert {} with selection score {}, not {}", k,
                                        id, selection[id], best));
      }
      const double want = scores[id] / sum * static_cast<double>(spec_.routed_scaling_factor);
      if (!(std::fabs(static_cast<double>(weights[k]) - want) <= 1e-6 * want)) {
        return wrong(token, fmt::format("weight {} is {}, expected {}", k, weights[k], want));
      }
    }
    return {};
  }

  // -inf for the experts of groups that are not among the best by the sum of their best two.
  void refuse_groups(std::vector<double>* selection) const {
    if (spec_.keep_groups == spec_.num_groups) return;
    const auto size = static_cast<size_t>(spec_.num_experts / spec_.num_groups);
    std::vector<std::pair<double, size_t>> groups;
    for (size_t first = 0; first < selection->size(); first += size) {
      std::vector<double> own(selection->begin() + static_cast<std::ptrdiff_t>(first),
                              selection->begin() + static_cast<std::ptrdiff_t>(first + size));
      std::sort(own.rbegin(), own.rend());
      groups.emplace_back(-(own[0] + own[1]), first);
    }
    std::sort(groups.begin(), groups.end());
    for (size_t i = static_cast<size_t>(spec_.keep_groups); i < groups.size(); ++i) {
      std::fill_n(selection->begin() + static_cast<std::ptrdiff_t>(groups[i].second), size,
                  -std::numeric_limits<double>::infinity());
    }
  }

  RouterSpec spec_;
  std::unique_ptr<ThreadPool> pool_;
  std::vector<Tensor> sets_;
  size_t next_set_ = 0;
  Tensor bias_;
  Routing routing_;
};

class RouterBench : public Bench {
 public:
  RouterBench(Floor floor, RouterWork work) : floor_(std::move(floor)), work_(std::move(work)) {}

  Result<Sample> sample() override {
    Sample sample;
    ARGOSY_ASSIGN_OR_RETURN(sample.limit_seconds, floor_.seconds(0, work_.logit_bytes()));
    ARGOSY_ASSIGN_OR_RETURN(sample.seconds, work_.run());
    return sample;
  }

 private:
  Floor floor_;
  RouterWork work_;
};

BenchCase case_of(const std::string& name, const RouterShape& shape, const BenchSizes& sizes,
                  double goal) {
  nlohmann::ordered_json params = {
      {"T", shape.num_tokens}, {"E", shape.num_experts}, {"K", shape.top_k}};
  if (shape.num_groups > 1) {
    params["groups"] = shape.num_groups;
    params["keep_groups"] = shape.keep_groups;
  }
  params["threads"] = sizes.num_threads;
  const int64_t bytes = 4 * shape.num_tokens * shape.num_experts;
  const int64_t num_sets = sizes.quick ? 2 : std::max<int64_t>(2, kSetBytes / bytes);
  return {name, params, "DRAM read rate", Goals::same(goal),
          [=](const BenchContext& context) -> Result<std::unique_ptr<Bench>> {
            ARGOSY_ASSIGN_OR_RETURN(Floor floor,
                                    Floor::create(context, context.num_threads, Floor::Of::kRead));
            ARGOSY_ASSIGN_OR_RETURN(RouterWork work,
                                    RouterWork::create(shape, context.num_threads, num_sets));
            return std::unique_ptr<Bench>(new RouterBench(std::move(floor), std::move(work)));
          }};
}

}  // namespace

std::vector<BenchCase> router_cases(const BenchSizes& sizes) {
  const int64_t num_tokens = sizes.quick ? 40 : 8192;
  return {
      case_of("router_deepseek_v3", {"deepseek_v3", num_tokens, 256, 8, 8, 4}, sizes, 1 / 3.5),
      case_of("router_softmax", {"qwen3_moe", num_tokens, 128, 8}, sizes, 1 / 3.0),
  };
}

}  // namespace argosy::tools::bench
