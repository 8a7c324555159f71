// The model families as data: how each names and means the fields of its config and its tensors.
//
// One row per family; the code that reads configs and checkpoints has no other knowledge of a
// family. docs/checkpoints.md is this table in words. Test: tests/io/config_test.cc,
// tests/io/checkpoint_test.cc.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "argosy/activation.h"
#include "argosy/router.h"

namespace argosy::io {

// Which layers have experts.
enum class LayerRule {
  kAll,
  kAfterFirstDense,  // index >= first_k_dense_replace and index % moe_layer_freq == 0
  kSparseStep,       // (index + 1) % decoder_sparse_step == 0 and not in mlp_only_layers
};

// What limits the choice to some groups of experts.
enum class GroupRule {
  kNone,
  kAlways,      // n_group and topk_group are required
  kTopkMethod,  // only when topk_method is group_limited_greedy
};

enum class NormRule {
  kField,       // norm_topk_prob, required
  kAlways,      // norm_topk_prob may only be true
  kNever,       // norm_topk_prob may only be false
  kOverChosen,  // the score function normalises: norm_topk_prob may only be true
};

// What says how wide the shared experts are, as one MLP.
enum class SharedRule {
  kNone,
  kCount,  // n_shared_experts times the width of a routed expert
  kWidth,  // shared_expert_intermediate_size, required; scaled by sigmoid(x . shared_expert_gate)
};

// How all experts of a layer lie in two tensors, gate_up_proj and down_proj.
enum class FusedLayout {
  kGateFirst,              // [E, 2F, H], gate rows first; [E, H, F]
  kInterleavedTransposed,  // [E, H, 2F], columns gate 0, up 0, gate 1, ..; [E, F, H]
};

// Names of an expert's matrices below "experts.<e>." and of one MLP, without ".weight".
struct MatrixNames {
  std::string_view gate, up, down;
};

struct Family {
  std::string_view name;
  std::string_view width_field;  // holds the width of a routed expert
  ScoreFunction score_function;
  std::string_view score_word;  // the only value of scoring_func
  bool selection_bias;
  GroupRule group_rule;
  GroupScore group_score;
  NormRule norm_rule;
  bool scaling_factor;  // routed_scaling_factor is required; otherwise only 1 is accepted
  SharedRule shared_rule;
  LayerRule layer_rule;
  std::string_view module;  // of the MoE block with per-expert tensors
  MatrixNames expert;
  // What few families have.
  std::string_view shared_module = "shared_experts";
  std::string_view router_module = "gate";
  FusedLayout fused_layout = FusedLayout::kGateFirst;
  ActivationKind activation = ActivationKind::kSwiGlu;  // kClampedSwiGlu reads swiglu_limit, _alpha
  bool biases = false;                                  // of the router and of every expert product
};

inline constexpr MatrixNames kProjections = {"gate_proj", "up_proj", "down_proj"};

inline constexpr std::array<Family, 7> kFamilies = {{
    {.name = "deepseek_v3",
     .width_field = "moe_intermediate_size",
     .score_function = ScoreFunction::kSigmoid,
     .score_word = "sigmoid",
     .selection_bias = true,
     .group_rule = GroupRule::kAlways,
     .group_score = GroupScore::kSumOfBestTwo,
     .norm_rule = NormRule::kField,
     .scaling_factor = true,
     .shared_rule = SharedRule::kCount,
     .layer_rule = LayerRule::kAfterFirstDense,
     .module = "mlp",
     .expert = kProjections},
    {.name = "deepseek_v2",
     .width_field = "moe_intermediate_size",
     .score_function = ScoreFunction::kSoftmax,
     .score_word = "softmax",
     .selection_bias = false,
     .group_rule = GroupRule::kTopkMethod,
     .group_score = GroupScore::kMax,
     .norm_rule = NormRule::kNever,
     .scaling_factor = true,
     .shared_rule = SharedRule::kCount,
     .layer_rule = LayerRule::kAfterFirstDense,
     .module = "mlp",
     .expert = kProjections},
    {.name = "mixtral",
     .width_field = "intermediate_size",
     .score_function = ScoreFunction::kSoftmax,
     .score_word = "softmax",
     .selection_bias = false,
     .group_rule = GroupRule::kNone,
     .group_score = GroupScore::kUnset,
     .norm_rule = NormRule::kAlways,
     .scaling_factor = false,
     .shared_rule = SharedRule::kNone,
     .layer_rule = LayerRule::kAll,
     .module = "block_sparse_moe",
     .expert = {"w1", "w3", "w2"}},
    {.name = "qwen2_moe",
     .width_field = "moe_intermediate_size",
     .score_function = ScoreFunction::kSoftmax,
     .score_word = "softmax",
     .selection_bias = false,
     .group_rule = GroupRule::kNone,
     .group_score = GroupScore::kUnset,
     .norm_rule = NormRule::kField,
     .scaling_factor = false,
     .shared_rule = SharedRule::kWidth,
     .layer_rule = LayerRule::kSparseStep,
     .module = "mlp",
     .expert = kProjections,
     .shared_module = "shared_expert"},
    {.name = "qwen3_moe",
     .width_field = "moe_intermediate_size",
     .score_function = ScoreFunction::kSoftmax,
     .score_word = "softmax",
     .selection_bias = false,
     .group_rule = GroupRule::kNone,
     .group_score = GroupScore::kUnset,
     .norm_rule = NormRule::kField,
     .scaling_factor = false,
     .shared_rule = SharedRule::kNone,
     .layer_rule = LayerRule::kSparseStep,
     .module = "mlp",
     .expert = kProjections},
    {.name = "olmoe",
     .width_field = "intermediate_size",
     .score_function = ScoreFunction::kSoftmax,
     .score_word = "softmax",
     .selection_bias = false,
     .group_rule = GroupRule::kNone,
     .group_score = GroupScore::kUnset,
     .norm_rule = NormRule::kField,
     .scaling_factor = false,
     .shared_rule = SharedRule::kNone,
     .layer_rule = LayerRule::kAll,
     .module = "mlp",
     .expert = kProjections},
    {.name = "gpt_oss",
     .width_field = "intermediate_size",
     .score_function = ScoreFunction::kSoftmaxTopK,
     .score_word = "softmax",
     .selection_bias = false,
     .group_rule = GroupRule::kNone,
     .group_score = GroupScore::kUnset,
     .norm_rule = NormRule::kOverChosen,
     .scaling_factor = false,
     .shared_rule = SharedRule::kNone,
     .layer_rule = LayerRule::kAll,
     .module = "mlp",
     .expert = kProjections,
     .router_module = "router",
     .fused_layout = FusedLayout::kInterleavedTransposed,
     .activation = ActivationKind::kClampedSwiGlu,
     .biases = true},
}};

// The MoE block's module in checkpoints with fused experts, of every family.
inline constexpr std::string_view kFusedModule = "mlp";

// Null for an unknown name.
constexpr const Family* find_family(std::string_view name) {
  for (const Family& family : kFamilies) {
    if (family.name == name) return &family;
  }
  return nullptr;
}

}  // namespace argosy::io
