// What an expert does between its products: h = activation(x . gate, x . up), in fp32.
//
// One enum for every place that names an activation: checkpoint configs, the layer, the epilogue of
// the grouped GEMM, its backward, the fp64 reference. Arithmetic: contract 3.5 and 4.4. Test:
// tests/gemm/, tests/moe/.
#pragma once

#include <cstdint>
#include <string>

#include "argosy/status.h"

namespace argosy {

// All are gated: h = act(gate) * up, and one polynomial stands behind each at every level.
enum class ActivationKind : int32_t {
  kSwiGlu = 0,     // act = silu, gate * sigmoid(gate)
  kClampedSwiGlu,  // gpt-oss: g = min(gate, limit), u = up clamped to [-limit, limit];
                   // g * sigmoid(alpha * g) * (u + 1)
  kGeGlu,          // act = GELU by erf, gate * Phi(gate)
  kGeGluTanh,      // act = GELU by tanh, gate * sigmoid(2 sqrt(2 / pi) (gate + 0.044715 gate^3))
  kRelu2Glu,       // act = max(gate, 0)^2
};
inline constexpr int kNumActivations = 5;
// "swiglu", "clamped_swiglu", "geglu", "geglu_tanh", "relu2_glu".
const char* name_of(ActivationKind kind);

struct Activation {
  ActivationKind kind = ActivationKind::kSwiGlu;
  // Read by kClampedSwiGlu only. The values of gpt-oss.
  float limit = 7.0f;
  float alpha = 1.702f;
};

// Ok, or kInvalidArgument that names field and value: an unknown kind; a limit or alpha that is
// read and not finite and positive.
Status validate(const Activation& activation);

// "swiglu", or "clamped_swiglu limit 7 alpha 1.702".
std::string to_string(const Activation& activation);

}  // namespace argosy
