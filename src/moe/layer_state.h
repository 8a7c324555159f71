// The insides of a MoeLayer, shared by its two modes.
//
// Test: tests/moe/.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "argosy/moe.h"
#include "moe/capacity_drop.h"
#include "moe/expert_products.h"
#include "moe/gate_product.h"
#include "moe/layer_checks.h"
#include "moe/tape.h"
#include "moe/timeline.h"

namespace argosy {

struct BackwardBuffers;
class RowGather;

// Rows that the groups of a round reach to; offsets of empty groups are drawn in.
int64_t end_of_groups(ReceivedRows* received);
// The groups' rows to the same places at `to`.
void copy_groups(const ConstTensorView& rows, const ReceivedRows& received, int64_t row_bytes,
                 std::byte* to);

// Grown, never shrunk. Bytes: tape_size.cc.
struct ForwardBuffers {
  AlignedBuffer logits, inner, shared_inner, shared_rows, shared_scale;
  AlignedBuffer pre_gate,
      pre_up;           // fp32, before the activation, where these are not kept as they are
  AlignedBuffer codes;  // with training_format: operands of a round's product
  // Latency mode: rows of all calls so far, side by side, until their number and order are known.
  AlignedBuffer slot_rows, slot_gate, slot_up, slot_h, slot_results;
};

struct MoeLayer::State : ForwardBuffers {
  State(Group& the_group, const RouterSpec& spec, MoeWeights the_weights, BlockFormat format);
  ~State();
  Group& group;
  RouterSpec router;
  MoeWeights weights;
  QuantisedExperts quantised;  // of these weights
  GateProduct gate;
  LayerShape shape;
  DType dtype = DType::kUnset;
  std::shared_ptr<Exchange> exchange;

  Routing routing;
  std::unique_ptr<CapacityDrop> capacity;    // null: dropless
  bool is_dropped = false;                   // of the last call
  Routing assigned;                          // then the routing before the drop
  std::vector<int64_t> assigned_per_expert;  // of all ranks
  CountsMatrix counts;
  DispatchPlan dispatch_plan;
  ReceivedRows received;
  Timeline timeline;
  uint64_t weights_version = 0;                 // counts update_weights
  Status weights_status;                        // of the last one
  std::vector<const std::byte*> row_addresses;  // of a quantised payload

  // Latency mode; null where the layer never takes it.
  MoeMode mode = MoeMode::kThroughput;
  std::shared_ptr<LatencyExchange> latency;
  bool chunk = false;
  bool weights_inside = false;
  std::vector<float> ones;     // [T, K] what combine weighs with when the weights are inside
  int64_t latency_tokens = 0;  // kAuto: the most tokens of a rank that latency mode is faster for
  LatencyRows latency_rows;
  Routing part;                          // of the routing, for one of several calls
  std::vector<PartTraffic> traffic;      // of the parts of a call
  std::vector<int64_t> received_before;  // [L] latency->stats() before the call

  // Training; null where the layer was not made for it.
  uint64_t id = 0;      // of this layer in this process
  uint16_t number = 0;  // of this layer in its group, the same on every rank; its calls carry it
  std::array<std::string, 2> call_words;  // of forward, of forward_train
  std::unique_ptr<BackwardBuffers> backward;
  std::unique_ptr<RowGather> row_gather;
  MoeTape::State* tape = nullptr;  // of the forward under way

  ExpertProducts experts() { return {weights, quantised, &codes, nullptr}; }
  GemmOptions gemm() const {
    return {group.level(), group.dot_order(), &group.pool(), weights.activation};
  }

  Status check_call(const ConstTensorView& hidden, const TensorView& output) const;
  Status run_router(const ConstTensorView& hidden, const uint8_t* mask);
  // Of assigned to routing; every rank gets the same error.
  Status drop_choices(const Status& local);
  Status check_changed(const LayerShape& before, const std::vector<std::string>& formats);
  Status take_routing(const ConstTensorView& hidden, const ConstTensorView& topk_idx,
                      const ConstTensorView& topk_weights);
  Status run_shared(const ConstTensorView& hidden, const uint8_t* mask, CombineInput* input);
  Status run_inside(const RaggedRows& x, const TensorView& gates, const TensorView& ups,
                    const TensorView& h);
  Status run_experts(const ConstTensorView& rows);
  // training.cc
  TapeShape tape_shape() const;
  Status start_tape(MoeMode taken, const TapeShape& of_call, const uint8_t* mask);
  Status prepare_tape(const uint8_t* mask);
  Status agree_on_tape(const uint8_t* mask);
  Status run_experts_kept(const ConstTensorView& rows, int64_t round);
  Status run_rounds(const ConstTensorView& hidden, const CombineInput& input,
                    const TensorView& output);
  Status run(const Status& local, const ConstTensorView& hidden, const uint8_t* mask,
             const TensorView& output, MoeReport* report);
  void fill_report(MoeReport* report) const;

  // Latency mode: one call, or several of at most max_tokens each. *declined: some rank wants throughput mode.
  Status run_latency(const Status& local, const ConstTensorView& hidden, const uint8_t* mask,
                     const TensorView& output, MoeReport* report, bool* declined);
  Status run_part(const Status& local, const ConstTensorView& hidden, int64_t first,
                  const uint8_t* mask, const TensorView& output, CombineInput* input, bool* is_last,
                  bool* declined);
  const Routing& routing_of_part(const Routing& whole, int64_t first, int64_t count);
  Status run_slot_experts();
  // latency_training.cc
  Status run_slot_experts_kept(bool is_first);
  // Received rows, side by side in `rows`, -> h -> results, also where they belong. `gates`, `ups`: what enters the activation,
  // or without dtype.
  Status run_gathered(const TensorView& rows, const TensorView& gates, const TensorView& ups,
                      const TensorView& h, const TensorView& results);
  Status fill_slot_tape(const uint8_t* mask);
  // A call without rows: every rank's error, or that all go on. `same` as DispatchNote has it.
  Status agree_in_latency_mode(const Status& local, const std::string& same);
  void fill_latency_report(MoeReport* report) const;

  // Calls body(first, count) for every run of unmasked tokens.
  template <typename Body>
  static Status for_each_run(int64_t num_tokens, const uint8_t* mask, const Body& body) {
    for (int64_t first = 0; first < num_tokens;) {
      int64_t end = mask == nullptr ? num_tokens : first;
      while (end < num_tokens && mask[end] != 0) ++end;
      if (end > first) ARGOSY_RETURN_IF_ERROR(body(first, end - first));
      first = end + (mask == nullptr ? 0 : 1);
    }
    return {};
  }
};

}  // namespace argosy
