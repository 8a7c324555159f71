// A dense MoE layer in fp64, the yardstick of the checks: a loop over tokens and their experts, no ranks,
// no packing, no fused steps. Reads the checkpoint's tensors by their names on its own; shares with the
// layer only the file reader and the config. Slow. Test: tests/moe/reference_test.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

struct ReferenceToken {
  std::vector<int32_t> experts;   // [K], falling selection score, ties to the lowest id
  std::vector<double> weights;    // [K]
  double selection_gap = 0;       // between the K-th and the best refused selection score (or the best
                                  // refused group's, if smaller), relative to the larger magnitude
  std::vector<double> output;     // [H]
};

class ReferenceLayer {
 public:
  // Errors: those of Checkpoint.
  static Result<ReferenceLayer> open(const std::string& dir, int64_t layer);
  ~ReferenceLayer();
  ReferenceLayer(ReferenceLayer&&) noexcept;

  // One token: hidden [H] in fp64. Weights are the stored values, exactly; no step rounds below fp64.
  // When `experts` is not empty these are used (weights from the gate) instead of the own choice.
  ReferenceToken run(std::span<const double> hidden, std::span<const int32_t> experts = {}) const;

 private:
  struct State;
  explicit ReferenceLayer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace argosy
