// Weights in both directions for products of quantised operands: scales along k for the forward,
// along n for the gradients of rows.
//
// Two quantisations of the same bf16 weights, not a transpose of one: what a scale covers differs.
// Test: tests/gemm/quantised_weights_test.cc.
#pragma once

#include <cstdint>

#include "argosy/gemm.h"
#include "argosy/quantise.h"
#include "argosy/status.h"

namespace argosy {

struct QuantisedWeights {
  // For grouped_gemm and grouped_gemm_preactivation: kind, n, k and bias of the bf16 weights.
  PackedWeights along_k;
  // For the gradient of rows, which is grouped_gemm of d_y, quantised along n: plain, n() = k of
  // the bf16 weights, k() = gradient_columns() of them.
  PackedWeights along_n;
};

// Columns of d_y as a row of along_n wants them. Plain weights: n. gate_up: d_gate and d_up beside each
// other, each filled with zeros to a multiple of 32, so that no scale spans both.
struct GradientColumns {
  int64_t total = 0;
  int64_t up = 0;  // where d_up begins; 0 of plain weights
};
GradientColumns gradient_columns(PackedWeights::Kind kind, int64_t n);

// Quantises all groups of `w` in both directions, the bytes of quantise() and transpose_quantise().
//
// in   w    bf16, not quantised
// in   format   kMxfp8 or kMxfp8Ceil
// out  out  its buffers are used again where they fit; else made
// Blocks: no. Allocates: where `out` does not fit; each thread of options.pool keeps room for 32
// columns. Errors: kInvalidArgument (weights never created, of fp32), kUnsupported (quantised weights,
// another format, level), kNonFinite where options ask for it, kOutOfMemory.
Status quantise_weights(const QuantiseOptions& options, const PackedWeights& w, BlockFormat format,
                        QuantisedWeights* out);

}  // namespace argosy
