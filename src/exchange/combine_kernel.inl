// Included by combine_kernel_base.cc and combine_kernel_fma.cc, which define ARGOSY_KERNEL_TABLE.
// Nothing here may have external linkage but the table: a function compiled for FMA must never be
// picked by the linker for the baseline. Hence the builtins in place of std::fma and std::bit_cast.
#include "exchange/combine_kernel.h"

namespace argosy {
namespace {

float widen(BFloat16 value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
}
float widen(float value) { return value; }

// NaN becomes the canonical one, everything else rounds to nearest even (as BFloat16::from_float).
BFloat16 narrow(float value) {
  const auto word = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
  const bool nan = (word & 0x7FFFFFFFu) > 0x7F800000u;
  return BFloat16{static_cast<uint16_t>(nan ? 0x7FC0u : rounded)};
}

template <typename T>
void start(const T* first, float scale, int64_t n, float* acc) {
  if (first == nullptr) {
    for (int64_t i = 0; i < n; ++i) acc[i] = 0.0f;
  } else {
    for (int64_t i = 0; i < n; ++i) acc[i] = widen(first[i]) * scale;
  }
}

template <typename T>
void add(const T* addend, int64_t n, float* acc) {
  for (int64_t i = 0; i < n; ++i) acc[i] += widen(addend[i]);
}

template <typename T>
void accumulate(float weight, const T* row, int64_t n, float* acc) {
  for (int64_t i = 0; i < n; ++i) acc[i] = __builtin_fmaf(weight, widen(row[i]), acc[i]);
}

void store_bf16(const float* acc, int64_t n, BFloat16* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = narrow(acc[i]);
}

void store_f32(const float* acc, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = acc[i];
    out[i] = value != value ? __builtin_bit_cast(float, 0x7FC00000u) : value;
  }
}

}  // namespace

const CombineKernel ARGOSY_KERNEL_TABLE = {
    start<BFloat16>,      start<float>,      add<BFloat16>, add<float>,
    accumulate<BFloat16>, accumulate<float>, store_bf16,    store_f32,
};

}  // namespace argosy
