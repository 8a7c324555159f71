// Gradients of weights from operands that are quantised along a group's rows. Both are stored with
// these rows side by side: a line of d_y's codes is a row of the product as it stands, 32 lines of
// x's become a panel by transposing pairs. Test: tests/gemm/quantised_wgrad_test.cc.
#include <array>
#include <cstring>

#include "argosy/gemm_backward.h"
#include "base/error.h"
#include "gemm/backward_dot.h"
#include "gemm/backward_driver.h"
#include "gemm/backward_moves.h"
#include "gemm/backward_reference.h"
#include "gemm/check_arguments.h"
#include "gemm/row_codes.h"
#include "gemm/weight_gradient.h"
#include "quant/view_checks.h"

namespace argosy {
namespace gemm {
namespace {

class QuantisedWgradSource {
 public:
  static constexpr bool kIsScaled = true;

  QuantisedWgradSource(const GemmOptions& options, const RaggedQuantisedColumns& d_y,
                       const ConstQuantisedView& x, std::span<const int64_t> first_block,
                       const GradientOutput& output)
      : level_(options.level),
        moves_(moves_for(options.level)),
        d_y_(d_y),
        x_(x),
        first_block_(first_block),
        output_(output) {}

  int64_t num_blocks(int64_t group) const {
    return ceil_div(d_y_.sizes[static_cast<size_t>(group)], kBlockK);
  }
  int64_t row_element() const { return size_of(DType::kBF16); }

  void load(const Tile& tile, const Part& blocks, const TileRows& rows) const {
    const RowRange lines{tile.rows.first, tile.rows.count};
    decode(d_y_.columns, tile.group, blocks, lines, rows.values, rows.value_stride);
    rows.put(0, blocks.count * kBlockK, rows.values, rows.value_stride);
    for (int64_t at = 0; at < rows.num_row_blocks; ++at) {
      const Part block = rows.row_block(at);
      load_scales(d_y_.columns, tile.group, blocks, {lines.first + block.first, block.count},
                  rows.scales_of(block), block.count);
    }
  }

  const std::byte* panel(const Tile& tile, int64_t panel, const Part& blocks,
                         std::byte* room) const {
    // So many blocks at a time: decoded lines stay in the L1 cache.
    constexpr int64_t kAtOnce = 8, kStride = kAtOnce * kBlockK * 2 + 64;
    alignas(64) std::byte values[kPanelColumns * kStride];
    const RowRange lines{panel * kPanelColumns,
                         std::min(kPanelColumns, x_.rows - panel * kPanelColumns)};
    auto* const scales = reinterpret_cast<float*>(room);
    if (lines.count < kPanelColumns) {
      std::memset(values, 0, sizeof(values));
      std::memset(scales, 0, static_cast<size_t>(blocks.count * kPanelColumns) * sizeof(float));
    }
    load_scales(x_, tile.group, blocks, lines, scales, kPanelColumns);
    std::byte* to = room + kPanelScaleBytes;
    for (int64_t done = 0; done < blocks.count; done += kAtOnce) {
      const Part some{blocks.first + done, std::min(kAtOnce, blocks.count - done)};
      decode(x_, tile.group, some, lines, values, kStride);
      for (int64_t i = 0; i < some.count; ++i) {
        for (int64_t half = 0; half < 2; ++half) {
          moves_.transpose(values + half * kTileColumns * kStride + i * kBlockK * 2, kStride,
                           to + half * kTileStride, kPairStride);
        }
        to += kDecodedBlockBytes;
      }
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
  // Blocks of a group of some stored lines as bf16, zeros past the group's end.
  void decode(const ConstQuantisedView& from, int64_t group, const Part& blocks,
              const RowRange& lines, std::byte* to, int64_t stride_bytes) const {
    const auto g = static_cast<size_t>(group);
    const int64_t first = blocks.first * kBlockK;
    ConstTensorView codes = from.codes;
    codes.data += d_y_.offsets[g] + first;
    codes.shape[1] = std::min(blocks.count * kBlockK, d_y_.sizes[g] - first);
    decode_rows(codes, lines, level_, to, stride_bytes);
    const int64_t rest = blocks.count * kBlockK - codes.shape[1];
    for (int64_t r = 0; rest > 0 && r < lines.count; ++r) {
      std::memset(to + r * stride_bytes + codes.shape[1] * 2, 0, static_cast<size_t>(rest * 2));
    }
  }

  // to[block][line], `width` floats from one block to the next.
  void load_scales(const ConstQuantisedView& from, int64_t group, const Part& blocks,
                   const RowRange& lines, float* to, int64_t width) const {
    const int64_t first = first_block_[static_cast<size_t>(group)] + blocks.first;
    for (int64_t r = 0; r < lines.count; ++r) {
      const std::byte* const codes = from.scales.row(lines.first + r) + first;
      for (int64_t block = 0; block < blocks.count; ++block) {
        to[block * width + r] = row_scale_of(codes[block]);
      }
    }
  }

  Level level_;
  const MoveKernels& moves_;
  const RaggedQuantisedColumns& d_y_;
  const ConstQuantisedView& x_;
  std::span<const int64_t> first_block_;
  const GradientOutput& output_;
};

Status check_columns(const char* name, const ConstQuantisedView& view, const RowGroups& groups) {
  if (view.format != BlockFormat::kMxfp8 && view.format != BlockFormat::kMxfp8Ceil) {
    if (view.format == BlockFormat::kUnset) return base::invalid("{} needs a format", name);
    return base::error(StatusCode::kUnsupported,
                       "{} is {}: weight gradients are made of mxfp8 and mxfp8_ceil", name,
                       name_of(view.format));
  }
  if (view.rows < 1) {
    return base::invalid("{} is {} [{}, {}], expected lines", name, name_of(view.format), view.rows,
                         view.cols);
  }
  ARGOSY_ASSIGN_OR_RETURN(
      const QuantisedLayout layout,
      quantised_layout(view.format, view.rows, view.cols, groups, GroupAxis::kCols));
  const Status status = quant::check_quantised_view(view, layout);
  return status.ok() ? status : base::error(status.code(), "{}: {}", name, status.message());
}

Status check_wgrad(const GemmOptions& options, const RaggedQuantisedColumns& d_y,
                   const ConstQuantisedView& x, const WeightGradientOptions& gradient,
                   const TensorView& out) {
  ARGOSY_RETURN_IF_ERROR(check_dot_order(options, DType::kBF16));
  ARGOSY_RETURN_IF_ERROR(
      check_gradient(d_y.offsets, d_y.sizes, d_y.columns.cols, gradient, out, 3));
  if (x.cols != d_y.columns.cols) {
    return base::invalid("x has {} columns, d_y {}: their number must be equal", x.cols,
                         d_y.columns.cols);
  }
  const RowGroups groups{d_y.offsets, d_y.sizes};
  ARGOSY_RETURN_IF_ERROR(check_columns("d_y", d_y.columns, groups));
  ARGOSY_RETURN_IF_ERROR(check_columns("x", x, groups));
  const std::array read{d_y.columns.codes, d_y.columns.scales, x.codes, x.scales};
  return check_gradient_matrices(d_y.columns.rows, x.rows, read, out);
}

}  // namespace
}  // namespace gemm

Status grouped_wgrad(const GemmOptions& options, const RaggedQuantisedColumns& d_y,
                     const ConstQuantisedView& x, const WeightGradientOptions& gradient,
                     const TensorView& out) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_wgrad(options, d_y, x, gradient, out));
  // Where each group's scales begin. Kept, so that a steady state does not allocate.
  thread_local std::vector<int64_t> first_block;
  first_block.clear();
  int64_t blocks = 0;
  for (const int64_t size : d_y.sizes) {
    first_block.push_back(blocks);
    blocks += gemm::ceil_div(size, gemm::kBlockK);
  }
  if (options.level == Level::kReference) {
    gemm::reference_wgrad(options, d_y, x, first_block, gradient, out);
    return {};
  }
  const gemm::ProductRows products = gemm::product_rows(d_y.sizes, out.dim(1), gradient.accumulate);
  const gemm::GradientOutput output(options.level, gradient, d_y.sizes, out);
  const gemm::QuantisedWgradSource source(options, d_y, x, first_block, output);
  const gemm::Dot* dot = &gemm::backward_dot(*table, DType::kBF16, DType::kBF16, options.dot_order);
  if (dot->run_scaled == nullptr) dot = dot->few;
  const gemm::BackwardLimits limits =
      gemm::backward_limits(*dot, DType::kBF16, DType::kBF16,
                            gemm::ceil_div(products.max_size, gemm::kBlockK), true, true);
  return gemm::run_backward(options, source, *dot, limits, products.rows,
                            gemm::ceil_div(x.rows, gemm::kPanelColumns));
}

}  // namespace argosy
