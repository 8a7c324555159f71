// New weights for a layer that is there, after a step of an optimiser. Test: tests/moe/update_weights_test.cc.
#include "base/error.h"
#include "moe/layer_checks.h"
#include "moe/layer_state.h"

namespace argosy {
namespace {

// What a change of values must leave alone, beside the shapes.
std::vector<std::string> formats_of(const MoeWeights& weights) {
  std::vector<std::string> formats;
  for (const PackedWeights* const packed :
       {&weights.gate_up, &weights.down, &weights.shared_gate_up, &weights.shared_down}) {
    formats.push_back(fmt::format("{} {}{}", name_of(packed->dtype()), name_of(packed->format()),
                                  packed->has_bias() ? " with bias" : ""));
  }
  return formats;
}

}  // namespace

Status MoeLayer::State::check_changed(const LayerShape& before,
                                      const std::vector<std::string>& formats) {
  const Placement placement{router.num_experts, group.num_ranks(), 0};
  ARGOSY_ASSIGN_OR_RETURN(const LayerShape after,
                          check_weights(router, weights, dtype, placement, group.rank()));
  if (after.hidden != before.hidden || after.intermediate != before.intermediate ||
      after.shared_intermediate != before.shared_intermediate ||
      after.shared_gate != before.shared_gate) {
    return base::invalid("widths were {}, {} and {} and are {}, {} and {}", before.hidden,
                         before.intermediate, before.shared_intermediate, after.hidden,
                         after.intermediate, after.shared_intermediate);
  }
  const std::vector<std::string> now = formats_of(weights);
  for (size_t i = 0; i < formats.size(); ++i) {
    if (now[i] != formats[i]) {
      return base::invalid("packed weights {} were {} and are {}", i, formats[i], now[i]);
    }
  }
  ARGOSY_ASSIGN_OR_RETURN(gate, GateProduct::create(weights.gate.view(), weights.gate_bias.view()));
  return {};
}

Status MoeLayer::update_weights(const std::function<Status(MoeWeights&)>& change) {
  State& state = *state_;
  const std::vector<std::string> formats = formats_of(state.weights);
  ++state.weights_version;
  Status status = change(state.weights);
  if (status.ok()) status = state.check_changed(state.shape, formats);
  if (status.ok()) status = state.quantised.take(state.gemm(), state.weights);
  state.weights_status =
      status.ok() ? Status()
                  : Status(status.code(), "the last update_weights failed: " + status.message());
  return status;
}

}  // namespace argosy
