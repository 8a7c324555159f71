// Data that looks like a model's: normal values, random routings. Cheap enough for gigabytes, the
// same for the same seed. Zeros would move faster than what users have. Test:
// tests/bench/data_test.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "argosy/bfloat16.h"
#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy::tools::bench {

// Fills a dense bf16 tensor with normal values of this standard deviation.
void fill_normal(const TensorView& tensor, double deviation, uint64_t seed);

// A dense bf16 tensor of them.
Result<Tensor> normal_tensor(std::initializer_list<int64_t> dims, double deviation, uint64_t seed);

struct RandomRouting {
  Tensor topk_idx;      // int32 [T, K], K different experts a token, uniform
  Tensor topk_weights;  // fp32 [T, K], positive, a token's sum is 1
};
Result<RandomRouting> random_routing(int64_t num_tokens, int64_t num_experts, int64_t top_k,
                                     uint64_t seed);

// The same as what the router would have given.
Routing to_routing(const RandomRouting& random, int64_t num_experts);

// Experts with at least one token.
int64_t num_experts_touched(const ConstTensorView& topk_idx, int64_t num_experts);

// sum of x[i] * w[i] in fp64.
double exact_dot(const BFloat16* x, const BFloat16* w, int64_t size);

// Ok when `got` is `want` within what bf16 rounding and fp32 sums of values near 1 allow; else
// kInternal, naming `what` and both.
Status check_near(double got, double want, const char* what);

}  // namespace argosy::tools::bench
