// Gradients of a layer as the tensors of a checkpoint. The public door is Checkpoint::gradient_tensors.
//
// Test: tests/io/gradient_layout_test.cc.
#pragma once

#include <vector>

#include "argosy/checkpoint.h"
#include "io/layer_layout.h"

namespace argosy::io {

Result<std::vector<OwnedTensor>> gradient_tensors(const ModelConfig& config, const Family& family,
                                                  const LayerLayout& layout,
                                                  const LayerGradients& gradients);

}  // namespace argosy::io
