// Codes and scales of experts as quantised checkpoints keep them, by the layouts of docs/checkpoints.md.
//
// Shapes and dtypes are compared before anything is allocated, scales before anything is returned. Test:
// tests/io/quantised_checkpoint_test.cc.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "argosy/checkpoint.h"
#include "argosy/quantise.h"
#include "argosy/status.h"
#include "io/families.h"
#include "io/tensor_directory.h"

namespace argosy::io {

// What follows a matrix's name where its scales are. e8m0 scales may have either, fp32 ones the first.
inline constexpr std::array<std::string_view, 2> kScaleSuffixes = {".weight_scale_inv",
                                                                   ".weight_scale"};

struct QuantisedRules {
  const CheckpointQuantisation* quantisation = nullptr;  // null: nothing is quantised
  OnNonFinite on_nan_scale = OnNonFinite::kNaN;
  DType dequantise_to = DType::kUnset;

  bool converts(std::string_view module) const {
    return quantisation != nullptr && quantisation->converts(module);
  }
};

// Whether the three matrices `prefix` + name of one MLP are quantised. Errors: kUnsupported when some are.
Result<bool> converts_mlp(const QuantisedRules& rules, const std::string& prefix,
                          const MatrixNames& names);

// Errors: kInvalidArgument naming a scale that lies beside one of the three matrices.
Status expect_no_scales(const TensorDirectory& tensors, const std::string& prefix,
                        const MatrixNames& names);

// The three matrices, each NAME.weight with its scales. Precondition: converts_mlp().
Result<ExpertTensors> read_quantised_mlp(const TensorDirectory& tensors,
                                         const QuantisedRules& rules, const std::string& prefix,
                                         const MatrixNames& names, int64_t width, int64_t hidden);

// Expert `expert` of "experts.gate_up_proj_blocks" and so on below `block`, without its biases.
Result<ExpertTensors> read_packed_expert(const TensorDirectory& tensors,
                                         const QuantisedRules& rules, const std::string& block,
                                         int64_t expert, const ModelConfig& config);

}  // namespace argosy::io
