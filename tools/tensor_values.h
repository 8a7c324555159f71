// Values of fp32 and bf16 tensors as fp64, exactly, and checks of tensors that a user named.
//
// Test: tests/cli/compare_test.cc.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy::tools {

inline bool is_fp32_or_bf16(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }

// Elements [first, first + count) of a dense fp32 or bf16 tensor. Precondition: in range.
std::vector<double> values_of(const ConstTensorView& tensor, int64_t first, int64_t count);
std::vector<double> values_of(const ConstTensorView& tensor);

// Errors: kInvalidArgument naming `name`, the dtype and shape seen, and what was expected; -1 in
// `shape` allows any size.
Status expect_float_tensor(std::string_view name, const ConstTensorView& tensor,
                           std::initializer_list<int64_t> shape);
Status expect_shape(std::string_view name, const ConstTensorView& tensor,
                    std::initializer_list<int64_t> shape);

// Errors: kNonFinite naming `name`, the first NaN or Inf and its index. `tensor`: dense fp32 or bf16.
Status expect_finite(std::string_view name, const ConstTensorView& tensor);

}  // namespace argosy::tools
