// Included by combine_kernel_base.cc and combine_kernel_fma.cc, which define ARGOSY_KERNEL_TABLE and
// ARGOSY_KERNEL_LEVEL. Nothing here may have external linkage but the table: a function compiled for FMA must
// never be picked by the linker for the baseline. Hence the builtins in place of std::fma and std::bit_cast.
#include "argosy/bfloat16.h"
#include "exchange/combine_kernel.h"

namespace argosy {
namespace {

// Columns at a time; their sums stay in L1.
constexpr int64_t kBlock = 512;

inline float widen(BFloat16 value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
}
inline float widen(float value) { return value; }

// NaN becomes the canonical one, everything else rounds to nearest even (as BFloat16::from_float).
inline void narrow(float value, BFloat16* out) {
  const auto word = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
  const bool nan = (word & 0x7FFFFFFFu) > 0x7F800000u;
  out->bits = static_cast<uint16_t>(nan ? 0x7FC0u : rounded);
}
inline void narrow(float value, float* out) {
  *out = value != value ? __builtin_bit_cast(float, 0x7FC00000u) : value;
}

template <typename T>
const T* at(const std::byte* row, int64_t column) {
  return reinterpret_cast<const T*>(row) + column;
}

template <typename T>
void combine_block(const CombineArgs& args, int64_t first, int64_t n) {
  float acc[kBlock];
  if (args.shared == nullptr) {
    for (int64_t i = 0; i < n; ++i) acc[i] = 0.0f;
  } else {
    const T* const shared = at<T>(args.shared, first);
    for (int64_t i = 0; i < n; ++i) acc[i] = widen(shared[i]) * args.shared_scale;
  }
  if (args.residual != nullptr) {
    const T* const residual = at<T>(args.residual, first);
    for (int64_t i = 0; i < n; ++i) acc[i] += widen(residual[i]);
  }
  if (args.bias != nullptr) {
    const float* const bias = args.bias + first;
    for (int64_t i = 0; i < n; ++i) acc[i] += bias[i];
  }
  for (int64_t k = 0; k < args.num_rows; ++k) {
    const T* const row = at<T>(args.rows[k], first);
    const float weight = args.weights[k];
    for (int64_t i = 0; i < n; ++i) acc[i] = __builtin_fmaf(weight, widen(row[i]), acc[i]);
  }
  T* const out = reinterpret_cast<T*>(args.out) + first;
  for (int64_t i = 0; i < n; ++i) narrow(acc[i], out + i);
}

template <typename T>
void combine(const CombineArgs& args) {
  for (int64_t first = 0; first < args.n; first += kBlock) {
    combine_block<T>(args, first, kBlock < args.n - first ? kBlock : args.n - first);
  }
}

}  // namespace

const CombineKernel ARGOSY_KERNEL_TABLE = {ARGOSY_KERNEL_LEVEL, combine<BFloat16>, combine<float>};

}  // namespace argosy
