// Part of kernel.inl: the experts of one row by comparisons without branches on scores, so that a token
// costs no mispredictions.
//
// A threshold from maxima of disjoint parts of the row leaves some K + K/2 candidates, and the rank of each is
// the number of greater keys. Vectors are those of the compiler: the same source for every instruction set.
// Test: tests/router/select_kernel_test.cc.

// 8 fp32 scores in the order of integers, and 4 keys.
typedef int32_t I8 __attribute__((vector_size(32)));
typedef int64_t L4 __attribute__((vector_size(32)));
typedef float F8 __attribute__((vector_size(32)));

constexpr int32_t kNobody = INT32_MIN;  // below the order of -Inf
constexpr int kLanes = 8;
constexpr int kKeyLanes = 4;
constexpr int kMostCandidates = 5 * kSelectMostTopK;         // of a row
static_assert(2 * kSelectMostTopK == int64_t{16} * kLanes);  // threshold_of()

ARGOSY_INLINE I8 load(const int32_t* at) {
  I8 v;
  __builtin_memcpy(&v, at, sizeof(v));
  return v;
}
ARGOSY_INLINE void store(int32_t* at, const I8& v) { __builtin_memcpy(at, &v, sizeof(v)); }
ARGOSY_INLINE I8 larger(const I8& a, const I8& b) { return a > b ? a : b; }
ARGOSY_INLINE I8 smaller(const I8& a, const I8& b) { return a < b ? a : b; }

// Rises with the score; -0 equals +0.
ARGOSY_INLINE int32_t order_of(float score) {
  const int32_t bits = __builtin_bit_cast(int32_t, score);
  const int32_t order = bits ^ ((bits >> 31) & INT32_MAX);
  return order == -1 ? 0 : order;
}

ARGOSY_INLINE float score_of(int32_t order) {
  return __builtin_bit_cast(float, order ^ ((order >> 31) & INT32_MAX));
}

// Lanes moved by 4, 2 or 1: folds of a whole vector.
template <int kStep>
ARGOSY_INLINE I8 moved(const I8& v) {
  return __builtin_shufflevector(v, v, 0 ^ kStep, 1 ^ kStep, 2 ^ kStep, 3 ^ kStep, 4 ^ kStep,
                                 5 ^ kStep, 6 ^ kStep, 7 ^ kStep);
}

ARGOSY_INLINE int32_t largest_lane(I8 v) {
  v = larger(v, moved<4>(v));
  v = larger(v, moved<2>(v));
  return larger(v, moved<1>(v))[0];
}

ARGOSY_INLINE int32_t smallest_lane(I8 v) {
  v = smaller(v, moved<4>(v));
  v = smaller(v, moved<2>(v));
  return smaller(v, moved<1>(v))[0];
}

template <int kStep>
ARGOSY_INLINE void fold_best_two(I8* most, I8* second) {
  const I8 other_most = moved<kStep>(*most), other_second = moved<kStep>(*second);
  *second = larger(smaller(*most, other_most), larger(*second, other_second));
  *most = larger(*most, other_most);
}

// Bit i: lane i lies at or above the threshold.
ARGOSY_INLINE uint32_t reaching(const I8& v, const I8& threshold) {
  const I8 found = v >= threshold;
#ifdef __AVX2__
  return static_cast<uint32_t>(__builtin_ia32_movmskps256(__builtin_bit_cast(F8, found)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(found[i] & 1) << i;
  return bits;
#endif
}

// threshold_of() by kVectors vectors of maxima, which so stay in registers.
template <int kVectors>
ARGOSY_INLINE int32_t threshold_by(const int32_t* orders, int64_t size, int64_t count) {
  constexpr int kBlock = kVectors * kLanes;
  I8 most[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) most[i] = load(orders + int64_t{i} * kLanes);
  int64_t at = kBlock;
  for (; at + kBlock <= size; at += kBlock) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i)
      most[i] = larger(most[i], load(orders + at + int64_t{i} * kLanes));
  }
  int32_t each[kBlock];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) store(each + i * kLanes, most[i]);
  for (int i = 0; i < kBlock && at < size; at += kLanes, i += kLanes) {
    store(each + i, larger(load(each + i), load(orders + at)));
  }
  I8 least = I8{} + INT32_MAX;
  for (int i = 0; i < kBlock; i += kLanes) {
    const I8 own = load(each + i);
    I8 num_above = {};
#pragma GCC unroll 8
    for (int j = 0; j < kBlock; ++j) num_above -= (I8{} + each[j]) > own;
    least = smaller(least, num_above < static_cast<int32_t>(count) ? own : I8{} + INT32_MAX);
  }
  return smallest_lane(least);
}

// An order that at least `count` of `orders` reach, and mostly few more: the count-th of the maxima of twice
// as many parts, to which the vectors of the row are dealt. Above kNobody.
ARGOSY_INLINE int32_t threshold_of(const int32_t* orders, int64_t size, int64_t count) {
  int64_t num_vectors = 1;
  while (num_vectors * kLanes < 2 * count) num_vectors *= 2;
  if (size <= num_vectors * kLanes) return kNobody + 1;
  int32_t threshold = kNobody;
  switch (num_vectors) {
    case 1:
      threshold = threshold_by<1>(orders, size, count);
      break;
    case 2:
      threshold = threshold_by<2>(orders, size, count);
      break;
    case 4:
      threshold = threshold_by<4>(orders, size, count);
      break;
    case 8:
      threshold = threshold_by<8>(orders, size, count);
      break;
    default:
      threshold = threshold_by<16>(orders, size, count);
      break;
  }
  return threshold == kNobody ? kNobody + 1 : threshold;
}

// Keys (order, then the lower place) of what reaches the threshold, padded to whole vectors with the least
// key. Returns how many, or -1 where there is no room.
ARGOSY_INLINE int64_t gather_keys(const int32_t* orders, int64_t size, int32_t threshold,
                                  int64_t* keys) {
  const I8 least = I8{} + threshold;
  int64_t count = 0;
  for (int64_t at = 0; at < size; at += kLanes) {
    for (uint32_t left = reaching(load(orders + at), least); left != 0; left &= left - 1) {
      const int64_t place = at + __builtin_ctz(left);
      keys[count++] = (int64_t{orders[place]} << 32) | (UINT32_MAX - static_cast<uint32_t>(place));
    }
    if (count > kMostCandidates - kLanes) return -1;
  }
  for (int i = 0; i < kKeyLanes; ++i) keys[count + i] = INT64_MIN;
  return count;
}

// The `count` largest of `size` (whole vectors) orders, of which as many reach the threshold; falling, equal
// ones by rising place. False: too many are equal.
ARGOSY_INLINE bool best_of(const int32_t* orders, int64_t size, int64_t count, int32_t threshold,
                           int64_t* best) {
  alignas(32) int64_t keys[kMostCandidates + kKeyLanes];
  const int64_t num_keys = gather_keys(orders, size, threshold, keys);
  if (num_keys < 0) return false;
  for (int64_t i = 0; i < num_keys; i += kKeyLanes) {
    L4 own, rank = {};
    __builtin_memcpy(&own, keys + i, sizeof(own));
    for (int64_t j = 0; j < num_keys; ++j) rank -= (L4{} + keys[j]) > own;
    for (int lane = 0; lane < kKeyLanes; ++lane) {
      // The padding ranks behind all.
      if (rank[lane] < count) best[rank[lane]] = own[lane];
    }
  }
  return true;
}

ARGOSY_INLINE int64_t place_of(int64_t key) {
  return static_cast<int64_t>(UINT32_MAX - static_cast<uint32_t>(key));
}

// As select_groups() of top_k.cc: the sum of a group's best, in falling order, in fp64.
ARGOSY_INLINE bool score_group(const int32_t* orders, int64_t size, int64_t num_summed,
                               int32_t* group_order) {
  double sum = 0.0;
  if (num_summed <= 2) {
    I8 most = load(orders), second = I8{} + kNobody;
    for (int64_t at = kLanes; at < size; at += kLanes) {
      const I8 own = load(orders + at);
      second = larger(second, smaller(most, own));
      most = larger(most, own);
    }
    fold_best_two<4>(&most, &second);
    fold_best_two<2>(&most, &second);
    fold_best_two<1>(&most, &second);
    sum += static_cast<double>(score_of(most[0]));
    if (num_summed == 2) sum += static_cast<double>(score_of(second[0]));
  } else {
    int64_t best[kSelectMostTopK];
    if (!best_of(orders, size, num_summed, threshold_of(orders, size, num_summed), best))
      return false;
    for (int64_t i = 0; i < num_summed; ++i) {
      sum += static_cast<double>(score_of(static_cast<int32_t>(best[i] >> 32)));
    }
  }
  *group_order = order_of(static_cast<float>(sum));
  return true;
}

// Takes all experts but those of the best groups out.
ARGOSY_INLINE bool refuse_groups(const SelectRules& rules, int32_t* orders) {
  int32_t groups[kSelectMostTopK];
  const int64_t num_padded = (rules.num_groups + kLanes - 1) / kLanes * kLanes;
  for (int64_t g = 0; g < num_padded; ++g) groups[g] = kNobody;
  for (int64_t g = 0; g < rules.num_groups; ++g) {
    if (!score_group(orders + g * rules.group_stride, rules.group_stride, rules.num_summed,
                     &groups[g])) {
      return false;
    }
  }
  int64_t best[kSelectMostTopK];
  if (!best_of(groups, num_padded, rules.keep_groups, kNobody + 1, best)) return false;
  bool kept[kSelectMostTopK] = {};
  for (int64_t i = 0; i < rules.keep_groups; ++i) kept[place_of(best[i])] = true;
  for (int64_t g = 0; g < rules.num_groups; ++g) {
    if (kept[g]) continue;
    int32_t* const group = orders + g * rules.group_stride;
    for (int64_t at = 0; at < rules.group_stride; at += kLanes) store(group + at, I8{} + kNobody);
  }
  return true;
}

void order(const SelectRules& rules, const float* selection, int64_t first, int64_t count,
           int32_t* orders) {
  int64_t at = first % rules.group_size;
  int32_t* out = orders + first / rules.group_size * rules.group_stride;
  while (count > 0) {
    const int64_t piece = count < rules.group_size - at ? count : rules.group_size - at;
    for (int64_t i = 0; i < piece; ++i) out[at + i] = order_of(selection[i]);
    selection += piece;
    count -= piece;
    at += piece;
    if (at < rules.group_size) return;
    for (; at < rules.group_stride; ++at) out[at] = kNobody;
    out += rules.group_stride;
    at = 0;
  }
}

bool select(const SelectRules& rules, int32_t* orders, int32_t* topk_idx) {
  const int64_t stride = rules.group_stride;
  if (rules.keep_groups < rules.num_groups && !refuse_groups(rules, orders)) return false;
  const int64_t size = rules.num_groups * stride;
  int64_t best[kSelectMostTopK];
  if (!best_of(orders, size, rules.top_k, threshold_of(orders, size, rules.top_k), best)) {
    return false;
  }
  for (int64_t k = 0; k < rules.top_k; ++k) {
    const auto place = static_cast<uint32_t>(place_of(best[k]));
    const auto group = place / static_cast<uint32_t>(stride);
    const auto skipped = group * static_cast<uint32_t>(stride - rules.group_size);
    topk_idx[k] = static_cast<int32_t>(place - skipped);
  }
  return true;
}
