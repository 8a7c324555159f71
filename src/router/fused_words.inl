// Part of fused_avx512.cc: candidates in 16-bit words, 32 experts a vector, for CPUs with AVX512_VBMI2 and up to
// 256 experts. Sigmoids in fixed point by lines of 128 pieces, or the upper halves of logits.
//
// A token whose words do not decide (groups, the last of the chosen, more than 16 candidates) is looked at again
// in fp32, alone; what that does not decide is left to the reference. Test: tests/router/fused_test.cc.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

using Half = __m256i;     // 16 words
using Quarter = __m128i;  // 8 words

constexpr int kWordLanes = 2 * kLanes;
constexpr int kMostWordCandidates = 2 * kLanes;  // that a second look takes

struct alignas(64) WordTables {
  // Of |x| in [512 i, 512 (i + 1)), x = 2^12 z: 2^14 (sigmoid(z) - 1/2) is base + 1/2 + x slope / 2^15. The
  // best lines with integers, negative x counted as ~x; the last takes all above.
  int16_t base[64] = {-1,   4,    20,   53,   116,  199,  320,  473,  665,  872,  1126, 1391, 1680,
                      1995, 2304, 2638, 2964, 3288, 3612, 3924, 4226, 4530, 4799, 5079, 5310, 5562,
                      5764, 5991, 6169, 6358, 6515, 6675, 6786, 6935, 7048, 7155, 7271, 7347, 7433,
                      7478, 7544, 7625, 7686, 7752, 7770, 7834, 7865, 7899, 7917, 7963, 8000, 8010,
                      8010, 8028, 8044, 8100, 8114, 8083, 8123, 8125, 8149, 8165, 8136, 8089};
  int16_t slope[64] = {32741, 32471, 31963, 31264, 30259, 29199, 27907, 26509, 24975, 23504, 21878,
                       20337, 18795, 17245, 15832, 14406, 13104, 11884, 10732, 9682,  8715,  7790,
                       7008,  6228,  5613,  4968,  4471,  3933,  3526,  3109,  2774,  2444,  2221,
                       1932,  1719,  1523,  1317,  1186,  1041,  967,   860,   733,   640,   542,
                       516,   425,   382,   336,   312,   252,   205,   193,   193,   171,   152,
                       87,    72,    107,   63,    61,    36,    20,    50,    100};
  // The expert of each word: sigmoids as they come from packs_epi32, logits in order.
  uint8_t sigmoid_ids[kWordMostExperts] = {};
  uint8_t logit_ids[kWordMostExperts] = {};
  uint16_t upper_half[kWordLanes] = {};  // the odd words of two vectors

  constexpr WordTables() {
    for (int i = 0; i < static_cast<int>(kWordMostExperts); ++i) {
      const int first = i / kWordLanes * kWordLanes;
      sigmoid_ids[i] = static_cast<uint8_t>(first + expert_of_word(i - first));
      logit_ids[i] = static_cast<uint8_t>(i);
    }
    for (int i = 0; i < kWordLanes; ++i) upper_half[i] = static_cast<uint16_t>(2 * i + 1);
  }
};
constexpr WordTables kWordTables;

struct alignas(64) WordWork {
  // Words 0-7: column maxima 0-7, or sums of groups, of tokens r and r + 8 in two quarters; then columns 8-15, or
  // the groups' seconds.
  uint16_t edges[8][kWordLanes];
  uint16_t threshold[kLanes];
  uint16_t kept_groups[kLanes];  // bits
  uint16_t counts[kLanes];       // of candidates
  // Candidates, 0 behind the last; a line for each of the first 16, so that stores of 16 cross none.
  uint16_t values[kLanes][2 * kMostWordCandidates];
  uint8_t ids[kLanes][2 * kMostWordCandidates];
};

class Words {
 public:
  Words(const FusedPlan& plan, const FusedBlock& block, Ahead* ahead, Work* work)
      : plan_(plan),
        block_(block),
        work_(*work),
        ahead_(*ahead),
        lines_(Ahead::lines_of_row(plan) / 4),
        num_tokens_(static_cast<int>(block.num_tokens)),
        values_(reinterpret_cast<uint16_t*>(block.scratch)) {}

  // Sigmoids of 32 logits as kWordSigmoidError says, in the order of expert_of_word().
  static I approximate(const float* logits) { return sigmoid_words(fixed_point(logits)); }

  // Leaves the experts in work.keys, in falling order of words; all are decided or left.
  void collect() {
    clear_unused();
    if (!is_sigmoid()) {
      survey_logits();
      set_thresholds();
      pack_candidates<false>();
    } else if (plan_.num_groups == 1) {
      survey_sigmoids<false>();
      set_thresholds();
      pack_candidates<false>();
    } else {
      survey_sigmoids<true>();
      choose_groups();
      pack_candidates<true>();
    }
    sort_candidates();
  }

 private:
  bool is_sigmoid() const { return plan_.score == Score::kSigmoid; }
  uint32_t tokens() const { return (1u << num_tokens_) - 1; }
  uint16_t* values(int token) const { return values_ + token * plan_.num_experts; }

  static Half load(const uint16_t* from) {
    return _mm256_load_si256(reinterpret_cast<const Half*>(from));
  }
  static void store(uint16_t* to, Half x) { _mm256_store_si256(reinterpret_cast<Half*>(to), x); }
  static Half set_half(int value) { return _mm256_set1_epi16(static_cast<int16_t>(value)); }

  // Lanes of tokens that are not there hold no candidates.
  void clear_unused() {
    for (int token = num_tokens_; token < kLanes; ++token) {
      store_edges(token, _mm_setzero_si128(), _mm_setzero_si128());
      store(words_.values[token], _mm256_setzero_si256());
      store(reinterpret_cast<uint16_t*>(words_.ids[token]), _mm256_setzero_si256());
    }
  }

  void store_edges(int token, Quarter first, Quarter second) {
    uint16_t* const edges = words_.edges[token % 8] + token / 8 * 8;
    _mm_store_si128(reinterpret_cast<Quarter*>(edges), first);
    _mm_store_si128(reinterpret_cast<Quarter*>(edges + 16), second);
  }

  // --- Along a row ---

  // In units of 2^-12, within +-8; the least for NaN, Inf and what is beyond int32.
  static I fixed_point(const float* logits) {
    const V scale = set(4096.0f);
    return _mm512_packs_epi32(
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(logits), scale)),
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(logits + kLanes), scale)));
  }

  static I sigmoid_words(I x) {
    const I sign = _mm512_srai_epi16(x, 15);
    const I piece = _mm512_srli_epi16(_mm512_xor_si512(x, sign), 9);
    const auto look_up = [piece](const int16_t* table) {
      return _mm512_permutex2var_epi16(_mm512_load_si512(table), piece,
                                       _mm512_load_si512(table + kWordLanes));
    };
    const I base = _mm512_xor_si512(look_up(kWordTables.base), sign);
    return _mm512_add_epi16(_mm512_mulhrs_epi16(x, look_up(kWordTables.slope)), base);
  }

  template <bool kGroups>
  [[gnu::noinline]] void survey_sigmoids() {
    const int num_vectors = static_cast<int>(plan_.num_experts / kWordLanes);
    for (int token = 0; token < num_tokens_; ++token) {
      const float* const row = block_.rows[token];
      uint16_t* const out = values(token);
      ahead_.fetch(lines_);
      I least = _mm512_setzero_si512();
      const auto next = [&](int i) {
        const I x = fixed_point(row + i * kWordLanes);
        least = _mm512_min_epi16(least, x);
        const I bias = _mm512_load_si512(plan_.word_bias + i * kWordLanes);
        const I value = _mm512_add_epi16(sigmoid_words(x), bias);
        _mm512_store_si512(out + i * kWordLanes, value);
        return value;
      };
      if constexpr (kGroups) {
        I x[8];
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) x[g] = next(g);
        store_best_two(token, x);
      } else {
        I most = next(0);
#pragma GCC unroll 4
        for (int i = 1; i < num_vectors; ++i) most = _mm512_max_epu16(most, next(i));
        store_columns(token, most);
      }
      const __mmask32 lowest = _mm512_cmpeq_epi16_mask(least, _mm512_set1_epi16(INT16_MIN));
      if (__builtin_expect(lowest != 0, 0)) leave_huge(token);
    }
  }

  [[gnu::noinline]] void leave_huge(int token) {
    const float* const row = block_.rows[token];
    I largest = _mm512_setzero_si512();
    for (int64_t at = 0; at < plan_.num_experts; at += kLanes) {
      const I magnitude = _mm512_and_si512(bits(_mm512_loadu_ps(row + at)), set(0x7FFFFFFF));
      largest = _mm512_max_epu32(largest, magnitude);
    }
    if (_mm512_cmpgt_epu32_mask(largest, bits(set(0x1p+18f))) != 0) leave(1u << token);
  }

  // Upper halves of logits in the order of unsigned words.
  [[gnu::noinline]] void survey_logits() {
    const I upper_half = _mm512_load_si512(kWordTables.upper_half);
    const I sign = _mm512_set1_epi16(INT16_MIN);
    const int num_vectors = static_cast<int>(plan_.num_experts / kWordLanes);
    for (int token = 0; token < num_tokens_; ++token) {
      const float* const row = block_.rows[token];
      uint16_t* const out = values(token);
      ahead_.fetch(lines_);
      I most = _mm512_setzero_si512(), least = _mm512_set1_epi16(-1);
#pragma GCC unroll 4
      for (int i = 0; i < num_vectors; ++i) {
        const I low = _mm512_loadu_si512(row + i * kWordLanes);
        const I high = _mm512_loadu_si512(row + i * kWordLanes + kLanes);
        const I x = _mm512_permutex2var_epi16(low, upper_half, high);
        constexpr int kFlip = 0x1E;  // a ^ (b | c)
        const I value = _mm512_ternarylogic_epi32(x, _mm512_srai_epi16(x, 15), sign, kFlip);
        _mm512_store_si512(out + i * kWordLanes, value);
        most = _mm512_max_epu16(most, value);
        least = _mm512_min_epu16(least, value);
      }
      store_columns(token, most);
      const __mmask32 above = _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(-0x80));
      const __mmask32 below = _mm512_cmple_epu16_mask(least, _mm512_set1_epi16(0x7F));
      leave(static_cast<uint32_t>((above | below) != 0) << token);
    }
  }

  void leave(uint32_t tokens) { work_.undecided |= tokens; }

  void store_columns(int token, I most) {
    const Half columns =
        _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    store_edges(token, _mm256_castsi256_si128(columns), _mm256_extracti128_si256(columns, 1));
  }

  // The second of two pairs as in Collector::tree_of_two.
  static void fold(I& m, I& s, I other_m, I other_s) {
    s = _mm512_max_epi16(_mm512_min_epi16(m, other_m), _mm512_max_epi16(s, other_s));
    m = _mm512_max_epi16(m, other_m);
  }
  static void fold(Half& m, Half& s, Half other_m, Half other_s) {
    s = _mm256_max_epi16(_mm256_min_epi16(m, other_m), _mm256_max_epi16(s, other_s));
    m = _mm256_max_epi16(m, other_m);
  }
  static void fold(Quarter& m, Quarter& s, Quarter other_m, Quarter other_s) {
    s = _mm_max_epi16(_mm_min_epi16(m, other_m), _mm_max_epi16(s, other_s));
    m = _mm_max_epi16(m, other_m);
  }

  // Of eight groups of a vector each: sums of the best two, and the seconds.
  void store_best_two(int token, const I* x) {
    I m[4], s[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const I low = _mm512_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
      const I high = _mm512_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
      m[i] = _mm512_max_epi16(low, high);
      s[i] = _mm512_min_epi16(low, high);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const I high_m = _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]);
      const I high_s = _mm512_unpackhi_epi32(s[2 * i], s[2 * i + 1]);
      m[i] = _mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]);
      s[i] = _mm512_unpacklo_epi32(s[2 * i], s[2 * i + 1]);
      fold(m[i], s[i], high_m, high_s);
    }
    const I high_m = _mm512_unpackhi_epi64(m[0], m[1]), high_s = _mm512_unpackhi_epi64(s[0], s[1]);
    m[0] = _mm512_unpacklo_epi64(m[0], m[1]);
    s[0] = _mm512_unpacklo_epi64(s[0], s[1]);
    fold(m[0], s[0], high_m, high_s);
    Half half_m = _mm512_castsi512_si256(m[0]), half_s = _mm512_castsi512_si256(s[0]);
    fold(half_m, half_s, _mm512_extracti64x4_epi64(m[0], 1), _mm512_extracti64x4_epi64(s[0], 1));
    Quarter most = _mm256_castsi256_si128(half_m), second = _mm256_castsi256_si128(half_s);
    fold(most, second, _mm256_extracti128_si256(half_m, 1), _mm256_extracti128_si256(half_s, 1));
    store_edges(token, _mm_add_epi16(most, second), second);
  }

  // --- Across tokens, one a word ---

  // Rows of edges to columns: x[c] has column c in its lower half, column 8 + c in its upper one.
  void load_edges(I* x) const {
    I a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const I even = _mm512_load_si512(words_.edges[2 * i]);
      const I odd = _mm512_load_si512(words_.edges[2 * i + 1]);
      a[2 * i] = _mm512_unpacklo_epi16(even, odd);
      a[2 * i + 1] = _mm512_unpackhi_epi16(even, odd);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 2]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 2]);
      b[i + 2] = _mm512_unpacklo_epi32(a[i + 1], a[i + 3]);
      b[i + 3] = _mm512_unpackhi_epi32(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = _mm512_unpacklo_epi64(b[i], b[i + 4]);
      x[2 * i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 4]);
    }
  }

  static void sort_words(I* x) {
    constexpr Network kNetwork = network_of(8);
#pragma GCC unroll 32
    for (int i = 0; i < kNetwork.size; ++i) {
      I& a = x[kNetwork.first[i]];
      I& b = x[kNetwork.second[i]];
      const I largest = _mm512_max_epu16(a, b);
      b = _mm512_min_epu16(a, b);
      a = largest;
    }
  }

  [[gnu::noinline]] void choose_groups() {
    I columns[8], sorted[8];
    load_edges(columns);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) sorted[g] = columns[g];
    sort_words(sorted);
    alignas(64) uint16_t falling[8][kWordLanes];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) _mm512_store_si512(falling[g], sorted[g]);
    const Half least = load(falling[plan_.keep_groups - 1]);
    const Half refused = load(falling[plan_.keep_groups]);
    Half kept = _mm256_setzero_si256(), threshold = set_half(-1);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const __mmask16 keeps = _mm256_cmpge_epu16_mask(_mm512_castsi512_si256(columns[g]), least);
      const Half second = _mm512_extracti64x4_epi64(columns[g], 1);
      kept = _mm256_mask_add_epi16(kept, keeps, kept, set_half(1 << g));
      threshold = _mm256_mask_min_epu16(threshold, keeps, threshold, second);
    }
    store(words_.kept_groups, kept);
    store(words_.threshold, _mm256_subs_epu16(threshold, set_half(plan_.word_margin)));
    uint32_t open =
        _mm256_cmple_epu16_mask(_mm256_subs_epu16(least, refused), set_half(2 * plan_.word_margin));
    for (open &= tokens() & ~work_.undecided; open != 0; open &= open - 1) {
      choose_groups_again(__builtin_ctz(open));
    }
  }

  // In fp32.
  [[gnu::noinline]] void choose_groups_again(int token) {
    const float* const row = block_.rows[token];
    I most[8], second[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const int at = g * kWordLanes;
      const I a = bits(_mm512_add_ps(fine_sigmoid(_mm512_loadu_ps(row + at)),
                                     _mm512_load_ps(plan_.shifted_bias + at)));
      const I b = bits(_mm512_add_ps(fine_sigmoid(_mm512_loadu_ps(row + at + kLanes)),
                                     _mm512_load_ps(plan_.shifted_bias + at + kLanes)));
      most[g] = _mm512_max_epi32(a, b);
      second[g] = _mm512_min_epi32(a, b);
    }
    const V sums = _mm512_mask_mov_ps(set(kLowest), 0x00FF, Collector::tree_of_two(most, second));
    alignas(64) float falling[kLanes];
    _mm512_store_ps(falling, sort_within(sums));
    const float least = falling[plan_.keep_groups - 1];
    if (!(least - falling[plan_.keep_groups] > 4.0f * plan_.fine_error)) leave(1u << token);
    const uint32_t kept = _mm512_cmp_ps_mask(sums, set(least), _CMP_GE_OQ);
    const uint16_t* const seconds = words_.edges[token % 8] + token / 8 * 8 + 16;
    int threshold = UINT16_MAX;
    for (int g = 0; g < 8; ++g) {
      if ((kept >> g & 1) != 0 && seconds[g] < threshold) threshold = seconds[g];
    }
    words_.kept_groups[token] = static_cast<uint16_t>(kept);
    words_.threshold[token] =
        static_cast<uint16_t>(threshold > plan_.word_margin ? threshold - plan_.word_margin : 0);
  }

  // K experts reach the K-th of the 16 column maxima.
  [[gnu::noinline]] void set_thresholds() {
    I columns[8];
    load_edges(columns);
    sort_words(columns);
    alignas(64) uint16_t falling[8][kWordLanes];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) _mm512_store_si512(falling[k], columns[k]);
    // The best K of two falling lists: the first of one against the last of the other.
    const int last = static_cast<int>(plan_.top_k) - 1;
    Half reached = set_half(-1);
    for (int k = 0; k <= last; ++k) {
      const Half larger = _mm256_max_epu16(load(falling[k]), load(falling[last - k] + kLanes));
      reached = _mm256_min_epu16(reached, larger);
    }
    if (is_sigmoid()) {
      store(words_.threshold, _mm256_subs_epu16(reached, set_half(plan_.word_margin)));
      return;
    }
    const I word = _mm512_slli_epi32(_mm512_cvtepu16_epi32(reached), 16);
    const V least =
        _mm512_sub_ps(logit_of(_mm512_xor_si512(word, set(INT32_MIN))), set(2 * kApart));
    const I order = _mm512_xor_si512(order_of(bits(least)), set(INT32_MIN));
    store(words_.threshold, _mm512_cvtepi32_epi16(_mm512_srli_epi32(order, 16)));
  }

  // The logit of an order as signed integers.
  static V logit_of(I order) { return floats(order_of(order)); }

  // --- Candidates ---

  // A lambda would not have the target.
  struct Packed {
    uint16_t* values;
    uint8_t* ids;
    uint32_t count;
    uint32_t most;  // of a vector
  };
  __attribute__((always_inline, target("avx512vbmi2"))) static inline void pack(
      const uint16_t* words, const uint8_t* experts, I threshold, Packed* packed) {
    const I value = _mm512_load_si512(words);
    const __mmask32 found = _mm512_cmpge_epu16_mask(value, threshold);
    const Half id = _mm256_load_si256(reinterpret_cast<const Half*>(experts));
    const uint32_t at = packed->count < kMostWordCandidates ? packed->count : kMostWordCandidates;
    _mm256_storeu_si256(reinterpret_cast<Half*>(packed->values + at),
                        _mm512_castsi512_si256(_mm512_maskz_compress_epi16(found, value)));
    _mm_storeu_si128(reinterpret_cast<Quarter*>(packed->ids + at),
                     _mm256_castsi256_si128(_mm256_maskz_compress_epi8(found, id)));
    const auto more = static_cast<uint32_t>(__builtin_popcount(found));
    packed->count += more;
    packed->most = packed->most < more ? more : packed->most;
  }

  template <bool kGroups>
  __attribute__((noinline, target("avx512vbmi2"))) void pack_candidates() {
    const uint8_t* const experts = is_sigmoid() ? kWordTables.sigmoid_ids : kWordTables.logit_ids;
    const int num_experts = static_cast<int>(plan_.num_experts);
    for (int token = 0; token < num_tokens_; ++token) {
      ahead_.fetch(lines_);
      const uint16_t* const row = values(token);
      const I threshold = _mm512_set1_epi16(static_cast<int16_t>(words_.threshold[token]));
      Packed packed = {words_.values[token], words_.ids[token], 0, 0};
      if constexpr (kGroups) {
        for (uint32_t left = words_.kept_groups[token]; left != 0; left &= left - 1) {
          const int at = __builtin_ctz(left) * kWordLanes;
          pack(row + at, experts + at, threshold, &packed);
        }
      } else {
#pragma GCC unroll 4
        for (int at = 0; at < num_experts; at += kWordLanes) {
          pack(row + at, experts + at, threshold, &packed);
        }
      }
      // A store holds 16 of a vector.
      const bool fits = packed.most <= kLanes && packed.count <= kMostWordCandidates;
      words_.counts[token] = static_cast<uint16_t>(fits ? packed.count : kMostWordCandidates + 1);
    }
  }

  [[gnu::noinline]] void sort_candidates() {
    V rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const I value = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load(words_.values[i])), 16);
      const I id =
          _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const Quarter*>(words_.ids[i])));
      constexpr int kToSigned = 0x56;  // (a | b) ^ c
      rows[i] = floats(_mm512_ternarylogic_epi32(value, id, set(INT32_MIN), kToSigned));
    }
    transpose(rows);
    I keys[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) keys[i] = bits(rows[i]);
    sort_lanes<kLanes>(keys);
    uint32_t again = open_cuts(keys[plan_.top_k - 1], keys[plan_.top_k + 1]);
    again |= _mm256_cmpgt_epu16_mask(load(words_.counts), set_half(kLanes));
#pragma GCC unroll 10
    for (int k = 0; k < kKeys; ++k) {
      const V id = floats(_mm512_and_si512(keys[k], set(0xFF)));
      _mm512_store_ps(work_.keys[k], _mm512_mask_mov_ps(id, missing(keys[k]), set(kLowest)));
    }
    for (again &= tokens() & ~work_.undecided; again != 0; again &= again - 1) {
      rank_again(__builtin_ctz(again));
    }
  }

  static __mmask16 missing(I key) { return _mm512_cmpeq_epi32_mask(key, set(INT32_MIN)); }

  // Tokens of which the key after next to the last chosen one may be among the chosen.
  uint32_t open_cuts(I last, I out) const {
    if (is_sigmoid()) {
      const I apart = _mm512_sub_epi32(_mm512_srai_epi32(last, 16), _mm512_srai_epi32(out, 16));
      return _mm512_cmple_epi32_mask(apart, set(plan_.word_margin));
    }
    const V least = logit_of(_mm512_andnot_si512(set(0xFFFF), last));
    const V most = logit_of(_mm512_or_si512(out, set(0xFFFF)));
    const V gap = _mm512_sub_ps(least, most);
    const __mmask16 decided = _mm512_cmp_ps_mask(gap, set(2 * kApart), _CMP_GT_OQ);
    return static_cast<__mmask16>(~(decided | missing(out)));
  }

  // Sorts the candidates of one token by their logits, or by fine approximations.
  [[gnu::noinline]] void rank_again(int token) {
    const int count = words_.counts[token];
    if (count > kMostWordCandidates) {
      leave(1u << token);
      return;
    }
    alignas(64) float keys[2 * kLanes];
    for (int first = 0; first < count; first += kLanes) {
      const I id = _mm512_cvtepu8_epi32(
          _mm_load_si128(reinterpret_cast<const Quarter*>(words_.ids[token] + first)));
      const __mmask16 there = tail_mask(count, first);
      V value = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, id, block_.rows[token], 4);
      if (is_sigmoid()) {
        const V bias =
            _mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, id, plan_.shifted_bias, 4);
        value = _mm512_add_ps(fine_sigmoid(value), bias);
      }
      constexpr int kInsertLow = 0xBA;  // a & ~b | c
      const I key = _mm512_ternarylogic_epi32(bits(value), set(0xFF), id, kInsertLow);
      _mm512_store_ps(keys + first, _mm512_mask_mov_ps(set(kLowest), there, floats(key)));
    }
    if (count > kLanes) keep_largest(keys);
    _mm512_store_ps(keys, sort_within(_mm512_load_ps(keys)));
    const V error = set(is_sigmoid() ? plan_.fine_error : 0.0f);
    const V last = set(keys[plan_.top_k - 1]), out = set(keys[plan_.top_k + 1]);
    if (may_be_chosen(out, last, 0xFF, error) != 0) leave(1u << token);
    for (int k = 0; k < kKeys; ++k) work_.keys[k][token] = keys[k];
  }

  const FusedPlan& plan_;
  const FusedBlock& block_;
  Work& work_;
  Ahead& ahead_;
  const int lines_;  // to fetch beside each row's survey, and beside its search for candidates
  const int num_tokens_;
  uint16_t* const values_;  // [token][E], in the block's scratch
  WordWork words_;
};
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
