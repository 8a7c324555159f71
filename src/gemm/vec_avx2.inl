// Vectors of 8 fp32, included into the anonymous namespace of avx2.cc. Every operation is one
// instruction of the name, correctly rounded in the current MXCSR. Test: tests/gemm/kernels_test.cc.

struct Vec {
  using F = __m256;
  using Bits = __m256i;
  using Mask = __m256;  // all bits of a lane
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;

  ARGOSY_KERNEL_INLINE static F zero() { return _mm256_setzero_ps(); }
  ARGOSY_KERNEL_INLINE static F splat(float x) { return _mm256_set1_ps(x); }
  ARGOSY_KERNEL_INLINE static F broadcast(const float* x) { return _mm256_broadcast_ss(x); }
  ARGOSY_KERNEL_INLINE static F load(const float* x) { return _mm256_loadu_ps(x); }
  ARGOSY_KERNEL_INLINE static void store(float* to, F x) { _mm256_storeu_ps(to, x); }
  ARGOSY_KERNEL_INLINE static F add(F a, F b) { return _mm256_add_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F div(F a, F b) { return _mm256_div_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  ARGOSY_KERNEL_INLINE static F min_or_second(F a, F b) { return _mm256_min_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F max_or_second(F a, F b) { return _mm256_max_ps(a, b); }

  // The even and the odd elements of 8 pairs of bf16, widened.
  ARGOSY_KERNEL_INLINE static Bits load_bits(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  ARGOSY_KERNEL_INLINE static F even(Bits pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  }
  ARGOSY_KERNEL_INLINE static F odd(Bits pairs) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }

  ARGOSY_KERNEL_INLINE static Mask is_positive(F x) { return _mm256_cmp_ps(x, zero(), _CMP_GT_OQ); }
  ARGOSY_KERNEL_INLINE static Mask is_greater(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  ARGOSY_KERNEL_INLINE static Mask is_nan(F x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
  ARGOSY_KERNEL_INLINE static bool any_outside(F x, F least, F largest) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x, least, _CMP_LT_OQ),
                                           _mm256_cmp_ps(x, largest, _CMP_GT_OQ))) != 0;
  }
  ARGOSY_KERNEL_INLINE static F select(Mask mask, F yes, F no) {
    return _mm256_blendv_ps(no, yes, mask);
  }
  ARGOSY_KERNEL_INLINE static F negate(F x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

  // 2^(n / 2) and 2^(n - n / 2), n an integer in [-150, 0], n / 2 rounded to zero.
  ARGOSY_KERNEL_INLINE static void powers_of_two(F n, F* half_power, F* rest_power) {
    const Bits exponent = _mm256_cvtps_epi32(n);
    const Bits half =
        _mm256_srai_epi32(_mm256_add_epi32(exponent, _mm256_srli_epi32(exponent, 31)), 1);
    const Bits bias = _mm256_set1_epi32(127);
    *half_power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    *rest_power = _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(exponent, half), bias), 23));
  }
};

// The bf16 bits of 8 fp32 in the low half of each lane: round to nearest even, denormals kept, NaN
// 0x7FC0.
ARGOSY_KERNEL_INLINE __m256i bf16_bits(Vec::F x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i canonical =
      _mm256_blendv_epi8(rounded, _mm256_set1_epi32(static_cast<int>(numeric::kCanonicalNaN)),
                         _mm256_castps_si256(Vec::is_nan(x)));
  return _mm256_srli_epi32(canonical, 16);
}

ARGOSY_KERNEL_INLINE void store_16(std::byte* to, BFloat16*, const Vec::F (&x)[2], int64_t count) {
  const __m256i packed = _mm256_packus_epi32(bf16_bits(x[0]), bf16_bits(x[1]));
  const __m256i halves = _mm256_permute4x64_epi64(packed, 0xD8);
  if (count >= kTileColumns) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
  } else {
    std::byte all[32];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(all), halves);
    std::memcpy(to, all, static_cast<size_t>(count) * 2);
  }
}

// 16 fp32, NaN 0x7FC00000.
ARGOSY_KERNEL_INLINE void store_16(std::byte* to, float*, const Vec::F (&x)[2], int64_t count) {
  float all[kTileColumns];
  for (int i = 0; i < 2; ++i) {
    Vec::store(all + i * Vec::kLanes,
               Vec::select(Vec::is_nan(x[i]),
                           Vec::splat(std::bit_cast<float>(numeric::kCanonicalNaN)), x[i]));
  }
  std::memcpy(to, all, static_cast<size_t>(count < kTileColumns ? count : kTileColumns) * 4);
}
