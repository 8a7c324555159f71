// What an expert does between its products: h = activation(x . gate, x . up), in fp32.
//
// One enum for every place that names an activation: checkpoint configs, the layer, the epilogue of the
// grouped GEMM, the fp64 reference. Arithmetic: contract 3.5 and 4.4. Test: tests/gemm/, tests/moe/.
#pragma once

#include <cstdint>
#include <string>

#include "argosy/status.h"

namespace argosy {

enum class ActivationKind : int32_t {
  kSwiGlu = 0,     // silu(gate) * up
  kClampedSwiGlu,  // gpt-oss: g = min(gate, limit), u = up clamped to [-limit, limit];
                   // g * sigmoid(alpha * g) * (u + 1)
};
inline constexpr int kNumActivations = 2;
// "swiglu", "clamped_swiglu".
const char* name_of(ActivationKind kind);

struct Activation {
  ActivationKind kind = ActivationKind::kSwiGlu;
  // Read by kClampedSwiGlu only. The values of gpt-oss.
  float limit = 7.0f;
  float alpha = 1.702f;
};

// Ok, or kInvalidArgument that names field and value: an unknown kind; a limit or alpha that is read and not
// finite and positive.
Status validate(const Activation& activation);

// "swiglu", or "clamped_swiglu limit 7 alpha 1.702".
std::string to_string(const Activation& activation);

}  // namespace argosy
