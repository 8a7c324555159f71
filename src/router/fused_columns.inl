// Part of fused_avx512.cc: the best keys of up to 16 tokens where experts are ordered by their logits and there
// are no groups. No threshold, no branch on a logit.
//
// Along a row, each of 16 columns keeps its best four of all vectors; then one token a lane, the best three of
// 16 columns are merged. A token of which some column or half of them may hide one more is looked at again.
// Test: tests/router/fused_test.cc.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

// Keys: the value's bits in the order of integers, the low ones replaced by the expert.
struct alignas(64) ColumnWork {
  I best[4][kLanes];  // row, then token; after transposing: column
};

// From the bits of a float to the order of integers, and back.
ARGOSY_INLINE I order_of(I x) {
  constexpr int kFlipMasked = 0x78;  // a ^ (b & c)
  return _mm512_ternarylogic_epi32(x, _mm512_srai_epi32(x, 31), set(0x7FFFFFFF), kFlipMasked);
}

class Columns {
 public:
  Columns(const FusedPlan& plan, const FusedBlock& block, Ahead* ahead, Work* work)
      : plan_(plan),
        block_(block),
        work_(*work),
        ahead_(*ahead),
        lines_(Ahead::lines_of_row(plan) / 4),
        id_mask_(id_mask_of(plan.num_experts)) {}

  static bool takes(const FusedPlan& plan) {
    return plan.score != Score::kSigmoid && plan.num_groups == 1;
  }

  // Leaves work.keys; rows that are not finite are undecided.
  void collect() {
    _mm512_store_ps(work_.error, _mm512_setzero_ps());
    if (plan_.num_experts % kBlock == 0) {
      survey<true>();
    } else {
      survey<false>();
    }
    merge();
  }

 private:
  static constexpr int64_t kBlock = 4 * kLanes;
  static constexpr int32_t kLeastFinite =
      static_cast<int32_t>(0x80800000u);  // the order of -FLT_MAX

  static I with_id(I order, I id_mask, int64_t at) {
    constexpr int kInsertLow = 0xBA;  // a & ~b | c
    return _mm512_ternarylogic_epi32(order, id_mask, _mm512_load_si512(kIds.of + at), kInsertLow);
  }

  // Keys of 16 logits, and the least of all so far.
  I load_tail(const float* row, int64_t at, I id_mask, I* least) const {
    if (at >= plan_.num_experts) return set(INT32_MIN);
    const __mmask16 there = tail_mask(plan_.num_experts, at);
    const I key = with_id(order_of(_mm512_maskz_loadu_epi32(there, row + at)), id_mask, at);
    *least = _mm512_mask_min_epi32(*least, there, *least, key);
    return _mm512_mask_mov_epi32(set(INT32_MIN), there, key);
  }

  // Four falling vectors of column maxima, best first, from four in any order.
  static void sort_four(I* x) {
    exchange(x[0], x[1]);
    exchange(x[2], x[3]);
    exchange(x[0], x[2]);
    exchange(x[1], x[3]);
    exchange(x[1], x[2]);
  }

  // The best four of two falling lists: a sequence that rises and falls, put in order.
  static void keep_four(I* best, const I* next) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) best[i] = _mm512_max_epi32(best[i], next[3 - i]);
    exchange(best[0], best[2]);
    exchange(best[1], best[3]);
    exchange(best[0], best[1]);
    exchange(best[2], best[3]);
  }

  // kWhole: a multiple of kBlock experts.
  template <bool kWhole>
  [[gnu::noinline]] void survey() {
    const I id_mask = set(id_mask_);
    for (int token = 0; token < static_cast<int>(block_.num_tokens); ++token) {
      const float* const row = block_.rows[token];
      ahead_.fetch(lines_);
      I best[4], least = set(INT32_MAX);
      const auto next_four = [&](int64_t first, I* next) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const int64_t at = first + i * kLanes;
          next[i] = kWhole ? with_id(order_of(_mm512_loadu_si512(row + at)), id_mask, at)
                           : load_tail(row, at, id_mask, &least);
        }
        sort_four(next);
        if (kWhole) least = _mm512_min_epi32(least, next[3]);
      };
      next_four(0, best);
      for (int64_t at = kBlock; at < plan_.num_experts; at += kBlock) {
        I next[4];
        next_four(at, next);
        keep_four(best, next);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) columns_.best[i][token] = best[i];
      const uint32_t bad = _mm512_cmplt_epi32_mask(least, set(kLeastFinite)) |
                           _mm512_cmpge_epi32_mask(best[0], set(0x7F800000));
      work_.undecided |= static_cast<uint32_t>(bad != 0) << token;
    }
  }

  // Two falling lists of three to one of six, as Batcher's odd-even merge.
  void merge_three(int a, int b, I* out) const {
    const auto& best = columns_.best;
    I a0 = best[0][a], a1 = best[1][a], a2 = best[2][a];
    I b0 = best[0][b], b1 = best[1][b], b2 = best[2][b];
    exchange(a0, b0);
    exchange(a2, b2);
    exchange(b0, a2);
    exchange(a1, b1);
    exchange(a1, b0);
    exchange(b1, a2);
    out[0] = a0;
    out[1] = a1;
    out[2] = b0;
    out[3] = b1;
    out[4] = a2;
    out[5] = b2;
  }

  // A sequence of eight that rises and falls, to a falling one.
  static void put_in_order(I* x) {
#pragma GCC unroll 3
    for (int stride = 4; stride >= 1; stride /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        if ((i & stride) == 0) exchange(x[i], x[i + stride]);
      }
    }
  }

  // The best eight of columns [4 * quarter, 4 * quarter + 4).
  void merge_quarter(int quarter, I* best) const {
    I a[6], b[6];
    ahead_.fetch(4 * lines_);
    merge_three(4 * quarter, 4 * quarter + 1, a);
    merge_three(4 * quarter + 2, 4 * quarter + 3, b);
    best[0] = a[0];
    best[1] = a[1];
#pragma GCC unroll 4
    for (int i = 2; i < 6; ++i) best[i] = _mm512_max_epi32(a[i], b[7 - i]);
    best[6] = b[1];
    best[7] = b[0];
    put_in_order(best);
  }

  [[gnu::noinline]] void merge() {
    const int last_token = static_cast<int>(block_.num_tokens) - 1;
    alignas(64) I fourth[kLanes];
#pragma GCC unroll 16
    for (int token = 0; token < kLanes; ++token) {
      fourth[token] = columns_.best[3][token < last_token ? token : last_token];
    }
#pragma GCC unroll 1
    for (int row = 0; row < 3; ++row) transpose_row(row, last_token);
    I half[2][8];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      I other[8];
      merge_quarter(2 * h, half[h]);
      merge_quarter(2 * h + 1, other);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) half[h][i] = _mm512_max_epi32(half[h][i], other[7 - i]);
      put_in_order(half[h]);
    }
    I best[kKeys], rest[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      best[i] = _mm512_max_epi32(half[0][i], half[1][7 - i]);
      rest[i] = _mm512_min_epi32(half[0][i], half[1][7 - i]);
    }
    put_in_order(best);
    best_two(rest, &best[8], &best[9]);
    store(best, _mm512_max_epi32(half[0][7], half[1][7]), fourth);
  }

  void transpose_row(int row, int last_token) {
    V x[kLanes];
#pragma GCC unroll 16
    for (int token = 0; token < kLanes; ++token) {
      x[token] = floats(columns_.best[row][token < last_token ? token : last_token]);
    }
    transpose(x);
#pragma GCC unroll 16
    for (int column = 0; column < kLanes; ++column) columns_.best[row][column] = bits(x[column]);
  }

  static void best_two(const I* x, I* most, I* second) {
    *most = _mm512_max_epi32(x[0], x[1]);
    *second = _mm512_min_epi32(x[0], x[1]);
#pragma GCC unroll 6
    for (int i = 2; i < 8; ++i) {
      *second = _mm512_max_epi32(*second, _mm512_min_epi32(*most, x[i]));
      *most = _mm512_max_epi32(*most, x[i]);
    }
  }

  // The key as a float with the expert in its low bits; what is not there: kLowest.
  V float_key(I key) const {
    constexpr int kSelect = 0xCA;  // a ? b : c
    const V value = floats(_mm512_ternarylogic_epi32(set(id_mask_), key, order_of(key), kSelect));
    return _mm512_mask_mov_ps(value, _mm512_cmplt_epi32_mask(key, set(kLeastFinite)), set(kLowest));
  }

  // hidden, fourth: no key that is missing in `best` lies above these.
  void store(const I* best, I hidden, const I* fourth) {
#pragma GCC unroll 10
    for (int k = 0; k < kKeys; ++k) _mm512_store_ps(work_.keys[k], float_key(best[k]));
    const V least = out_below(_mm512_load_ps(work_.keys[plan_.top_k - 1]), id_mask_,
                              _mm512_load_ps(work_.error));
    const I cut = _mm512_andnot_si512(set(id_mask_), order_of(bits(least)));
    uint32_t again = _mm512_cmpge_epi32_mask(hidden, cut);
    alignas(64) int32_t cuts[kLanes];
    _mm512_store_si512(cuts, cut);
#pragma GCC unroll 16
    for (int token = 0; token < kLanes; ++token) {
      const __mmask16 above = _mm512_cmpge_epi32_mask(fourth[token], set(cuts[token]));
      again |= static_cast<uint32_t>(above != 0) << token;
    }
    again &= (1u << block_.num_tokens) - 1;
    for (again &= ~work_.undecided; again != 0; again &= again - 1) {
      look_again(__builtin_ctz(again));
    }
  }

  // The same keys one expert after the other.
  [[gnu::noinline]] void look_again(int token) {
    const float* const row = block_.rows[token];
    int32_t best[kKeys];
    for (int32_t& key : best) key = INT32_MIN;
    for (int64_t i = 0; i < plan_.num_experts; ++i) {
      const int32_t word = __builtin_bit_cast(int32_t, row[i]);
      const int32_t order = word ^ ((word >> 31) & INT32_MAX);
      const int32_t key = (order & ~id_mask_) | static_cast<int32_t>(i);
      int k = kKeys - 1;
      if (key <= best[k]) continue;
      for (; k > 0 && key > best[k - 1]; --k) best[k] = best[k - 1];
      best[k] = key;
    }
    for (int k = 0; k < kKeys; ++k) {
      alignas(64) float lanes[kLanes];
      _mm512_store_ps(lanes, float_key(set(best[k])));
      work_.keys[k][token] = lanes[0];
    }
  }

  const FusedPlan& plan_;
  const FusedBlock& block_;
  Work& work_;
  Ahead& ahead_;
  const int lines_;  // to fetch beside each row's survey, and four times as many beside each merge
  const int32_t id_mask_;
  ColumnWork columns_;
};
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
