// The gradients of a training step over all ranks: sums over the copies of every parameter, the mean over the tokens of the
// global batch, the norm, and clipping.
//
// Ranks stand in a grid of E x C. A row of it is an expert-parallel group (`ep`, E ranks): it holds every expert once and
// runs a part of the batch. A column (`copies`, C ranks) holds the same experts in every row: what others call the expert
// data parallel group. Every rank is in one of each (argosy/rank_grid.h).
//
//   gradient of           MoeLayer::backward has added        added here
//   experts               the rows of all ranks of `ep`       over `copies`
//   gate, shared experts  the tokens of all ranks of `ep`     over `copies`
//   all                                                       x 1 / tokens of the global batch
//
// d_output is the gradient of a sum over tokens. It is never divided by the size of a group: an expert has already got the
// tokens of all ranks (Megatron-LM 5956: gradients E times too large). Test: tests/moe/gradient_sync_test.cc.
#pragma once

#include <cstdint>
#include <memory>

#include "argosy/group.h"
#include "argosy/moe_backward.h"
#include "argosy/status.h"

namespace argosy {

// The same on every rank.
struct GradientSyncOptions {
  // Valid tokens of the global batch; 0: what the ranks give is added up.
  int64_t global_tokens = 0;
  // Above this norm gradients are multiplied by max_norm / norm; 0: never.
  double max_norm = 0;
  // NaN or Inf among the gradients of all ranks: kNonFinite names the tensor, the expert and the place; or they stay, the norm
  // is not finite and nothing is clipped.
  NonFiniteGradients nonfinite = NonFiniteGradients::kError;
};

struct GradientSummary {
  int64_t num_tokens = 0;  // that the sums were divided by
  double norm = 0;  // of the mean, before clipping: experts once each, what every rank holds once
  float clip_scale = 1;  // what gradients were multiplied by at last
};

class GradientSync {
 public:
  // copies: null, or of one rank: every expert exists once. Both groups must outlive the result.
  //
  // Collective: yes, over both. Blocks: at most the groups' step_deadline for each step. Errors, on every rank of the grid
  // that they concern: kDisagree for ranks that stand in no grid (their number or place in one group differs within the
  // other); kOutOfMemory; those of a wait.
  static Result<std::unique_ptr<GradientSync>> create(Group& ep, Group* copies);
  ~GradientSync();

  // Every weight gradient of `gradients` becomes the mean over the global batch, in place. d_hidden and d_topk_weights
  // belong to tokens and are left alone.
  //
  // Sums are fp32 in the order of the ranks in `copies`; then one division by the number of tokens, rounded once: without
  // copies the bits do not depend on the number of ranks, with them the result is within 1e-6 of one rank's that has the
  // whole batch, and the same in every run. The norm is fp64, expert by expert: its bits depend on the gradients alone.
  //
  // Collective: yes, over both groups. Blocks: at most step_deadline for each step. Allocates: a few small buffers.
  // in   num_tokens  valid tokens of this rank, of all micro-batches that the gradients hold; 0 is fine
  // Errors, the same on every rank: kInvalidArgument for a view that is no dense fp32 or does not fit the others, a negative
  // number, a global batch without a token; kDisagree names the tensor or option that differs and its ranks. Gradients
  // are then unchanged. kNonFinite: they hold the means, not clipped. The groups stay usable. kTimeout, kPeerLost, kAborted.
  Result<GradientSummary> run(const MoeGradients& gradients, int64_t num_tokens,
                              const GradientSyncOptions& options);

  struct State;  // internal: src/moe/gradient_sync.cc

 private:
  explicit GradientSync(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace argosy
