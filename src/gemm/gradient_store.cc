// The three builds of gradient_store.inl; what differs is the instruction set. Test: tests/gemm/wgrad_test.cc.
#include "gemm/gradient_store.h"

namespace argosy::gemm {
namespace {

namespace base {
#define ARGOSY_KERNEL_TARGET
#include "gemm/gradient_store.inl"
#undef ARGOSY_KERNEL_TARGET
}  // namespace base

namespace avx2 {
#define ARGOSY_KERNEL_TARGET __attribute__((target("avx2")))
#include "gemm/gradient_store.inl"
#undef ARGOSY_KERNEL_TARGET
}  // namespace avx2

namespace avx512 {
#define ARGOSY_KERNEL_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#include "gemm/gradient_store.inl"
#undef ARGOSY_KERNEL_TARGET
}  // namespace avx512

}  // namespace

const GradientStores& base_gradient_stores() { return base::kStores; }
const GradientStores& avx2_gradient_stores() { return avx2::kStores; }
const GradientStores& avx512_gradient_stores() { return avx512::kStores; }

const GradientStores& gradient_stores_for(Level level) {
  if (level >= Level::kAvx512) return avx512_gradient_stores();
  return level >= Level::kAvx2 ? avx2_gradient_stores() : base_gradient_stores();
}

}  // namespace argosy::gemm
