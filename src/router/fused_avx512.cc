// The fused pass in AVX-512; see fused.h.
//
// Two shapes of work alternate. Along a row: approximations, group scores and the candidates above a
// threshold, 16 experts a vector. Across tokens: thresholds, sorting, exact scores and weights, one
// token a lane, so that networks of minima and maxima have no latency to wait for. No standard
// function may come in here: the linker could keep its AVX-512 copy for everyone. Test:
// tests/router/fused_test.cc.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <utility>

#include "numeric/elementary.h"
#include "router/fused.h"

namespace argosy::router {
namespace {

using V = __m512;   // 16 fp32
using I = __m512i;  // 16 or 8 integers
using D = __m512d;  // 8 fp64
using Score = FusedPlan::Score;

constexpr int kLanes = 16;
constexpr int kExact = static_cast<int>(kFusedMostTopK) + 1;  // candidates with an exact score
constexpr int kMostCandidates = 32;                           // of a token
// Logits of a softmax at least this far apart have different fp32 scores: e^(2^-22) is more than an ulp.
constexpr float kApart = 0x1p-22f;
// No score of a softmax over kFusedMostExperts underflows within this distance of the largest logit.
constexpr float kSoftmaxRange = 76.0f;
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

template <int kCount, size_t... kStep>
ARGOSY_INLINE void sort_steps(V* list, std::index_sequence<kStep...>) {
  constexpr Network kNetwork = network_of(kCount);
  (exchange(list[kNetwork.first[kStep]], list[kNetwork.second[kStep]]), ...);
}

template <int kCount>
ARGOSY_INLINE void sort_lanes(V* list) {
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

// --- Approximations ---

// 2^-(z log2 e) by a minimax polynomial of 2^f, |f| <= 1/2; the exponent is added as an integer.
template <int kDegree>
ARGOSY_INLINE V exp_negative(V z, const float (&coefficients)[kDegree + 1]) {
  const V log2_e = set(-0x1.715476p+0f), magic = set(12582912.0f);  // 1.5 * 2^23
  const V shifted = _mm512_fmadd_ps(z, log2_e, magic);
  const V f = _mm512_fmsub_ps(z, log2_e, _mm512_sub_ps(shifted, magic));
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

// e^min(z, 0) is 1 or the same e^-|z| as in the denominator.
ARGOSY_INLINE D exact_sigmoid(D z) {
  const D zero = _mm512_setzero_pd(), one = _mm512_set1_pd(1.0);
  const __mmask8 negative = _mm512_cmp_pd_mask(z, zero, _CMP_LT_OQ);
  const D power = exp_nonpositive(_mm512_mask_sub_pd(z, static_cast<__mmask8>(~negative), zero, z));
  return _mm512_div_pd(_mm512_mask_mov_pd(one, negative, power), _mm512_add_pd(one, power));
}

ARGOSY_INLINE D low_half(V v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
ARGOSY_INLINE D high_half(V v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
ARGOSY_INLINE V rounded(D low, D high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}

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

// --- A block ---

struct alignas(64) Work {
  float edges[kLanes][kLanes];   // a token's lane maxima, or scores and seconds of its groups
  float threshold[kLanes];       // no candidate lies below
  float error[kLanes];           // of the approximations of a token
  uint32_t kept_groups[kLanes];  // bits
  float candidates[kLanes]
                  [kMostCandidates + kLanes];  // key: approximation, its low bits the expert
  uint32_t undecided = 0;                      // bits
};

ARGOSY_INLINE __mmask16 tail_mask(int64_t num_experts, int64_t first) {
  const int64_t left = num_experts - first;
  return static_cast<__mmask16>(left >= kLanes ? 0xFFFF : (1u << left) - 1);
}

class Block {
 public:
  Block(const FusedPlan& plan, const FusedBlock& block) : plan_(plan), block_(block) {
    int64_t used = 1;
    while (used < plan.num_experts) used *= 2;
    id_mask_ = static_cast<int32_t>(used - 1);
    num_padded_ = (plan.num_experts + kLanes - 1) / kLanes * kLanes;
  }

  uint32_t route() {
    const int64_t step =
        plan_.score == Score::kSigmoid ? kFusedScratchFloats / num_padded_ : kLanes;
    for (int64_t first = 0; first < block_.num_tokens; first += step) {
      const int64_t last = first + step < block_.num_tokens ? first + step : block_.num_tokens;
      collect(static_cast<int>(first), static_cast<int>(last));
    }
    finish();
    return work_.undecided;
  }

 private:
  // What the order of experts goes by: approximations, or the logits themselves.
  const float* values(int token, int first) const {
    return plan_.score == Score::kSigmoid ? block_.scratch + (token - first) * num_padded_
                                          : block_.rows[token];
  }

  void collect(int first, int last) {
    for (int token = first; token < last; ++token) survey(token, first, false);
    if (plan_.num_groups > 1) {
      uint32_t again = choose_groups(first, last);
      if (plan_.score == Score::kSigmoid && again != 0) {
        for (int token = first; token < last; ++token) {
          if ((again >> token & 1) != 0) survey(token, first, true);
        }
        again = choose_groups(first, last);
      }
      work_.undecided |= again;
      if (plan_.top_k > 2 * plan_.keep_groups || !plan_.sum_of_two) {
        for (int token = first; token < last; ++token) survey_kept(token, values(token, first));
        set_thresholds(first, last);
      }
    } else {
      set_thresholds(first, last);
    }
    for (int token = first; token < last; ++token) gather_candidates(token, values(token, first));
  }

  // Approximates a row and leaves its edges. Coarse first; a row beyond the range of that is done again.
  [[gnu::noinline]] void survey(int token, int first, bool fine) {
    if (plan_.score != Score::kSigmoid) {
      if (num_padded_ == plan_.num_experts) {
        survey_logits<true>(token);
      } else {
        survey_logits<false>(token);
      }
      return;
    }
    float* out = block_.scratch + (token - first) * num_padded_;
    if (num_padded_ == plan_.num_experts) {
      fine = fine || !survey_sigmoids<false, true>(token, out);
      if (fine) survey_sigmoids<true, true>(token, out);
    } else {
      fine = fine || !survey_sigmoids<false, false>(token, out);
      if (fine) survey_sigmoids<true, false>(token, out);
    }
    work_.error[token] = fine ? plan_.fine_error : plan_.coarse_error;
  }

  template <bool kFine, bool kWhole>
  bool survey_sigmoids(int token, float* out) {
    const float* const row = block_.rows[token];
    const I magnitude = set(0x7FFFFFFF);
    I largest = _mm512_setzero_si512();
    const auto approximate = [&](int64_t at) {
      const V bias = _mm512_loadu_ps(plan_.shifted_bias + at);
      const __mmask16 there = kWhole ? __mmask16{0xFFFF} : tail_mask(plan_.num_experts, at);
      const V z = kWhole ? _mm512_loadu_ps(row + at) : _mm512_maskz_loadu_ps(there, row + at);
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits(z), magnitude));
      V value = _mm512_add_ps(kFine ? fine_sigmoid(z) : coarse_sigmoid(z), bias);
      if (!kWhole) value = _mm512_maskz_mov_ps(there, value);
      _mm512_store_ps(out + at, value);
      return value;
    };
    if (plan_.num_groups == 1) {
      V most = approximate(0);
      for (int64_t at = kLanes; at < num_padded_; at += kLanes) {
        most = _mm512_max_ps(most, approximate(at));
      }
      _mm512_store_ps(work_.edges[token], most);
    } else if (!plan_.sum_of_two) {
      store_best(token, 0.0f, approximate);
    } else if (plan_.num_groups == 8 && plan_.num_experts == 256) {
      store_best_two<2>(token, approximate);
    } else {
      store_best_two<0>(token, approximate);
    }
    if (kFine) leave_nonfinite(token, largest);
    return _mm512_cmp_epu32_mask(largest, bits(set(kCoarseRange)), _MM_CMPINT_GT) == 0;
  }

  void leave_nonfinite(int token, I largest) {
    if (_mm512_cmp_epu32_mask(largest, set(0x7F800000), _MM_CMPINT_NLT) != 0) {
      work_.undecided |= 1u << token;
    }
  }

  template <bool kWhole>
  void survey_logits(int token) {
    const float* const row = block_.rows[token];
    const I magnitude = set(0x7FFFFFFF);
    I largest = _mm512_setzero_si512();
    const auto load = [&](int64_t at) {
      if (kWhole) {
        const V z = _mm512_loadu_ps(row + at);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(bits(z), magnitude));
        return z;
      }
      const __mmask16 there = tail_mask(plan_.num_experts, at);
      const V z = _mm512_mask_loadu_ps(set(kLowest), there, row + at);
      largest =
          _mm512_mask_max_epu32(largest, there, largest, _mm512_and_si512(bits(z), magnitude));
      return z;
    };
    work_.error[token] = 0.0f;
    if (plan_.num_groups > 1) {
      store_best(token, kLowest, load);
    } else {
      V most = load(0);
      for (int64_t at = kLanes; at < num_padded_; at += kLanes) {
        most = _mm512_max_ps(most, load(at));
      }
      _mm512_store_ps(work_.edges[token], most);
    }
    leave_nonfinite(token, largest);
  }

  // Group g's largest value in lane g of the edges; `none` for groups that are not there.
  template <typename Load>
  void store_best(int token, float none, const Load& load) {
    const int64_t group_size = plan_.num_experts / plan_.num_groups;
    V most[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      most[g] = set(none);
      if (g >= plan_.num_groups) continue;
      for (int64_t at = g * group_size; at < (g + 1) * group_size; at += kLanes) {
        most[g] = at == g * group_size ? load(at) : _mm512_max_ps(most[g], load(at));
      }
    }
    const V best = tree(most, [](V a, V b) { return _mm512_max_ps(a, b); });
    _mm512_store_ps(work_.edges[token], best);
  }

  // Eight vectors to one whose lane g holds the fold of vector g. `fold` takes lanes pair by pair.
  template <typename Fold>
  static V tree(const V* x, const Fold& fold) {
    V pair[4], quad[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      pair[i] = fold(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]),
                     _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const D a = _mm512_castps_pd(pair[2 * i]), b = _mm512_castps_pd(pair[2 * i + 1]);
      quad[i] = fold(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                     _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const V all = fold(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88),
                       _mm512_shuffle_f32x4(quad[0], quad[1], 0xDD));
    return fold(_mm512_shuffle_f32x4(all, all, 0x88), _mm512_shuffle_f32x4(all, all, 0xDD));
  }

  // Group g's sum of its best two in lane g of the edges, its second in lane 8 + g. Positive floats are
  // compared as integers, of which there are more units.
  // kVectors: of each of eight groups; 0: any number, of any number of groups.
  template <int kVectors, typename Load>
  void store_best_two(int token, const Load& load) {
    const int64_t group_size =
        kVectors > 0 ? kVectors * kLanes : plan_.num_experts / plan_.num_groups;
    I most[8], second[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      if constexpr (kVectors == 2) {
        const I a = bits(load(g * group_size)), b = bits(load(g * group_size + kLanes));
        most[g] = _mm512_max_epi32(a, b);
        second[g] = _mm512_min_epi32(a, b);
        continue;
      }
      most[g] = second[g] = _mm512_setzero_si512();
      if (g >= plan_.num_groups) continue;
      for (int64_t at = g * group_size; at < (g + 1) * group_size; at += kLanes) {
        const I value = bits(load(at));
        second[g] = _mm512_max_epi32(second[g], _mm512_min_epi32(most[g], value));
        most[g] = _mm512_max_epi32(most[g], value);
      }
    }
    // Of two pairs (largest, second): the second of all four is the larger of the smaller largest and the
    // larger second.
    const auto fold = [](I& m, I& s, I other_m, I other_s) {
      s = _mm512_max_epi32(_mm512_min_epi32(m, other_m), _mm512_max_epi32(s, other_s));
      m = _mm512_max_epi32(m, other_m);
    };
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const I m = _mm512_unpackhi_epi32(most[2 * i], most[2 * i + 1]);
      const I s = _mm512_unpackhi_epi32(second[2 * i], second[2 * i + 1]);
      most[i] = _mm512_unpacklo_epi32(most[2 * i], most[2 * i + 1]);
      second[i] = _mm512_unpacklo_epi32(second[2 * i], second[2 * i + 1]);
      fold(most[i], second[i], m, s);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const I m = _mm512_unpackhi_epi64(most[2 * i], most[2 * i + 1]);
      const I s = _mm512_unpackhi_epi64(second[2 * i], second[2 * i + 1]);
      most[i] = _mm512_unpacklo_epi64(most[2 * i], most[2 * i + 1]);
      second[i] = _mm512_unpacklo_epi64(second[2 * i], second[2 * i + 1]);
      fold(most[i], second[i], m, s);
    }
    const I m = _mm512_shuffle_i32x4(most[0], most[1], 0xDD);
    const I s = _mm512_shuffle_i32x4(second[0], second[1], 0xDD);
    most[0] = _mm512_shuffle_i32x4(most[0], most[1], 0x88);
    second[0] = _mm512_shuffle_i32x4(second[0], second[1], 0x88);
    fold(most[0], second[0], m, s);
    const I last_m = _mm512_shuffle_i32x4(most[0], most[0], 0xDD);
    const I last_s = _mm512_shuffle_i32x4(second[0], second[0], 0xDD);
    most[0] = _mm512_shuffle_i32x4(most[0], most[0], 0x88);
    second[0] = _mm512_shuffle_i32x4(second[0], second[0], 0x88);
    fold(most[0], second[0], last_m, last_s);
    const V seconds = floats(second[0]);
    _mm512_store_ps(work_.edges[token],
                    _mm512_mask_mov_ps(seconds, 0x00FF, _mm512_add_ps(floats(most[0]), seconds)));
  }

  void survey_kept(int token, const float* row) {
    V most = set(kLowest);
    for_kept_vectors(token, [&](int64_t at) {
      const V value =
          _mm512_mask_loadu_ps(set(kLowest), tail_mask(plan_.num_experts, at), row + at);
      most = _mm512_max_ps(most, value);
    });
    _mm512_store_ps(work_.edges[token], most);
  }

  template <typename Body>
  void for_kept_vectors(int token, const Body& body) const {
    if (plan_.num_groups == 1) {
      for (int64_t at = 0; at < num_padded_; at += kLanes) body(at);
      return;
    }
    const int64_t group_size = plan_.num_experts / plan_.num_groups;
    for (uint32_t left = work_.kept_groups[token]; left != 0; left &= left - 1) {
      const int64_t begin = __builtin_ctz(left) * group_size;
      for (int64_t at = begin; at < begin + group_size; at += kLanes) body(at);
    }
  }

  // Edges of all tokens of [first, last), an edge per vector and a token per lane; other lanes repeat.
  void load_edges(int first, int last, V* columns) const {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const int token = i >= first && i < last ? i : first;
      columns[i] = _mm512_load_ps(work_.edges[token]);
    }
    transpose(columns);
  }

  static __mmask16 lanes_of(int first, int last) {
    return static_cast<__mmask16>((1u << last) - (1u << first));
  }

  // Leaves kept_groups, and the threshold where the groups' seconds give one. Returns undecided tokens.
  [[gnu::noinline]] uint32_t choose_groups(int first, int last) {
    V columns[kLanes];
    load_edges(first, last, columns);
    V sorted[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) sorted[g] = columns[g];
    sort_lanes<8>(sorted);
    alignas(64) float falling[8][kLanes];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) _mm512_store_ps(falling[g], sorted[g]);
    const V least = _mm512_load_ps(falling[plan_.keep_groups - 1]);
    const V refused = _mm512_load_ps(falling[plan_.keep_groups]);
    const V error = _mm512_load_ps(work_.error);
    const float apart = plan_.score == Score::kSoftmax ? kApart : 0.0f;
    const V margin = _mm512_fmadd_ps(error, set(plan_.sum_of_two ? 4.0f : 2.0f), set(apart));
    const __mmask16 decided = _mm512_cmp_ps_mask(_mm512_sub_ps(least, refused), margin, _CMP_GT_OQ);
    I kept = _mm512_setzero_si512();
    V threshold = set(-kLowest);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const __mmask16 keeps = _mm512_cmp_ps_mask(columns[g], least, _CMP_GE_OQ);
      kept = _mm512_mask_or_epi32(kept, keeps, kept, set(1 << g));
      threshold = _mm512_mask_min_ps(threshold, keeps, threshold, columns[8 + g]);
    }
    const __mmask16 lanes = lanes_of(first, last);
    _mm512_mask_store_epi32(work_.kept_groups, lanes, kept);
    _mm512_mask_store_ps(work_.threshold, lanes, below(threshold, error));
    return static_cast<uint32_t>(lanes & ~decided);
  }

  // Every expert that may be among the best K lies at or above this, when K experts reach `value`.
  V below(V value, V error) const {
    const float apart = plan_.score == Score::kSoftmax ? 2 * kApart : 0.0f;
    return _mm512_sub_ps(value, _mm512_fmadd_ps(error, set(2.0f), set(apart)));
  }

  // The K-th of the 16 lane maxima: K experts reach it.
  [[gnu::noinline]] void set_thresholds(int first, int last) {
    V columns[kLanes];
    load_edges(first, last, columns);
    sort_lanes<16>(columns);
    alignas(64) float falling[kFusedMostTopK][kLanes];
#pragma GCC unroll 8
    for (int k = 0; k < static_cast<int>(kFusedMostTopK); ++k) {
      _mm512_store_ps(falling[k], columns[k]);
    }
    const V reached = _mm512_load_ps(falling[plan_.top_k - 1]);
    _mm512_mask_store_ps(work_.threshold, lanes_of(first, last),
                         below(reached, _mm512_load_ps(work_.error)));
  }

  // Keys of what reaches the threshold; of more than kLanes the largest.
  [[gnu::noinline]] void gather_candidates(int token, const float* row) {
    _mm512_store_ps(work_.candidates[token], set(kLowest));
    const bool whole = num_padded_ == plan_.num_experts;
    const int64_t count =
        whole ? put_candidates<true>(token, row) : put_candidates<false>(token, row);
    if (count <= kLanes) return;
    if (count > kMostCandidates) {
      work_.undecided |= 1u << token;
      return;
    }
    float* const keys = work_.candidates[token];
    _mm512_storeu_ps(keys + count, set(kLowest));  // where the last store did not reach
    keep_largest(keys);
  }

  template <bool kWhole>
  int64_t put_candidates(int token, const float* row) {
    float* const out = work_.candidates[token];
    const V threshold = set(work_.threshold[token]), lowest = set(kLowest);
    const I ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I id_mask = set(id_mask_);
    int64_t count = 0;
    for_kept_vectors(token, [&](int64_t at) {
      const __mmask16 there = kWhole ? __mmask16{0xFFFF} : tail_mask(plan_.num_experts, at);
      const V value =
          kWhole ? _mm512_loadu_ps(row + at) : _mm512_mask_loadu_ps(lowest, there, row + at);
      const __mmask16 found = kWhole ? _mm512_cmp_ps_mask(value, threshold, _CMP_GE_OQ)
                                     : _mm512_mask_cmp_ps_mask(there, value, threshold, _CMP_GE_OQ);
      const I own = _mm512_add_epi32(ids, set(static_cast<int32_t>(at)));
      const V key = floats(_mm512_ternarylogic_epi32(bits(value), id_mask, own, 0xBA));
      _mm512_storeu_ps(out + (count < kMostCandidates ? count : kMostCandidates),
                       _mm512_mask_compress_ps(lowest, found, key));
      count += __builtin_popcount(found);
    });
    return count;
  }

  static V sort_within(V x) {
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
  static void keep_largest(float* keys) {
    const I reversed = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const V a = sort_within(_mm512_loadu_ps(keys));
    const V b = sort_within(_mm512_loadu_ps(keys + kLanes));
    _mm512_storeu_ps(keys, _mm512_max_ps(a, _mm512_permutexvar_ps(reversed, b)));
  }

  // --- Across tokens ---

  struct Chosen {
    V selection[kExact];  // falling; kLogit, kSoftmax: the logits
    V scores[kExact];     // kSigmoid only
    I ids[kExact];
  };

  [[gnu::noinline]] void finish() {
    V keys[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      keys[i] = _mm512_load_ps(work_.candidates[i < block_.num_tokens ? i : 0]);
    }
    transpose(keys);
    sort_lanes<16>(keys);
    alignas(64) float falling[kLanes][kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) _mm512_store_ps(falling[i], keys[i]);
    check_cut(_mm512_load_ps(falling[plan_.top_k - 1]), _mm512_load_ps(falling[plan_.top_k + 1]));
    Chosen chosen;
    rank(keys, &chosen);
    weigh(&chosen);
  }

  void leave(__mmask16 tokens) { work_.undecided |= tokens; }

  // The key after next to the last chosen one, and all below, are out whatever the errors.
  void check_cut(V last, V out) {
    const V magnitude = floats(set(0x7FFFFFFF)), huge = set(0x1p+100f);
    const V unit = set(static_cast<float>(id_mask_ + 1) * 0x1p-23f);
    const V low = _mm512_fnmadd_ps(_mm512_and_ps(last, magnitude), unit, last);
    const V high = _mm512_fmadd_ps(_mm512_min_ps(_mm512_and_ps(out, magnitude), huge), unit, out);
    const V margin = _mm512_fmadd_ps(_mm512_load_ps(work_.error), set(2.0f), set(2 * kApart));
    leave(
        static_cast<__mmask16>(~_mm512_cmp_ps_mask(_mm512_sub_ps(low, high), margin, _CMP_GT_OQ)));
  }

  // Row pointers as integers, for the gathers.
  struct Addresses {
    I low, high;
  };

  static V gather(const Addresses& rows, I ids) {
    const I low = _mm512_slli_epi64(_mm512_cvtepu32_epi64(_mm512_castsi512_si256(ids)), 2);
    const I high = _mm512_slli_epi64(_mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(ids, 1)), 2);
    const __m256 a = _mm512_i64gather_ps(_mm512_add_epi64(low, rows.low), nullptr, 1);
    const __m256 b = _mm512_i64gather_ps(_mm512_add_epi64(high, rows.high), nullptr, 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
  }

  // Exact selection scores of the first candidates, in order; ties go to the lowest id.
  void rank(const V* keys, Chosen* chosen) {
    const Addresses rows = {_mm512_loadu_si512(block_.rows), _mm512_loadu_si512(block_.rows + 8)};
    const bool is_sigmoid = plan_.score == Score::kSigmoid;
#pragma GCC unroll 9
    for (int slot = 0; slot < kExact; ++slot) {
      const __mmask16 there = _mm512_cmp_ps_mask(keys[slot], set(kLowest), _CMP_GT_OQ);
      const I id = _mm512_and_si512(bits(keys[slot]), set(id_mask_));
      V value = gather(rows, id);
      chosen->scores[slot] = value;
      if (is_sigmoid) {
        value = rounded(exact_sigmoid(low_half(value)), exact_sigmoid(high_half(value)));
        chosen->scores[slot] = value;
        if (plan_.bias != nullptr) {
          value = _mm512_add_ps(value, _mm512_i32gather_ps(id, plan_.bias, 4));
        }
      }
      chosen->ids[slot] = id;
      chosen->selection[slot] = _mm512_mask_mov_ps(set(kLowest), there, value);
    }
    // The keys' order is nearly right: two rounds, the second to see it, are the rule.
    __mmask16 moved = 1;
    while (moved != 0) {
      moved = 0;
#pragma GCC unroll 2
      for (int begin = 0; begin < 2; ++begin) {
#pragma GCC unroll 4
        for (int k = begin; k + 1 < kExact; k += 2) moved |= put_in_order(chosen, k);
      }
    }
  }

  static __mmask16 put_in_order(Chosen* chosen, int k) {
    const V a = chosen->selection[k], b = chosen->selection[k + 1];
    const I id_a = chosen->ids[k], id_b = chosen->ids[k + 1];
    const V score_a = chosen->scores[k], score_b = chosen->scores[k + 1];
    const __mmask16 ties = _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
    const __mmask16 swap = _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) |
                           _mm512_mask_cmp_epi32_mask(ties, id_a, id_b, _MM_CMPINT_GT);
    chosen->selection[k] = _mm512_mask_mov_ps(a, swap, b);
    chosen->selection[k + 1] = _mm512_mask_mov_ps(b, swap, a);
    chosen->ids[k] = _mm512_mask_mov_epi32(id_a, swap, id_b);
    chosen->ids[k + 1] = _mm512_mask_mov_epi32(id_b, swap, id_a);
    chosen->scores[k] = _mm512_mask_mov_ps(score_a, swap, score_b);
    chosen->scores[k + 1] = _mm512_mask_mov_ps(score_b, swap, score_a);
    return swap;
  }

  void weigh(Chosen* chosen) {
    D low[8], high[8];
    switch (plan_.score) {
      case Score::kSigmoid:
        take_scores(chosen->scores, low, high);
        break;
      case Score::kSoftmax:
        check_gaps(chosen->selection);
        take_powers(chosen->selection, low, high);
        divide_by_all(chosen->selection[0], chosen->scores, low, high);
        break;
      case Score::kLogit:
        take_powers(chosen->selection, low, high);
        break;
    }
    if (plan_.normalised) {
      const D added = _mm512_set1_pd(plan_.added_to_sum);
      const D low_sum = _mm512_add_pd(sum_of_eight(low), added);
      const D high_sum = _mm512_add_pd(sum_of_eight(high), added);
      for (int k = 0; k < plan_.top_k; ++k) {
        low[k] = _mm512_div_pd(low[k], low_sum);
        high[k] = _mm512_div_pd(high[k], high_sum);
      }
    }
    store(chosen->ids, low, high);
  }

  // fp32 scores, widened; those beyond top_k are 0.
  void take_scores(const V* scores, D* low, D* high) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      low[k] = high[k] = _mm512_setzero_pd();
      if (k >= plan_.top_k) continue;
      leave(_mm512_cmp_ps_mask(scores[k], set(plan_.least_score), _CMP_LT_OQ));
      low[k] = low_half(scores[k]);
      high[k] = high_half(scores[k]);
    }
  }

  void take_powers(const V* logits, D* low, D* high) {
    const D low_peak = low_half(logits[0]), high_peak = high_half(logits[0]);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      low[k] = high[k] = _mm512_setzero_pd();
      if (k >= plan_.top_k) continue;
      low[k] = exp_nonpositive(_mm512_sub_pd(low_half(logits[k]), low_peak));
      high[k] = exp_nonpositive(_mm512_sub_pd(high_half(logits[k]), high_peak));
    }
  }

  // Different logits whose scores may be the same fp32 number, or no normal one.
  void check_gaps(const V* logits) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      if (k >= plan_.top_k) continue;
      const V gap = _mm512_sub_ps(logits[k], logits[k + 1]);
      const __mmask16 close = _mm512_cmp_ps_mask(gap, set(kApart), _CMP_LT_OQ);
      leave(_mm512_mask_cmp_ps_mask(close, gap, _mm512_setzero_ps(), _CMP_NEQ_OQ));
      leave(
          _mm512_cmp_ps_mask(_mm512_sub_ps(logits[0], logits[k]), set(kSoftmaxRange), _CMP_GT_OQ));
    }
  }

  // Powers to scores of a softmax over all experts; rounded to fp32 where they are normalised next.
  void divide_by_all(V peak, V* scores, D* low, D* high) {
    alignas(64) float peaks[kLanes];
    alignas(64) double sums[kLanes];
    _mm512_store_ps(peaks, peak);
    for (int i = 0; i < kLanes; ++i) {
      sums[i] = i < block_.num_tokens ? sum_of_powers(block_.rows[i], plan_.num_experts, peaks[i])
                                      : sums[0];
    }
    const D low_sum = _mm512_load_pd(sums), high_sum = _mm512_load_pd(sums + 8);
    for (int k = 0; k < plan_.top_k; ++k) {
      low[k] = _mm512_div_pd(low[k], low_sum);
      high[k] = _mm512_div_pd(high[k], high_sum);
      scores[k] = rounded(low[k], high[k]);
    }
    if (plan_.normalised) take_scores(scores, low, high);
  }

  // x the factor in fp32; denormal weights before their rounding.
  V scaled(D low, D high) const {
    const V weight = rounded(low, high), factor = set(plan_.factor);
    const __mmask16 denormal = _mm512_cmp_ps_mask(weight, set(0x1p-126f), _CMP_LT_OQ);
    const V product = _mm512_mul_ps(weight, factor);
    if (__builtin_expect(denormal == 0, 1)) return product;
    const D wide = _mm512_set1_pd(static_cast<double>(plan_.factor));
    return _mm512_mask_mov_ps(product, denormal,
                              rounded(_mm512_mul_pd(low, wide), _mm512_mul_pd(high, wide)));
  }

  void store(const I* ids, const D* low, const D* high) const {
    V rows[kLanes];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      rows[k] = floats(ids[k]);
      rows[8 + k] = k < plan_.top_k ? scaled(low[k], high[k]) : _mm512_setzero_ps();
    }
    transpose(rows);
    alignas(64) float out[kLanes][kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) _mm512_store_ps(out[i], rows[i]);
    const auto mask = static_cast<__mmask8>((1u << plan_.top_k) - 1);
    for (int64_t i = 0; i < block_.num_tokens; ++i) {
      const V row = _mm512_load_ps(out[i]);
      _mm256_mask_storeu_epi32(block_.topk_idx[i], mask, _mm512_castsi512_si256(bits(row)));
      _mm256_mask_storeu_ps(block_.weights[i], mask, _mm512_extractf32x8_ps(row, 1));
    }
  }

  const FusedPlan& plan_;
  const FusedBlock& block_;
  int32_t id_mask_ = 0;
  int64_t num_padded_ = 0;
  Work work_;
};

uint32_t route_block(const FusedPlan& plan, const FusedBlock& block) {
  const uint32_t all = (1u << block.num_tokens) - 1;
  return Block(plan, block).route() & all;
}

void coarse_sigmoids(const float* logits, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    _mm512_storeu_ps(out + i, coarse_sigmoid(_mm512_loadu_ps(logits + i)));
  }
}

void fine_sigmoids(const float* logits, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    _mm512_storeu_ps(out + i, fine_sigmoid(_mm512_loadu_ps(logits + i)));
  }
}

bool is_finite(const float* values, int64_t count) {
  const I magnitude = set(0x7FFFFFFF);
  I largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += kLanes) {
    const I word = bits(_mm512_maskz_loadu_ps(tail_mask(count, i), values + i));
    largest = _mm512_max_epu32(largest, _mm512_and_si512(word, magnitude));
  }
  return _mm512_cmp_epu32_mask(largest, set(0x7F800000), _MM_CMPINT_NLT) == 0;
}

}  // namespace

constinit const FusedKernel kFusedKernelAvx512 = {route_block, coarse_sigmoids, fine_sigmoids,
                                                  is_finite};

}  // namespace argosy::router
