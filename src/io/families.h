// The model families as data: how each names and means the fields of its config and its tensors.
//
// One row per family; the code that reads configs and checkpoints has no other knowledge of a
// family. docs/checkpoints.md is this table in words. Test: tests/io/config_test.cc,
// tests/io/checkpoint_test.cc.
#pragma once

#include <array>
#include <span>
#include <string_view>

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
  kField,   // norm_topk_prob, required
  kAlways,  // norm_topk_prob may only be true
  kNever,   // norm_topk_prob may only be false
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
  bool shared_experts;  // n_shared_experts is read; otherwise only 0 is accepted
  LayerRule layer_rule;
  std::string_view module;  // of the MoE block with per-expert tensors
  MatrixNames expert;
};

inline constexpr MatrixNames kProjections = {"gate_proj", "up_proj", "down_proj"};

inline constexpr std::array<Family, 5> kFamilies = {{
    {.name = "deepseek_v3",
     .width_field = "moe_intermediate_size",
     .score_function = ScoreFunction::kSigmoid,
     .score_word = "sigmoid",
     .selection_bias = true,
     .group_rule = GroupRule::kAlways,
     .group_score = GroupScore::kSumOfBestTwo,
     .norm_rule = NormRule::kField,
     .scaling_factor = true,
     .shared_experts = true,
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
     .shared_experts = true,
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
     .shared_experts = false,
     .layer_rule = LayerRule::kAll,
     .module = "block_sparse_moe",
     .expert = {"w1", "w3", "w2"}},
    {.name = "qwen3_moe",
     .width_field = "moe_intermediate_size",
     .score_function = ScoreFunction::kSoftmax,
     .score_word = "softmax",
     .selection_bias = false,
     .group_rule = GroupRule::kNone,
     .group_score = GroupScore::kUnset,
     .norm_rule = NormRule::kField,
     .scaling_factor = false,
     .shared_experts = false,
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
     .shared_experts = false,
     .layer_rule = LayerRule::kAll,
     .module = "mlp",
     .expert = kProjections},
}};

// Families that are known but not built yet.
inline constexpr std::array<std::string_view, 2> kLaterFamilies = {"qwen2_moe", "gpt_oss"};

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
