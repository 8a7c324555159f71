// Which of a level's kernels multiplies, by the dtypes of both sides. Test:
// tests/gemm/dgrad_test.cc.
#pragma once

#include "gemm/kernels.h"

namespace argosy::gemm {

inline const Dot& backward_dot(const KernelTable& table, DType rows, DType panels, DotOrder order) {
  if (rows == DType::kF32) return panels == DType::kF32 ? table.f32_f32 : table.f32_bf16;
  return order == DotOrder::kAmx ? table.bf16_amx : table.bf16_vdpbf16;
}

}  // namespace argosy::gemm
