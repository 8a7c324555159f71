// Largest magnitudes and e8m0 scales of the AVX-512 kernel: part of kernel_avx512.cc, inside its namespace. Test:
// tests/quant/kernel_test.cc.

inline __mmask16 lanes_left(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xFFFF : (1u << count) - 1);
}

// --- largest magnitudes ---

inline uint32_t largest_of(__m512i magnitudes) {
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitudes),
                                        _mm512_extracti64x4_epi64(magnitudes, 1));
  const __m128i quarter =
      _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // There is an instruction for the least of eight words: take it of the complements.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi32(-1)));
  return ~static_cast<uint32_t>(_mm_cvtsi128_si32(least)) << 16;
}

// Largest word of each of 16 registers, in order: rounds that halve their number and double the blocks in one.
inline __m256i largest_words(const __m512i (&of)[16]) {
  __m512i two[8], four[4], eight[2];
  for (ptrdiff_t i = 0; i < 8; ++i) {
    two[i] = _mm512_max_epu16(_mm512_unpacklo_epi16(of[2 * i], of[2 * i + 1]),
                              _mm512_unpackhi_epi16(of[2 * i], of[2 * i + 1]));
  }
  for (ptrdiff_t i = 0; i < 4; ++i) {
    four[i] = _mm512_max_epu16(_mm512_unpacklo_epi32(two[2 * i], two[2 * i + 1]),
                               _mm512_unpackhi_epi32(two[2 * i], two[2 * i + 1]));
  }
  for (ptrdiff_t i = 0; i < 2; ++i) {
    eight[i] = _mm512_max_epu16(_mm512_unpacklo_epi64(four[2 * i], four[2 * i + 1]),
                                _mm512_unpackhi_epi64(four[2 * i], four[2 * i + 1]));
  }
  // Two quarters of the first eight blocks, two of the others.
  const __m512i quarters = _mm512_max_epu16(_mm512_shuffle_i32x4(eight[0], eight[1], 0x88),
                                            _mm512_shuffle_i32x4(eight[0], eight[1], 0xDD));
  const __m512i even = _mm512_shuffle_i32x4(quarters, quarters, 0x88);
  const __m512i odd = _mm512_shuffle_i32x4(quarters, quarters, 0xDD);
  return _mm512_castsi512_si256(_mm512_max_epu16(even, odd));
}

// Of blocks of kVectors registers, sixteen at a time: the last sixteen, or, of fewer in all, some that are not there, whose words
// are 0. Returns how many were done: a few alone are not worth it.
template <int64_t kVectors>
int64_t amax_together_bf16(const uint16_t* x, int64_t num_blocks, uint32_t* amax) {
  constexpr int64_t kTogether = 16, kFew = 4;  // blocks
  const __m512i mask = _mm512_set1_epi16(0x7FFF);
  __m512i largest[kTogether];
  const auto take = [&](int64_t i, const uint16_t* from) {
    largest[i] = _mm512_and_si512(_mm512_loadu_si512(from), mask);
#pragma GCC unroll 4
    for (int64_t j = 1; j < kVectors; ++j) {
      largest[i] = _mm512_max_epu16(largest[i],
                                    _mm512_and_si512(_mm512_loadu_si512(from + j * kLanes), mask));
    }
  };
  const auto words = [&] {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(largest_words(largest)), 16);
  };
  int64_t b = 0;
  for (; b + kTogether <= num_blocks; b += kTogether) {
    for (int64_t i = 0; i < kTogether; ++i) take(i, x + (b + i) * kVectors * kLanes);
    _mm512_storeu_si512(amax + b, words());
  }
  if (b == num_blocks) return b;
  if (b > 0) {
    // The last sixteen, some of them again.
    b = num_blocks - kTogether;
    for (int64_t i = 0; i < kTogether; ++i) take(i, x + (b + i) * kVectors * kLanes);
    _mm512_storeu_si512(amax + b, words());
    return num_blocks;
  }
  if (num_blocks <= kFew) return 0;
  for (int64_t i = 0; i < kTogether; ++i) {
    largest[i] = _mm512_setzero_si512();
    if (i < num_blocks) take(i, x + i * kVectors * kLanes);
  }
  _mm512_mask_storeu_epi32(amax, lanes_left(num_blocks), words());
  return num_blocks;
}

void amax_bf16(const AmaxArgs& args) {
  if (args.block % kLanes != 0) return amax_rows<uint16_t>(args);
  const auto* const x = reinterpret_cast<const uint16_t*>(args.x);
  const __m512i mask = _mm512_set1_epi16(0x7FFF);
  const int64_t whole = args.n / args.block;
  int64_t b = 0;
  if (args.block == kLanes) b = amax_together_bf16<1>(x, whole, args.amax);
  if (args.block == 4 * kLanes) b = amax_together_bf16<4>(x, whole, args.amax);
  for (; b < whole; ++b) {
    const uint16_t* const from = x + b * args.block;
    __m512i largest = _mm512_and_si512(_mm512_loadu_si512(from), mask);
    for (int64_t i = kLanes; i < args.block; i += kLanes) {
      largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_loadu_si512(from + i), mask));
    }
    args.amax[b] = largest_of(largest);
  }
  AmaxArgs rest = args;
  rest.x += whole * args.block * 2;
  rest.n -= whole * args.block;
  rest.amax += whole;
  amax_rows<uint16_t>(rest);
}

// Largest of each of 16 registers, in order: four rounds, each of which halves their number and doubles the count in one.
inline __m512i largest_of_each(const __m512i (&of)[16]) {
  __m512i two[8], four[4], eight[2];
  for (ptrdiff_t i = 0; i < 8; ++i) {
    two[i] = _mm512_max_epu32(_mm512_unpacklo_epi32(of[2 * i], of[2 * i + 1]),
                              _mm512_unpackhi_epi32(of[2 * i], of[2 * i + 1]));
  }
  for (ptrdiff_t i = 0; i < 4; ++i) {
    four[i] = _mm512_max_epu32(_mm512_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm512_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  }
  // Quarters: even ones of both, then odd ones.
  const auto fold = [](__m512i a, __m512i b) {
    return _mm512_max_epu32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
  };
  for (ptrdiff_t i = 0; i < 2; ++i) eight[i] = fold(four[2 * i], four[2 * i + 1]);
  return fold(eight[0], eight[1]);
}

// Of whole blocks of kVectors registers, sixteen at a time; how many blocks.
template <int64_t kVectors>
int64_t amax_together(const uint32_t* x, int64_t num_blocks, uint32_t* amax) {
  constexpr int64_t kWords = 16, kTogether = 16;  // values of a register, blocks
  const __m512i mask = _mm512_set1_epi32(0x7FFFFFFF);
  int64_t b = 0;
  for (; b + kTogether <= num_blocks; b += kTogether) {
    __m512i largest[kTogether];
    for (int64_t i = 0; i < kTogether; ++i) {
      const uint32_t* const from = x + (b + i) * kVectors * kWords;
      largest[i] = _mm512_and_si512(_mm512_loadu_si512(from), mask);
#pragma GCC unroll 8
      for (int64_t j = 1; j < kVectors; ++j) {
        largest[i] = _mm512_max_epu32(
            largest[i], _mm512_and_si512(_mm512_loadu_si512(from + j * kWords), mask));
      }
    }
    _mm512_storeu_si512(amax + b, largest_of_each(largest));
  }
  return b;
}

void amax_f32(const AmaxArgs& args) {
  const auto* const x = reinterpret_cast<const uint32_t*>(args.x);
  const int64_t whole = args.n / args.block;
  int64_t done = 0;
  if (args.block == 32) done = amax_together<2>(x, whole, args.amax);
  if (args.block == 128) done = amax_together<8>(x, whole, args.amax);
  AmaxArgs rest = args;
  rest.x += done * args.block * 4;
  rest.n -= done * args.block;
  rest.amax += done;
  amax_rows<uint32_t>(rest);
}

// --- e8m0 scales: as kernel.inl, also where there are few ---

void store_e8m0(const E8M0Args& args) {
  const __m512i infinity = _mm512_set1_epi32(static_cast<int>(kInfBits));
  const __m512i mantissa = _mm512_set1_epi32(static_cast<int>(E8M0Args::kMantissaMask));
  const __m512i above = _mm512_set1_epi32(static_cast<int>(args.ceil_above));
  for (int64_t b = 0; b < args.num_blocks; b += 16) {
    const __mmask16 there = lanes_left(args.num_blocks - b);
    const __m512i amax = _mm512_maskz_loadu_epi32(there, args.amax + b);
    __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(amax, kMantissaBits),
                                    _mm512_set1_epi32(args.largest_exponent));
    const __mmask16 up = _mm512_cmpgt_epu32_mask(_mm512_and_si512(amax, mantissa), above);
    code = _mm512_mask_add_epi32(code, up, code, _mm512_set1_epi32(1));
    code = _mm512_max_epi32(code, _mm512_setzero_si512());
    code = _mm512_mask_mov_epi32(code, _mm512_testn_epi32_mask(amax, amax),
                                 _mm512_set1_epi32(args.zero_block_code));
    const __m512i factor =
        _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), code), kMantissaBits);
    const __mmask16 finite = _mm512_cmplt_epu32_mask(amax, infinity);
    const __m512i nan_code = _mm512_set1_epi32(kE8M0NaN);
    const __m512i nan = _mm512_set1_epi32(static_cast<int>(kNaNBits));
    _mm_mask_storeu_epi8(args.codes + b, there,
                         _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(nan_code, finite, code)));
    _mm512_mask_storeu_epi32(args.factors + b, there, _mm512_mask_mov_epi32(nan, finite, factor));
  }
}

uint32_t load_e8m0(const uint8_t* codes, int64_t num_blocks, float* values) {
  const __m512i least = _mm512_set1_epi32(1 << (kMantissaBits - 1));  // 2^-127
  __m512i largest = _mm512_setzero_si512();
  for (int64_t b = 0; b < num_blocks; b += 16) {
    const __mmask16 there = lanes_left(num_blocks - b);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, codes + b));
    __m512i word = _mm512_max_epu32(_mm512_slli_epi32(code, kMantissaBits), least);
    word = _mm512_mask_mov_epi32(word, _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(kE8M0NaN)),
                                 _mm512_set1_epi32(static_cast<int>(kNaNBits)));
    _mm512_mask_storeu_epi32(values + b, there, word);
    largest = _mm512_max_epu32(largest, word);
  }
  return _mm512_reduce_max_epu32(largest);
}
