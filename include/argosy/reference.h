// A dense MoE layer in fp64, the yardstick of the checks: a loop over tokens and their experts, no
// ranks, no packing, no fused steps. Reads the checkpoint's tensors by their names on its own;
// shares with the layer only the file reader and the config. Slow. Test:
// tests/moe/reference_test.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

struct ReferenceRouting {
  std::vector<int32_t> experts;  // [K], falling selection score, ties to the lowest id
  std::vector<double> weights;   // [K]
  // Between the K-th and the best refused selection score (or between the groups at the group
  // limit, if smaller), relative to the largest term (score, bias, sum) of the two; at least 2^-126
  // is divided by, so that what fp32 cannot tell apart has gap 0. Infinite when nothing was
  // refused.
  double selection_gap = 0;
};

// kFp32 rounds scores, selection scores and group scores to fp32 before they are compared: a gap of
// 0 then is a tie for every system that selects in fp32. Weights stay fp64.
enum class SelectionPrecision { kFp64, kFp32 };

// Routes one token from its logits [E] by the rules of `spec` (contract 1.2 to 1.7). Logits that
// are not finite count as a row of zeros. `selection_bias` [E], or empty when the spec has none.
// Preconditions: validate(spec) is ok; sizes fit.
ReferenceRouting reference_route(const RouterSpec& spec, std::span<const double> logits,
                                 std::span<const double> selection_bias,
                                 SelectionPrecision precision);

struct ReferenceToken {
  std::vector<int32_t> experts;  // [K], falling selection score, ties to the lowest id
  std::vector<double> weights;   // [K]
  double selection_gap = 0;      // as in ReferenceRouting
  std::vector<double> output;    // [H]
};

class ReferenceLayer {
 public:
  // Reads the whole layer, in its stored dtype. Errors: those of Checkpoint.
  static Result<ReferenceLayer> open(const std::string& dir, int64_t layer,
                                     const CheckpointOptions& options = {});
  ~ReferenceLayer();
  ReferenceLayer(ReferenceLayer&&) noexcept;

  // One token: hidden [H] in fp64. Weights are the stored values, exactly; no step rounds below
  // fp64. When `experts` is not empty these are used (weights from the gate) instead of the own
  // choice; selection_gap stays that of the own choice. `routed` [H], when not empty, is what the routed experts read in
  // place of hidden: the row as it travelled. `weights_inside` the activation, as MoeOptions has it. Preconditions: sizes fit,
  // experts in [0, E).
  ReferenceToken run(std::span<const double> hidden, std::span<const int32_t> experts = {},
                     std::span<const double> routed = {}, bool weights_inside = false) const;

 private:
  struct State;
  explicit ReferenceLayer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace argosy
