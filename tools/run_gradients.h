// Gradients of `argosy run --backward`: as the checkpoint's tensors, and against a file of them. Test:
// tests/cli/backward_test.cc.
#pragma once

#include <string>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "tools/check.h"
#include "tools/run_ranks.h"

namespace argosy::tools {

// A tensor in another dtype: fp32 to bf16 rounds to nearest even. Errors: kInvalidArgument unless both are bf16 or fp32.
Result<Tensor> converted(const char* option, Tensor tensor, DType dtype);

// d.hidden and the layer's tensors, names sorted.
Result<std::vector<OwnedTensor>> gradient_tensors(const Checkpoint& checkpoint, int64_t layer,
                                                  const RanksResult& result);

struct GradientError {
  std::string name;
  PeakError error;
};
// Every tensor against the one of the same name and shape in the file, fp32 or bf16. Errors: kNotFound names what the file
// lacks; kInvalidArgument; kNonFinite names the first value of the file that is not finite.
Result<std::vector<GradientError>> compare_gradients(const std::vector<OwnedTensor>& tensors,
                                                     const std::string& file);

}  // namespace argosy::tools
