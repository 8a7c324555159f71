// From a checkpoint to one rank's packed weights, expert by expert: at no time does a rank hold
// more than one expert unpacked. Test: tests/moe/load_test.cc.
#include "argosy/moe.h"
#include "base/error.h"

namespace argosy {
namespace {

// Packs the gate, up and down of one MLP, and its biases if any, as group `group`.
Status pack(const ExpertTensors& expert, int64_t group, PackedWeights* gate_up,
            PackedWeights* down) {
  ARGOSY_RETURN_IF_ERROR(gate_up->set_group(group, expert.gate.view(), expert.up.view()));
  ARGOSY_RETURN_IF_ERROR(down->set_group(group, expert.down.view()));
  if (!gate_up->has_bias()) return {};
  ARGOSY_RETURN_IF_ERROR(gate_up->set_bias(group, expert.gate_bias.view(), expert.up_bias.view()));
  return down->set_bias(group, expert.down_bias.view());
}

// Room for the routed experts of a rank, none set.
Status create_experts(const ModelConfig& config, DType dtype, int64_t num_local,
                      MoeWeights* weights) {
  ARGOSY_ASSIGN_OR_RETURN(weights->gate_up,
                          PackedWeights::create(PackedWeights::Kind::kGateUp, dtype, num_local,
                                                config.intermediate, config.hidden));
  ARGOSY_ASSIGN_OR_RETURN(weights->down,
                          PackedWeights::create(PackedWeights::Kind::kPlain, dtype, num_local,
                                                config.hidden, config.intermediate));
  if (!config.expert_bias) return {};
  ARGOSY_RETURN_IF_ERROR(weights->gate_up.add_bias());
  return weights->down.add_bias();
}

}  // namespace

Result<MoeWeights> load_moe_weights(const Checkpoint& checkpoint, int64_t layer, int rank,
                                    int num_ranks) {
  const ModelConfig& config = checkpoint.config();
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    return base::invalid("rank {} is outside [0, {})", rank, num_ranks);
  }
  MoeWeights weights;
  ARGOSY_ASSIGN_OR_RETURN(SharedTensors shared, checkpoint.read_shared(layer));
  weights.gate = std::move(shared.gate);
  weights.gate_bias = std::move(shared.gate_bias);
  weights.selection_bias = std::move(shared.selection_bias);
  weights.shared_gate = std::move(shared.shared_gate);
  weights.activation = config.activation;
  if (shared.shared.has_value()) {
    const DType dtype = shared.shared->gate.view().dtype;
    const int64_t width = config.shared_intermediate;
    ARGOSY_ASSIGN_OR_RETURN(
        weights.shared_gate_up,
        PackedWeights::create(PackedWeights::Kind::kGateUp, dtype, 1, width, config.hidden));
    ARGOSY_ASSIGN_OR_RETURN(
        weights.shared_down,
        PackedWeights::create(PackedWeights::Kind::kPlain, dtype, 1, config.hidden, width));
    ARGOSY_RETURN_IF_ERROR(pack(*shared.shared, 0, &weights.shared_gate_up, &weights.shared_down));
  }
  const Placement placement{config.router.num_experts, num_ranks, 0};
  const int64_t num_local = placement.num_local(rank);
  weights.first_expert = placement.begin(rank);
  for (int64_t local = 0; local < num_local; ++local) {
    ARGOSY_ASSIGN_OR_RETURN(const ExpertTensors expert,
                            checkpoint.read_expert(layer, placement.begin(rank) + local));
    if (local == 0) {
      const DType dtype = expert.gate.view().dtype;
      ARGOSY_RETURN_IF_ERROR(create_experts(config, dtype, num_local, &weights));
    }
    ARGOSY_RETURN_IF_ERROR(pack(expert, local, &weights.gate_up, &weights.down));
  }
  if (num_local == 0) {
    // A rank without experts still takes part; its empty weights carry the sizes.
    const DType dtype = weights.gate.view().dtype;
    ARGOSY_RETURN_IF_ERROR(create_experts(config, dtype, 0, &weights));
  }
  return weights;
}

}  // namespace argosy
