// The fused pass in AVX-512; see fused.h.
//
// Two shapes of work alternate. Along a row: approximations, group scores and the candidates above a
// threshold (fused_rows.inl), or the best logits of 16 columns (fused_columns.inl), 16 experts a vector.
// Across tokens: thresholds, sorting, exact scores and weights, one token a lane, so that networks of minima
// and maxima have no latency to wait for. No standard function may come in here: the linker could keep its
// AVX-512 copy for everyone. Test: tests/router/fused_test.cc.
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

#include "router/fused_lanes.inl"
// Uses its vectors.
#include "router/fused_rows.inl"
// Uses both.
#include "router/fused_columns.inl"
// Uses all.
#include "router/fused_words.inl"

// Candidates of a token that get an exact score: one more than can be chosen.
constexpr int kExact = static_cast<int>(kFusedMostTopK) + 1;
// No score of a softmax over kFusedMostExperts underflows within this distance of the largest logit.
constexpr float kSoftmaxRange = 76.0f;

// From the candidates of a block to its experts and weights. kTopK: the plan's, or 0 for any.
template <int kTopK>
class Finisher {
 public:
  Finisher(const FusedPlan& plan, const FusedBlock& block, Ahead* ahead, Work* work)
      : plan_(plan),
        block_(block),
        work_(*work),
        ahead_(*ahead),
        // A core has some 24 misses in flight: rows come evenly over all of the work.
        lines_(Ahead::lines_of_row(plan) * kLanes / (4 * kExact)),
        lines_beside_weight_(Ahead::lines_of_row(plan) / 4),
        id_mask_(id_mask_of(plan.num_experts)) {}

  [[gnu::noinline]] void finish() {
    Chosen chosen;
    switch (plan_.score) {
      case Score::kSigmoid:
        rank<Score::kSigmoid>(&chosen);
        break;
      case Score::kSoftmax:
      case Score::kLogit:
        rank<Score::kLogit>(&chosen);
        break;
    }
    weigh(chosen);
  }

 private:
  int64_t top_k() const { return kTopK > 0 ? kTopK : plan_.top_k; }

  struct Chosen {
    V selection[kExact];  // falling; kLogit, kSoftmax: the logits
    V scores[kExact];     // kSigmoid only
    I ids[kExact];
  };

  void leave(__mmask16 tokens) { work_.undecided |= tokens; }

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
  template <Score kScore>
  void rank(Chosen* chosen) {
    const Addresses rows = {_mm512_loadu_si512(block_.rows), _mm512_loadu_si512(block_.rows + 8)};
    constexpr bool kIsSigmoid = kScore == Score::kSigmoid;
#pragma GCC unroll 9
    for (int slot = 0; slot < kExact; ++slot) {
      ahead_.fetch(lines_);
      if (!kIsSigmoid && slot > top_k()) {
        chosen->ids[slot] = _mm512_setzero_si512();
        chosen->selection[slot] = set(kLowest);
        continue;
      }
      const V key = _mm512_load_ps(work_.keys[slot]);
      const __mmask16 there = _mm512_cmp_ps_mask(key, set(kLowest), _CMP_GT_OQ);
      const I id = _mm512_and_si512(bits(key), set(id_mask_));
      V value = gather(rows, id);
      if (kIsSigmoid) {
        value = sigmoid(value);
        chosen->scores[slot] = value;
        if (plan_.bias != nullptr) {
          value = _mm512_add_ps(value, _mm512_i32gather_ps(id, plan_.bias, 4));
        }
      }
      chosen->ids[slot] = id;
      chosen->selection[slot] = _mm512_mask_mov_ps(set(kLowest), there, value);
    }
    // The keys' order is nearly right: one round is the rule.
    while (is_out_of_order(*chosen, static_cast<int>(top_k()))) {
      __mmask16 moved = 0;
#pragma GCC unroll 2
      for (int begin = 0; begin < 2; ++begin) {
#pragma GCC unroll 4
        for (int k = begin; k + 1 < kExact; k += 2) moved |= put_in_order<kIsSigmoid>(chosen, k);
      }
      if (moved == 0) break;
    }
  }

  // Below -100 no score is of any use, see check_scores().
  V sigmoid(V z) {
    const __mmask16 negative = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_LT_OQ);
    const V below = _mm512_max_ps(_mm512_or_ps(z, set(-0.0f)), set(-100.0f));
    const D low = near_sigmoid(low_half(below), static_cast<__mmask8>(negative));
    const D high = near_sigmoid(high_half(below), static_cast<__mmask8>(negative >> 8));
    leave_near_ties<false>(low);
    leave_near_ties<true>(high);
    return rounded(low, high);
  }

  template <bool kHigh>
  void leave_near_ties(D x) {
    const auto ties = static_cast<__mmask16>(is_near_tie(x));
    leave(kHigh ? static_cast<__mmask16>(ties << 8) : ties);
  }

  // True also for equal neighbours, in whatever order.
  static bool is_out_of_order(const Chosen& chosen, int top_k) {
    __mmask16 found = 0;
#pragma GCC unroll 8
    for (int k = 0; k + 1 < kExact; ++k) {
      if (k >= top_k) continue;
      found |= _mm512_cmp_ps_mask(chosen.selection[k], chosen.selection[k + 1], _CMP_LE_OQ);
    }
    return found != 0;
  }

  template <bool kScores>
  static __mmask16 put_in_order(Chosen* chosen, int k) {
    const V a = chosen->selection[k], b = chosen->selection[k + 1];
    const I id_a = chosen->ids[k], id_b = chosen->ids[k + 1];
    const __mmask16 ties = _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
    const __mmask16 swap = _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) |
                           _mm512_mask_cmp_epi32_mask(ties, id_a, id_b, _MM_CMPINT_GT);
    chosen->selection[k] = _mm512_mask_mov_ps(a, swap, b);
    chosen->selection[k + 1] = _mm512_mask_mov_ps(b, swap, a);
    chosen->ids[k] = _mm512_mask_mov_epi32(id_a, swap, id_b);
    chosen->ids[k + 1] = _mm512_mask_mov_epi32(id_b, swap, id_a);
    if constexpr (kScores) {
      const V score_a = chosen->scores[k], score_b = chosen->scores[k + 1];
      chosen->scores[k] = _mm512_mask_mov_ps(score_a, swap, score_b);
      chosen->scores[k + 1] = _mm512_mask_mov_ps(score_b, swap, score_a);
    }
    return swap;
  }

  void weigh(const Chosen& chosen) {
    alignas(64) double sums[kLanes];
    if (plan_.score == Score::kSigmoid) {
      check_scores(chosen.scores);
    } else {
      check_range(chosen.selection);
      if (plan_.score == Score::kSoftmax) check_gaps(chosen.selection);
      if (plan_.over_all) sum_over_all(chosen.selection[0], sums);
    }
    // The upper half of a row: its weights.
    V rows[kLanes];
    alignas(64) float weights[kFusedMostTopK][kLanes];
    weigh_half<false>(chosen, sums, weights);
    weigh_half<true>(chosen, sums + 8, weights);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      rows[k] = floats(chosen.ids[k]);
      rows[8 + k] = _mm512_load_ps(weights[k]);
    }
    transpose(rows);
    store(rows);
  }

  template <bool kHigh>
  static D half(V v) {
    return kHigh ? high_half(v) : low_half(v);
  }

  // Weights of eight tokens, those beyond top_k 0. sums: of the powers over all experts.
  template <bool kHigh>
  void weigh_half(const Chosen& chosen, const double* sums, float (*weights)[kLanes]) {
    D terms[8];
    const D peak = half<kHigh>(chosen.selection[0]);
    const bool are_scores = plan_.score == Score::kSigmoid;
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      terms[k] = _mm512_setzero_pd();
      ahead_.fetch(lines_beside_weight_);
      if (k >= top_k()) continue;
      if (are_scores) {
        terms[k] = half<kHigh>(chosen.scores[k]);
      } else if (plan_.over_all) {
        terms[k] = exp_nonpositive(_mm512_sub_pd(half<kHigh>(chosen.selection[k]), peak));
      } else {
        terms[k] = k == 0 ? _mm512_set1_pd(1.0)
                          : near_exp(_mm512_sub_pd(half<kHigh>(chosen.selection[k]), peak));
      }
    }
    if (plan_.over_all) divide_by_all<kHigh>(_mm512_load_pd(sums), terms);
    if (plan_.normalised) {
      const D sum = _mm512_add_pd(sum_of_eight(terms), _mm512_set1_pd(plan_.added_to_sum));
      const D inverse = inverse_of(sum);
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) {
        if (k >= top_k()) continue;
        terms[k] = _mm512_mul_pd(terms[k], inverse);
        leave_near_ties<kHigh>(terms[k]);
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const __m256 weight = k < top_k() ? scaled<kHigh>(terms[k]) : _mm256_setzero_ps();
      _mm256_store_ps(weights[k] + (kHigh ? 8 : 0), weight);
    }
  }

  // Powers to scores of a softmax over all experts; rounded to fp32 where they are normalised next.
  template <bool kHigh>
  void divide_by_all(D sum, D* terms) {
    const D inverse = inverse_of(sum);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      if (k >= top_k()) continue;
      terms[k] = quotient(terms[k], sum, inverse);
      if (!plan_.normalised) continue;
      const __m256 score = _mm512_cvtpd_ps(terms[k]);
      const uint32_t small =
          _mm256_cmp_ps_mask(score, _mm256_set1_ps(plan_.least_score), _CMP_LT_OQ);
      work_.undecided |= kHigh ? small << 8 : small;
      terms[k] = _mm512_cvtps_pd(score);
    }
  }

  void sum_over_all(V peak, double* sums) const {
    alignas(64) float peaks[kLanes];
    _mm512_store_ps(peaks, peak);
    for (int i = 0; i < kLanes; ++i) {
      sums[i] = i < block_.num_tokens ? sum_of_powers(block_.rows[i], plan_.num_experts, peaks[i])
                                      : sums[0];
    }
  }

  // Rows whose weights the reference computes in the log domain.
  void check_scores(const V* scores) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      if (k >= top_k()) continue;
      leave(_mm512_cmp_ps_mask(scores[k], set(plan_.least_score), _CMP_LT_OQ));
    }
  }

  // Different logits whose scores may be the same fp32 number, or no normal one.
  void check_gaps(const V* logits) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      if (k >= top_k()) continue;
      const V gap = _mm512_sub_ps(logits[k], logits[k + 1]);
      const __mmask16 close = _mm512_cmp_ps_mask(gap, set(kApart), _CMP_LT_OQ);
      leave(_mm512_mask_cmp_ps_mask(close, gap, _mm512_setzero_ps(), _CMP_NEQ_OQ));
    }
  }

  void check_range(const V* logits) {
    const V least = logits[top_k() - 1];
    leave(_mm512_cmp_ps_mask(_mm512_sub_ps(logits[0], least), set(kSoftmaxRange), _CMP_GT_OQ));
  }

  // x the factor in fp32; denormal weights before their rounding, if they are exact.
  template <bool kHigh>
  __m256 scaled(D exact) {
    const __m256 weight = _mm512_cvtpd_ps(exact);
    const __m256 product = _mm256_mul_ps(weight, _mm256_set1_ps(plan_.factor));
    const auto denormal =
        static_cast<uint32_t>(_mm256_cmp_ps_mask(weight, _mm256_set1_ps(0x1p-126f), _CMP_LT_OQ));
    if (__builtin_expect(denormal == 0, 1)) return product;
    if (plan_.normalised) work_.undecided |= kHigh ? denormal << 8 : denormal;
    const D wide = _mm512_set1_pd(static_cast<double>(plan_.factor));
    return _mm256_mask_mov_ps(product, static_cast<__mmask8>(denormal),
                              _mm512_cvtpd_ps(_mm512_mul_pd(exact, wide)));
  }

  void store(const V* rows) const {
    alignas(64) float out[kLanes][kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) _mm512_store_ps(out[i], rows[i]);
    const auto mask = static_cast<__mmask8>((1u << top_k()) - 1);
    for (int64_t i = 0; i < block_.num_tokens; ++i) {
      const V row = _mm512_load_ps(out[i]);
      const int64_t at = block_.tokens[i] * top_k();
      _mm256_mask_storeu_epi32(block_.topk_idx + at, mask, _mm512_castsi512_si256(bits(row)));
      _mm256_mask_storeu_ps(block_.weights + at, mask, _mm512_extractf32x8_ps(row, 1));
    }
  }

  const FusedPlan& plan_;
  const FusedBlock& block_;
  Work& work_;
  Ahead& ahead_;
  const int lines_;                // to fetch beside each exact candidate
  const int lines_beside_weight_;  // and beside each weight of eight tokens
  const int32_t id_mask_;
};

// Leaves what a key does not decide.
void check_cut(const FusedPlan& plan, Work* work) {
  work->undecided |= may_be_chosen(_mm512_load_ps(work->keys[plan.top_k + 1]),
                                   _mm512_load_ps(work->keys[plan.top_k - 1]),
                                   id_mask_of(plan.num_experts), _mm512_load_ps(work->error));
}

template <bool kWords>
uint32_t route_block(const FusedPlan& plan, const FusedBlock& block) {
  // What is written at the end: stores that miss would hold up all stores after them.
  for (int64_t i = 0; i < block.num_tokens; ++i) {
    __builtin_prefetch(block.topk_idx + block.tokens[i] * plan.top_k, 1);
    __builtin_prefetch(block.weights + block.tokens[i] * plan.top_k, 1);
  }
  Work work;
  work.undecided = 0;
  Ahead ahead(plan, block);
  if (kWords && plan.word_bias != nullptr) {
    Words(plan, block, &ahead, &work).collect();
  } else if (Columns::takes(plan)) {
    Columns(plan, block, &ahead, &work).collect();
    check_cut(plan, &work);
  } else {
    Collector(plan, block, &ahead, &work).collect();
    check_cut(plan, &work);
  }
  if (plan.top_k == 8) {
    Finisher<8>(plan, block, &ahead, &work).finish();
  } else {
    Finisher<0>(plan, block, &ahead, &work).finish();
  }
  return work.undecided & ((1u << block.num_tokens) - 1);
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

void word_sigmoid(const float* logits, int16_t* out) {
  _mm512_storeu_si512(out, Words::approximate(logits));
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

constinit const FusedKernel kFusedKernelAvx512 = {route_block<false>, coarse_sigmoids,
                                                  fine_sigmoids, nullptr, is_finite};
constinit const FusedKernel kFusedKernelVbmi2 = {route_block<true>, coarse_sigmoids, fine_sigmoids,
                                                 word_sigmoid, is_finite};

}  // namespace argosy::router
