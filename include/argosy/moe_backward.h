// Training: what a forward call keeps, and the gradients of the whole layer.
//
// Backward of dispatch is combine with the same plan, and the reverse; no second count exchange. Gradients are bit for bit the
// same for any number of ranks (contract 3.5, 4.1, 4.3). Test: tests/moe/backward_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "argosy/group.h"
#include "argosy/plan.h"
#include "argosy/quantise.h"
#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

// What happens to a tensor between forward and backward.
enum class Keep : uint8_t {
  kSave,       // kept as it is
  kRecompute,  // computed, or exchanged, again by backward; the same bits
  // Kept as e4m3_1x128 with fp32 scales, row by row, so that bits do not depend on ranks, rounds or threads. Backward reads
  // code * scale instead, and so does what is made again from it: gradients are near those of kSave, not the same.
  kFp8,
  kOffload,  // kept as it is in the caller's buffer; the same bits
};
// "save", "recompute", "fp8", "offload".
const char* name_of(Keep keep);
// kNotFound names the word and the known ones.
Result<Keep> parse_keep(std::string_view name);

struct TapePolicy {
  Keep rows = Keep::kSave;  // received rows: S x H of the hidden dtype; again: one more dispatch
  Keep preactivation =
      Keep::kSave;       // gate and up before the activation: 2 x S x F fp32; again: one product
  Keep h = Keep::kSave;  // S x F of the hidden dtype; again: the activation
  // Expert rows: S x H of the hidden dtype; again: one product. Neither kept nor made again with weights inside the
  // activation, whose gradient does not read them.
  Keep results = Keep::kSave;

  bool operator==(const TapePolicy&) const = default;
};
// "rows save, preactivation fp8, h recompute, results recompute".
std::string to_string(const TapePolicy& policy);

// How gradients of what every rank holds (gate, shared experts) are made.
enum class ReplicatedGradients : uint8_t {
  kExact,  // one chain over global token order: the same bits for any number of ranks
  kReduced,  // sums of the ranks, added in rank order: within 1e-6, repeatable for one number of ranks
};

// What sizes depend on, for this rank. MoeLayer::tape_shape() fills what belongs to the layer.
struct TapeShape {
  DType dtype = DType::kUnset;  // of the hidden states
  int64_t hidden = 0, intermediate = 0, num_experts = 0, top_k = 0;
  int64_t shared_intermediate = 0;  // 0: no shared experts
  int num_ranks = 1;
  int64_t round_rows = 0;       // of a receive buffer: ExchangeSize::round_rows
  bool weights_inside = false;  // MoeOptions::weights_inside
  BlockFormat training_format = BlockFormat::kUnset;  // MoeOptions::training_format
  ReplicatedGradients replicated = ReplicatedGradients::kExact;
  // Of a call.
  int64_t num_tokens = 0;     // T of this rank
  int64_t global_tokens = 0;  // of all ranks
  int64_t num_slots = 0;      // S: DispatchPlan::receive_slots of this rank
  int64_t num_rounds = 1;     // DispatchPlan::num_rounds
  // Latency mode: the calls that forward_train took, and the most received rows of one of them. 0: throughput mode.
  int64_t num_calls = 0;
  int64_t call_slots = 0;
};

// Bytes of buffers, each rounded up to 64 as AlignedBuffer does. The one function for planning and for running: buffers are
// made by the table that this sums. Beside it: windows (size_exchange), weights and gradients, what threads keep for products
// (gemm.h), and a few numbers per token and expert (routing, plan).
struct TapeSize {
  int64_t tape_bytes = 0;      // held by a tape from forward to backward
  int64_t offload_bytes = 0;   // of the caller's buffer
  int64_t forward_bytes = 0;   // held by the layer since its first forward_train
  int64_t backward_bytes = 0;  // held by the layer since its first backward
  int64_t exchange_bytes =
      0;  // held by the exchange in calls of several rounds: rows on their way home
};
TapeSize size_tape(const TapePolicy& policy, const TapeShape& shape);

// Filled by MoeLayer::forward_train, read by MoeLayer::backward. Buffers grow and are used again. Movable;
// moved from, it may only be assigned to or destroyed.
class MoeTape {
 public:
  explicit MoeTape(const TapePolicy& policy = {});
  ~MoeTape();
  MoeTape(MoeTape&&) noexcept;
  MoeTape& operator=(MoeTape&&) noexcept;

  // Where tensors with Keep::kOffload go, from the next forward_train on: 64-byte aligned, at least
  // size_tape().offload_bytes. The caller's: forward_train writes it, and it must live, unchanged, until the last backward
  // of that call. Too small or not aligned: an error of forward_train on every rank (kCapacity names the bytes it needs).
  void set_offload(std::span<std::byte> buffer);

  const TapePolicy& policy() const;
  // Of the last forward; empty before. In latency mode, which has no counts of others, what this rank knows: topk_idx and the
  // groups of all rows that came; no destinations, and no Exchange takes it.
  const DispatchPlan& plan() const;
  const Routing& routing() const;
  const TapeShape& shape() const;
  // What it holds now, the caller's buffer not included.
  int64_t num_bytes() const;

  struct State;  // internal: src/moe/tape.h
  State& state() { return *state_; }
  const State& state() const { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

// NaN or Inf in a gradient of an expert's row, or of the weight beside it.
enum class NonFiniteGradients : uint8_t {
  kPass,   // it goes where it goes
  kError,  // kNonFinite on every rank, naming expert and row; before weight gradients are written
};

// Where gradients go. A view without dtype is not computed. Weight gradients are fp32, dense, and those of what every rank
// holds are sums over all ranks, the same on each.
struct MoeGradients {
  TensorView d_hidden;                              // [T, H] of hidden_dtype, unit stride in H
  TensorView d_gate;                                // [E, H]
  TensorView d_gate_bias;                           // [E]
  TensorView d_expert_gate, d_expert_up;            // [L, F, H]
  TensorView d_expert_down;                         // [L, H, F]
  TensorView d_expert_gate_bias, d_expert_up_bias;  // [L, F]
  TensorView d_expert_down_bias;                    // [L, H]
  TensorView d_shared_gate, d_shared_up;            // [Fs, H]
  TensorView d_shared_down;                         // [H, Fs]
  TensorView d_shared_scale;                        // [1, H], the gate of the shared experts
  TensorView d_topk_weights;                        // [T, K], of the weights that combine used
  // Weight gradients are added to what the buffers hold, last and once, instead of written.
  bool accumulate = false;
  ReplicatedGradients replicated = ReplicatedGradients::kExact;
  NonFiniteGradients nonfinite = NonFiniteGradients::kPass;
};

// sqrt of the sum of squares of all weight gradients of a layer: experts of all ranks, replicated ones once. fp64, expert by
// expert: the bits depend on the gradients alone, not on the number of ranks. Over copies too: argosy/gradient_sync.h.
//
// Collective: yes. Blocks: at most step_deadline a step. Errors: kInvalidArgument for a view that is no dense fp32; those of a
// wait.
Result<double> gradient_norm(Group& group, const MoeGradients& gradients);

}  // namespace argosy
