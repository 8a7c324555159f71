// Part of fused_avx512.cc: the work along rows. From the logits of up to 16 tokens to at most 16 candidates
// of each, among which its experts are: of sigmoids, and of logits with groups.
//
// Lanes, vectors and tokens of a block are counted in int: numbers below a thousand that the compiler unrolls.
// Test: tests/router/fused_test.cc.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

constexpr int kKeys =
    static_cast<int>(kFusedMostTopK) + 2;  // of a token; it may choose all but two
constexpr int kMostCandidates = 32;        // of a token, before the largest kLanes are kept
// Logits of a softmax at least this far apart have different fp32 scores: e^(2^-22) is more than an ulp.
constexpr float kApart = 0x1p-22f;

struct alignas(64) Work {
  float edges[kLanes][kLanes];   // a token's lane maxima, or scores and seconds of its groups
  float threshold[kLanes];       // no expert below it is a candidate
  float error[kLanes];           // of the approximations of a token
  uint32_t kept_groups[kLanes];  // bits
  // Keys: the approximation (or logit), its low bits replaced by the expert.
  float candidates[kLanes][kMostCandidates + kLanes];
  float keys[kKeys][kLanes];  // the best of the candidates, falling
  uint32_t undecided;         // tokens, as bits
};

// Fetches the rows after the block's, which mostly are the next block's; a line that is not there costs
// nothing. A core has too few misses in flight to read at DRAM speed in one stage and not at all in the
// others: so each fetches its part.
class Ahead {
 public:
  Ahead(const FusedPlan& plan, const FusedBlock& block)
      : next_(reinterpret_cast<uintptr_t>(block.rows[0]) +
              static_cast<uintptr_t>(kLanes * plan.num_experts) * sizeof(float)) {}

  static int lines_of_row(const FusedPlan& plan) {
    return static_cast<int>(plan.num_experts / kLanes);
  }

  void fetch(int num_lines) {
    for (int i = 0; i < num_lines; ++i, next_ += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(next_), _MM_HINT_T0);
    }
  }

 private:
  uintptr_t next_;
};

// The bits of a key that hold the expert.
ARGOSY_INLINE int32_t id_mask_of(int64_t num_experts) {
  int64_t size = 1;
  while (size < num_experts) size *= 2;
  return static_cast<int32_t>(size - 1);
}

// Every expert that may be among the best K lies at or above this when the K-th key is `last`: a key is off by
// its low bits, a logit less than kApart above another may have its score.
ARGOSY_INLINE V out_below(V last, int32_t id_mask, V error) {
  const V magnitude = floats(set(0x7FFFFFFF));
  const V unit = set(static_cast<float>(id_mask + 1) * 0x1p-23f);
  const V low = _mm512_fnmadd_ps(_mm512_and_ps(last, magnitude), unit, last);
  return _mm512_sub_ps(low, _mm512_fmadd_ps(error, set(2.0f), set(2 * kApart)));
}

// Lanes whose key `out`, the next but one after the K-th, may be among the best K, hence more below it too.
ARGOSY_INLINE __mmask16 may_be_chosen(V out, V last, int32_t id_mask, V error) {
  const V magnitude = floats(set(0x7FFFFFFF)), huge = set(0x1p+100f);
  const V unit = set(static_cast<float>(id_mask + 1) * 0x1p-23f);
  const V high = _mm512_fmadd_ps(_mm512_min_ps(_mm512_and_ps(out, magnitude), huge), unit, out);
  const V least = out_below(last, id_mask, error);
  return static_cast<__mmask16>(~_mm512_cmp_ps_mask(least, high, _CMP_GT_OQ));
}

class Collector {
 public:
  Collector(const FusedPlan& plan, const FusedBlock& block, Ahead* ahead, Work* work)
      : plan_(plan),
        block_(block),
        work_(*work),
        ahead_(*ahead),
        lines_(Ahead::lines_of_row(plan) / 4),
        id_mask_(id_mask_of(plan.num_experts)),
        num_padded_((plan.num_experts + kLanes - 1) / kLanes * kLanes),
        group_size_(plan.num_experts / plan.num_groups) {}

  void collect() {
    const int64_t step = is_sigmoid() ? kFusedScratchFloats / num_padded_ : kLanes;
    for (int64_t first = 0; first < block_.num_tokens; first += step) {
      first_ = static_cast<int>(first);
      last_ = static_cast<int>(first + step < block_.num_tokens ? first + step : block_.num_tokens);
      collect_part();
    }
    sort_candidates();
  }

  // Of pairs of eight vectors, compared as integers: see best_two_of_groups().
  static V tree_of_two(I* most, I* second) {
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
    return _mm512_mask_mov_ps(seconds, 0x00FF, _mm512_add_ps(floats(most[0]), seconds));
  }

 private:
  // Which experts a token may have: all, or those of the kept groups, of any size or of two vectors each.
  enum class Kept { kAll, kGroups, kGroupsOfPairs };
  enum class Edges { kMaxima, kBest, kBestTwo, kBestTwoOfPairs };

  bool is_sigmoid() const { return plan_.score == Score::kSigmoid; }
  bool is_whole() const { return num_padded_ == plan_.num_experts; }
  // Tokens of this part, as bits.
  uint32_t part() const { return (1u << last_) - (1u << first_); }
  // What the order of experts goes by: approximations, or the logits themselves.
  const float* values(int token) const {
    return is_sigmoid() ? block_.scratch + (token - first_) * num_padded_ : block_.rows[token];
  }

  [[gnu::noinline]] void sort_candidates() {
    V keys[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      keys[i] = _mm512_load_ps(work_.candidates[i < block_.num_tokens ? i : 0]);
    }
    transpose(keys);
    if (is_sigmoid()) {
      I positive[kLanes];  // or kLowest, which as an integer is below them too
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) positive[i] = bits(keys[i]);
      sort_lanes<kLanes>(positive);
#pragma GCC unroll 10
      for (int k = 0; k < kKeys; ++k) _mm512_store_ps(work_.keys[k], floats(positive[k]));
      return;
    }
    sort_lanes<kLanes>(keys);
#pragma GCC unroll 10
    for (int k = 0; k < kKeys; ++k) _mm512_store_ps(work_.keys[k], keys[k]);
  }

  void limit_groups() {
    uint32_t open = choose_groups();
    if (is_sigmoid() && open != 0) {
      survey_finely(open);
      open = choose_groups();
    }
    work_.undecided |= open;
  }

  void collect_part() {
    survey();
    if (plan_.num_groups == 1) {
      set_thresholds();
    } else {
      limit_groups();
      // Otherwise the seconds of the kept groups are K experts or more.
      if (plan_.top_k > 2 * plan_.keep_groups || !plan_.sum_of_two) {
        survey_kept();
        set_thresholds();
      }
    }
    if (!is_whole()) {
      for (int token = first_; token < last_; ++token) put_candidates<Kept::kAll>(token);
    } else if (plan_.num_groups == 1) {
      pack_candidates<Kept::kAll>();
    } else if (group_size_ == 2 * kLanes) {
      pack_candidates<Kept::kGroupsOfPairs>();
    } else {
      pack_candidates<Kept::kGroups>();
    }
  }

  // Leaves the approximations and edges of all tokens. Coarse ones, but for rows beyond the range of those.
  void survey() {
    if (!is_sigmoid()) {
      survey_logits();
      return;
    }
    uint32_t outside = 0;
    if (!is_whole()) {
      outside = survey_sigmoids<false, false, Edges::kMaxima>(part());
    } else if (plan_.num_groups == 1) {
      outside = survey_sigmoids<false, true, Edges::kMaxima>(part());
    } else if (!plan_.sum_of_two) {
      outside = survey_sigmoids<false, true, Edges::kBest>(part());
    } else if (plan_.num_groups == 8 && group_size_ == 2 * kLanes) {
      outside = survey_sigmoids<false, true, Edges::kBestTwoOfPairs>(part());
    } else {
      outside = survey_sigmoids<false, true, Edges::kBestTwo>(part());
    }
    if (outside != 0) survey_finely(outside);
  }

  void survey_finely(uint32_t tokens) {
    if (!is_whole()) {
      survey_sigmoids<true, false, Edges::kMaxima>(tokens);
    } else if (plan_.num_groups == 1) {
      survey_sigmoids<true, true, Edges::kMaxima>(tokens);
    } else if (!plan_.sum_of_two) {
      survey_sigmoids<true, true, Edges::kBest>(tokens);
    } else {
      survey_sigmoids<true, true, Edges::kBestTwo>(tokens);
    }
  }

  // Returns which of the tokens have logits beyond kCoarseRange. A fine survey leaves rows that are not
  // finite to the reference.
  template <bool kFine, bool kWhole, Edges kEdges>
  [[gnu::noinline]] uint32_t survey_sigmoids(uint32_t tokens) {
    const float* const shifted_bias = plan_.shifted_bias;
    const int64_t num_experts = plan_.num_experts;
    const I magnitude = set(0x7FFFFFFF), range = bits(set(kCoarseRange));
    uint32_t outside = 0;
    for (uint32_t left = tokens; left != 0; left &= left - 1) {
      const int token = __builtin_ctz(left);
      const float* const row = block_.rows[token];
      float* const out = block_.scratch + (token - first_) * num_padded_;
      I largest = _mm512_setzero_si512();
      ahead_.fetch(lines_);
      const auto approximate = [&](int64_t at) {
        const __mmask16 there = kWhole ? __mmask16{0xFFFF} : tail_mask(num_experts, at);
        const V z = kWhole ? _mm512_loadu_ps(row + at) : _mm512_maskz_loadu_ps(there, row + at);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(bits(z), magnitude));
        V value = kFine ? fine_sigmoid(z) : coarse_sigmoid(z);
        value = _mm512_add_ps(value, _mm512_load_ps(shifted_bias + at));
        if (!kWhole) value = _mm512_maskz_mov_ps(there, value);
        _mm512_store_ps(out + at, value);
        return value;
      };
      store_edges<kEdges>(token, 0.0f, approximate);
      if (kFine) leave_nonfinite(token, largest);
      if (_mm512_cmp_epu32_mask(largest, range, _MM_CMPINT_GT) != 0) outside |= 1u << token;
      work_.error[token] = kFine ? plan_.fine_error : plan_.coarse_error;
    }
    return outside;
  }

  // With groups, hence of whole vectors.
  [[gnu::noinline]] void survey_logits() {
    const I magnitude = set(0x7FFFFFFF);
    for (int token = first_; token < last_; ++token) {
      const float* const row = block_.rows[token];
      I largest = _mm512_setzero_si512();
      ahead_.fetch(lines_);
      const auto load = [&](int64_t at) {
        const V z = _mm512_loadu_ps(row + at);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(bits(z), magnitude));
        return z;
      };
      store_edges<Edges::kBest>(token, kLowest, load);
      leave_nonfinite(token, largest);
      work_.error[token] = 0.0f;
    }
  }

  void leave_nonfinite(int token, I largest) {
    if (_mm512_cmp_epu32_mask(largest, set(0x7F800000), _MM_CMPINT_NLT) != 0) {
      work_.undecided |= 1u << token;
    }
  }

  // `load(at)` gives the values of 16 experts, each once; `none` lies below all.
  template <Edges kEdges, typename Load>
  void store_edges(int token, float none, const Load& load) {
    V edges;
    if constexpr (kEdges == Edges::kMaxima) {
      edges = load(0);
#pragma GCC unroll 8
      for (int64_t at = kLanes; at < num_padded_; at += kLanes) {
        edges = _mm512_max_ps(edges, load(at));
      }
    } else if constexpr (kEdges == Edges::kBest) {
      edges = best_of_groups(none, load);
    } else if constexpr (kEdges == Edges::kBestTwoOfPairs) {
      edges = best_two_of_groups<2>(load);
    } else {
      edges = best_two_of_groups<0>(load);
    }
    _mm512_store_ps(work_.edges[token], edges);
  }

  // Group g's largest value in lane g; `none` for groups that are not there.
  template <typename Load>
  V best_of_groups(float none, const Load& load) const {
    V most[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      most[g] = set(none);
      if (g >= plan_.num_groups) continue;
      for (int64_t at = g * group_size_; at < (g + 1) * group_size_; at += kLanes) {
        most[g] = at == g * group_size_ ? load(at) : _mm512_max_ps(most[g], load(at));
      }
    }
    return tree(most, [](V a, V b) { return _mm512_max_ps(a, b); });
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

  // Group g's sum of its best two in lane g, its second in lane 8 + g. Positive floats are compared as
  // integers, of which there are more units. kVectors: of each of eight groups; 0: any number, of any
  // number of groups.
  template <int kVectors, typename Load>
  V best_two_of_groups(const Load& load) const {
    I most[8], second[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      if constexpr (kVectors == 2) {
        const I a = bits(load(g * 2 * kLanes)), b = bits(load((g * 2 + 1) * kLanes));
        most[g] = _mm512_max_epi32(a, b);
        second[g] = _mm512_min_epi32(a, b);
        continue;
      }
      most[g] = second[g] = _mm512_setzero_si512();
      if (g >= plan_.num_groups) continue;
      for (int64_t at = g * group_size_; at < (g + 1) * group_size_; at += kLanes) {
        const I value = bits(load(at));
        second[g] = _mm512_max_epi32(second[g], _mm512_min_epi32(most[g], value));
        most[g] = _mm512_max_epi32(most[g], value);
      }
    }
    return tree_of_two(most, second);
  }

  // Lane maxima over the kept groups.
  void survey_kept() {
    for (int token = first_; token < last_; ++token) {
      const float* const row = values(token);
      V most = set(kLowest);
      for_kept_vectors<Kept::kGroups>(
          token, [&](int64_t at) { most = _mm512_max_ps(most, _mm512_loadu_ps(row + at)); });
      _mm512_store_ps(work_.edges[token], most);
    }
  }

  // Unrolled: leaving a short loop is mispredicted too often.
  template <Kept kKept, typename Body>
  void for_kept_vectors(int token, const Body& body) const {
    if constexpr (kKept == Kept::kAll) {
#pragma GCC unroll 8
      for (int64_t at = 0; at < num_padded_; at += kLanes) body(at);
      return;
    }
    for (uint32_t left = work_.kept_groups[token]; left != 0; left &= left - 1) {
      const int64_t begin = __builtin_ctz(left) * group_size_;
      if constexpr (kKept == Kept::kGroupsOfPairs) {
        body(begin);
        body(begin + kLanes);
        continue;
      }
      for (int64_t at = begin; at < begin + group_size_; at += kLanes) body(at);
    }
  }

  // Edges of this part, an edge per vector and a token per lane; other lanes repeat the first.
  void load_edges(V* columns) const {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      columns[i] = _mm512_load_ps(work_.edges[i >= first_ && i < last_ ? i : first_]);
    }
    transpose(columns);
  }

  // Leaves kept_groups, and the threshold where the groups' seconds give one. Returns undecided tokens.
  [[gnu::noinline]] uint32_t choose_groups() {
    V columns[kLanes];
    load_edges(columns);
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
    const auto lanes = static_cast<__mmask16>(part());
    _mm512_mask_store_epi32(work_.kept_groups, lanes, kept);
    _mm512_mask_store_ps(work_.threshold, lanes, below(threshold, error));
    return part() & ~uint32_t{decided};
  }

  // Every expert that may be among the best K lies at or above this, when K experts reach `value`.
  V below(V value, V error) const {
    const float apart = plan_.score == Score::kSoftmax ? 2 * kApart : 0.0f;
    return _mm512_sub_ps(value, _mm512_fmadd_ps(error, set(2.0f), set(apart)));
  }

  // The K-th of the 16 lane maxima: K experts reach it.
  [[gnu::noinline]] void set_thresholds() {
    V columns[kLanes];
    load_edges(columns);
    sort_lanes<kLanes>(columns);
    alignas(64) float falling[kFusedMostTopK][kLanes];
#pragma GCC unroll 8
    for (int k = 0; k < static_cast<int>(kFusedMostTopK); ++k) {
      _mm512_store_ps(falling[k], columns[k]);
    }
    const V reached = _mm512_load_ps(falling[plan_.top_k - 1]);
    _mm512_mask_store_ps(work_.threshold, static_cast<__mmask16>(part()),
                         below(reached, _mm512_load_ps(work_.error)));
  }

  // Keys of what reaches the threshold, packed in a register: stores that overlap are three times as dear.
  // Whole vectors only.
  template <Kept kKept>
  [[gnu::noinline]] void pack_candidates() {
    const I id_mask = set(id_mask_);
    for (int token = first_; token < last_; ++token) {
      const float* const row = values(token);
      ahead_.fetch(lines_);
      const V threshold = set(work_.threshold[token]);
      I packed = _mm512_setzero_si512();
      const int32_t* up = kIds.rotations + kFusedMostExperts;
      for_kept_vectors<kKept>(token, [&](int64_t at) {
        const V value = _mm512_loadu_ps(row + at);
        const __mmask16 found = _mm512_cmp_ps_mask(value, threshold, _CMP_GE_OQ);
        const I moved = _mm512_maskz_compress_epi32(found, key_of(value, at, id_mask));
        const I rotation = _mm512_loadu_si512(up);
        packed = _mm512_or_si512(packed, _mm512_permutexvar_epi32(rotation, moved));
        up -= __builtin_popcount(found);
      });
      const int64_t count = kIds.rotations + kFusedMostExperts - up;
      if (count > kLanes) {
        put_candidates<kKept>(token);
        continue;
      }
      const auto filled = static_cast<__mmask16>((1u << count) - 1);
      _mm512_store_ps(work_.candidates[token],
                      _mm512_mask_mov_ps(set(kLowest), filled, floats(packed)));
    }
  }

  static I key_of(V value, int64_t at, I id_mask) {
    constexpr int kInsertLow = 0xBA;  // a & ~b | c
    return _mm512_ternarylogic_epi32(bits(value), id_mask, _mm512_load_si512(kIds.of + at),
                                     kInsertLow);
  }

  // The same for any row and up to kMostCandidates, of which the largest kLanes stay.
  template <Kept kKept>
  [[gnu::noinline]] void put_candidates(int token) {
    const float* const row = values(token);
    float* const keys = work_.candidates[token];
    const V threshold = set(work_.threshold[token]), lowest = set(kLowest);
    const I id_mask = set(id_mask_);
    int64_t count = 0;
    for_kept_vectors<kKept>(token, [&](int64_t at) {
      const __mmask16 there = tail_mask(plan_.num_experts, at);
      const V value = _mm512_mask_loadu_ps(lowest, there, row + at);
      const __mmask16 found = _mm512_mask_cmp_ps_mask(there, value, threshold, _CMP_GE_OQ);
      _mm512_storeu_ps(keys + (count < kMostCandidates ? count : kMostCandidates),
                       _mm512_mask_compress_ps(lowest, found, floats(key_of(value, at, id_mask))));
      count += __builtin_popcount(found);
    });
    if (count > kMostCandidates) {
      work_.undecided |= 1u << token;
      count = kMostCandidates;
    }
    _mm512_storeu_ps(keys + count, lowest);  // where the last store did not reach
    if (count > kLanes) keep_largest(keys);
  }

  const FusedPlan& plan_;
  const FusedBlock& block_;
  Work& work_;
  Ahead& ahead_;
  const int lines_;  // to fetch beside each row's survey, and beside its search for candidates
  const int32_t id_mask_;
  const int64_t num_padded_;
  const int64_t group_size_;
  int first_ = 0, last_ = 0;  // tokens whose approximations are in the scratch
};
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
