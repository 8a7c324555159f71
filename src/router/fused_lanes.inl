// Vectors of 16 fp32 and 8 fp64 for fused_avx512.cc alone, inside its namespace: sorting networks,
// approximate and exact scores.
//
// The exact ones have the bits of numeric/elementary.h and kernel.inl, or say that they may not. Test:
// tests/router/fused_test.cc.

using V = __m512;   // 16 fp32
using I = __m512i;  // 16 or 8 integers
using D = __m512d;  // 8 fp64
using Score = FusedPlan::Score;

constexpr int kLanes = 16;
constexpr float kLowest = -__builtin_inff();

ARGOSY_INLINE V set(float value) { return _mm512_set1_ps(value); }
ARGOSY_INLINE I set(int32_t value) { return _mm512_set1_epi32(value); }
ARGOSY_INLINE I bits(V v) { return _mm512_castps_si512(v); }
ARGOSY_INLINE V floats(I v) { return _mm512_castsi512_ps(v); }

// --- Sorting networks: one list per lane, largest first ---

struct Network {
  int size = 0;
  int first[64] = {};
  int second[64] = {};
};

// Batcher's odd-even merge sort of 16 without what touches the entries from `count` on.
constexpr Network network_of(int count) {
  Network network;
  for (int p = 1; p < 16; p *= 2) {
    for (int k = p; k >= 1; k /= 2) {
      for (int j = k % p; j + k < 16; j += 2 * k) {
        for (int i = j; i < j + k && i + k < count; ++i) {
          if (i / (2 * p) != (i + k) / (2 * p)) continue;
          network.first[network.size] = i;
          network.second[network.size] = i + k;
          ++network.size;
        }
      }
    }
  }
  return network;
}

ARGOSY_INLINE void exchange(V& a, V& b) {
  const V largest = _mm512_max_ps(a, b);
  b = _mm512_min_ps(a, b);
  a = largest;
}

// Half the time of floats. The order of positive ones is the same.
ARGOSY_INLINE void exchange(I& a, I& b) {
  const I largest = _mm512_max_epi32(a, b);
  b = _mm512_min_epi32(a, b);
  a = largest;
}

template <int kCount, typename T, size_t... kStep>
ARGOSY_INLINE void sort_steps(T* list, std::index_sequence<kStep...>) {
  constexpr Network kNetwork = network_of(kCount);
  (exchange(list[kNetwork.first[kStep]], list[kNetwork.second[kStep]]), ...);
}

template <int kCount, typename T>
ARGOSY_INLINE void sort_lanes(T* list) {
  sort_steps<kCount>(list,
                     std::make_index_sequence<static_cast<size_t>(network_of(kCount).size)>());
}

ARGOSY_INLINE void transpose(V* rows) {
  V mixed[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 2) {
    mixed[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    mixed[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  const auto low = [](V a, V b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](V a, V b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 4) {
    rows[i] = low(mixed[i], mixed[i + 2]);
    rows[i + 1] = high(mixed[i], mixed[i + 2]);
    rows[i + 2] = low(mixed[i + 1], mixed[i + 3]);
    rows[i + 3] = high(mixed[i + 1], mixed[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    const V even_low = _mm512_shuffle_f32x4(rows[i], rows[4 + i], 0x88);
    const V odd_low = _mm512_shuffle_f32x4(rows[i], rows[4 + i], 0xDD);
    const V even_high = _mm512_shuffle_f32x4(rows[8 + i], rows[12 + i], 0x88);
    const V odd_high = _mm512_shuffle_f32x4(rows[8 + i], rows[12 + i], 0xDD);
    rows[i] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    rows[8 + i] = _mm512_shuffle_f32x4(even_low, even_high, 0xDD);
    rows[4 + i] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[12 + i] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xDD);
  }
}

// One list over the lanes, largest first.
ARGOSY_INLINE V sort_within(V x) {
  const I lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
  for (int size = 2; size <= kLanes; size *= 2) {
#pragma GCC unroll 4
    for (int stride = size / 2; stride >= 1; stride /= 2) {
      const V other = _mm512_permutexvar_ps(_mm512_xor_si512(lanes, set(stride)), x);
      const __mmask16 upper = _mm512_test_epi32_mask(lanes, set(stride));
      const __mmask16 rising =
          size == kLanes ? __mmask16{0} : _mm512_test_epi32_mask(lanes, set(size));
      x = _mm512_mask_min_ps(_mm512_max_ps(x, other), static_cast<__mmask16>(upper ^ rising), x,
                             other);
    }
  }
  return x;
}

// The largest 16 of 32, in any order: the first of two falling lists against the last of the other.
ARGOSY_INLINE void keep_largest(float* keys) {
  const I reversed = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const V a = sort_within(_mm512_loadu_ps(keys));
  const V b = sort_within(_mm512_loadu_ps(keys + kLanes));
  _mm512_storeu_ps(keys, _mm512_max_ps(a, _mm512_permutexvar_ps(reversed, b)));
}

// --- Approximations ---

// 2^-(z log2 e) by a minimax polynomial of 2^f, |f| <= 1/2; the exponent is added as an integer.
template <int kDegree>
ARGOSY_INLINE V exp_negative(V z, const float (&coefficients)[kDegree + 1]) {
  const V magic = set(12582912.0f);  // 1.5 * 2^23
  const V y = _mm512_mul_ps(z, set(-0x1.715476p+0f));
  const V shifted = _mm512_add_ps(y, magic);
  const V f = _mm512_sub_ps(y, _mm512_sub_ps(shifted, magic));
  V p = set(coefficients[kDegree]);
#pragma GCC unroll 8
  for (int i = kDegree - 1; i >= 0; --i) p = _mm512_fmadd_ps(p, f, set(coefficients[i]));
  return floats(_mm512_add_epi32(bits(p), _mm512_slli_epi32(bits(shifted), 23)));
}

// Error: a quarter of the polynomial's 7.5e-5, and 2^-14 of the reciprocal.
ARGOSY_INLINE V coarse_sigmoid(V z) {
  constexpr float kExp2[] = {0x1.fff692p-1f, 0x1.62f31ap-1f, 0x1.f0de1ap-3f, 0x1.c3f760p-5f};
  return _mm512_rcp14_ps(_mm512_add_ps(exp_negative<3>(z, kExp2), set(1.0f)));
}

// One Newton step on the reciprocal; beyond +-80 the sigmoid is 0 or 1 to more than fp32 shows.
ARGOSY_INLINE V fine_sigmoid(V z) {
  constexpr float kExp2[] = {0x1.000002p+0f, 0x1.62e428p-1f, 0x1.ebf918p-3f,
                             0x1.c6b6e4p-5f, 0x1.3d0c52p-7f, 0x1.5c08e6p-10f};
  z = _mm512_max_ps(_mm512_min_ps(z, set(kCoarseRange)), set(-kCoarseRange));
  const V sum = _mm512_add_ps(exp_negative<5>(z, kExp2), set(1.0f));
  const V reciprocal = _mm512_rcp14_ps(sum);
  return _mm512_mul_ps(reciprocal, _mm512_fnmadd_ps(sum, reciprocal, set(2.0f)));
}

// --- Exact scores: the operations of numeric/elementary.h and kernel.inl, eight at a time ---

ARGOSY_INLINE D exp_nonpositive(D x) {
  const D magic = _mm512_set1_pd(6755399441055744.0), least = _mm512_set1_pd(-708.0);
  const D clamped = _mm512_max_pd(x, least);
  const D shifted = _mm512_fmadd_pd(clamped, _mm512_set1_pd(0x1.71547652b82fep+0), magic);
  const D n = _mm512_sub_pd(shifted, magic);
  D r = _mm512_fmadd_pd(n, _mm512_set1_pd(-0x1.62e42fee00000p-1), clamped);
  r = _mm512_fmadd_pd(n, _mm512_set1_pd(-0x1.a39ef35793c76p-33), r);
  constexpr double kTaylor[] = {
      1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0,
      1.0 / 120.0,      1.0 / 24.0,      1.0 / 6.0,      0.5,           1.0,          1.0};
  D p = _mm512_set1_pd(1.0 / 479001600.0);
#pragma GCC unroll 12
  for (const double c : kTaylor) p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(c));
  const I biased = _mm512_add_epi64(_mm512_castpd_si512(shifted), _mm512_set1_epi64(1023));
  const D scale = _mm512_castsi512_pd(_mm512_slli_epi64(biased, 52));
  const __mmask8 above = _mm512_cmp_pd_mask(x, least, _CMP_GE_OQ);
  return _mm512_maskz_mul_pd(above, p, scale);
}

// --- Nearly exact scores, whose fp32 rounding is the exact one's unless is_near_tie() ---

struct alignas(64) Powers {
  double of_sixteenth[16] = {
      0x1.0000000000000p+0, 0x1.0b5586cf9890fp+0, 0x1.172b83c7d517bp+0, 0x1.2387a6e756238p+0,
      0x1.306fe0a31b715p+0, 0x1.3dea64c123422p+0, 0x1.4bfdad5362a27p+0, 0x1.5ab07dd485429p+0,
      0x1.6a09e667f3bcdp+0, 0x1.7a11473eb0187p+0, 0x1.8ace5422aa0dbp+0, 0x1.9c49182a3f090p+0,
      0x1.ae89f995ad3adp+0, 0x1.c199bdd85529cp+0, 0x1.d5818dcfba487p+0, 0x1.ea4afa2a490dap+0};
};
constexpr Powers kPowers;  // 2^(i/16)

// e^x for x in [-100, 0], relative error below 1.5e-13: x = n ln(2)/16 + r, |r| <= 0.0217, and the Taylor
// polynomial of degree 5.
ARGOSY_INLINE D near_exp(D x) {
  const D magic = _mm512_set1_pd(6755399441055744.0);  // 1.5 * 2^52
  const D shifted = _mm512_fmadd_pd(x, _mm512_set1_pd(0x1.71547652b82fep+4), magic);
  const D n = _mm512_sub_pd(shifted, magic);
  const D r = _mm512_fmadd_pd(n, _mm512_set1_pd(-0x1.62e42fefa39efp-5), x);
  D p = _mm512_set1_pd(1.0 / 120.0);
  constexpr double kTaylor[] = {1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0};
#pragma GCC unroll 5
  for (const double c : kTaylor) p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(c));
  const I word = _mm512_castpd_si512(shifted);
  const D power = _mm512_permutex2var_pd(_mm512_load_pd(kPowers.of_sixteenth), word,
                                         _mm512_load_pd(kPowers.of_sixteenth + 8));
  const I whole = _mm512_slli_epi64(_mm512_andnot_si512(_mm512_set1_epi64(15), word), 48);
  return _mm512_mul_pd(p, _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(power), whole)));
}

// At most 2^-41 from the middle of two normal fp32 numbers, relative; twice the error of near_exp() is less.
ARGOSY_INLINE __mmask8 is_near_tie(D x) {
  constexpr int64_t kMargin = 1 << 12, kHalf = 1 << 28;
  const I moved = _mm512_add_epi64(_mm512_castpd_si512(x), _mm512_set1_epi64(kHalf + kMargin));
  return _mm512_testn_epi64_mask(moved, _mm512_set1_epi64(2 * kHalf - 2 * kMargin));
}

// From e^-|z|; the numerator is 1 or the same.
ARGOSY_INLINE D near_sigmoid(D below, __mmask8 negative) {
  const D one = _mm512_set1_pd(1.0);
  const D power = near_exp(below);
  return _mm512_div_pd(_mm512_mask_mov_pd(one, negative, power), _mm512_add_pd(one, power));
}

ARGOSY_INLINE D low_half(V v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
ARGOSY_INLINE D high_half(V v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
ARGOSY_INLINE V rounded(D low, D high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}

// x / y, given 1 / y as the division rounds it. The first remainder leaves a quotient within an ulp, the
// second one rounded to nearest (Markstein); a third of a division's time. Quotients that fp32 has no bit
// of may differ.
ARGOSY_INLINE D quotient(D x, D y, D inverse) {
  D q = _mm512_mul_pd(x, inverse);
  q = _mm512_fmadd_pd(_mm512_fnmadd_pd(q, y, x), inverse, q);
  return _mm512_fmadd_pd(_mm512_fnmadd_pd(q, y, x), inverse, q);
}

ARGOSY_INLINE D inverse_of(D x) { return _mm512_div_pd(_mm512_set1_pd(1.0), x); }

// ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)): the order of lanes.h.
ARGOSY_INLINE D sum_of_eight(const D* x) {
  const D even = _mm512_add_pd(_mm512_add_pd(x[0], x[4]), _mm512_add_pd(x[2], x[6]));
  const D odd = _mm512_add_pd(_mm512_add_pd(x[1], x[5]), _mm512_add_pd(x[3], x[7]));
  return _mm512_add_pd(even, odd);
}

// Sum over all experts of e^(z - peak), lanes.h's order.
double sum_of_powers(const float* logits, int64_t count, float peak) {
  const D shift = _mm512_set1_pd(static_cast<double>(peak));
  D sum = _mm512_setzero_pd();
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const D z = _mm512_cvtps_pd(_mm256_loadu_ps(logits + i));
    sum = _mm512_add_pd(sum, exp_nonpositive(_mm512_sub_pd(z, shift)));
  }
  if (i < count) {
    const auto rest = static_cast<__mmask8>((1u << (count - i)) - 1);
    const D z = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(rest, logits + i));
    // Terms that are not there are no addition at all.
    sum = _mm512_mask_add_pd(sum, rest, sum, exp_nonpositive(_mm512_sub_pd(z, shift)));
  }
  alignas(64) double lanes[8];
  _mm512_store_pd(lanes, sum);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

struct alignas(64) Ids {
  int32_t of[kFusedMostExperts] = {};  // i
  // From kFusedMostExperts - n on: the permutation that moves lanes up by n modulo 16.
  int32_t rotations[kFusedMostExperts + kLanes] = {};
};

constexpr Ids make_ids() {
  Ids ids;
  for (int i = 0; i < kFusedMostExperts; ++i) ids.of[i] = i;
  for (int i = 0; i < kFusedMostExperts + kLanes; ++i) ids.rotations[i] = i % kLanes;
  return ids;
}
constexpr Ids kIds = make_ids();

ARGOSY_INLINE __mmask16 tail_mask(int64_t num_experts, int64_t first) {
  const int64_t left = num_experts - first;
  return static_cast<__mmask16>(left >= kLanes ? 0xFFFF : (1u << left) - 1);
}
