// A training step as the comparison calls it: a small C interface around forward_train and backward, for ctypes.
//
// One rank, one thread, the layer's own router; weights in bf16 as checkpoints hold them, their gradients fp32.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>

#include "argosy/moe.h"
#include "argosy/router.h"

namespace {

using namespace argosy;  // NOLINT(google-build-using-namespace)

struct TrainPeer {
  std::unique_ptr<Group> group;
  std::unique_ptr<MoeLayer> layer;
  MoeTape tape;
  Tensor d_gate, d_expert_gate, d_expert_up, d_expert_down;
  int64_t hidden = 0;
};

struct Shape {
  int64_t num_experts, top_k, hidden, intermediate;
};

Result<MoeWeights> pack(const Shape& shape, const uint16_t* gate, const uint16_t* gate_up,
                        const uint16_t* down) {
  const int64_t e = shape.num_experts, h = shape.hidden, f = shape.intermediate;
  MoeWeights weights;
  ARGOSY_ASSIGN_OR_RETURN(weights.gate, Tensor::zeros(DType::kBF16, {e, h}));
  std::copy(gate, gate + e * h, weights.gate.view().as<uint16_t>());
  ARGOSY_ASSIGN_OR_RETURN(
      weights.gate_up, PackedWeights::create(PackedWeights::Kind::kGateUp, DType::kBF16, e, f, h));
  ARGOSY_ASSIGN_OR_RETURN(
      weights.down, PackedWeights::create(PackedWeights::Kind::kPlain, DType::kBF16, e, h, f));
  for (int64_t expert = 0; expert < e; ++expert) {
    const uint16_t* const wide = gate_up + expert * 2 * f * h;
    ARGOSY_RETURN_IF_ERROR(
        weights.gate_up.set_group(expert, ConstTensorView(wide, DType::kBF16, {f, h}),
                                  ConstTensorView(wide + f * h, DType::kBF16, {f, h})));
    ARGOSY_RETURN_IF_ERROR(weights.down.set_group(
        expert, ConstTensorView(down + expert * h * f, DType::kBF16, {h, f})));
  }
  return weights;
}

Result<std::unique_ptr<TrainPeer>> create(const Shape& shape, const uint16_t* gate,
                                          const uint16_t* gate_up, const uint16_t* down) {
  const int64_t e = shape.num_experts, h = shape.hidden, f = shape.intermediate;
  auto peer = std::make_unique<TrainPeer>();
  ARGOSY_ASSIGN_OR_RETURN(peer->group, Group::join({}));
  ARGOSY_ASSIGN_OR_RETURN(MoeWeights weights, pack(shape, gate, gate_up, down));
  ARGOSY_ASSIGN_OR_RETURN(const RouterSpec router, router_preset("mixtral", e, shape.top_k));
  MoeOptions options;
  options.hidden_dtype = DType::kBF16;
  options.training = true;
  ARGOSY_ASSIGN_OR_RETURN(peer->layer,
                          MoeLayer::create(*peer->group, router, std::move(weights), options));
  ARGOSY_ASSIGN_OR_RETURN(peer->d_gate, Tensor::zeros(DType::kF32, {e, h}));
  ARGOSY_ASSIGN_OR_RETURN(peer->d_expert_gate, Tensor::zeros(DType::kF32, {e, f, h}));
  ARGOSY_ASSIGN_OR_RETURN(peer->d_expert_up, Tensor::zeros(DType::kF32, {e, f, h}));
  ARGOSY_ASSIGN_OR_RETURN(peer->d_expert_down, Tensor::zeros(DType::kF32, {e, h, f}));
  peer->hidden = h;
  return peer;
}

Status step(TrainPeer* peer, int64_t num_tokens, const uint16_t* x, const uint16_t* d_output,
            uint16_t* output, uint16_t* d_hidden) {
  const auto in = [&](const uint16_t* data) {
    return ConstTensorView(data, DType::kBF16, {num_tokens, peer->hidden});
  };
  const auto out = [&](uint16_t* data) {
    return TensorView(data, DType::kBF16, {num_tokens, peer->hidden});
  };
  MoeGradients gradients;
  gradients.d_hidden = out(d_hidden);
  gradients.d_gate = peer->d_gate.view();
  gradients.d_expert_gate = peer->d_expert_gate.view();
  gradients.d_expert_up = peer->d_expert_up.view();
  gradients.d_expert_down = peer->d_expert_down.view();
  ARGOSY_RETURN_IF_ERROR(
      peer->layer->forward_train(in(x), nullptr, out(output), &peer->tape, nullptr));
  return peer->layer->backward(peer->tape, in(x), in(d_output), {}, gradients);
}

void tell(const Status& status, char* error, size_t size) {
  std::snprintf(error, size, "%s", status.to_string().c_str());
}

}  // namespace

extern "C" {

// shape: E, K, H, F; gate [E, H], gate_up [E, 2F, H], down [E, H, F] in bf16. Null, and the reason in `error`, when it fails.
void* argosy_train_create(const int64_t* shape, const uint16_t* gate, const uint16_t* gate_up,
                          const uint16_t* down, char* error, int error_size) {
  Result<std::unique_ptr<TrainPeer>> peer =
      create({shape[0], shape[1], shape[2], shape[3]}, gate, gate_up, down);
  if (peer.has_value()) return peer->release();
  tell(peer.error(), error, static_cast<size_t>(error_size));
  return nullptr;
}

// Forward, and backward with all gradients. 0, or not 0 and the reason in `error`.
int argosy_train_step(void* handle, int64_t num_tokens, const uint16_t* x, const uint16_t* d_output,
                      uint16_t* output, uint16_t* d_hidden, char* error, int error_size) {
  const Status status =
      step(static_cast<TrainPeer*>(handle), num_tokens, x, d_output, output, d_hidden);
  if (status.ok()) return 0;
  tell(status, error, static_cast<size_t>(error_size));
  return 1;
}

// Of the last step, fp32: 0 the router's gate [E, H], 1 gate [E, F, H], 2 up [E, F, H], 3 down [E, H, F].
const float* argosy_train_gradient(void* handle, int which) {
  const TrainPeer& peer = *static_cast<TrainPeer*>(handle);
  const Tensor* const all[] = {&peer.d_gate, &peer.d_expert_gate, &peer.d_expert_up,
                               &peer.d_expert_down};
  return all[which]->view().as<float>();
}

}  // extern "C"
