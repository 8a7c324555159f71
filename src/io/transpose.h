// Columns of a stored matrix as rows of a new one: what checkpoints that keep inputs as rows need.
// Test: tests/io/checkpoint_test.cc.
#pragma once

#include <cstdint>
#include <span>

#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy::io {

// Row i of the result is column `first` + i * `step` of `from` [rows, columns], dense, bf16 or fp32. `shape`: what
// the result is called, count * rows elements. Preconditions: the columns exist, the shape fits.
Result<Tensor> transposed_columns(const ConstTensorView& from, int64_t first, int64_t step,
                                  std::span<const int64_t> shape);

}  // namespace argosy::io
