// What of the router is worth an instruction set: score functions, the choice of experts and the gate
// product.
//
// kernel.inl is compiled three times, for any x86-64, for AVX2 with FMA and for AVX-512; all give the same
// bits, because every FMA is written out. Callers set the floating-point environment. Test:
// tests/router/kernel_test.cc, tests/router/select_kernel_test.cc.
#pragma once

#include <cstdint>

#include "router/lanes.h"

namespace argosy::router {

inline constexpr int64_t kGateTokens = 8;    // rows of a gate tile
inline constexpr int64_t kGateExperts = 16;  // columns of a gate tile: one AVX-512 register of fp32
inline constexpr int64_t kGateHidden = 256;  // hidden elements of one packed panel: 16 KiB

// Scores of one row of `num_experts` finite logits: before rounding to fp32 and after.
using ScoreRow = void (*)(const float* logits, int64_t num_experts, double* exact, float* scores);

// Terms [top_k] in the ratio of the chosen experts' scores, the largest near 1, none of which
// underflows unless its weight does. Returns their sum.
using ChosenTerms = double (*)(const float* chosen_logits, int64_t top_k, double* terms);

// The parts of softmax_scores, for a row that is taken in chunks: e^(logit - peak), added to `sum` in the order
// of sum_lanes() (all chunks but the last: multiples of 8); and values / sum, rounded to fp32 too.
using SoftmaxPowers = void (*)(const float* logits, int64_t count, double peak, double* powers,
                               LaneSum* sum);
using Quotients = void (*)(double* values, int64_t count, double sum, float* rounded);

inline constexpr int64_t kSelectMostTopK = 64;

// What select() needs of a spec; see select_rules().
struct SelectRules {
  int64_t top_k = 0;
  int64_t num_groups = 1;
  int64_t keep_groups = 1;  // num_groups: no limit
  int64_t num_summed = 1;   // experts that a group's score sums up
  int64_t group_size = 0;
  int64_t group_stride = 0;  // whole vectors
};

// The selection scores of the experts [first, first + count) as integers in their order, at their places in
// `orders` [num_groups * group_stride].
using Order = void (*)(const SelectRules& rules, const float* selection, int64_t first,
                       int64_t count, int32_t* orders);

// The bits of select_experts() of top_k.h, from what Order made of all experts; it may be overwritten. False
// when too many scores are equal: select_experts() is faster then.
using Select = bool (*)(const SelectRules& rules, int32_t* orders, int32_t* topk_idx);

struct Kernel {
  ScoreRow softmax_scores;
  ScoreRow sigmoid_scores;
  ScoreRow sqrt_softplus_scores;
  ChosenTerms softmax_terms;
  ChosenTerms sigmoid_terms;
  ChosenTerms sqrt_softplus_terms;
  float (*largest)(const float* values, int64_t count);  // of -0 and +0 either
  SoftmaxPowers softmax_powers;
  Quotients quotients;
  Order order;
  Select select;
  // acc[t * kGateExperts + j] = fma(x[t * kGateHidden + h], panel[h * kGateExperts + j], acc), h
  // ascending over [0, depth). Denormals: flushed.
  void (*gate_tile)(const float* x, const float* panel, int64_t depth, float* acc);
};

extern const Kernel kBaselineKernel;
extern const Kernel kFmaKernel;     // only on a CPU with Level::kAvx2
extern const Kernel kAvx512Kernel;  // only on a CPU with Level::kAvx512

// The kernel for this CPU, ARGOSY_MAX_LEVEL heeded.
const Kernel& kernel();

}  // namespace argosy::router
