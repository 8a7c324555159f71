// The arithmetic of the router that is worth an instruction set: score functions and the gate
// product.
//
// kernel.inl is compiled twice, for any x86-64 and for AVX2 with FMA; both give the same bits,
// because every FMA is written out. Callers set the floating-point environment. Test:
// tests/router/kernel_test.cc.
#pragma once

#include <cstdint>

namespace argosy::router {

inline constexpr int64_t kGateTokens = 8;    // rows of a gate tile
inline constexpr int64_t kGateExperts = 8;   // columns of a gate tile: one AVX2 register of fp32
inline constexpr int64_t kGateHidden = 256;  // hidden elements of one packed panel: 8 KiB each side

// Scores of one row of `num_experts` finite logits: before rounding to fp32 and after.
using ScoreRow = void (*)(const float* logits, int64_t num_experts, double* exact, float* scores);

// Terms [top_k] in the ratio of the chosen experts' scores, the largest near 1, none of which
// underflows unless its weight does. Returns their sum.
using ChosenTerms = double (*)(const float* chosen_logits, int64_t top_k, double* terms);

struct Kernel {
  ScoreRow softmax_scores;
  ScoreRow sigmoid_scores;
  ScoreRow sqrt_softplus_scores;
  ChosenTerms softmax_terms;
  ChosenTerms sigmoid_terms;
  ChosenTerms sqrt_softplus_terms;
  // acc[t * kGateExperts + j] = fma(x[t * kGateHidden + h], panel[h * kGateExperts + j], acc), h
  // ascending over [0, depth). Denormals: flushed.
  void (*gate_tile)(const float* x, const float* panel, int64_t depth, float* acc);
};

extern const Kernel kBaselineKernel;
extern const Kernel kFmaKernel;  // only on a CPU with AVX2 and FMA

// The kernel for this CPU.
const Kernel& kernel();

}  // namespace argosy::router
