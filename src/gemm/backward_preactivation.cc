// The forward's two products as they enter the activation, and h besides: the panels are the packed
// ones as they lie. Test: tests/gemm/activation_backward_test.cc.
#include "argosy/gemm_backward.h"
#include "base/error.h"
#include "gemm/backward_dot.h"
#include "gemm/backward_driver.h"
#include "gemm/backward_reference.h"
#include "gemm/check_arguments.h"
#include "gemm/gradient_store.h"
#include "platform/copy.h"

namespace argosy {
namespace gemm {
namespace {

class PreactivationSource {
 public:
  PreactivationSource(const GemmOptions& options, const KernelTable& table, const RaggedRows& x,
                      const PackedWeights& w, const TensorView& gate, const TensorView& up,
                      const TensorView& h)
      : options_(options),
        table_(table),
        x_(x),
        w_(w),
        gate_(gate),
        up_(up),
        h_(h),
        stream_(!w.has_bias() && is_streamed(options.level, gate) && is_streamed(options.level, up)
                    ? gradient_stores_for(options.level).stream_f32
                    : nullptr) {}

  int64_t num_blocks(int64_t) const { return w_.padded_k() / kBlockK; }
  int64_t row_element() const { return size_of(x_.rows.dtype); }
  bool moves_sums(const Tile&) const { return false; }
  void finish_tile(const Tile&) const {
    if (stream_ != nullptr) platform::finish_streaming();
  }

  void load(const Tile& tile, const Part& blocks, const TileRows& rows) const {
    const int64_t k = blocks.first * kBlockK;
    rows.put(0, std::min(blocks.count * kBlockK, w_.k() - k),
             x_.rows.row(first_row(tile)) + k * row_element(), x_.rows.stride(0) * row_element());
  }

  const std::byte* panel(const Tile& tile, int64_t panel, const Part& blocks, std::byte*) const {
    const int64_t block_bytes = kBlockK * kPanelColumns * size_of(w_.dtype());
    return w_.panel(tile.group, panel) + blocks.first * block_bytes;
  }

  Prefetch ahead(const Tile& tile, int64_t panel, const Part& blocks, const Share& share) const {
    if (panel + 1 == tile.panels.first + tile.panels.count) return {};
    const std::byte* const next = this->panel(tile, panel + 1, blocks, nullptr);
    const int64_t bytes = blocks.count * kBlockK * kPanelColumns * size_of(w_.dtype());
    return part_ahead(reinterpret_cast<uintptr_t>(next), bytes, blocks.count, share);
  }

  void fetch_output(const Tile& tile, int64_t panel, const Part& rows) const {
    if (stream_ != nullptr) return;
    for (const TensorView* out : {&gate_, &up_}) {
      fetch_rows(output(*out, tile, panel), out->stride(0) * size_of(out->dtype), rows, 1);
    }
  }

  void store(const Tile& tile, int64_t panel, const float* products) const {
    const float* bias = w_.bias_of_panel(tile.group, panel);
    const size_t has_bias = bias == nullptr ? 0 : 1;
    for (const TensorView* out : {&gate_, &up_, &h_}) {
      if (out->data == nullptr) continue;
      const int64_t column = out == &up_ ? kTileColumns : 0;
      const int64_t num_columns = std::min(kTileColumns, w_.n() - panel * kTileColumns);
      if (out != &h_ && stream_ != nullptr) {
        stream_({.sums = products + column,
                 .num_rows = tile.rows.count,
                 .num_columns = num_columns,
                 .out = output(*out, tile, panel),
                 .row_stride_bytes = out->stride(0) * size_of(out->dtype)});
        continue;
      }
      const Stores& stores = out->dtype == DType::kF32 ? table_.store_f32 : table_.store_bf16;
      const StoreKernel kernel =
          out == &h_ ? stores.gate_up[static_cast<size_t>(options_.activation.kind)][has_bias]
                     : stores.plain[has_bias];
      kernel({.scratch = products + column,
              .bias = bias == nullptr ? nullptr : bias + column,
              .limit = options_.activation.limit,
              .alpha = options_.activation.alpha,
              .num_rows = tile.rows.count,
              .num_columns = num_columns,
              .out = output(*out, tile, panel),
              .row_stride_bytes = out->stride(0) * size_of(out->dtype)});
    }
  }

 private:
  int64_t first_row(const Tile& tile) const {
    return x_.offsets[static_cast<size_t>(tile.group)] + tile.rows.first;
  }
  std::byte* output(const TensorView& out, const Tile& tile, int64_t panel) const {
    return out.row(first_row(tile)) + panel * kTileColumns * size_of(out.dtype);
  }

  const GemmOptions& options_;
  const KernelTable& table_;
  const RaggedRows& x_;
  const PackedWeights& w_;
  const TensorView& gate_;
  const TensorView& up_;
  const TensorView& h_;
  GradientStore stream_;  // of gate and up; null: not past the caches
};

Status check_output(const char* name, const RaggedRows& x, const PackedWeights& w,
                    const TensorView& out) {
  ARGOSY_RETURN_IF_ERROR(check_matrix(name, out, w.n()));
  if (out.dim(0) != x.rows.dim(0)) {
    return base::invalid("{} is {}, the rows are {}: the number of rows must be equal", name,
                         describe(out), describe(x.rows));
  }
  if (x.rows.dtype == DType::kF32 && out.dtype != DType::kF32) {
    return base::invalid("{} is {}, that of F32 rows is F32", name, describe(out));
  }
  ARGOSY_RETURN_IF_ERROR(check_output_rows(out));
  return check_apart(x.rows, out);
}

Status check_preactivation(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                           const TensorView& gate, const TensorView& up, const TensorView& h) {
  ARGOSY_RETURN_IF_ERROR(check_matrix("rows", x.rows, w.k()));
  ARGOSY_RETURN_IF_ERROR(check_weights(options, x.rows.dtype, w));
  if (w.format() != BlockFormat::kUnset) {
    return base::error(StatusCode::kUnsupported,
                       "pre-activations by weights in {}: only bf16 and fp32", name_of(w.format()));
  }
  if (w.kind() != PackedWeights::Kind::kGateUp) {
    return base::invalid("pre-activations are those of gate_up weights, these are plain");
  }
  ARGOSY_RETURN_IF_ERROR(check_output("gate", x, w, gate));
  ARGOSY_RETURN_IF_ERROR(check_output("up", x, w, up));
  if (gate.dtype != up.dtype) {
    return base::invalid("gate is {}, up is {}: the dtypes must be equal", describe(gate),
                         describe(up));
  }
  ARGOSY_RETURN_IF_ERROR(check_apart(gate, up));
  if (h.data != nullptr) {
    ARGOSY_RETURN_IF_ERROR(validate(options.activation));
    ARGOSY_RETURN_IF_ERROR(check_output("h", x, w, h));
    if (h.dtype != x.rows.dtype) {
      return base::invalid("h is {}, the rows are {}: the dtypes must be equal", describe(h),
                           describe(x.rows));
    }
    ARGOSY_RETURN_IF_ERROR(check_apart(gate, h));
    ARGOSY_RETURN_IF_ERROR(check_apart(up, h));
  }
  return check_groups(x.offsets, x.sizes, x.rows.dim(0), w.num_groups());
}

}  // namespace
}  // namespace gemm

Status grouped_gemm_preactivation(const GemmOptions& options, const RaggedRows& x,
                                  const PackedWeights& w, const TensorView& gate,
                                  const TensorView& up, const TensorView& h) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_preactivation(options, x, w, gate, up, h));
  if (options.level == Level::kReference) {
    gemm::reference_preactivation(options, x, w, gate, up, h);
    return {};
  }
  const gemm::PreactivationSource source(options, *table, x, w, gate, up, h);
  const gemm::Dot& dot = gemm::backward_dot(*table, x.rows.dtype, w.dtype(), options.dot_order);
  const gemm::BackwardLimits limits =
      gemm::backward_limits(dot, x.rows.dtype, w.dtype(), source.num_blocks(0), false);
  return gemm::run_backward(options, source, dot, limits, x.sizes, w.num_panels());
}

}  // namespace argosy
