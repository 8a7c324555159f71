// Gradients of rows: the rows are those of d_y, a panel is 32 columns k of W by all of n,
// transposed block by block from the packed weights into a worker's room, once per tile of rows.
// Test: tests/gemm/dgrad_test.cc.
#include <cstring>

#include "argosy/gemm_backward.h"
#include "base/error.h"
#include "gemm/backward_dot.h"
#include "gemm/backward_driver.h"
#include "gemm/backward_moves.h"
#include "gemm/backward_reference.h"
#include "gemm/check_arguments.h"
#include "gemm/gradient_store.h"
#include "platform/copy.h"

namespace argosy {
namespace gemm {
namespace {

class DgradSource {
 public:
  // `d_up` is null for plain weights.
  DgradSource(const GemmOptions& options, const KernelTable& table, const RaggedRows& d_y,
              const ConstTensorView* d_up, const PackedWeights& w, const TensorView& d_x)
      : moves_(moves_for(options.level)),
        d_y_(d_y),
        d_up_(d_up),
        w_(w),
        d_x_(d_x),
        stream_(is_streamed(options.level, d_x) ? gradient_stores_for(options.level).stream_f32
                                                : nullptr),
        store_((d_x.dtype == DType::kF32 ? table.store_f32 : table.store_bf16).plain[0]) {}

  int64_t operand_blocks() const { return ceil_div(w_.n(), kBlockK); }
  int64_t num_blocks(int64_t) const { return operand_blocks() * (d_up_ == nullptr ? 1 : 2); }
  int64_t row_element() const { return size_of(d_y_.rows.dtype); }

  void load(const Tile& tile, const Part& blocks, const TileRows& rows) const {
    const int64_t first_row = d_y_.offsets[static_cast<size_t>(tile.group)] + tile.rows.first;
    const int64_t end = blocks.first + blocks.count;
    for (int64_t operand = 0; operand < (d_up_ == nullptr ? 1 : 2); ++operand) {
      const int64_t base = operand * operand_blocks();
      const int64_t from = std::max(blocks.first, base);
      const int64_t until = std::min(end, base + operand_blocks());
      if (from >= until) continue;
      const int64_t n = (from - base) * kBlockK;
      const ConstTensorView& view = operand == 0 ? d_y_.rows : *d_up_;
      rows.put(from - blocks.first, std::min(w_.n(), (until - base) * kBlockK) - n,
               view.row(first_row) + n * row_element(), view.stride(0) * row_element());
    }
  }

  const std::byte* panel(const Tile& tile, int64_t panel, const Part& blocks,
                         std::byte* room) const {
    const int64_t block_bytes = kBlockK * kPanelColumns * size_of(w_.dtype());
    for (int64_t i = 0; i < blocks.count; ++i) {
      for (int64_t half = 0; half < 2; ++half) {
        transpose_half(tile.group, panel, blocks.first + i, half, room + i * block_bytes);
      }
    }
    return room;
  }

  // Of bf16: 2 KiB of every source panel, as many as there are blocks. The hardware does not see so many streams, and all of
  // them at once would be waited for.
  Prefetch ahead(const Tile& tile, int64_t panel, const Part& blocks, const Share& share) const {
    if (panel + 1 == tile.panels.first + tile.panels.count) return {};
    const int64_t block_bytes = kBlockK * kPanelColumns * size_of(w_.dtype());
    // An address: that of a panel past the last lies past the weights.
    const auto first = reinterpret_cast<uintptr_t>(w_.panel(tile.group, 0));
    Prefetch next = part_ahead(first + static_cast<uintptr_t>((panel + 1) * block_bytes),
                               block_bytes, 1, share);
    next.from += static_cast<uintptr_t>(blocks.first * w_.panel_bytes());
    next.stride = w_.panel_bytes();
    return next;
  }

  void fetch_output(const Tile& tile, int64_t panel, const Part& rows) const {
    if (stream_ != nullptr) return;
    fetch_rows(output(tile, panel), row_stride_bytes(), rows, d_x_.dtype == DType::kF32 ? 2 : 1);
  }

  void store(const Tile& tile, int64_t panel, const float* products) const {
    if (stream_ != nullptr) {
      return stream_({.sums = products,
                      .num_rows = tile.rows.count,
                      .num_columns = std::min(kPanelColumns, w_.k() - panel * kPanelColumns),
                      .out = output(tile, panel),
                      .row_stride_bytes = row_stride_bytes()});
    }
    store_({.scratch = products,
            .num_rows = tile.rows.count,
            .num_columns = std::min(kPanelColumns, w_.k() - panel * kPanelColumns),
            .out = output(tile, panel),
            .row_stride_bytes = row_stride_bytes()});
  }
  bool moves_sums(const Tile&) const { return true; }
  void finish_tile(const Tile&) const {
    if (stream_ != nullptr) platform::finish_streaming();
  }

 private:
  // 16 of a block's 32 n: a tile of a source panel, or zeros past the last.
  void transpose_half(int64_t group, int64_t panel, int64_t block, int64_t half,
                      std::byte* to) const {
    const int64_t in_operand = block % operand_blocks();
    const int64_t source = d_up_ == nullptr ? in_operand : 2 * in_operand + half;
    const int64_t tile = d_up_ == nullptr ? half : block / operand_blocks();
    if (source >= w_.num_panels()) return clear_half(half, to);
    const std::byte* from = w_.panel(group, source);
    transpose_weights(moves_, w_.dtype(), from, tile, panel, half, to);
  }

  void clear_half(int64_t half, std::byte* to) const {
    if (w_.dtype() == DType::kF32) {
      constexpr int64_t kHalfBytes = kTileColumns * kPanelColumns * 4;
      std::memset(to + half * kHalfBytes, 0, kHalfBytes);
      return;
    }
    constexpr int64_t kHalfBytes = kDecodedBlockBytes / 2;
    std::memset(to + half * kHalfBytes, 0, kHalfBytes);
  }

  std::byte* output(const Tile& tile, int64_t panel) const {
    const int64_t row = d_y_.offsets[static_cast<size_t>(tile.group)] + tile.rows.first;
    return d_x_.row(row) + panel * kPanelColumns * size_of(d_x_.dtype);
  }
  int64_t row_stride_bytes() const { return d_x_.stride(0) * size_of(d_x_.dtype); }

  const MoveKernels& moves_;
  const RaggedRows& d_y_;
  const ConstTensorView* d_up_;
  const PackedWeights& w_;
  const TensorView& d_x_;
  GradientStore stream_;  // null: not past the caches
  StoreKernel store_;
};

Status check_dgrad(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView* d_up,
                   const PackedWeights& w, const TensorView& d_x) {
  const char* const name = d_up == nullptr ? "d_y" : "d_gate";
  ARGOSY_RETURN_IF_ERROR(check_matrix(name, d_y.rows, w.n()));
  if (d_up != nullptr) {
    ARGOSY_RETURN_IF_ERROR(check_matrix("d_up", *d_up, w.n()));
    if (d_up->dtype != d_y.rows.dtype || d_up->dim(0) != d_y.rows.dim(0)) {
      return base::invalid("d_up is {}, d_gate is {}: dtype and shape must be equal",
                           describe(*d_up), describe(d_y.rows));
    }
  }
  ARGOSY_RETURN_IF_ERROR(check_weights(options, d_y.rows.dtype, w));
  if (w.format() != BlockFormat::kUnset) {
    return base::error(StatusCode::kUnsupported, "dgrad by weights in {}: only bf16 and fp32",
                       name_of(w.format()));
  }
  const bool is_plain = w.kind() == PackedWeights::Kind::kPlain;
  if (is_plain != (d_up == nullptr)) {
    return base::invalid("the weights are {}, the gradients are those of {} ones",
                         is_plain ? "plain" : "gate_up", is_plain ? "gate_up" : "plain");
  }
  ARGOSY_RETURN_IF_ERROR(check_matrix("d_x", d_x, w.k()));
  if (d_x.dim(0) != d_y.rows.dim(0)) {
    return base::invalid("d_x is {}, {} is {}: the number of rows must be equal", describe(d_x),
                         name, describe(d_y.rows));
  }
  if (d_y.rows.dtype == DType::kF32 && d_x.dtype != DType::kF32) {
    return base::invalid("d_x is {}, that of F32 rows is F32", describe(d_x));
  }
  ARGOSY_RETURN_IF_ERROR(check_output_rows(d_x));
  ARGOSY_RETURN_IF_ERROR(check_apart(d_y.rows, d_x));
  if (d_up != nullptr) ARGOSY_RETURN_IF_ERROR(check_apart(*d_up, d_x));
  return check_groups(d_y.offsets, d_y.sizes, d_y.rows.dim(0), w.num_groups());
}

Status dgrad(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView* d_up,
             const PackedWeights& w, const TensorView& d_x) {
  ARGOSY_ASSIGN_OR_RETURN(const KernelTable* table, kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(check_dgrad(options, d_y, d_up, w, d_x));
  if (options.level == Level::kReference) {
    reference_dgrad(options, d_y, d_up, w, d_x);
    return {};
  }
  const DgradSource source(options, *table, d_y, d_up, w, d_x);
  const Dot& dot = backward_dot(*table, d_y.rows.dtype, w.dtype(), options.dot_order);
  const BackwardLimits limits =
      backward_limits(dot, d_y.rows.dtype, w.dtype(), source.num_blocks(0), false);
  return run_backward(options, source, dot, limits, d_y.sizes, ceil_div(w.k(), kPanelColumns));
}

}  // namespace
}  // namespace gemm

Status grouped_dgrad(const GemmOptions& options, const RaggedRows& d_y, const PackedWeights& w,
                     const TensorView& d_x) {
  return gemm::dgrad(options, d_y, nullptr, w, d_x);
}

Status grouped_dgrad(const GemmOptions& options, const RaggedRows& d_gate,
                     const ConstTensorView& d_up, const PackedWeights& w, const TensorView& d_x) {
  return gemm::dgrad(options, d_gate, &d_up, w, d_x);
}

}  // namespace argosy
