// The grouped GEMM alone: weights hot, weights cold, one expert with most of the rows.
//
// Floors: docs/perf/gemm.md. Test: tests/bench/bench_test.cc.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

#include "argosy/gemm.h"
#include "argosy/pinning.h"
#include "argosy/thread_pool.h"
#include "tools/bench/bench_case.h"
#include "tools/bench/floor.h"
#include "tools/bench/random_data.h"

namespace argosy::tools::bench {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Groups of rows over weights [n, k] each, and all that a call needs.
class GemmWork {
 public:
  // Sizes of the groups of one call. `num_sets` times as many weights: calls take them in turn.
  static Result<GemmWork> create(const BenchContext& context, std::vector<int64_t> group_rows,
                                 int64_t n, int64_t k, int64_t num_sets) {
    GemmWork work;
    work.options_.level = context.level;
    work.options_.dot_order = context.dot_order;
    work.n_ = n;
    work.k_ = k;
    work.sizes_ = std::move(group_rows);
    std::exclusive_scan(work.sizes_.begin(), work.sizes_.end(), std::back_inserter(work.offsets_),
                        int64_t{0});
    const int64_t num_rows = std::reduce(work.sizes_.begin(), work.sizes_.end());
    ARGOSY_ASSIGN_OR_RETURN(work.rows_, normal_tensor({num_rows, k}, 1.0, kRowSeed));
    ARGOSY_ASSIGN_OR_RETURN(work.out_, Tensor::zeros(DType::kBF16, {num_rows, n}));
    const auto num_groups = static_cast<int64_t>(work.sizes_.size());
    for (int64_t set = 0; set < num_sets; ++set) {
      ARGOSY_ASSIGN_OR_RETURN(
          PackedWeights weights,
          PackedWeights::create(PackedWeights::Kind::kPlain, DType::kBF16, num_groups, n, k));
      for (int64_t group = 0; group < num_groups; ++group) {
        ARGOSY_ASSIGN_OR_RETURN(const Tensor values, work.group_weights(set, group));
        ARGOSY_RETURN_IF_ERROR(weights.set_group(group, values.view()));
      }
      work.weights_.push_back(std::move(weights));
    }
    ARGOSY_RETURN_IF_ERROR(work.check());
    return work;
  }

  // One call with the next set of weights; its seconds. `pool`: null for the calling thread.
  Result<double> run(ThreadPool* pool) {
    GemmOptions options = options_;
    options.pool = pool;
    const PackedWeights& weights = weights_[next_set_];
    next_set_ = (next_set_ + 1) % weights_.size();
    const double begin = now_seconds();
    ARGOSY_RETURN_IF_ERROR(grouped_gemm(options, {std::as_const(rows_).view(), offsets_, sizes_},
                                        weights, out_.view()));
    return now_seconds() - begin;
  }

  double operations() const {
    return 2.0 * static_cast<double>(rows_.view().num_elements()) * static_cast<double>(n_);
  }
  double weight_bytes() const {
    return 2.0 * static_cast<double>(sizes_.size()) * static_cast<double>(n_ * k_);
  }

 private:
  static constexpr uint64_t kRowSeed = 1;

  GemmWork() = default;

  // Deviation 1/sqrt(k): outputs are about 1.
  Result<Tensor> group_weights(int64_t set, int64_t group) const {
    const auto seed = static_cast<uint64_t>(1000 + set * 4096 + group);
    return normal_tensor({n_, k_}, 1.0 / std::sqrt(static_cast<double>(k_)), seed);
  }

  // First, middle and last row of every group against fp64, some columns each.
  Status check() {
    ARGOSY_ASSIGN_OR_RETURN([[maybe_unused]] const double seconds, run(nullptr));
    next_set_ = 0;
    for (size_t group = 0; group < sizes_.size(); ++group) {
      ARGOSY_ASSIGN_OR_RETURN(const Tensor values, group_weights(0, static_cast<int64_t>(group)));
      for (const int64_t row : {int64_t{0}, sizes_[group] / 2, sizes_[group] - 1}) {
        if (sizes_[group] == 0) continue;
        const int64_t at = offsets_[group] + row;
        for (int64_t column = row % 7; column < n_; column += std::max<int64_t>(1, n_ / 5)) {
          const double want =
              exact_dot(std::as_const(rows_).view().as<BFloat16>() + at * k_,
                        std::as_const(values).view().as<BFloat16>() + column * k_, k_);
          const BFloat16 got = out_.view().as<BFloat16>()[at * n_ + column];
          ARGOSY_RETURN_IF_ERROR(
              check_near(static_cast<double>(got.to_float()), want, "an output of the GEMM"));
        }
      }
    }
    return {};
  }

  GemmOptions options_;
  int64_t n_ = 0, k_ = 0;
  std::vector<int64_t> offsets_, sizes_;
  Tensor rows_, out_;
  std::vector<PackedWeights> weights_;  // [num_sets]
  size_t next_set_ = 0;
};

// A pool only for more than one thread; all of them pinned, the calling thread in any case.
struct PinnedPool {
  std::unique_ptr<ThreadPool> pool;

  static Result<PinnedPool> create(int num_threads) {
    PinnedPool made;
    ARGOSY_ASSIGN_OR_RETURN(made.pool, ThreadPool::create(num_threads));
    pin_threads(*made.pool, 0);
    return made;
  }
};

class FloorBench : public Bench {
 public:
  FloorBench(PinnedPool pool, Floor floor, GemmWork work)
      : pool_(std::move(pool)), floor_(std::move(floor)), work_(std::move(work)) {}

  Result<Sample> sample() override {
    Sample sample;
    ARGOSY_ASSIGN_OR_RETURN(sample.limit_seconds,
                            floor_.seconds(work_.operations(), work_.weight_bytes()));
    ARGOSY_ASSIGN_OR_RETURN(sample.seconds, work_.run(pool_.pool.get()));
    return sample;
  }

  // `of`: what limits it. Calls walk `num_sets` sets of weights, so that none is in a cache.
  static std::function<Result<std::unique_ptr<Bench>>(const BenchContext&)> maker(
      Floor::Of of, std::vector<int64_t> group_rows, int64_t n, int64_t k, int64_t num_sets) {
    return [=](const BenchContext& context) -> Result<std::unique_ptr<Bench>> {
      ARGOSY_ASSIGN_OR_RETURN(PinnedPool pool, PinnedPool::create(context.num_threads));
      ARGOSY_ASSIGN_OR_RETURN(Floor floor, Floor::create(context, context.num_threads, of));
      ARGOSY_ASSIGN_OR_RETURN(GemmWork work, GemmWork::create(context, group_rows, n, k, num_sets));
      return std::unique_ptr<Bench>(
          new FloorBench(std::move(pool), std::move(floor), std::move(work)));
    };
  }

 private:
  PinnedPool pool_;
  Floor floor_;
  GemmWork work_;
};

// Two threads against half the time of one.
class SkewBench : public Bench {
 public:
  SkewBench(PinnedPool pool, GemmWork work) : pool_(std::move(pool)), work_(std::move(work)) {}

  Result<Sample> sample() override {
    Sample sample;
    ARGOSY_ASSIGN_OR_RETURN(const double one, work_.run(nullptr));
    sample.limit_seconds = one / 2;
    ARGOSY_ASSIGN_OR_RETURN(sample.seconds, work_.run(pool_.pool.get()));
    return sample;
  }

  static Result<std::unique_ptr<Bench>> make(const BenchContext& context,
                                             const std::vector<int64_t>& group_rows, int64_t n,
                                             int64_t k) {
    ARGOSY_ASSIGN_OR_RETURN(PinnedPool pool, PinnedPool::create(2));
    ARGOSY_ASSIGN_OR_RETURN(GemmWork work, GemmWork::create(context, group_rows, n, k, 1));
    return std::unique_ptr<Bench>(new SkewBench(std::move(pool), std::move(work)));
  }

 private:
  PinnedPool pool_;
  GemmWork work_;
};

// 90 % of the rows at the first group, the rest shared out.
std::vector<int64_t> skewed_rows(int64_t num_rows, int64_t num_groups) {
  std::vector<int64_t> rows(static_cast<size_t>(num_groups));
  rows[0] = num_rows * 9 / 10;
  int64_t left = num_rows - rows[0];
  for (int64_t group = 1; group < num_groups; ++group) {
    const int64_t share = left / (num_groups - group);
    rows[static_cast<size_t>(group)] = share;
    left -= share;
  }
  return rows;
}

}  // namespace

std::vector<BenchCase> gemm_cases(const BenchSizes& sizes) {
  const int64_t n = sizes.quick ? 96 : 2048;
  const int64_t hot_rows = sizes.quick ? 8 : 256;
  const int64_t skew_rows = sizes.quick ? 40 : 4096;
  // 8 groups are one call of a decode step; 8 sets of them are 512 MiB at full size.
  constexpr int64_t kColdGroups = 8, kColdSets = 8, kSkewGroups = 8;
  std::vector<BenchCase> cases;
  cases.push_back({"gemm_hot",
                   {{"rows", hot_rows}, {"N", n}, {"K", n}, {"threads", sizes.num_threads}},
                   "bf16 peak",
                   {0.45, 0.88, 0.75},
                   FloorBench::maker(Floor::Of::kPeak, {hot_rows}, n, n, 1)});
  for (int64_t rows = 1; rows <= 8; ++rows) {
    cases.push_back({"gemm_cold",
                     {{"rows", rows},
                      {"N", n},
                      {"K", n},
                      {"groups", kColdGroups},
                      {"threads", sizes.num_threads}},
                     "DRAM read rate",
                     Goals::same(0.88),
                     FloorBench::maker(Floor::Of::kRead, std::vector<int64_t>(kColdGroups, rows), n,
                                       n, kColdSets)});
  }
  const std::vector<int64_t> skewed = skewed_rows(skew_rows, kSkewGroups);
  cases.push_back(
      {"gemm_skew",
       {{"rows", skew_rows}, {"N", n}, {"K", n}, {"groups", kSkewGroups}, {"threads", 2}},
       "half the time of one thread",
       Goals::same(0.95),
       [=](const BenchContext& context) { return SkewBench::make(context, skewed, n, n); }});
  std::vector<BenchCase> backward = gemm_backward_cases(sizes);
  std::move(backward.begin(), backward.end(), std::back_inserter(cases));
  return cases;
}

}  // namespace argosy::tools::bench
