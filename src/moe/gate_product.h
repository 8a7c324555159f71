// The gate product of a layer, x . W_gate, by the grouped GEMM's fp32 kernels over weights packed once.
//
// The same bits as gate_logits(), which is its naive twin (contract 4.3). Test: tests/moe/gate_product_test.cc.
#pragma once

#include "argosy/gemm.h"
#include "argosy/tensor.h"

namespace argosy {

class GateProduct {
 public:
  // gate [E, H] bf16 or fp32, dense; bias [E] bf16 or fp32, or unset. Both are copied. Errors: kOutOfMemory.
  static Result<GateProduct> create(const ConstTensorView& gate, const ConstTensorView& bias);

  // in   hidden  bf16 or fp32 [T, H], unit stride in H
  // in   mask    [T], 1 = valid, or null; rows of masked tokens are not read, their logits are unspecified
  // out  logits  fp32 [T, E], dense
  // Errors: those of grouped_gemm; kOutOfMemory. Allocates: once, for rows that must be widened.
  Status run(const GemmOptions& options, const ConstTensorView& hidden, const uint8_t* mask,
             const TensorView& logits);

 private:
  Status run_block(const GemmOptions& options, const ConstTensorView& rows,
                   const TensorView& logits) const;
  void finish(const TensorView& logits) const;

  PackedWeights weights_;
  AlignedBuffer bias_;  // fp32 [E], or empty
  AlignedBuffer wide_;  // fp32 [block, H]
};

}  // namespace argosy
