// Tensors of a safetensors file to codes and scales, and back.
//
// NAME becomes NAME.codes, NAME.scales, NAME.tag (the payload tag: format and width) and for nvfp4
// NAME.tensor_scales; docs/formats.md. Test: tests/cli/quantise_test.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/quantise.h"
#include "argosy/status.h"
#include "argosy/thread_pool.h"
#include "tools/quantise_error.h"

namespace argosy::tools {

// FILE, FILE:TENSOR or FILE:PATTERN with * and ?.
struct TensorSelection {
  std::string file;
  std::string pattern;  // empty: all
};
// A word that names a file is one, colons or not; else the last colon splits.
TensorSelection parse_selection(const std::string& word);

struct QuantiseSettings {
  BlockFormat format = BlockFormat::kUnset;  // kUnset when dequantising
  DType dtype = DType::kBF16;                // of dequantised tensors
  OnNonFinite non_finite = OnNonFinite::kNaN;
  ThreadPool* pool = nullptr;
};

struct ConvertedTensor {
  std::string name;
  BlockFormat format = BlockFormat::kUnset;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t bytes = 0;    // codes and scales
  QuantiseError error;  // not when dequantising
};

struct Conversion {
  std::vector<ConvertedTensor> tensors;  // by rising name
  std::vector<std::string> skipped;      // no bf16 or fp32 matrices, though they were selected
  // What is to be written; `owned` and `owned_quantised` hold its memory.
  std::vector<NamedTensor> output;
  std::vector<Tensor> owned;
  std::vector<QuantisedTensor> owned_quantised;
};

// Every selected bf16 or fp32 matrix. Errors: kNotFound when nothing is selected; kInvalidArgument when TENSOR
// or all that PATTERN or FILE select is no such matrix; those of quantise(), naming the tensor.
Result<Conversion> quantise_tensors(const TensorSelection& selection,
                                    const QuantiseSettings& settings);

// Every selected NAME that has a NAME.tag. Errors: kNotFound, kInvalidArgument, kCorruptData, kNonFinite, each
// naming the tensor.
Result<Conversion> dequantise_tensors(const TensorSelection& selection,
                                      const QuantiseSettings& settings);

}  // namespace argosy::tools
