// Ragged grouped GEMM: one weight matrix per group, groups of unequal length in one buffer of rows.
//
// Weights live in PackedWeights, an opaque panel layout that every level reads (docs/adr/0004). Bits: for
// one dot_order the same at every level and thread count, by contract 4.2 (bf16) and 4.3 (fp32, block scales).
// Test: tests/gemm/.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "argosy/activation.h"
#include "argosy/cpu.h"
#include "argosy/payload.h"
#include "argosy/quantise.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "argosy/thread_pool.h"

namespace argosy {

namespace gemm {
struct PackedShape;
struct PanelAccess;
}  // namespace gemm

// Weights of `num_groups` experts, packed for the kernels. Two kinds:
//   plain    out[n] = x . w[n],                              w   [N, K] per group
//   gate_up  out[f] = activation(x . gate[f], x . up[f]),    gate, up [F, K] per group; n() is F
// and for each, once add_bias() was called, a bias per column that is added in fp32 to the finished product
// (contract 3.5). Owns its memory, 64-byte aligned; movable (a moved-from object may only be assigned or
// destroyed). N and K of any size >= 1 (padded inside with zeros).
class PackedWeights {
 public:
  enum class Kind { kPlain, kGateUp };

  PackedWeights() = default;
  // dtype kBF16 or kF32. Errors: kInvalidArgument (sizes), kOutOfMemory (bytes asked for).
  // num_groups = 0 is legal.
  static Result<PackedWeights> create(Kind kind, DType dtype, int64_t num_groups, int64_t n,
                                      int64_t k);

  // Quantised weights, any BlockFormat but kNvfp4: codes and scales stay as they are, a scale below 2^-126
  // becomes 0 (contract 5). Errors: those of create(); kUnsupported for a format that is not multiplied.
  static Result<PackedWeights> create_quantised(Kind kind, BlockFormat format, int64_t num_groups,
                                                int64_t n, int64_t k);

  // Packs one group. Any strides and alignment; may be called again with new values. Different groups may
  // be set by different threads at a time. A group never set is zero. Errors: kInvalidArgument for a group
  // out of range, another kind, shape or dtype.
  Status set_group(int64_t group, const ConstTensorView& w);
  Status set_group(int64_t group, const ConstTensorView& gate, const ConstTensorView& up);
  // The same for weights made by create_quantised. Errors beside those above: another format; those of
  // check_quantised(). A NaN scale makes its block NaN.
  Status set_group(int64_t group, const ConstQuantisedView& w);
  Status set_group(int64_t group, const ConstQuantisedView& gate, const ConstQuantisedView& up);

  // Gives every group a bias of zeros, which set_bias then sets; a second call changes nothing.
  // Errors: kInvalidArgument for weights never created; kOutOfMemory.
  Status add_bias();
  // Sets the bias of one group: [N], or gate and up [F]. bf16 or fp32, any stride; widened. Different groups
  // may be set by different threads at a time. Errors: kInvalidArgument for a group out of range, another
  // kind, shape or dtype, or without add_bias() before.
  Status set_bias(int64_t group, const ConstTensorView& bias);
  Status set_bias(int64_t group, const ConstTensorView& gate, const ConstTensorView& up);

  Kind kind() const { return kind_; }
  DType dtype() const { return dtype_; }          // quantised: of the codes
  BlockFormat format() const { return format_; }  // kUnset: not quantised
  int64_t num_groups() const { return num_groups_; }
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t num_bytes() const {
    return data_.size_bytes() + bias_.size_bytes() + plain_lines_.size_bytes();
  }
  bool has_bias() const { return has_bias_; }

  // Layout, for kernels. A panel is 32 columns by all of k (padded to 32), with their scales if there are any,
  // contiguous, bf16 by pairs of k; panels of a group in order. gate_up: columns 0..15 of a panel are gate, 16..31 up, of the same 16 output columns.
  int64_t num_panels() const { return num_panels_; }
  int64_t padded_k() const { return padded_k_; }
  int64_t panel_bytes() const { return panel_bytes_; }
  const std::byte* panel(int64_t group, int64_t panel) const {
    return data_.data() + (group * num_panels_ + panel) * panel_bytes_;
  }
  // Of e4m3 codes, [padded_k / 32]: bit i, set, says that the 64 codes of pair i of these 32 k are all plain, neither
  // zero nor denormal nor NaN, so that a kernel needs no table; clear: unknown. set_group sets those that are, quantise_weights
  // none. Null for other weights.
  const uint16_t* plain_lines_of_panel(int64_t group, int64_t panel) const {
    if (plain_lines_.size_bytes() == 0) return nullptr;
    return reinterpret_cast<const uint16_t*>(plain_lines_.data()) +
           (group * num_panels_ + panel) * (padded_k_ / 32);
  }
  // The 32 biases of a panel's columns in their order, zero in the padding; null without add_bias().
  const float* bias_of_panel(int64_t group, int64_t panel) const {
    if (!has_bias_) return nullptr;
    return reinterpret_cast<const float*>(bias_.data()) + (group * num_panels_ + panel) * 32;
  }

 private:
  friend struct gemm::PanelAccess;
  PackedWeights(Kind kind, int64_t num_groups, int64_t n, int64_t k)
      : kind_(kind), num_groups_(num_groups), n_(n), k_(k) {}
  Status allocate(const gemm::PackedShape& shape);
  std::byte* group_data(int64_t group);
  float* group_bias(int64_t group);
  uint16_t* plain_lines(int64_t group, int64_t panel);
  void mark_plain_lines(int64_t group);

  Kind kind_ = Kind::kPlain;
  DType dtype_ = DType::kUnset;
  BlockFormat format_ = BlockFormat::kUnset;
  int64_t num_groups_ = 0, n_ = 0, k_ = 0;
  int64_t num_panels_ = 0, padded_k_ = 0, panel_bytes_ = 0;
  bool has_bias_ = false;
  AlignedBuffer data_, bias_, plain_lines_;
};

struct GemmOptions {
  Level level = Level::kGeneric;
  DotOrder dot_order = DotOrder::kAuto;  // must be kAmx or kVdpbf16 for bf16 rows
  ThreadPool* pool = nullptr;            // null: the calling thread
  Activation activation = {};            // of gate_up weights; plain ones have none
};

// Rows in groups. Group g is rows [offsets[g], offsets[g] + sizes[g]); rows outside are never read
// (contract 3.3).
struct RaggedRows {
  ConstTensorView rows;              // bf16 or fp32 [S, K], unit stride in K
  std::span<const int64_t> offsets;  // [G] or [G + 1], rising, exclusive
  std::span<const int64_t> sizes;    // [G], real counts
};

// The same in codes and scales: e4m3_1x128, e4m3_1x128_e8m0, mxfp8 or mxfp8_ceil. Scales of rows outside the groups are
// never read either.
struct RaggedQuantisedRows {
  ConstQuantisedView rows;           // [S, K], any row strides
  std::span<const int64_t> offsets;  // as RaggedRows
  std::span<const int64_t> sizes;
};

// out[row] = rows[row] . w[group]^T + bias for plain weights; activation(gate, up) for gate_up weights.
//
// bf16 rows: products by dot_order, bias and activation in fp32, one rounding to bf16. fp32 rows: everything
// by the fp32 chain; bf16 weights are widened. Quantised weights: per scale block of k a partial in that order
// over the codes' exact values, then acc = fma(partial, scale, acc). Denormals: flushed in the products, kept in bias and activation.
// Rows of `out` outside every group are not written.
//
// in   x     as above; K = w.k(); any row stride
// in   w     num_groups = G. fp32 weights need fp32 rows.
// out  out   [S, w.n()] of the rows' dtype, unit stride in n, rows that do not overlap. Its bytes, from the
//            first row to the last, must not overlap those of x (refused)
// Errors: kInvalidArgument names shapes, dtypes, the group whose range leaves [0, S], overlapping groups, an
// activation that validate() refuses; kUnsupported for a level this build or CPU lacks; kOutOfMemory.
// Blocks: no. Allocates: for messages, and the calling thread keeps staged rows of at most `tile_bytes`
// (or one row block) for each thread of the pool, grown and never shrunk.
Status grouped_gemm(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                    const TensorView& out);

// Quantised rows by bf16 or quantised weights: codes are multiplied as bf16 in dot_order. A partial is as long as the
// shorter of the two scale blocks along k; then acc = fma(partial, s, acc) with s = scale_x * scale_w (bf16 weights: 1), an fp32
// product that flushes denormals, theirs included. Two e8m0 scales are added as exponents: 2^-127 counts, and a sum below
// 2^-126 is 0. Where s is above 2^127: acc = fma(partial * scale_x, scale_w, acc). A NaN scale makes the result NaN.
//
// in   x, w  as above; never fp32 weights
// out  out   bf16 or fp32 [S, w.n()]: the finished product, bias and activation are fp32, then one rounding
// Errors: those above; kUnsupported for another format of rows; kCorruptData names row and block of an fp32 scale that is
// negative or Inf. Allocates: as above, and room for the rows as bf16.
Status grouped_gemm(const GemmOptions& options, const RaggedQuantisedRows& x,
                    const PackedWeights& w, const TensorView& out);

// Rows that lie anywhere, each as it travelled: straight from the slots they came in. Quantised payloads are decoded to
// bf16 rows in cache, then everything is as with bf16 rows.
struct ScatteredRows {
  PayloadLayout payload;  // hidden = K
  std::span<const std::byte* const>
      rows;  // [S] aligned to the dtype, or to 4 bytes; null outside the groups is fine
  std::span<const int64_t> offsets;  // as RaggedRows
  std::span<const int64_t> sizes;
};
// The same bits as the rows in one matrix. Errors: those above; kInvalidArgument for a group's row without data.
Status grouped_gemm(const GemmOptions& options, const ScatteredRows& x, const PackedWeights& w,
                    const TensorView& out);

// Results to anywhere: straight to where their readers are.
// out  out  [S] one row [w.n()] of the rows' dtype each, aligned to it; rows outside the groups are not written. None
//           may overlap another or any of x (not checked)
Status grouped_gemm(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                    std::span<std::byte* const> out);

// What steers a level: speed only, never bits. For reports.
struct GemmHeuristics {
  Level level = Level::kReference;
  // A task is at most `tile_rows` rows, and at most `tile_bytes` of them (but one row block): they stay in
  // L2 beside two panels of weights. With several threads there are at least `tasks_per_thread` for each,
  // as far as panels allow it.
  int64_t tile_rows = 0;
  int64_t tile_bytes = 0;
  int64_t tasks_per_thread = 0;
  // A task of at most `few_rows` rows goes over each panel once: from `ahead_from_rows` rows on it
  // (quantised weights: always) prefetches `ahead_bytes` before its reads (below, the hardware alone keeps up). A task of more rows
  // prefetches the next panel while its rows go by.
  int64_t few_rows = 0;
  int64_t ahead_from_rows = 0;
  int64_t ahead_bytes = 0;
  // Rows that one pass over a panel takes at most: bf16 rows in each dot order, fp32 rows.
  int64_t row_block_amx = 0;
  int64_t row_block_vdpbf16 = 0;
  int64_t row_block_f32 = 0;
};

// One row per level, rising, also for levels that this CPU lacks.
std::vector<GemmHeuristics> gemm_heuristics();

}  // namespace argosy
