// The three builds of gradient_store.inl; what differs is the instruction set. Test:
// tests/gemm/wgrad_test.cc.
#include "gemm/gradient_store.h"

#include <immintrin.h>

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
#define ARGOSY_KERNEL_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "gemm/gradient_store.inl"

// Whole lines only; what is left of a row goes the usual way.
template <bool kScales>
ARGOSY_KERNEL_TARGET void stream_rows(const GradientStoreArgs& args) {
  const __m512 alpha = _mm512_set1_ps(args.alpha);
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
  const int64_t num_lines = args.num_columns / kLanes;
  for (int64_t r = 0; r < args.num_rows; ++r) {
    auto* const to = reinterpret_cast<float*>(args.out + r * args.row_stride_bytes);
    for (int64_t line = 0; line < num_lines; ++line) {
      __m512 x = _mm512_load_ps(args.sums + r * 32 + line * kLanes);
      if constexpr (kScales) x = _mm512_mul_ps(alpha, x);
      const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      _mm512_stream_ps(to + line * kLanes, _mm512_mask_blend_ps(is_nan, x, nan));
    }
  }
  if (args.num_columns % kLanes == 0) return;
  const int64_t first = num_lines * kLanes;
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const auto rest = static_cast<__mmask16>((1u << (args.num_columns - first)) - 1);
    __m512 x = _mm512_load_ps(args.sums + r * 32 + first);
    if constexpr (kScales) x = _mm512_mul_ps(alpha, x);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    _mm512_mask_storeu_ps(args.out + r * args.row_stride_bytes + first * 4, rest,
                          _mm512_mask_blend_ps(is_nan, x, nan));
  }
}

ARGOSY_KERNEL_TARGET void stream(const GradientStoreArgs& args) {
  // A product by 1 is left out: it would flush denormals in the middle of the products.
  (args.alpha == 1.0f ? stream_rows<false> : stream_rows<true>)(args);
}

constexpr GradientStores kStreaming{
    .of = {{kStores.of[0][0], kStores.of[0][1]}, {kStores.of[1][0], kStores.of[1][1]}},
    .stream_f32 = stream};
#undef ARGOSY_KERNEL_TARGET
}  // namespace avx512

}  // namespace

const GradientStores& base_gradient_stores() { return base::kStores; }
const GradientStores& avx2_gradient_stores() { return avx2::kStores; }
const GradientStores& avx512_gradient_stores() { return avx512::kStreaming; }

const GradientStores& gradient_stores_for(Level level) {
  if (level >= Level::kAvx512) return avx512_gradient_stores();
  return level >= Level::kAvx2 ? avx2_gradient_stores() : base_gradient_stores();
}

bool is_streamed(Level level, const TensorView& out) {
  constexpr int64_t kLineFloats = 16, kLeastBytes = int64_t{4} << 20;
  if (gradient_stores_for(level).stream_f32 == nullptr || out.dtype != DType::kF32) return false;
  if (reinterpret_cast<uintptr_t>(out.data) % 64 != 0) return false;
  for (int dim = 0; dim + 1 < out.num_dims; ++dim) {
    if (out.stride(dim) % kLineFloats != 0) return false;
  }
  return out.num_elements() * 4 >= kLeastBytes;
}

}  // namespace argosy::gemm
