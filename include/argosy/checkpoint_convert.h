// A checkpoint folder with quantised experts made from one without.
//
// Routed and shared experts become codes and scales in the layouts of docs/checkpoints.md; every other tensor
// is copied byte for byte, and config.json says what was done. Test: tests/io/checkpoint_convert_test.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "argosy/quantise.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

struct ConvertOptions {
  // kE4M3Block128, kE4M3Row128, kMxfp8, kMxfp8Ceil or kMxfp4: those that a checkpoint's config can name.
  BlockFormat format = BlockFormat::kUnset;
  QuantiseOptions quantise = {};
  // Called after each matrix with its name ("model.layers.1.mlp.experts.0.gate_proj"), its values and what
  // they became; an error ends the conversion. May be empty.
  std::function<Status(std::string_view name, const ConstTensorView& values,
                       const ConstQuantisedView& made)>
      on_matrix = nullptr;
};

struct ConvertReport {
  int64_t num_matrices = 0;
  int64_t bytes_before = 0;  // of these matrices
  int64_t bytes_after = 0;
  int64_t num_shards = 0;
};

// Reads checkpoint `dir`, writes folder `target`: config.json with a quantization_config, an index, one shard
// a layer of experts and one for what each source shard holds besides, and copies of the small files beside
// them (tokenizers and the like). Layers without a tensor in the source stay without.
//
// Memory: one layer's quantised experts and one source shard. On failure nothing of the target is left.
// Errors: those of Checkpoint; kInvalidArgument for a target that exists and is not an empty folder, for a source
// that is quantised already, or for another format; those of quantise() naming the matrix; kIo.
Result<ConvertReport> quantise_checkpoint(const std::string& dir, const std::string& target,
                                          const ConvertOptions& options);

}  // namespace argosy
