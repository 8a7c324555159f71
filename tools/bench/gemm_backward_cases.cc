// The gradients of the grouped GEMM: of rows by the packed weights, and of weights, written or
// added to, of bf16 operands or of such as are quantised along the rows.
//
// Floors: docs/perf/gemm.md. Test: tests/bench/bench_test.cc.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "argosy/gemm_backward.h"
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

enum class Gradient { kRows, kWeights, kAddedWeights, kQuantisedWeights };

struct GradientSize {
  Gradient of = Gradient::kRows;
  int64_t rows = 0;
  int64_t n = 0;
  int64_t k = 0;
};

// One group of rows.
class GradientBench : public Bench {
 public:
  static Result<std::unique_ptr<Bench>> make(const BenchContext& context,
                                             const GradientSize& size) {
    std::unique_ptr<GradientBench> bench(new GradientBench(size));
    ARGOSY_ASSIGN_OR_RETURN(bench->pool_, ThreadPool::create(context.num_threads));
    pin_threads(*bench->pool_, 0);
    ARGOSY_ASSIGN_OR_RETURN(Floor floor,
                            Floor::create(context, context.num_threads, Floor::Of::kPeak));
    bench->floor_.emplace(std::move(floor));
    bench->options_ = {.level = context.level, .dot_order = context.dot_order};
    bench->options_.pool = bench->pool_.get();
    const double deviation = 1.0 / std::sqrt(static_cast<double>(std::max(size.n, size.rows)));
    ARGOSY_ASSIGN_OR_RETURN(bench->d_y_, normal_tensor({size.rows, size.n}, deviation, 1));
    ARGOSY_ASSIGN_OR_RETURN(bench->x_, normal_tensor({size.rows, size.k}, 1.0, 2));
    if (size.of == Gradient::kRows) {
      ARGOSY_RETURN_IF_ERROR(bench->prepare_weights());
    } else {
      ARGOSY_ASSIGN_OR_RETURN(bench->out_, Tensor::zeros(DType::kF32, {1, size.n, size.k}));
    }
    if (size.of == Gradient::kQuantisedWeights) {
      ARGOSY_ASSIGN_OR_RETURN(bench->d_y_codes_, quantised(&bench->d_y_));
      ARGOSY_ASSIGN_OR_RETURN(bench->x_codes_, quantised(&bench->x_));
    }
    ARGOSY_RETURN_IF_ERROR(bench->check());
    return std::unique_ptr<Bench>(std::move(bench));
  }

  Result<Sample> sample() override {
    Sample sample;
    const double operations = 2.0 * static_cast<double>(size_.rows) * static_cast<double>(size_.n) *
                              static_cast<double>(size_.k);
    ARGOSY_ASSIGN_OR_RETURN(sample.limit_seconds, floor_->seconds(operations, 0));
    const double begin = now_seconds();
    ARGOSY_RETURN_IF_ERROR(run());
    sample.seconds = now_seconds() - begin;
    return sample;
  }

 private:
  explicit GradientBench(const GradientSize& size) : size_(size) {}

  Status prepare_weights() {
    ARGOSY_ASSIGN_OR_RETURN(matrix_, normal_tensor({size_.n, size_.k}, 1.0, 3));
    ARGOSY_ASSIGN_OR_RETURN(weights_, PackedWeights::create(PackedWeights::Kind::kPlain,
                                                            DType::kBF16, 1, size_.n, size_.k));
    ARGOSY_RETURN_IF_ERROR(weights_.set_group(0, std::as_const(matrix_).view()));
    ARGOSY_ASSIGN_OR_RETURN(out_, Tensor::zeros(DType::kBF16, {size_.rows, size_.k}));
    return {};
  }

  // Along the rows; `values` become what the codes stand for, exactly.
  static Result<QuantisedTensor> quantised(Tensor* values) {
    const TensorView rows = values->view();
    ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                            quantised_layout(BlockFormat::kMxfp8, rows.dim(1), rows.dim(0)));
    ARGOSY_ASSIGN_OR_RETURN(QuantisedTensor codes, QuantisedTensor::create(layout));
    ARGOSY_RETURN_IF_ERROR(transpose_quantise({}, rows, codes.view()));
    ARGOSY_ASSIGN_OR_RETURN(Tensor lines, Tensor::zeros(DType::kBF16, {rows.dim(1), rows.dim(0)}));
    ARGOSY_RETURN_IF_ERROR(dequantise({}, std::as_const(codes).view(), lines.view()));
    for (int64_t r = 0; r < rows.dim(0); ++r) {
      for (int64_t c = 0; c < rows.dim(1); ++c) {
        rows.as<BFloat16>()[r * rows.dim(1) + c] = lines.view().as<BFloat16>()[c * rows.dim(0) + r];
      }
    }
    return codes;
  }

  Status run() {
    const int64_t offset = 0;
    if (size_.of == Gradient::kQuantisedWeights) {
      return grouped_wgrad(options_,
                           {std::as_const(d_y_codes_).view(), {&offset, 1}, {&size_.rows, 1}},
                           std::as_const(x_codes_).view(), {}, out_.view());
    }
    const RaggedRows d_y{std::as_const(d_y_).view(), {&offset, 1}, {&size_.rows, 1}};
    if (size_.of == Gradient::kRows) return grouped_dgrad(options_, d_y, weights_, out_.view());
    return grouped_wgrad(options_, d_y, std::as_const(x_).view(),
                         {.accumulate = size_.of == Gradient::kAddedWeights}, out_.view());
  }

  // Some elements against fp64; the first sum is added to zeros.
  Status check() {
    ARGOSY_RETURN_IF_ERROR(run());
    const bool of_rows = size_.of == Gradient::kRows;
    const int64_t lines = of_rows ? size_.rows : size_.n;
    const int64_t length = of_rows ? size_.n : size_.rows;
    const auto* d_y = d_y_.view().as<BFloat16>();
    const auto* other = of_rows ? matrix_.view().as<BFloat16>() : x_.view().as<BFloat16>();
    for (const int64_t line : {int64_t{0}, lines / 2, lines - 1}) {
      for (int64_t k = line % 7; k < size_.k; k += std::max<int64_t>(1, size_.k / 5)) {
        double want = 0;
        for (int64_t i = 0; i < length; ++i) {
          const int64_t at = of_rows ? line * size_.n + i : i * size_.n + line;
          want += double{d_y[at].to_float()} * double{other[i * size_.k + k].to_float()};
        }
        const int64_t at = line * size_.k + k;
        const float got =
            of_rows ? out_.view().as<BFloat16>()[at].to_float() : out_.view().as<float>()[at];
        ARGOSY_RETURN_IF_ERROR(check_near(double{got}, want, "a gradient of the GEMM"));
      }
    }
    return {};
  }

  GradientSize size_;
  GemmOptions options_;
  std::unique_ptr<ThreadPool> pool_;
  std::optional<Floor> floor_;
  Tensor d_y_, x_, matrix_, out_;
  QuantisedTensor d_y_codes_, x_codes_;
  PackedWeights weights_;
};

}  // namespace

std::vector<BenchCase> gemm_backward_cases(const BenchSizes& sizes) {
  const int64_t n = sizes.quick ? 96 : 2048;
  const std::pair<const char*, Gradient> kinds[] = {
      {"gemm_dgrad", Gradient::kRows},
      {"gemm_wgrad", Gradient::kWeights},
      {"gemm_wgrad_added", Gradient::kAddedWeights},
      {"gemm_wgrad_mxfp8", Gradient::kQuantisedWeights}};
  std::vector<BenchCase> cases;
  for (const auto& [name, of] : kinds) {
    for (const int64_t rows : {64, 256, 1024}) {
      const int64_t used = sizes.quick ? rows / 8 : rows;
      // Few rows write a gradient of 16 MiB: no goal of arithmetic.
      const bool has_goal = rows == 256 && (of == Gradient::kRows || of == Gradient::kWeights);
      const double goal = has_goal ? 0.80 : 0;
      cases.push_back({name,
                       {{"rows", used}, {"N", n}, {"K", n}, {"threads", sizes.num_threads}},
                       "bf16 peak",
                       {goal / 2, goal, goal},
                       [size = GradientSize{of, used, n, n}](const BenchContext& context) {
                         return GradientBench::make(context, size);
                       }});
    }
  }
  return cases;
}

}  // namespace argosy::tools::bench
