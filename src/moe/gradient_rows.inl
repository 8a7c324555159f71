// The kernels of gradient_rows.h in plain loops, which compilers turn into vectors. Included into a namespace of each build by
// gradient_rows.cc. Needs ARGOSY_KERNEL_TARGET. Test: tests/moe/gradient_rows_test.cc.

#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline

ARGOSY_KERNEL_INLINE float widen(float value) { return value; }
ARGOSY_KERNEL_INLINE float widen(BFloat16 value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
}

ARGOSY_KERNEL_INLINE void narrow(float value, float* out) {
  *out = value != value ? __builtin_bit_cast(float, 0x7FC00000u) : value;
}
// As BFloat16::from_float.
ARGOSY_KERNEL_INLINE void narrow(float value, BFloat16* out) {
  const auto word = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
  const bool nan = (word & 0x7FFFFFFFu) > 0x7F800000u;
  out->bits = static_cast<uint16_t>(nan ? 0x7FC0u : rounded);
}

template <typename T>
ARGOSY_KERNEL_TARGET void scale(const std::byte* x, float weight, int64_t n, std::byte* out) {
  const T* const from = reinterpret_cast<const T*>(x);
  T* const to = reinterpret_cast<T*>(out);
  for (int64_t i = 0; i < n; ++i) narrow(weight * widen(from[i]), to + i);
}

template <typename T>
ARGOSY_KERNEL_TARGET double dot(const std::byte* a, const std::byte* b, int64_t n) {
  constexpr int64_t kChains = 16;
  const T* const x = reinterpret_cast<const T*>(a);
  const T* const y = reinterpret_cast<const T*>(b);
  double sums[kChains] = {};
  int64_t at = 0;
  for (; at + kChains <= n; at += kChains) {
    for (int64_t i = 0; i < kChains; ++i) {
      sums[i] += static_cast<double>(widen(x[at + i])) * static_cast<double>(widen(y[at + i]));
    }
  }
  for (int64_t i = 0; at + i < n; ++i) {
    sums[i] += static_cast<double>(widen(x[at + i])) * static_cast<double>(widen(y[at + i]));
  }
  for (int64_t half = kChains / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0] != sums[0] ? __builtin_nan("") : sums[0];
}

template <typename T>
ARGOSY_KERNEL_TARGET void sum(const SumRowsArgs& args) {
  constexpr int64_t kColumns = 512;  // at a time; their sums stay in L1
  for (int64_t first = 0; first < args.n; first += kColumns) {
    const int64_t n = kColumns < args.n - first ? kColumns : args.n - first;
    float sums[kColumns];
    for (int64_t i = 0; i < n; ++i)
      sums[i] = args.shared == nullptr ? 0.0f : args.shared[first + i];
    for (int64_t k = 0; k < args.num_rows; ++k) {
      if (args.rows[k] == nullptr) continue;
      const T* const row = reinterpret_cast<const T*>(args.rows[k]) + first;
      for (int64_t i = 0; i < n; ++i) sums[i] += widen(row[i]);
    }
    const float* const last = args.last + first;
    T* const out = reinterpret_cast<T*>(args.out) + first;
    for (int64_t i = 0; i < n; ++i) narrow(sums[i] + last[i], out + i);
  }
}

template <typename T>
constexpr GradientRowKernels kernels_of() {
  return {scale<T>, dot<T>, sum<T>};
}

#undef ARGOSY_KERNEL_INLINE
