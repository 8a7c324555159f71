// Where the tensors of each MoE layer are, found once when a checkpoint is opened.
//
// A tensor of an MoE block is either known by the family's table or reported; nothing is passed
// over. Test: tests/io/checkpoint_test.cc.
#pragma once

#include <string>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/status.h"
#include "io/families.h"
#include "io/tensor_directory.h"

namespace argosy::io {

enum class ExpertLayout {
  kSeparate,  // experts.<e>.<matrix>.weight, quantised with .weight_scale_inv or .weight_scale
  kFused,     // experts.gate_up_proj and experts.down_proj, by the family's FusedLayout
  kPacked,    // experts.gate_up_proj_blocks, _scales, experts.down_proj_blocks, _scales: mxfp4
};

struct LayerLayout {
  std::string block;  // "model.layers.1.mlp."
  ExpertLayout experts = ExpertLayout::kSeparate;
  Status problem;  // why the layer cannot be read, when it cannot
};

// One entry per layer; those of dense layers stay empty. Errors: kInvalidArgument when a layer that
// the config calls dense has experts, or when names of two different prefixes are there.
Result<std::vector<LayerLayout>> find_layer_layouts(const TensorDirectory& directory,
                                                    const ModelConfig& config,
                                                    const Family& family);

}  // namespace argosy::io
