// Routing and output against tensors captured from another implementation.
//
// FILE:PREFIX names PREFIX.router_logits [T, E], .topk_idx [T, K], .topk_weights [T, K] and
// .moe_output [T, H]. Experts are compared as sets, weights by expert. A token whose K-th and next
// selection score (or group score at the group limit), computed in fp32 from the captured logits,
// are equal is a tie: counted and left out of everything else but the logits. Test: tests/cli/compare_test.cc.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "tools/check.h"

namespace argosy::tools {

struct Captures {
  Tensor router_logits;
  Tensor topk_idx;
  Tensor topk_weights;
  Tensor moe_output;
};

// Every non-tie token is in exactly one of experts_equal and experts_differ; their sum with ties is
// T.
struct CompareResult {
  int64_t experts_equal = 0;
  int64_t experts_differ = 0;
  int64_t ties = 0;
  int64_t first_differing_token = -1;
  double weights_max_rel = 0;  // over experts of tokens whose experts are equal
  PeakError output;            // non-tie tokens; the peak is that of the whole captured tensor
  PeakError logits;            // all tokens: who is a tie hangs on them
};

// Reads and checks the four tensors. Errors: those of SafetensorsFile; kInvalidArgument for shapes
// and dtypes (seen and expected) and for expert ids out of range; kNonFinite for logits.
Result<Captures> read_captures(std::string_view file_and_prefix, const ModelConfig& config,
                               int64_t num_tokens);

// fp32 [T, E], by the router's gate and gate bias. hidden: [T, H].
Result<Tensor> router_logits(const SharedTensors& shared, const ConstTensorView& hidden);

// logits: fp32 [T, E]; output: [T, H]; topk_idx: int32 [T, K]; topk_weights: fp32 [T, K];
// selection_bias: fp32 [E] or empty.
CompareResult compare(const Captures& captures, const RouterSpec& router,
                      const Tensor& selection_bias, const Tensor& logits,
                      const ConstTensorView& output, const ConstTensorView& topk_idx,
                      const ConstTensorView& topk_weights);

}  // namespace argosy::tools
