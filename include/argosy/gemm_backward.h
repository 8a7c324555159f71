// The backward of the grouped GEMM: gradients of rows, of weights and of biases, and of the
// activation between.
//
// One packed copy of the weights serves forward and backward. Bits: for one dot_order the same at
// every level and thread count (contract 4.2, 4.3). Rows outside the groups are never read, and
// their outputs never written (contract 3.3). Non-finite values pass through; every NaN written is
// the canonical one. Test: tests/gemm/dgrad_test.cc, wgrad_test.cc, activation_backward_test.cc.
#pragma once

#include <cstdint>
#include <span>

#include "argosy/gemm.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

// d_x[row] = d_y[row] . w[group], plain weights: the dot product over n ascending, by dot_order
// (bf16 rows) or the fp32 chain (fp32 rows; bf16 weights are widened). No bias enters.
//
// in   d_y   bf16 or fp32 [S, w.n()], unit stride in n, as the rows of grouped_gemm
// in   w     the weights of the forward; quantised ones are refused
// out  d_x   [S, w.k()], unit stride in k. bf16 rows: fp32 (the finished product) or bf16 (that,
//            rounded once); fp32 rows: fp32. Its bytes must not overlap those of the rows
// Errors: kInvalidArgument names shapes, dtypes, the kind of weights, the group whose range leaves
// [0, S]; kUnsupported for a level this build or CPU lacks and for quantised weights; kOutOfMemory.
// Blocks: no. Allocates: what the calling thread keeps for each thread of the pool: staged rows,
// one panel and sums, at most 3 MiB; grown and never shrunk. options.activation is not read.
Status grouped_dgrad(const GemmOptions& options, const RaggedRows& d_y, const PackedWeights& w,
                     const TensorView& d_x);

// The same for gate_up weights: d_x = d_gate . w_gate + d_up . w_up as one product. The chain goes
// over gate's f ascending, then on over up's f; pairs and blocks of 32 are counted from the start
// of each, zeros fill the last.
//
// in   d_gate, d_up   of one dtype and shape, [S, w.n()]; the groups are d_gate's
Status grouped_dgrad(const GemmOptions& options, const RaggedRows& d_gate,
                     const ConstTensorView& d_up, const PackedWeights& w, const TensorView& d_x);

struct WeightGradientOptions {
  // [G] or empty (1): gradient = alpha[g] * sum, one fp32 product after the sum, no FMA.
  std::span<const float> alpha = {};
  // out = out + gradient, one fp32 addition (a bf16 `out` is widened, then rounded once).
  // Else out = gradient.
  bool accumulate = false;
};

// out[g] = sum over the group's rows of d_y[row]^T x[row], in row order by dot_order (bf16) or the
// fp32 chain (fp32); pairs and blocks of 32 rows are counted from the group's start, zeros fill the last. A group
// without rows gives 0, whatever its alpha; where gradients accumulate its `out` is not touched.
// Gate and up are two calls.
//
// in   d_y   bf16 or fp32 [S, N], unit stride in n, with groups
// in   x     [S, K] of the same dtype, unit stride in k
// out  out   fp32 or bf16 [G, N, K], unit stride in k; its matrices and rows must overlap neither
//            each other nor the rows read (the latter refused)
// Errors, Blocks, Allocates: those of grouped_dgrad; alpha of another length.
Status grouped_wgrad(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView& x,
                     const WeightGradientOptions& gradient, const TensorView& out);

// A matrix whose rows were in groups, transpose-quantised: stored [C, S], codes of a group side by
// side, scales counted from its start, as transpose_quantise() of [S, C] with these groups makes it.
struct RaggedQuantisedColumns {
  ConstQuantisedView columns;        // mxfp8 or mxfp8_ceil; any row strides
  std::span<const int64_t> offsets;  // as RaggedRows, of stored columns
  std::span<const int64_t> sizes;
};

// The same product of operands that are quantised along the rows of each group: codes by dot_order,
// per block of 32 rows acc = fma(partial, s, acc) with s as in grouped_gemm of quantised rows.
//
// in   d_y   [N, S] with groups
// in   x     [K, S], quantised with the same groups; mxfp8 and mxfp8_ceil may meet
// Errors, Blocks, Allocates: those of above, and numbers per group; kUnsupported for other formats.
Status grouped_wgrad(const GemmOptions& options, const RaggedQuantisedColumns& d_y,
                     const ConstQuantisedView& x, const WeightGradientOptions& gradient,
                     const TensorView& out);

// out[g] = the sum of the group's rows of d_y, fp32 additions from 0 in row order, denormals kept;
// alpha, accumulate and empty groups as above.
//
// out  out   fp32 or bf16 [G, N], unit stride in n
// Errors: those of grouped_wgrad. Only the pool and the level (which must be there) of `options`
// are read.
Status grouped_bias_gradient(const GemmOptions& options, const RaggedRows& d_y,
                             const WeightGradientOptions& gradient, const TensorView& out);

// What the activation of the forward read: gate = x . w_gate, up = x . w_up (+ bias), in fp32
// before the activation, to be kept or computed again.
//
// in   x, w   as grouped_gemm; w is gate_up, not quantised
// out  gate, up   [S, w.n()] each, unit stride, of one dtype: fp32, or bf16 (rounded once; bf16
//            rows only)
// out  h          empty (no data), or [S, w.n()] of the rows' dtype: what grouped_gemm gives, bit
//                 for bit
// Errors, Blocks, Allocates: those of grouped_dgrad; an activation that validate() refuses, where h
// is asked for.
Status grouped_gemm_preactivation(const GemmOptions& options, const RaggedRows& x,
                                  const PackedWeights& w, const TensorView& gate,
                                  const TensorView& up, const TensorView& h = {});

// The same of quantised rows by bf16 or quantised gate_up weights; the products are those of
// grouped_gemm.
//
// out  gate, up   bf16 or fp32
// out  h          empty, or bf16 or fp32 [S, w.n()]
// Errors, Allocates: those of grouped_gemm of quantised rows.
Status grouped_gemm_preactivation(const GemmOptions& options, const RaggedQuantisedRows& x,
                                  const PackedWeights& w, const TensorView& gate,
                                  const TensorView& up, const TensorView& h = {});

// The rows between the two products of an expert. Each tensor is bf16 or fp32 [S, F] with unit
// stride in F.
struct ActivationRows {
  ConstTensorView gate, up;  // before the activation
  std::span<const int64_t> offsets;
  std::span<const int64_t> sizes;  // [G] as RaggedRows
  // [S] or empty (1): the weight inside the activation (contract 3.5).
  std::span<const float> weights = {};
};

// h = (weight * act(gate)) * up, in fp32, one rounding to h's dtype. clamped_swiglu: a = weight *
// act(gate), fma(a, u, a).
//
// Errors: kInvalidArgument names shapes, dtypes, groups, an activation that validate() refuses;
// kUnsupported for a level this build or CPU lacks. Outputs may not overlap inputs, except where one starts where the other
// does, with equal strides and dtype (each element is read before it is written). Blocks: no.
// Allocates: for messages only.
Status activation_forward(const GemmOptions& options, const ActivationRows& rows,
                          const TensorView& h);

// With A = act(gate), A' its derivative, U = up (clamped_swiglu: u + 1), t = d_h * U, each product
// one fp32 operation:
//   d_gate = (weight * t) * A',  d_up = d_h * (weight * A),  d_weight = sum over f of t * A
// The sum: lane l of 16 chains acc = fma(t, A, acc) over f = l, l + 16, ..; then lanes i and i + 8
// are added, i and i + 4, + 2, + 1. A clamped gate or up (beyond its limit) has gradient 0 by
// selection; at the limit it flows.
//
// in   d_h            bf16 or fp32 [S, F]
// out  d_gate, d_up   bf16 or fp32 [S, F], one rounding each
// out  h              empty (no data), or bf16 or fp32 [S, F]: as activation_forward, computed in
//                     the same pass
// out  d_weights      [S], or empty: not computed. Rows outside the groups are not written
// Errors, Blocks, Allocates: those of activation_forward.
struct ActivationGradients {
  TensorView d_gate, d_up;
  TensorView h = {};
  std::span<float> d_weights = {};
};
Status activation_backward(const GemmOptions& options, const ActivationRows& rows,
                           const ConstTensorView& d_h, const ActivationGradients& out);

}  // namespace argosy
