// A tensor of a checkpoint that must have one shape and one of a few dtypes; checked before a byte of it is
// read. Test: tests/io/checkpoint_test.cc.
#pragma once

#include <span>
#include <string>

#include "argosy/status.h"
#include "argosy/tensor.h"
#include "io/tensor_directory.h"

namespace argosy::io {

// Errors: kNotFound; kInvalidArgument naming what was seen and expected; kUnsupported for F16 where a float is
// expected.
Result<const TensorDirectory::Entry*> expect_tensor(const TensorDirectory& tensors,
                                                    const std::string& name,
                                                    std::span<const int64_t> shape,
                                                    std::span<const DType> dtypes);
// BF16 or F32.
Result<const TensorDirectory::Entry*> expect_float(const TensorDirectory& tensors,
                                                   const std::string& name,
                                                   std::span<const int64_t> shape);

Status two_dtypes(const TensorDirectory::Entry& a, const TensorDirectory::Entry& b);

}  // namespace argosy::io
