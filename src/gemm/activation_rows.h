// The seam between the activation of rows, forward and backward, and one level of kernels: a row at
// a time.
//
// Kernels run with denormals kept, behind their pointers. Test:
// tests/gemm/activation_backward_test.cc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "argosy/activation.h"
#include "argosy/cpu.h"

namespace argosy::gemm {

// A row, bf16 or fp32, dense.
template <typename Byte>
struct ActivationRow {
  Byte* data = nullptr;  // null: not there
  bool is_f32 = false;
};

struct ActivationRowArgs {
  ActivationRow<const std::byte> gate, up;
  ActivationRow<const std::byte> d_h;  // backward only, as all below but h
  ActivationRow<std::byte> d_gate, d_up;
  ActivationRow<std::byte> h;
  float weight = 1;
  float* d_weight = nullptr;
  int64_t columns = 0;
  float limit = 0;
  float alpha = 0;
};
using ActivationRowKernel = void (*)(const ActivationRowArgs& args);

struct ActivationRowKernels {
  std::array<ActivationRowKernel, kNumActivations> forward = {};  // by ActivationKind
  std::array<ActivationRowKernel, kNumActivations> backward = {};
};
const ActivationRowKernels& base_activation_rows();
const ActivationRowKernels& fma_activation_rows();  // the same source; needs AVX2 and FMA
const ActivationRowKernels& avx2_activation_rows();
const ActivationRowKernels& avx512_activation_rows();
// What `level` may use.
const ActivationRowKernels& activation_rows_for(Level level);

}  // namespace argosy::gemm
