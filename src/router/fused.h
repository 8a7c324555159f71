// The fused pass over a block of tokens: scores, group limit, top-k and weights without a row of exact
// scores.
//
// Experts are chosen on cheap approximations with a proven bound of their error; only the few that
// may be among the top_k get their exact score, to the bits of kernel.inl. A token that
// the bounds do not decide is left to exact_row.h, so the bits are always those of the
// reference. Floor: docs/perf/router.md. Decision: docs/adr/0010. Test:
// tests/router/fused_test.cc.
#pragma once

#include <cstdint>

#include "argosy/router.h"
#include "router/kernel.h"

namespace argosy::router {

inline constexpr int64_t kFusedTokens = 16;  // of a block: one per lane of 16 fp32
inline constexpr int64_t kFusedMostTopK = 8;
inline constexpr int64_t kFusedMostExperts = 4096;
inline constexpr int64_t kFusedScratchFloats = 4096;  // approximations of a part of a block: 16 KiB

// What the pass needs of a spec and a bias. Made once per call of route().
struct FusedPlan {
  enum class Score { kLogit, kSoftmax, kSigmoid };  // kLogit: softmax over the chosen

  Score score = Score::kLogit;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t num_groups = 1;  // 1: no limit
  int64_t keep_groups = 1;
  bool sum_of_two = false;  // the score of a group; else its largest
  bool normalised = false;  // weights divided by their sum
  bool over_all = false;    // kSoftmax: they are scores over all experts first
  double added_to_sum = 0;  // WeightNorm::kReference
  float least_score = 0;    // a row with a smaller chosen one is left to the reference
  float factor = 1;
  const float* bias = nullptr;  // [E], kSigmoid only; null: none
  // kSigmoid: [E, to a multiple of 16] bias + shift, aligned to 64 bytes, the shift such that all approximations are >= 1.
  const float* shifted_bias = nullptr;
  float coarse_error = 0;  // of approximation - shift, against the exact selection score
  float fine_error = 0;
  // Null unless words decide (FusedKernel of a CPU with AVX512_VBMI2). [E] bias + shift in units of 2^-14, in
  // the order of expert_of_word(), aligned to 64 bytes; kLogit, kSoftmax: not read.
  const uint16_t* word_bias = nullptr;
  int32_t word_margin = 0;  // two selection scores farther apart have the order of their words
};

// A block of valid tokens. Rows with NaN or Inf are left to the reference.
struct FusedBlock {
  int64_t num_tokens = 0;           // 1 to kFusedTokens
  const float* rows[kFusedTokens];  // logits; unused ones repeat the first
  int64_t tokens[kFusedTokens];     // their places in the two below; unused ones are not read
  int32_t* topk_idx = nullptr;      // [T, top_k]
  float* weights = nullptr;         // [T, top_k]
  float* scratch = nullptr;         // [kFusedScratchFloats], aligned to 64 bytes
};

struct FusedKernel {
  // Bit t of the result: token t was left to the reference, what was written for it means nothing.
  uint32_t (*route)(const FusedPlan& plan, const FusedBlock& block);
  // The two approximations of the sigmoid, `count` a multiple of 16; for the test of their bounds.
  // Coarse: only for logits within kCoarseRange.
  void (*coarse_sigmoid)(const float* logits, int64_t count, float* out);
  void (*fine_sigmoid)(const float* logits, int64_t count, float* out);
  // The sigmoid in words, see kWordSigmoidError: of 32 logits, in the order of expert_of_word(). Null
  // without words.
  void (*word_sigmoid)(const float* logits, int16_t* out);
  // True when all values are finite.
  bool (*is_finite)(const float* values, int64_t count);
};

// Absolute errors of the approximations, tested over all fp32 values.
inline constexpr float kCoarseRange = 80.0f;
inline constexpr float kCoarseSigmoidError = 8.5e-5f;
inline constexpr float kFineSigmoidError = 5e-7f;

// In the order that packs_epi32 leaves: the expert of 32 that word i of 32 holds.
constexpr int expert_of_word(int i) { return i / 8 * 4 + i % 4 + (i / 4 % 2) * 16; }
// A word and a half approximate 2^14 (sigmoid(z) - 1/2) to this; tested over all words.
inline constexpr double kWordSigmoidError = 3.25;
inline constexpr int64_t kWordMostExperts = 256;

extern const FusedKernel kFusedKernelAvx512;  // only on a CPU with Level::kAvx512
extern const FusedKernel kFusedKernelVbmi2;   // and AVX512_VBMI2 beside it

// The kernel for this CPU, or null.
const FusedKernel* fused_kernel();

// Floats of `shifted_bias` for a plan, its words included.
int64_t shifted_bias_size(int64_t num_experts);

// Fills *plan; false when the pass has no way for this spec and bias. `shifted_bias` has
// shifted_bias_size(E) floats and outlives the plan; `bias`: [E] finite or null. Precondition:
// validate(spec).ok().
bool make_fused_plan(const RouterSpec& spec, const float* bias, bool normalised,
                     float* shifted_bias, FusedPlan* plan);

// The parts that route() goes through on a CPU; the same bits with any.
struct RoutePath {
  const Kernel* kernel = nullptr;
  bool select = false;                 // by Kernel::select, else by select_experts()
  const FusedKernel* fused = nullptr;  // null: no fused pass
};

// The naive twin.
inline constexpr RoutePath kReferencePath = {&kBaselineKernel, false, nullptr};

// route() by given parts.
Status route_by(const RoutePath& path, const RouterSpec& spec, const RouterInput& input,
                ThreadPool* pool, Routing* routing);

}  // namespace argosy::router
