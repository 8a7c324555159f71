// Routing: logits -> the top_k experts of every token and their weights. Numbers only, no I/O.
//
// Order of operations (contract 1.2): score function -> + selection bias -> group limit -> top-k ->
// weights gathered from the unbiased scores -> normalise -> x routed_scaling_factor, exactly once.
// Equal selection scores go to the lowest expert id. Arithmetic is fp32 with denormals kept; the
// same bits for any thread count. Shapes: T tokens, E experts, K top_k. Test: tests/router/.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/status.h"
#include "argosy/tensor.h"
#include "argosy/thread_pool.h"

namespace argosy {

enum class ScoreFunction {
  kUnset,
  kSoftmax,      // softmax over all E, then top-k
  kSoftmaxTopK,  // top-k on the logits, then softmax over the K chosen logits: always normalised
  kSigmoid,
  kSqrtSoftplus,  // sqrt(log(1 + exp(logit)))
};

// Score of a group of E/G consecutive experts (contract 1.4).
enum class GroupScore { kUnset, kMax, kSumOfBestTwo, kSumOfBestKPerGroup };

enum class Choice { kUnset, kNo, kYes };

// How weights are divided by their sum (contract 1.7).
enum class WeightNorm {
  kExact,  // of a softmax, e^(z - max) over the sum of the chosen ones; of others, plain division
           // (rows whose smallest chosen score is below 2^-100 without underflow)
  kReference,  // denominator + 1e-20, the formula of Megatron and Transformer Engine
};

// What a NaN or Inf logit in an unmasked row does (contract 1.6).
enum class OnNonfinite {
  kError,    // kNonFinite, naming the first such token
  kUniform,  // the row is routed as if all its logits were 0, and counted
};

// Every rule of a router. Presets only fill it; fields whose zero value is kUnset must be set.
struct RouterSpec {
  int64_t num_experts = 0;
  int64_t top_k = 0;
  ScoreFunction score_function = ScoreFunction::kUnset;
  Choice selection_bias =
      Choice::kUnset;      // whether a bias [E] is added to the scores for selection
  int64_t num_groups = 1;  // 1 with keep_groups 1: no group limit
  int64_t keep_groups = 1;
  GroupScore group_score = GroupScore::kUnset;  // may stay unset when num_groups is 1
  Choice normalise = Choice::kUnset;            // weights divided by their sum over the K chosen
  // The same when K is 1 and scores are sigmoid or sqrt-softplus, which are no distribution
  // (contract 1.7); may stay unset in any other case. A softmax weight of K = 1 that is normalised
  // is 1.
  Choice normalise_single = Choice::kUnset;
  WeightNorm weight_norm = WeightNorm::kExact;
  float routed_scaling_factor = 1.0f;
  OnNonfinite on_nonfinite = OnNonfinite::kError;
};

// Ok, or kInvalidArgument that names the broken rule and its values: E outside [1, 2^31), K outside
// [1, E], E % G != 0, Kg outside [1, G], K > Kg*E/G, K % Kg != 0 for kSumOfBestKPerGroup, unset
// fields, a factor that is not finite and positive.
Status validate(const RouterSpec& spec);

// One of: mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, gpt_oss, switch,
// softmax_pre, softmax_post, sigmoid, sqrt_softplus. Group limit off and factor 1 until the caller
// sets them; the result is not validated. Errors: kNotFound lists the presets.
Result<RouterSpec> router_preset(std::string_view name, int64_t num_experts, int64_t top_k);

// Every preset name, in the order above.
const std::vector<std::string>& router_preset_names();

// The effective spec, one "field = value" per line.
std::string to_string(const RouterSpec& spec);

// Weights know what has been done to them, so that no factor is applied twice.
struct TopkWeights {
  std::vector<float> values;  // [T, K]; 0 where topk_idx is -1
  bool normalised = false;
  bool scaled = false;   // x routed_scaling_factor
  bool applied = false;  // already multiplied into the rows
};

// The result of routing one rank's tokens. Owns its memory; reused, it does not allocate once
// grown.
struct Routing {
  int64_t num_tokens = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  std::vector<int32_t> topk_idx;  // [T, K], falling selection score; -1 = nobody
  TopkWeights topk_weights;
  std::vector<int64_t> counts;     // [E] tokens per expert, valid tokens, before any drop
  int64_t num_valid_tokens = 0;    // unmasked
  int64_t num_nonfinite_rows = 0;  // rows handled by OnNonfinite::kUniform
};

struct RouterInput {
  ConstTensorView logits;          // fp32 [T, E], unit stride in E; T = 0 is legal
  ConstTensorView selection_bias;  // fp32 [E], or unset (dtype kUnset) when the spec has none
  const uint8_t* mask = nullptr;   // [T], 1 = valid; null = all valid. Masked rows are never read.
};

// Fills *routing. Errors: those of validate(); kInvalidArgument for dtypes and shapes, for a bias
// that is missing, superfluous or not finite (names the expert); kNonFinite; kOutOfMemory. After
// any of them but kOutOfMemory *routing is unchanged. `pool` may be null (one thread). So that a steady
// state does not allocate, each thread keeps scratch, at most 32 KiB up to 4096 experts, top_k 64 and 64 groups; a
// calling thread 8 bytes for every expert and thread of the pool, to count in, and 6 for every expert; and with
// OnNonfinite::kError the memory of a second routing: the logits are read once, and the routing made there changes
// places with *routing when no row was bad.
Status route(const RouterSpec& spec, const RouterInput& input, ThreadPool* pool, Routing* routing);

// logits[t, e] = fp32 FMA chain over hidden of x[t] . gate[e] (contract 4.3, denormals flushed),
// then
// + gate_bias[e] (denormals kept).
//
// in   hidden      bf16 or fp32 [T, H], unit stride in H
// in   gate        bf16 or fp32 [E, H], dense
// in   gate_bias   fp32 or bf16 [E], or unset
// out  logits      fp32 [T, E], dense
// Errors: kInvalidArgument names the shapes. Blocks: no. Allocates: never.
Status gate_logits(const ConstTensorView& hidden, const ConstTensorView& gate,
                   const ConstTensorView& gate_bias, ThreadPool* pool, const TensorView& logits);

// Checks a routing given from outside (contract 1.8) and counts it.
//
// in   topk_idx  int32 [T, K], dense: -1 anywhere, else in [0, E), no expert twice in a row
// out  counts    [E], resized; empty after an error
// Errors: kInvalidArgument naming token, position, value and range, or the dtype when it is not
// int32.
Status count_topk(const ConstTensorView& topk_idx, int64_t num_experts,
                  std::vector<int64_t>* counts);

}  // namespace argosy
