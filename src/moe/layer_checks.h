// Whether weights, spec and group fit together, and whether all ranks mean the same layer.
#pragma once

#include "argosy/moe.h"

namespace argosy {

struct LayerShape {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t shared_intermediate = 0;  // 0 = no shared experts
  bool shared_gate = false;
};

// kInvalidArgument names the tensor, its shape and what the layer needs.
Result<LayerShape> check_weights(const RouterSpec& router, const MoeWeights& weights,
                                 DType hidden_dtype, int64_t num_local_experts);

// What every rank must share; the experts' own bytes are each rank's own.
std::vector<Setting> layer_settings(const RouterSpec& router, const MoeWeights& weights,
                                    const LayerShape& shape, DType hidden_dtype);

}  // namespace argosy
