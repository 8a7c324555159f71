// Argosy as the comparison calls it: a small C interface around MoeLayer, for ctypes.
//
// Routing comes from outside, weights are [E, 2F, H] and [E, H, F] in bf16 as checkpoints hold them, and quantised
// here where a format is asked for.
// One thread a rank; with more than one rank, ranks are processes that meet under `job`.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>

#include "argosy/moe.h"
#include "argosy/plan.h"
#include "argosy/quantise.h"
#include "argosy/router.h"

namespace {

using namespace argosy;  // NOLINT(google-build-using-namespace)

struct Peer {
  std::unique_ptr<Group> group;
  std::unique_ptr<MoeLayer> layer;
  int64_t top_k = 0;
  int64_t hidden = 0;
};

struct Shape {
  int64_t num_experts, top_k, hidden, intermediate;
};

Result<QuantisedTensor> quantised(BlockFormat format, const ConstTensorView& values) {
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                          quantised_layout(format, values.dim(0), values.dim(1)));
  ARGOSY_ASSIGN_OR_RETURN(QuantisedTensor made, QuantisedTensor::create(layout));
  ARGOSY_RETURN_IF_ERROR(quantise({}, values, made.view()));
  return made;
}

// kUnset: bf16 as they are.
Result<PackedWeights> make_weights(PackedWeights::Kind kind, BlockFormat format, int64_t count,
                                   int64_t n, int64_t k) {
  if (format == BlockFormat::kUnset) return PackedWeights::create(kind, DType::kBF16, count, n, k);
  return PackedWeights::create_quantised(kind, format, count, n, k);
}

Status set_expert(BlockFormat format, int64_t local, const ConstTensorView& gate,
                  const ConstTensorView& up, const ConstTensorView& down, MoeWeights* weights) {
  if (format == BlockFormat::kUnset) {
    ARGOSY_RETURN_IF_ERROR(weights->gate_up.set_group(local, gate, up));
    return weights->down.set_group(local, down);
  }
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedTensor gate_codes, quantised(format, gate));
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedTensor up_codes, quantised(format, up));
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedTensor down_codes, quantised(format, down));
  ARGOSY_RETURN_IF_ERROR(weights->gate_up.set_group(local, gate_codes.view(), up_codes.view()));
  return weights->down.set_group(local, down_codes.view());
}

Result<MoeWeights> pack(const Shape& shape, BlockFormat format, const Group& group,
                        const uint16_t* gate_up, const uint16_t* down) {
  const Placement placement{shape.num_experts, group.num_ranks(), 0};
  const int64_t first = placement.begin(group.rank());
  const int64_t count = placement.num_local(group.rank());
  const int64_t size = shape.intermediate * shape.hidden;
  MoeWeights weights;
  weights.first_expert = first;
  // Routing comes from outside: the gate is never used.
  ARGOSY_ASSIGN_OR_RETURN(weights.gate,
                          Tensor::zeros(DType::kBF16, {shape.num_experts, shape.hidden}));
  ARGOSY_ASSIGN_OR_RETURN(weights.gate_up, make_weights(PackedWeights::Kind::kGateUp, format, count,
                                                        shape.intermediate, shape.hidden));
  ARGOSY_ASSIGN_OR_RETURN(weights.down, make_weights(PackedWeights::Kind::kPlain, format, count,
                                                     shape.hidden, shape.intermediate));
  for (int64_t local = 0; local < count; ++local) {
    const uint16_t* const gate = gate_up + (first + local) * 2 * size;
    const auto wide = [&](const uint16_t* at) {
      return ConstTensorView(at, DType::kBF16, {shape.intermediate, shape.hidden});
    };
    const ConstTensorView tall(down + (first + local) * size, DType::kBF16,
                               {shape.hidden, shape.intermediate});
    ARGOSY_RETURN_IF_ERROR(
        set_expert(format, local, wide(gate), wide(gate + size), tall, &weights));
  }
  return weights;
}

Result<std::unique_ptr<Peer>> create(int rank, int num_ranks, const char* job, const Shape& shape,
                                     const char* format_name, const uint16_t* gate_up,
                                     const uint16_t* down) {
  BlockFormat format = BlockFormat::kUnset;
  if (*format_name != '\0') {
    ARGOSY_ASSIGN_OR_RETURN(format, parse_block_format(format_name));
  }
  auto peer = std::make_unique<Peer>();
  GroupOptions options;
  options.rank = rank;
  options.num_ranks = num_ranks;
  options.job = job;
  ARGOSY_ASSIGN_OR_RETURN(peer->group, Group::join(options));
  ARGOSY_ASSIGN_OR_RETURN(MoeWeights weights, pack(shape, format, *peer->group, gate_up, down));
  ARGOSY_ASSIGN_OR_RETURN(const RouterSpec router,
                          router_preset("mixtral", shape.num_experts, shape.top_k));
  MoeOptions moe;
  moe.hidden_dtype = DType::kBF16;
  ARGOSY_ASSIGN_OR_RETURN(peer->layer,
                          MoeLayer::create(*peer->group, router, std::move(weights), moe));
  peer->top_k = shape.top_k;
  peer->hidden = shape.hidden;
  return peer;
}

struct RouterPeer {
  RouterSpec spec;
  Routing routing;
};

void tell(const Status& status, char* error, size_t size) {
  std::snprintf(error, size, "%s", status.to_string().c_str());
}

}  // namespace

extern "C" {

// shape: E, K, H, F. format: a block format's name; empty: bf16. Null, and the reason in `error`, when it fails.
void* argosy_peer_create(int rank, int num_ranks, const char* job, const int64_t* shape,
                         const char* format, const uint16_t* gate_up, const uint16_t* down,
                         char* error, int error_size) {
  Result<std::unique_ptr<Peer>> peer =
      create(rank, num_ranks, job, {shape[0], shape[1], shape[2], shape[3]}, format, gate_up, down);
  if (peer.has_value()) return peer->release();
  tell(peer.error(), error, static_cast<size_t>(error_size));
  return nullptr;
}

// 0, or not 0 and the reason in `error`.
int argosy_peer_forward(void* handle, int64_t num_tokens, const uint16_t* x, const int32_t* experts,
                        const float* weights, uint16_t* out, char* error, int error_size) {
  const Peer& peer = *static_cast<Peer*>(handle);
  const Status status =
      peer.layer->forward_routed(ConstTensorView(x, DType::kBF16, {num_tokens, peer.hidden}),
                                 ConstTensorView(experts, DType::kI32, {num_tokens, peer.top_k}),
                                 ConstTensorView(weights, DType::kF32, {num_tokens, peer.top_k}),
                                 TensorView(out, DType::kBF16, {num_tokens, peer.hidden}), nullptr);
  if (status.ok()) return 0;
  tell(status, error, static_cast<size_t>(error_size));
  return 1;
}

// Waits for the other ranks, so that they start together. 0 when all came.
int argosy_peer_barrier(void* handle) {
  return static_cast<Peer*>(handle)->group->barrier().ok() ? 0 : 1;
}

void argosy_peer_destroy(void* handle) { delete static_cast<Peer*>(handle); }

// shape: E, K, groups, kept groups. Null, and the reason in `error`, when it fails.
void* argosy_router_create(const char* preset, const int64_t* shape, float factor, char* error,
                           int error_size) {
  Result<RouterSpec> spec = router_preset(preset, shape[0], shape[1]);
  if (spec.has_value()) {
    spec->num_groups = shape[2];
    spec->keep_groups = shape[3];
    spec->routed_scaling_factor = factor;
    return new RouterPeer{*spec, {}};
  }
  tell(spec.error(), error, static_cast<size_t>(error_size));
  return nullptr;
}

// bias: [E] or null. 0, or not 0 and the reason in `error`.
int argosy_router_run(void* handle, int64_t num_tokens, const float* logits, const float* bias,
                      char* error, int error_size) {
  RouterPeer& peer = *static_cast<RouterPeer*>(handle);
  const int64_t num_experts = peer.spec.num_experts;
  RouterInput input;
  input.logits = ConstTensorView(logits, DType::kF32, {num_tokens, num_experts});
  if (bias != nullptr) input.selection_bias = ConstTensorView(bias, DType::kF32, {num_experts});
  const Status status = route(peer.spec, input, nullptr, &peer.routing);
  if (status.ok()) return 0;
  tell(status, error, static_cast<size_t>(error_size));
  return 1;
}

// Experts and weights [T, K] of the last run.
void argosy_router_result(void* handle, int32_t* experts, float* weights) {
  const Routing& routing = static_cast<RouterPeer*>(handle)->routing;
  std::copy(routing.topk_idx.begin(), routing.topk_idx.end(), experts);
  std::copy(routing.topk_weights.values.begin(), routing.topk_weights.values.end(), weights);
}

}  // extern "C"
