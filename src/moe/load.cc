// From a checkpoint to one rank's packed weights, expert by expert: at no time does a rank hold
// more than one expert unpacked. Test: tests/moe/load_test.cc.
#include "argosy/moe.h"
#include "base/error.h"

namespace argosy {
namespace {

// Packs the gate, up and down of one MLP, and its biases if any, as group `group`.
Status pack(const ExpertTensors& expert, int64_t group, PackedWeights* gate_up,
            PackedWeights* down) {
  if (expert.quantised.has_value()) {
    const ExpertTensors::Quantised& codes = *expert.quantised;
    ARGOSY_RETURN_IF_ERROR(gate_up->set_group(group, codes.gate.view(), codes.up.view()));
    ARGOSY_RETURN_IF_ERROR(down->set_group(group, codes.down.view()));
  } else {
    ARGOSY_RETURN_IF_ERROR(gate_up->set_group(group, expert.gate.view(), expert.up.view()));
    ARGOSY_RETURN_IF_ERROR(down->set_group(group, expert.down.view()));
  }
  if (!gate_up->has_bias()) return {};
  ARGOSY_RETURN_IF_ERROR(gate_up->set_bias(group, expert.gate_bias.view(), expert.up_bias.view()));
  return down->set_bias(group, expert.down_bias.view());
}

// Room for matrices like `first`: dense, or codes and scales of its format.
Result<PackedWeights> create_like(const Tensor& first, const ConstQuantisedView& first_codes,
                                  PackedWeights::Kind kind, int64_t num_groups, int64_t n,
                                  int64_t k) {
  if (first_codes.format == BlockFormat::kUnset) {
    return PackedWeights::create(kind, first.view().dtype, num_groups, n, k);
  }
  return PackedWeights::create_quantised(kind, first_codes.format, num_groups, n, k);
}

// Room for MLPs like `first`, of `width`; none set.
Status create_experts(const ExpertTensors& first, int64_t num_groups, int64_t hidden, int64_t width,
                      PackedWeights* gate_up, PackedWeights* down) {
  ConstQuantisedView gate_codes, down_codes;
  if (first.quantised.has_value()) {
    gate_codes = first.quantised->gate.view();
    down_codes = first.quantised->down.view();
  }
  ARGOSY_ASSIGN_OR_RETURN(
      *gate_up,
      create_like(first.gate, gate_codes, PackedWeights::Kind::kGateUp, num_groups, width, hidden));
  ARGOSY_ASSIGN_OR_RETURN(*down, create_like(first.down, down_codes, PackedWeights::Kind::kPlain,
                                             num_groups, hidden, width));
  return {};
}

// A rank without experts still takes part; its empty weights carry the sizes.
Status create_none(const ModelConfig& config, DType dtype, MoeWeights* weights) {
  ARGOSY_ASSIGN_OR_RETURN(weights->gate_up,
                          PackedWeights::create(PackedWeights::Kind::kGateUp, dtype, 0,
                                                config.intermediate, config.hidden));
  ARGOSY_ASSIGN_OR_RETURN(
      weights->down, PackedWeights::create(PackedWeights::Kind::kPlain, dtype, 0, config.hidden,
                                           config.intermediate));
  return {};
}

Status add_biases(const ModelConfig& config, MoeWeights* weights) {
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
    ARGOSY_RETURN_IF_ERROR(create_experts(*shared.shared, 1, config.hidden,
                                          config.shared_intermediate, &weights.shared_gate_up,
                                          &weights.shared_down));
    ARGOSY_RETURN_IF_ERROR(pack(*shared.shared, 0, &weights.shared_gate_up, &weights.shared_down));
  }
  const Placement placement{config.router.num_experts, num_ranks, 0};
  const int64_t num_local = placement.num_local(rank);
  weights.first_expert = placement.begin(rank);
  for (int64_t local = 0; local < num_local; ++local) {
    ARGOSY_ASSIGN_OR_RETURN(const ExpertTensors expert,
                            checkpoint.read_expert(layer, placement.begin(rank) + local));
    if (local == 0) {
      ARGOSY_RETURN_IF_ERROR(create_experts(expert, num_local, config.hidden, config.intermediate,
                                            &weights.gate_up, &weights.down));
      ARGOSY_RETURN_IF_ERROR(add_biases(config, &weights));
    }
    ARGOSY_RETURN_IF_ERROR(pack(expert, local, &weights.gate_up, &weights.down));
  }
  if (num_local == 0) {
    ARGOSY_RETURN_IF_ERROR(create_none(config, weights.gate.view().dtype, &weights));
    ARGOSY_RETURN_IF_ERROR(add_biases(config, &weights));
  }
  return weights;
}

}  // namespace argosy
