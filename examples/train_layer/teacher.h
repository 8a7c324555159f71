// The frozen teacher: a dense SwiGLU layer with random weights of a fixed seed.
#pragma once

#include "argosy/gemm.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

// Its outputs for hidden [T, H] fp32, as fp32 [T, H].
argosy::Result<argosy::Tensor> run_teacher(argosy::ConstTensorView hidden, int64_t intermediate);
