// Names and checks of the activations; their arithmetic is numeric/activation.h and the epilogues of the
// levels. Test: tests/gemm/activation_test.cc.
#include "argosy/activation.h"

#include <fmt/format.h>

#include <cmath>

#include "base/error.h"

namespace argosy {
namespace {

Status check_positive(const Activation& activation, const char* field, float value) {
  if (std::isfinite(value) && value > 0.0f) return {};
  return base::invalid("{} of {} is {}, expected finite and positive", field,
                       name_of(activation.kind), value);
}

}  // namespace

const char* name_of(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kSwiGlu:
      return "swiglu";
    case ActivationKind::kClampedSwiGlu:
      return "clamped_swiglu";
    case ActivationKind::kGeGlu:
      return "geglu";
    case ActivationKind::kGeGluTanh:
      return "geglu_tanh";
    case ActivationKind::kRelu2Glu:
      return "relu2_glu";
  }
  return "unknown";
}

Status validate(const Activation& activation) {
  switch (activation.kind) {
    case ActivationKind::kSwiGlu:
    case ActivationKind::kGeGlu:
    case ActivationKind::kGeGluTanh:
    case ActivationKind::kRelu2Glu:
      return {};
    case ActivationKind::kClampedSwiGlu:
      ARGOSY_RETURN_IF_ERROR(check_positive(activation, "limit", activation.limit));
      return check_positive(activation, "alpha", activation.alpha);
  }
  return base::invalid("activation {} is unknown, expected 0 to {}",
                       static_cast<int32_t>(activation.kind), kNumActivations - 1);
}

std::string to_string(const Activation& activation) {
  if (activation.kind != ActivationKind::kClampedSwiGlu) return name_of(activation.kind);
  return fmt::format("{} limit {} alpha {}", name_of(activation.kind), activation.limit,
                     activation.alpha);
}

}  // namespace argosy
