// Gradients of weights and biases. The rows of the product are the columns of d_y, the contraction
// is over a group's rows: a tile of d_y is transposed once, and 32 columns of x at a time become a
// panel of pairs of rows. Test: tests/gemm/wgrad_test.cc.
#include <array>

#include "argosy/gemm_backward.h"
#include "base/error.h"
#include "gemm/backward_dot.h"
#include "gemm/backward_driver.h"
#include "gemm/backward_moves.h"
#include "gemm/backward_reference.h"
#include "gemm/check_arguments.h"
#include "gemm/weight_gradient.h"

namespace argosy {
namespace gemm {
namespace {

class WgradSource {
 public:
  WgradSource(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView& x,
              const GradientOutput& output)
      : moves_(moves_for(options.level)), d_y_(d_y), x_(x), output_(output) {}

  int64_t num_blocks(int64_t group) const { return ceil_div(size_of_group(group), kBlockK); }
  int64_t row_element() const { return size_of(x_.dtype); }

  void load(const Tile& tile, const Part& blocks, const TileRows& rows) const {
    for (int64_t i = 0; i < blocks.count; ++i) {
      for (int64_t n = 0; n < tile.rows.count; n += kPanelColumns) {
        const MatrixBlock from = block_of(d_y_.rows, tile.group, blocks.first + i,
                                          tile.rows.first + n, tile.rows.count - n);
        if (n + kPanelColumns < tile.rows.count) fetch_next(from);
        transpose_rows(moves_, x_.dtype, from,
                       rows.values + n * rows.value_stride + i * kBlockK * row_element(),
                       rows.value_stride);
      }
    }
    rows.put(0, blocks.count * kBlockK, rows.values, rows.value_stride);
  }

  const std::byte* panel(const Tile& tile, int64_t panel, const Part& blocks,
                         std::byte* room) const {
    const int64_t block_bytes = kBlockK * kPanelColumns * row_element();
    const int64_t column = panel * kPanelColumns;
    for (int64_t i = 0; i < blocks.count; ++i) {
      const MatrixBlock from =
          block_of(x_, tile.group, blocks.first + i, column, x_.dim(1) - column);
      if (column + kPanelColumns < x_.dim(1)) fetch_next(from);
      pack_rows(moves_, x_.dtype, from, room + i * block_bytes);
    }
    return room;
  }

  void fetch_output(const Tile& tile, int64_t panel, const Part& rows) const {
    output_.fetch(tile, panel, rows);
  }
  void store(const Tile& tile, int64_t panel, const float* products) const {
    output_.store(tile, panel, products);
  }
  bool moves_sums(const Tile& tile) const { return output_.moves_sums(tile); }
  void finish_tile(const Tile&) const { output_.finish_tile(); }

 private:
  int64_t size_of_group(int64_t group) const { return d_y_.sizes[static_cast<size_t>(group)]; }

  MatrixBlock block_of(const ConstTensorView& view, int64_t group, int64_t block, int64_t column,
                       int64_t num_columns) const {
    const int64_t row = d_y_.offsets[static_cast<size_t>(group)] + block * kBlockK;
    return {view.row(row) + column * row_element(), view.stride(0) * row_element(),
            std::min(kBlockK, size_of_group(group) - block * kBlockK),
            std::min(kPanelColumns, num_columns)};
  }

  // The next columns of the same rows: the hardware does not see so many streams.
  void fetch_next(const MatrixBlock& block) const {
    const int64_t bytes = kPanelColumns * row_element();
    for (int64_t r = 0; r < block.num_rows; ++r) {
      const std::byte* next = block.first + r * block.stride_bytes + bytes;
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
    }
  }

  const MoveKernels& moves_;
  const RaggedRows& d_y_;
  const ConstTensorView& x_;
  const GradientOutput& output_;
};

Status check_wgrad(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView& x,
                   const WeightGradientOptions& gradient, const TensorView& out) {
  if (d_y.rows.num_dims != 2 || x.num_dims != 2 || d_y.rows.dim(1) < 1 || x.dim(1) < 1) {
    return base::invalid("d_y is {} and x {}, expected matrices with columns", describe(d_y.rows),
                         describe(x));
  }
  ARGOSY_RETURN_IF_ERROR(check_matrix("d_y", d_y.rows, d_y.rows.dim(1)));
  ARGOSY_RETURN_IF_ERROR(check_matrix("x", x, x.dim(1)));
  if (x.dtype != d_y.rows.dtype || x.dim(0) != d_y.rows.dim(0)) {
    return base::invalid("x is {}, d_y is {}: dtype and number of rows must be equal", describe(x),
                         describe(d_y.rows));
  }
  ARGOSY_RETURN_IF_ERROR(check_dot_order(options, x.dtype));
  ARGOSY_RETURN_IF_ERROR(check_gradient(d_y.offsets, d_y.sizes, d_y.rows.dim(0), gradient, out, 3));
  return check_gradient_matrices(d_y.rows.dim(1), x.dim(1), std::array{d_y.rows, x}, out);
}

// The bias gradient of some columns of a group.
struct BiasTask {
  static constexpr int64_t kColumns = 512;  // at most; their sums stay in the L1 cache

  const RaggedRows& d_y;
  const WeightGradientOptions& gradient;
  const TensorView& out;
  size_t group;
  Part columns;

  // Not inlined, so that no arithmetic moves out of the caller's floating-point environment.
  __attribute__((noinline)) void run() const {
    const ConstTensorView& rows = d_y.rows;
    float sums[kColumns] = {};
    for (int64_t row = d_y.offsets[group]; row < d_y.offsets[group] + d_y.sizes[group]; ++row) {
      const std::byte* from = rows.row(row) + columns.first * size_of(rows.dtype);
      if (rows.dtype == DType::kF32) {
        add(reinterpret_cast<const float*>(from), sums);
      } else {
        add(reinterpret_cast<const BFloat16*>(from), sums);
      }
    }
    const bool has_alpha = !gradient.alpha.empty() && d_y.sizes[group] > 0;
    const float alpha = has_alpha ? gradient.alpha[group] : 1.0f;
    std::byte* to = out.row(static_cast<int64_t>(group)) + columns.first * size_of(out.dtype);
    for (int64_t c = 0; c < columns.count; ++c) {
      store_gradient(to + c * size_of(out.dtype), out.dtype, sums[c], alpha, gradient.accumulate);
    }
  }

 private:
  static float widened(float value) { return value; }
  static float widened(BFloat16 value) { return value.to_float(); }

  template <typename T>
  void add(const T* values, float* sums) const {
    for (int64_t c = 0; c < columns.count; ++c) sums[c] = sums[c] + widened(values[c]);
  }
};

}  // namespace
}  // namespace gemm

Status grouped_wgrad(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView& x,
                     const WeightGradientOptions& gradient, const TensorView& out) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_wgrad(options, d_y, x, gradient, out));
  if (options.level == Level::kReference) {
    gemm::reference_wgrad(options, d_y, x, gradient, out);
    return {};
  }
  const gemm::ProductRows products = gemm::product_rows(d_y.sizes, out.dim(1), gradient.accumulate);
  const gemm::GradientOutput output(options.level, gradient, d_y.sizes, out);
  const gemm::WgradSource source(options, d_y, x, output);
  const gemm::Dot& dot = gemm::backward_dot(*table, x.dtype, x.dtype, options.dot_order);
  const gemm::BackwardLimits limits = gemm::backward_limits(
      dot, x.dtype, x.dtype, gemm::ceil_div(products.max_size, gemm::kBlockK), true);
  return gemm::run_backward(options, source, dot, limits, products.rows,
                            gemm::ceil_div(x.dim(1), gemm::kPanelColumns));
}

Status grouped_bias_gradient(const GemmOptions& options, const RaggedRows& d_y,
                             const WeightGradientOptions& gradient, const TensorView& out) {
  ARGOSY_RETURN_IF_ERROR(gemm::kernels_for(options.level).error());
  ARGOSY_RETURN_IF_ERROR(gemm::check_matrix("d_y", d_y.rows, d_y.rows.dim(1)));
  ARGOSY_RETURN_IF_ERROR(
      gemm::check_gradient(d_y.offsets, d_y.sizes, d_y.rows.dim(0), gradient, out, 2));
  ARGOSY_RETURN_IF_ERROR(gemm::check_matrix("out", out, d_y.rows.dim(1)));
  ARGOSY_RETURN_IF_ERROR(gemm::check_output_rows(out));
  ARGOSY_RETURN_IF_ERROR(gemm::check_apart(d_y.rows, out));
  const int64_t chunks = gemm::ceil_div(out.dim(1), gemm::BiasTask::kColumns);
  const auto sum = [&](int64_t task, int) {
    const auto group = static_cast<size_t>(task / chunks);
    if (d_y.sizes[group] == 0 && gradient.accumulate) return;
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    gemm::BiasTask{d_y, gradient, out, group, gemm::part_of(out.dim(1), chunks, task % chunks)}
        .run();
  };
  const int64_t num_tasks = chunks * out.dim(0);
  if (options.pool != nullptr && num_tasks > 1) {
    options.pool->parallel_for(num_tasks, sum);
    return {};
  }
  for (int64_t task = 0; task < num_tasks; ++task) sum(task, 0);
  return {};
}

}  // namespace argosy
