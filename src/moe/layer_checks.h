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
                                 DType hidden_dtype, const Placement& placement, int rank);

// Whether a layer with these weights and options can be trained. Errors: kUnsupported.
Status check_training(const MoeWeights& weights, const MoeOptions& options);
// kUnsupported for what MoeOptions::weights_inside cannot be had with.
Status check_weights_inside(const MoeWeights& weights, const MoeOptions& options);

// Whether these options allow a capacity. Errors: kInvalidArgument for the spec, kUnsupported for the mode.
Status check_capacity(const MoeOptions& options);

// What the layer asks of its exchange.
ExchangeOptions exchange_options(const RouterSpec& router, const LayerShape& shape,
                                 const MoeOptions& options);

LatencyOptions latency_options(const RouterSpec& router, const LayerShape& shape,
                               const MoeOptions& options);

// Whether an exchange that was made elsewhere serves: same group, same options. kInvalidArgument names the
// option and both values.
Status check_exchange(const Group& group, const ExchangeOptions& wanted, const Exchange& given);
Status check_exchange(const Group& group, const LatencyOptions& wanted,
                      const LatencyExchange& given);

// Dtype, [T, hidden], unit stride in hidden, data when there are rows. Rows that are written must not
// overlap each other.
Status check_rows(const char* name, const ConstTensorView& view, DType dtype, int64_t num_tokens,
                  int64_t hidden, bool is_written);

// What every rank must share; the experts' own bytes are each rank's own.
std::vector<Setting> layer_settings(const RouterSpec& router, const MoeWeights& weights,
                                    const LayerShape& shape, const MoeOptions& options);

}  // namespace argosy
