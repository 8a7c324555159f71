// The router's kernel compiled with AVX-512; nothing else may live in this file, see kernel.inl. Test:
// tests/router/kernel_test.cc.
#include "router/kernel.inl"

namespace argosy::router {

constinit const Kernel kAvx512Kernel = kThisKernel;

}  // namespace argosy::router
