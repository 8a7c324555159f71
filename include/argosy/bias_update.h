// Balancing without a loss: the step of the selection bias (contract 2.3).
//
// b += rate * sign(mean(n) - n), once per global batch, from counts over all ranks and
// micro-batches. The sign is that of exact arithmetic, sign(0) = 0, so no order of reduction
// changes it. b stays fp32. Test: tests/router/bias_update_test.cc.
#pragma once

#include <cstdint>
#include <span>

#include "argosy/status.h"

namespace argosy {

struct BiasUpdateSpec {
  float rate = 1e-3f;
  // The mean of all steps is taken off each, so that the sum of the biases stays (torchtitan).
  // Megatron and DeepSeek do not.
  bool centred = false;
};

// in   counts  int64 [E] of the global batch, exact (contract 1.9), valid tokens, before any drop
// io   bias    fp32 [E]: one fp32 addition each; a centred step is rounded to fp32 once before
// Errors: kInvalidArgument naming sizes, a negative count, a rate that is negative or not finite, a
// bias that is not finite or would not be; nothing is changed.
Status update_selection_bias(const BiasUpdateSpec& spec, std::span<const int64_t> counts,
                             std::span<float> bias);

}  // namespace argosy
