// The router's kernel compiled with AVX2 and FMA; nothing else may live in this file, see
// kernel.inl. Test: tests/router/kernel_test.cc.
#include "router/kernel.inl"

namespace argosy::router {

constinit const Kernel kFmaKernel = kThisKernel;

}  // namespace argosy::router
