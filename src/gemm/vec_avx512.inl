// Vectors of 16 fp32, included into the anonymous namespace of avx512.cc. Every operation is one
// instruction of the name, correctly rounded in the current MXCSR. Test: tests/gemm/kernels_test.cc.

struct Vec {
  using F = __m512;
  using Bits = __m512i;
  using Mask = __mmask16;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;

  ARGOSY_KERNEL_INLINE static F zero() { return _mm512_setzero_ps(); }
  ARGOSY_KERNEL_INLINE static F splat(float x) { return _mm512_set1_ps(x); }
  ARGOSY_KERNEL_INLINE static F broadcast(const float* x) { return _mm512_set1_ps(*x); }
  ARGOSY_KERNEL_INLINE static F load(const float* x) { return _mm512_loadu_ps(x); }
  ARGOSY_KERNEL_INLINE static void store(float* to, F x) { _mm512_storeu_ps(to, x); }
  ARGOSY_KERNEL_INLINE static F add(F a, F b) { return _mm512_add_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F div(F a, F b) { return _mm512_div_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  ARGOSY_KERNEL_INLINE static F min_or_second(F a, F b) { return _mm512_min_ps(a, b); }
  ARGOSY_KERNEL_INLINE static F max_or_second(F a, F b) { return _mm512_max_ps(a, b); }

  // The even and the odd elements of 16 pairs of bf16, widened.
  ARGOSY_KERNEL_INLINE static Bits load_bits(const std::byte* p) { return _mm512_loadu_si512(p); }
  ARGOSY_KERNEL_INLINE static F even(Bits pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  }
  ARGOSY_KERNEL_INLINE static F odd(Bits pairs) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }

  ARGOSY_KERNEL_INLINE static Mask is_positive(F x) {
    return _mm512_cmp_ps_mask(x, zero(), _CMP_GT_OQ);
  }
  ARGOSY_KERNEL_INLINE static Mask is_greater(F a, F b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
  }
  ARGOSY_KERNEL_INLINE static Mask is_nan(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  ARGOSY_KERNEL_INLINE static bool any_outside(F x, F least, F largest) {
    return (_mm512_cmp_ps_mask(x, least, _CMP_LT_OQ) |
            _mm512_cmp_ps_mask(x, largest, _CMP_GT_OQ)) != 0;
  }
  ARGOSY_KERNEL_INLINE static F select(Mask mask, F yes, F no) {
    return _mm512_mask_blend_ps(mask, no, yes);
  }
  ARGOSY_KERNEL_INLINE static F negate(F x) {
    return _mm512_castsi512_ps(
        _mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0x80000000u))));
  }

  // 2^(n / 2) and 2^(n - n / 2), n an integer in [-150, 0], n / 2 rounded to zero.
  ARGOSY_KERNEL_INLINE static void powers_of_two(F n, F* half_power, F* rest_power) {
    const Bits exponent = _mm512_cvtps_epi32(n);
    const Bits half =
        _mm512_srai_epi32(_mm512_add_epi32(exponent, _mm512_srli_epi32(exponent, 31)), 1);
    const Bits bias = _mm512_set1_epi32(127);
    *half_power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23));
    *rest_power = _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(exponent, half), bias), 23));
  }
};

// 16 fp32 as bf16, round to nearest even, denormals kept, NaN 0x7FC0.
ARGOSY_KERNEL_INLINE void store_16(std::byte* to, BFloat16*, const Vec::F (&x)[1], int64_t count) {
  const __m512i bits = _mm512_castps_si512(x[0]);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i canonical = _mm512_mask_blend_epi32(
      Vec::is_nan(x[0]), rounded, _mm512_set1_epi32(static_cast<int>(numeric::kCanonicalNaN)));
  const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(canonical, 16));
  if (count >= kTileColumns) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
  } else {
    _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1), halves);
  }
}

// 16 fp32, NaN 0x7FC00000.
ARGOSY_KERNEL_INLINE void store_16(std::byte* to, float*, const Vec::F (&x)[1], int64_t count) {
  const Vec::F canonical = Vec::select(
      Vec::is_nan(x[0]), Vec::splat(std::bit_cast<float>(numeric::kCanonicalNaN)), x[0]);
  if (count >= kTileColumns) {
    _mm512_storeu_ps(to, canonical);
  } else {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), canonical);
  }
}
