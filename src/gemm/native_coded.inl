// Few rows by quantised weights: codes become operands of VDPBF16PS in registers, so that a weight is read once and
// stored nowhere. Included by avx512_bf16.cc; needs AVX512_VBMI and GFNI. Test: tests/gemm/quantised_gemm_test.cc.

#define ARGOSY_CODED_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,gfni,fma")))
#define ARGOSY_CODED_INLINE ARGOSY_CODED_TARGET __attribute__((always_inline)) inline

// The two vectors of columns of one pair of k.
struct PairColumns {
  __m512bh vectors[2];
};

ARGOSY_CODED_INLINE PairColumns unpacked(__m512i low, __m512i high) {
  return {{(__m512bh)_mm512_unpacklo_epi8(low, high), (__m512bh)_mm512_unpackhi_epi8(low, high)}};
}

// Loads that are followed by this are done once and stay in the order of the source: GCC would load a line again for each lookup,
// which overwrites its operand, and lines out of order cost 8 %. Measured: docs/perf/layer.md.
ARGOSY_CODED_INLINE void in_order(__m512i* line) { __asm__ volatile("" : "+v"(*line)); }

struct E4M3Codes {
  static constexpr int64_t kBlockBytes = kBlockK * kPanelColumns;
  __m512i low[2], high[2], sign;

  ARGOSY_CODED_INLINE static E4M3Codes make() {
    const E4M3Tables& tables = e4m3_tables();
    return {{_mm512_load_si512(tables.low), _mm512_load_si512(tables.low + 64)},
            {_mm512_load_si512(tables.high), _mm512_load_si512(tables.high + 64)},
            _mm512_set1_epi8(static_cast<char>(0x80))};
  }
  ARGOSY_CODED_INLINE PairColumns columns(const std::byte* block, int pair) const {
    constexpr int kOrOfAnd = 0xEA;  // a & b | c
    __m512i code = _mm512_load_si512(block + int64_t{pair} * 64);
    in_order(&code);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], code, high[1]);
    return unpacked(_mm512_permutex2var_epi8(low[0], code, low[1]),
                    _mm512_ternarylogic_epi64(code, sign, magnitude, kOrOfAnd));
  }
};

// Codes of normal numbers only: each bit of their bf16 is one of the code, or its reverse. From the lowest: three of mantissa and the
// lowest of the exponent to the upper half of the low byte; of the high byte the next two, the highest four times reversed and once
// as it is, the sign. 18 ns a block at 1 row, where the tables take 26.
struct PlainE4M3Codes {
  static constexpr int64_t kBlockBytes = E4M3Codes::kBlockBytes;
  __m512i low, high;

  ARGOSY_CODED_INLINE static PlainE4M3Codes make() {
    return {_mm512_set1_epi64(0x0000000001020408), _mm512_set1_epi64(0x1020404040404080)};
  }
  ARGOSY_CODED_INLINE PairColumns columns(const std::byte* block, int pair) const {
    constexpr int kReversed = 0x3C;
    __m512i code = _mm512_load_si512(block + int64_t{pair} * 64);
    in_order(&code);
    return unpacked(_mm512_gf2p8affine_epi64_epi8(code, low, 0),
                    _mm512_gf2p8affine_epi64_epi8(code, high, kReversed));
  }
};

// A lookup of words by their low 5 bits, of which the table ignores the highest: shifts are all that it takes.
struct E2M1Codes {
  static constexpr int64_t kBlockBytes = kBlockK * kPanelColumns / 2;
  __m512i words;

  ARGOSY_CODED_INLINE static E2M1Codes make() { return {_mm512_load_si512(kE2M1Words)}; }
  ARGOSY_CODED_INLINE PairColumns columns(const std::byte* block, int pair) const {
    const __m512i two = _mm512_load_si512(block + int64_t{pair} / 2 * 64);
    const __m512i low = pair % 2 == 0 ? two : _mm512_srli_epi16(two, 8);
    const __m512i high = _mm512_srli_epi16(two, pair % 2 == 0 ? 4 : 12);
    return {{(__m512bh)_mm512_permutexvar_epi16(low, words),
             (__m512bh)_mm512_permutexvar_epi16(high, words)}};
  }
};

// A line of codes, or of scales, `ahead` bytes further on. Line by line as they are read: a burst of a block's lines
// takes every miss buffer. The builtin: between lookups the compiler finds a better place for it (FP8 at 1 row 0.85 -> 0.77 ms).
ARGOSY_CODED_INLINE void prefetch_ahead(const std::byte* from, uintptr_t ahead) {
  __builtin_prefetch(from + ahead, 0, 2);
}

template <int kRows>
ARGOSY_CODED_INLINE void add_pair(const PairColumns& columns, const float* x, int pair,
                                  __m512 (&acc)[kRows][2]) {
  for (int r = 0; r < kRows; ++r) {
    const float* const row = x + r * PairRows::kStaged + pair;
    acc[r][0] = add_products(acc[r][0], row, columns.vectors[0]);
    acc[r][1] = add_products(acc[r][1], row, columns.vectors[1]);
  }
}

template <typename Codes, int kRows>
ARGOSY_CODED_INLINE void coded_pair(const Codes& codes, const float* x, const std::byte* block,
                                    uintptr_t ahead, int pair, __m512 (&acc)[kRows][2]) {
  constexpr int kPairsPerLine = static_cast<int>(kBlockK / 2 * 64 / Codes::kBlockBytes);
  if (pair % kPairsPerLine == 0) prefetch_ahead(block + pair / kPairsPerLine * 64, ahead);
  add_pair<kRows>(codes.columns(block, pair), x, pair, acc);
}

template <typename Codes, int kRows, int... kPairs>
ARGOSY_CODED_INLINE void coded_pairs(const Codes& codes, const float* x, const std::byte* block,
                                     uintptr_t ahead, __m512 (&acc)[kRows][2],
                                     std::integer_sequence<int, kPairs...>) {
  (coded_pair<Codes, kRows>(codes, x, block, ahead, kPairs, acc), ...);
}

// A block with codes that only the tables know. Not inlined: their registers would be the fast way's.
template <int kRows>
[[gnu::noinline]] ARGOSY_CODED_TARGET void add_mixed_block(const float* x, const std::byte* block,
                                                           uintptr_t ahead, uint32_t plain,
                                                           __m512 (*sums)[2]) {
  const PlainE4M3Codes plain_codes = PlainE4M3Codes::make();
  const E4M3Codes codes = E4M3Codes::make();
  __m512 acc[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < 2; ++c) acc[r][c] = sums[r][c];
  }
  for (int pair = 0; pair < kBlockK / 2; ++pair) {
    prefetch_ahead(block + pair * 64, ahead);
    const bool is_plain = (plain >> pair & 1) != 0;
    add_pair<kRows>(is_plain ? plain_codes.columns(block, pair) : codes.columns(block, pair), x,
                    pair, acc);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < 2; ++c) sums[r][c] = acc[r][c];
  }
}

// The products of one block of 32 k; e4m3 without tables where all codes are plain.
template <typename Codes, int kRows>
ARGOSY_CODED_INLINE void coded_block(const Codes& codes, const float* x, const std::byte* block,
                                     uintptr_t ahead, const uint16_t* plain_lines, int64_t at,
                                     __m512 (&acc)[kRows][2]) {
  constexpr auto kPairs = std::make_integer_sequence<int, 16>();
  if constexpr (std::is_same_v<Codes, PlainE4M3Codes>) {
    const uint32_t plain = plain_lines == nullptr ? 0 : plain_lines[at];
    if (__builtin_expect(plain != 0xFFFF, 0)) {
      // A copy, so that acc stays in registers.
      __m512 sums[kRows][2];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sums[r][0] = acc[r][0];
        sums[r][1] = acc[r][1];
      }
      add_mixed_block<kRows>(x, block, ahead, plain, sums);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        acc[r][0] = sums[r][0];
        acc[r][1] = sums[r][1];
      }
      return;
    }
  }
  coded_pairs<Codes, kRows>(codes, x, block, ahead, acc, kPairs);
}

template <int kRows>
ARGOSY_CODED_INLINE void store_vectors(const __m512 (&from)[kRows][2], float* to) {
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < 2; ++c) {
      _mm512_store_ps(to + r * kPanelColumns + c * kTileColumns, from[r][c]);
    }
  }
}

// The scales of the columns of one vector, from those of 32 columns: as load_scales(), without the way through memory.
ARGOSY_CODED_INLINE __m512 vector_of_scales(const std::byte* scales, bool are_f32, int vector) {
  if (are_f32) return _mm512_load_ps(scales + vector * kTileColumns * 4);
  const auto* const words = reinterpret_cast<const __m256i*>(scales + vector * kTileColumns * 2);
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256(words)), 16));
}

template <typename Codes, int kRows, bool kRowScales>
ARGOSY_CODED_TARGET void coded_rows(const DotArgs& args, const CodedPanel& panel) {
  // One row of plain codes waits for memory alone: scales first, line by line in their order. A half-width core then reads faster
  // ahead by itself than by prefetches from far ahead, but not without any; on Zen 5 far ones are a tenth better.
  constexpr bool kStreams = std::is_same_v<Codes, PlainE4M3Codes> && kRows == 1 && !kRowScales;
  const Codes codes = Codes::make();
  const float* x = reinterpret_cast<const float*>(args.rows);
  const int64_t k_blocks = (args.k + kBlockK - 1) / kBlockK;
  const int64_t blocks_per_scale = panel.block_k / kBlockK;
  // Nowhere to prefetch: to where it reads.
  const bool is_near = kStreams && is_half_width_core();
  const uintptr_t far = args.prefetch - reinterpret_cast<uintptr_t>(panel.panel);
  const uintptr_t ahead = args.prefetch_lines == 0 ? 0 : is_near ? 64 : far;
  [[maybe_unused]] const bool are_f32 =
      !std::is_same_v<Codes, E2M1Codes> && panel.layout.has_f32_scales();
  __m512 sums[kRows][2] = {};
  // With scales of rows the sums are in the scratch.
  [[maybe_unused]] alignas(64) float partials[kRows * kPanelColumns];
  if constexpr (kRowScales) store_vectors(sums, args.scratch);
  // The weights' scales, and the codes that follow them; `last` + 1 blocks of panel.block_k have the same scales.
  const int64_t last = (int64_t{1} << panel.block_shift) - 1;
  const std::byte* scales = panel.panel;
  const std::byte* from = scales + panel.layout.scale_bytes;
  int64_t at = 0;
  for (int64_t block = 0; at < k_blocks; ++block) {
    __m512 acc[kRows][2] = {};
    for (int64_t i = 0; i < panel.layout.scale_bytes; i += 64) prefetch_ahead(scales + i, ahead);
    [[maybe_unused]] __m512 scales_ahead[2];
    for (int c = 0; kStreams && c < 2; ++c) {
      scales_ahead[c] = vector_of_scales(scales, are_f32, c);
      __asm__ volatile("" : "+v"(scales_ahead[c]));
    }
    const int64_t end = std::min(at + blocks_per_scale, k_blocks);
    for (; at < end; ++at, from += Codes::kBlockBytes, x += kRows * PairRows::kStaged) {
      coded_block<Codes, kRows>(codes, x, from, ahead, panel.plain_lines, at, acc);
    }
    if constexpr (kRowScales) {
      alignas(64) float of_columns[kPanelColumns];
      load_scales(panel, block, of_columns);
      store_vectors(acc, partials);
      add_row_scaled({kRows, 2}, partials, row_scales_at(args, panel, block), of_columns,
                     panel.are_e8m0, args.scratch);
    } else {
      for (int c = 0; c < 2; ++c) {
        const __m512 scale = kStreams ? scales_ahead[c] : vector_of_scales(scales, are_f32, c);
        for (int r = 0; r < kRows; ++r) sums[r][c] = _mm512_fmadd_ps(acc[r][c], scale, sums[r][c]);
      }
    }
    if ((block & last) != last) continue;
    scales = from;
    from += panel.layout.scale_bytes;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < 2; ++c) {
      if constexpr (kRowScales)
        sums[r][c] = _mm512_load_ps(args.scratch + r * kPanelColumns + c * kTileColumns);
      sums[r][c] = _mm512_add_ps(sums[r][c], _mm512_setzero_ps());
    }
  }
  store_vectors(sums, args.scratch);
}

// Rows whose partials, sums and tables fit the registers, nearly.
constexpr int kCodedRows = 8;

template <typename Codes, bool kRowScales, int... kRows>
void coded_dot(const DotArgs& args, const CodedPanel& panel, std::integer_sequence<int, kRows...>) {
  static constexpr ScaledKernel kTable[] = {coded_rows<Codes, kRows + 1, kRowScales>...};
  kTable[args.num_rows - 1](args, panel);
}

template <typename Codes>
void coded_dot(const DotArgs& args, const CodedPanel& panel) {
  using Counts = std::make_integer_sequence<int, kCodedRows>;
  if (panel.rows.values != nullptr) return coded_dot<Codes, true>(args, panel, Counts());
  coded_dot<Codes, false>(args, panel, Counts());
}

void native_scaled_dot(const DotArgs& args, const CodedPanel& panel) {
  const bool has_vbmi =
      panel.decode == vbmi_decoders().e4m3 || panel.decode == vbmi_decoders().e2m1;
  if (panel.decoded != nullptr || !has_vbmi || args.num_rows > kCodedRows) {
    // Of codes in a cache: either core's steps, one build of them.
    return scaled_dot<NativeOrder<HalfWidthCore>, 12>(args, panel);
  }
  if (panel.layout.is_e2m1) return coded_dot<E2M1Codes>(args, panel);
  coded_dot<PlainE4M3Codes>(args, panel);
}
