// The rows of a panel of weight gradients, included into the anonymous namespace of each level's
// file; plain C++ over 16 columns, which compilers turn into vectors. Needs ARGOSY_KERNEL_TARGET.
// Test: tests/gemm/wgrad_test.cc.

constexpr int kLanes = 16;

__attribute__((always_inline)) inline void load_16(const std::byte* from, float*,
                                                   float (&x)[kLanes]) {
  std::memcpy(x, from, sizeof(x));
}
__attribute__((always_inline)) inline void load_16(const std::byte* from, BFloat16*,
                                                   float (&x)[kLanes]) {
  uint16_t bits[kLanes];
  std::memcpy(bits, from, sizeof(bits));
  for (int i = 0; i < kLanes; ++i) {
    x[i] = std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16);
  }
}

__attribute__((always_inline)) inline void store_16(std::byte* to, float*,
                                                    const float (&x)[kLanes]) {
  uint32_t words[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    words[i] = x[i] != x[i] ? 0x7FC00000u : std::bit_cast<uint32_t>(x[i]);
  }
  std::memcpy(to, words, sizeof(words));
}
__attribute__((always_inline)) inline void store_16(std::byte* to, BFloat16*,
                                                    const float (&x)[kLanes]) {
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t word = std::bit_cast<uint32_t>(x[i]);
    const uint32_t rounded = (word + 0x7FFFu + (word >> 16 & 1u)) >> 16;
    halves[i] = static_cast<uint16_t>((word & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
  }
  std::memcpy(to, halves, sizeof(halves));
}

template <typename Out, bool kAccumulate>
__attribute__((always_inline)) inline void gradient_16(const float* sums, float alpha,
                                                       std::byte* to) {
  float x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = alpha * sums[i];
  if constexpr (kAccumulate) {
    float main[kLanes];
    load_16(to, static_cast<Out*>(nullptr), main);
    for (int i = 0; i < kLanes; ++i) x[i] = main[i] + x[i];
  }
  store_16(to, static_cast<Out*>(nullptr), x);
}

template <typename Out, bool kAccumulate>
ARGOSY_KERNEL_TARGET void store_rows(const GradientStoreArgs& args) {
  constexpr int64_t kBytes = sizeof(Out);
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const float* sums = args.sums + r * 32;
    std::byte* to = args.out + r * args.row_stride_bytes;
    int64_t c = 0;
    for (; c + kLanes <= args.num_columns; c += kLanes) {
      gradient_16<Out, kAccumulate>(sums + c, args.alpha, to + c * kBytes);
    }
    if (c == args.num_columns) continue;
    const auto rest = static_cast<size_t>((args.num_columns - c) * kBytes);
    std::byte padded[kLanes * kBytes] = {};
    if constexpr (kAccumulate) std::memcpy(padded, to + c * kBytes, rest);
    gradient_16<Out, kAccumulate>(sums + c, args.alpha, padded);
    std::memcpy(to + c * kBytes, padded, rest);
  }
}

constexpr GradientStores kStores{{{store_rows<BFloat16, false>, store_rows<BFloat16, true>},
                                  {store_rows<float, false>, store_rows<float, true>}}};
