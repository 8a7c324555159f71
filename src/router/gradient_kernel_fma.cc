// The gradient kernel compiled with AVX2 and FMA; nothing else may live in this file, see
// kernel.inl. Test: tests/router/gradient_kernel_test.cc.
#include "router/gradient_kernel.inl"

namespace argosy::router {

constinit const GradientKernel kFmaGradientKernel = kThisKernel;

}  // namespace argosy::router
