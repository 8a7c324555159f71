// See argosy/bias_update.h. Signs come from integers of 128 bits. Test:
// tests/router/bias_update_test.cc.
#include "argosy/bias_update.h"

#include <cmath>

#include "base/error.h"
#include "platform/float_env.h"

namespace argosy {
namespace {

using base::invalid;
__extension__ using Wide = __int128;

int sign_of(Wide value) { return value > 0 ? 1 : (value < 0 ? -1 : 0); }

// Steps of all experts, given their exact mean and the sum of all signs.
class Steps {
 public:
  Steps(const BiasUpdateSpec& spec, std::span<const int64_t> counts)
      : spec_(spec), counts_(counts) {
    for (const int64_t count : counts) total_ += count;
    for (size_t e = 0; e < counts.size(); ++e) sum_of_signs_ += sign(e);
  }

  float step(size_t expert) const {
    if (!spec_.centred) return spec_.rate * static_cast<float>(sign(expert));
    const auto experts = static_cast<double>(counts_.size());
    const double off_mean =
        (static_cast<double>(sign(expert)) * experts - static_cast<double>(sum_of_signs_)) /
        experts;
    return static_cast<float>(static_cast<double>(spec_.rate) * off_mean);
  }

 private:
  int sign(size_t expert) const {
    return sign_of(total_ - static_cast<Wide>(counts_[expert]) * static_cast<Wide>(counts_.size()));
  }

  const BiasUpdateSpec& spec_;
  std::span<const int64_t> counts_;
  Wide total_ = 0;
  int64_t sum_of_signs_ = 0;
};

Status check(const BiasUpdateSpec& spec, std::span<const int64_t> counts,
             std::span<const float> bias) {
  if (counts.size() != bias.size()) {
    return invalid("{} counts for a bias of {} experts", counts.size(), bias.size());
  }
  if (!std::isfinite(spec.rate) || spec.rate < 0.0f) {
    return invalid("rate is {}, expected finite and not negative", spec.rate);
  }
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] < 0) return invalid("count of expert {} is {}", e, counts[e]);
    if (!std::isfinite(bias[e])) return invalid("selection_bias of expert {} is {}", e, bias[e]);
  }
  return {};
}

}  // namespace

[[gnu::noinline]] Status update_selection_bias(const BiasUpdateSpec& spec,
                                               std::span<const int64_t> counts,
                                               std::span<float> bias) {
  ARGOSY_RETURN_IF_ERROR(check(spec, counts, bias));
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  const Steps steps(spec, counts);
  for (size_t e = 0; e < bias.size(); ++e) {
    if (!std::isfinite(bias[e] + steps.step(e))) {
      return invalid("selection_bias of expert {} is {}: a step of {} leaves fp32", e, bias[e],
                     steps.step(e));
    }
  }
  for (size_t e = 0; e < bias.size(); ++e) bias[e] += steps.step(e);
  return {};
}

}  // namespace argosy
