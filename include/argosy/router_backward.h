// Gradients of routing: d_topk_weights -> d_logits, and of the gate product: d_logits -> d_hidden,
// d_gate, d_gate_bias. Formulas: docs/routing.md.
//
// Everything of a row is computed in fp64 and rounded to fp32 once; a row depends on nothing but
// itself, so neither threads nor the split of a batch over ranks change a bit. The choice of
// experts, the selection bias and the counts have no gradient. NaN is written as 0x7FC00000.
// Test: tests/router/backward_test.cc, tests/router/gate_backward_test.cc.
#pragma once

#include <cstdint>

#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "argosy/thread_pool.h"

namespace argosy {

// What happens to what a gradient buffer holds.
enum class GradientMode {
  kWrite,  // it is overwritten
  kAdd,    // the gradient is added to it, one addition an element
};

// d_logits = the gradient that reaches the logits through the weights of route().
//
// A row flows even when its weight is 0: what counts is topk_idx. Rows of masked tokens are zero
// and their logits and gradients are never read; so are rows that OnNonfinite::kUniform replaced,
// since a constant took their place. A normalised softmax weight of K = 1 is constantly 1: zero.
//
// in   input            as given to route(); its selection_bias is not looked at
// in   routing          what route() made of it, before any capacity drop (give a dropped
//                       assignment a gradient of 0, see capacity.h); only topk_idx is read
// in   d_topk_weights   fp32 [T, K] dense
// io   d_logits         fp32 [T, E] dense; must not overlap the inputs
// Errors: those of validate(); kInvalidArgument for dtypes and shapes, for a row of topk_idx that
// is no choice of K distinct experts although its token is valid (names token and position);
// kNonFinite as route(). After any of them d_logits is unchanged, but for kOutOfMemory.
// Allocates: scratch of some 30 bytes an expert for each thread, once.
Status route_backward(const RouterSpec& spec, const RouterInput& input, const Routing& routing,
                      const ConstTensorView& d_topk_weights, GradientMode mode, ThreadPool* pool,
                      const TensorView& d_logits);

// What the gradients of the gate start from.
enum class GateGradientMode {
  kWrite,     // chains from +0; the buffer is overwritten
  kAdd,       // chains from +0, then added to the buffer once: a main gradient (contract 4.3)
  kContinue,  // chains go on from what the buffer holds: calls over consecutive rows give the bits
              // of one call over all of them, whatever the split (the first call: kWrite)
};

// Gradients of the gate product. An output whose dtype is kUnset is not computed.
struct GateGradients {
  TensorView d_hidden;  // fp32 [T, H] dense
  GradientMode d_hidden_mode = GradientMode::kWrite;
  TensorView d_gate;                                        // fp32 [E, H] dense
  TensorView d_gate_bias;                                   // fp32 [E] dense
  GateGradientMode d_gate_mode = GateGradientMode::kWrite;  // of d_gate and d_gate_bias
};

// d_hidden[t, h] = chain over e of d_logits[t, e] . gate[e, h]
// d_gate[e, h] = chain over t of d_logits[t, e] . hidden[t, h];  d_gate_bias: the same, hidden = 1
//
// Each is one fp32 FMA chain, index ascending, from +0, + 0 at the end, denormals flushed
// (contract 4.3). A token whose d_logits are all zero (masked, replaced, or without a gradient)
// takes part in none of them: its d_hidden is zero (kWrite) or unchanged (kAdd), its hidden row is
// never read.
//
// in   hidden    bf16 or fp32 [T, H], unit stride in H; needed for d_gate only; some columns of it
//                give those columns of d_gate
// in   gate      bf16 or fp32 [E, H], dense; needed for d_hidden only
// in   d_logits  fp32 [T, E] dense
// Errors: kInvalidArgument names the shapes; nothing is changed. Allocates: never.
// Cost: two FMAs an element of T x E x H.
Status gate_backward(const ConstTensorView& hidden, const ConstTensorView& gate,
                     const ConstTensorView& d_logits, ThreadPool* pool,
                     const GateGradients& gradients);

}  // namespace argosy
