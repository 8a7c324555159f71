// Level `generic`: plain C++ over the panels, included into the anonymous namespace of two files
// that differ only in ARGOSY_KERNEL_TARGET. Per row, 16 independent column chains, so that a
// compiler vectorises std::fma over columns without changing any sum. The instruction set is set
// per function, not per file: a library inline function that is not inlined is then always the
// baseline copy, whichever file it is from. Test: tests/gemm/grouped_gemm_test.cc.

#include "gemm/store.inl"

#define ARGOSY_KERNEL_INLINE __attribute__((always_inline)) inline

// One block of 32 k of one row, widened, zero past k.
ARGOSY_KERNEL_INLINE void widen_block(const BFloat16* row, int64_t count, float* x) {
  uint16_t bits[kBlockK] = {};
  if (count >= kBlockK) {
    std::memcpy(bits, row, sizeof(bits));
  } else {
    std::memcpy(bits, row, static_cast<size_t>(count) * sizeof(BFloat16));
  }
  for (int64_t i = 0; i < kBlockK; ++i) {
    x[i] = std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16);
  }
}

ARGOSY_KERNEL_INLINE void widen_block(const float* row, int64_t count, float* x) {
  for (int64_t i = 0; i < kBlockK; ++i) x[i] = 0.0f;
  std::memcpy(x, row, static_cast<size_t>(count < kBlockK ? count : kBlockK) * sizeof(float));
}

// chain[c] = fma(x, w[c], chain[c])
ARGOSY_KERNEL_INLINE void fma_columns(float x, const float* w, float* chain) {
  for (int c = 0; c < kTileColumns; ++c) chain[c] = std::fma(x, w[c], chain[c]);
}

// The 16 columns of weights at pair `pair` of a block, as fp32.
ARGOSY_KERNEL_INLINE void load_pair(const std::byte* tile, int64_t pair, float* even, float* odd) {
  uint32_t words[kTileColumns];
  std::memcpy(words, tile + pair * kPairStride, sizeof(words));
  for (int c = 0; c < kTileColumns; ++c) {
    even[c] = std::bit_cast<float>(words[c] << 16);
    odd[c] = std::bit_cast<float>(words[c] & 0xFFFF0000u);
  }
}

// How a block of 32 k enters the 16 accumulators of each row. kDistance: bytes from one block's 16
// columns to those of the next; kHalf: from columns 0..15 to columns 16..31.
struct AmxOrder {
  using X = BFloat16;
  static constexpr int64_t kDistance = kDecodedBlockBytes, kHalf = kTileStride;

  template <int kRows>
  ARGOSY_KERNEL_INLINE static void block(const float (&x)[kRows][kBlockK], const std::byte* tile,
                                         float (&acc)[kRows][kTileColumns]) {
    float even[kRows][kTileColumns] = {};
    float odd[kRows][kTileColumns] = {};
    for (int64_t pair = 0; pair < kBlockK / 2; ++pair) {
      float w_even[kTileColumns], w_odd[kTileColumns];
      load_pair(tile, pair, w_even, w_odd);
      for (int r = 0; r < kRows; ++r) {
        fma_columns(x[r][2 * pair], w_even, even[r]);
        fma_columns(x[r][2 * pair + 1], w_odd, odd[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kTileColumns; ++c) acc[r][c] = acc[r][c] + (even[r][c] + odd[r][c]);
    }
  }
};

// One chain per column over the pairs of a bf16 tile; VDPBF16PS takes the odd element of a pair
// first.
template <typename Rows, bool kOddFirst>
struct PairOrder {
  using X = Rows;
  static constexpr int64_t kDistance = kDecodedBlockBytes, kHalf = kTileStride;

  template <int kRows>
  ARGOSY_KERNEL_INLINE static void block(const float (&x)[kRows][kBlockK], const std::byte* tile,
                                         float (&acc)[kRows][kTileColumns]) {
    for (int64_t pair = 0; pair < kBlockK / 2; ++pair) {
      float w[2][kTileColumns];
      load_pair(tile, pair, w[0], w[1]);
      constexpr int kFirst = kOddFirst ? 1 : 0;
      for (int r = 0; r < kRows; ++r) {
        fma_columns(x[r][2 * pair + kFirst], w[kFirst], acc[r]);
        fma_columns(x[r][2 * pair + 1 - kFirst], w[1 - kFirst], acc[r]);
      }
    }
  }
};

struct F32Order {
  using X = float;
  static constexpr int64_t kDistance = int64_t{32} * 32 * 4, kHalf = 64;

  template <int kRows>
  ARGOSY_KERNEL_INLINE static void block(const float (&x)[kRows][kBlockK], const std::byte* tile,
                                         float (&acc)[kRows][kTileColumns]) {
    for (int64_t k = 0; k < kBlockK; ++k) {
      float w[kTileColumns];
      std::memcpy(w, tile + k * kPanelColumns * int64_t{sizeof(float)}, sizeof(w));
      for (int r = 0; r < kRows; ++r) fma_columns(x[r][k], w, acc[r]);
    }
  }
};

// kRows rows, from row `first`, by the whole panel.
template <typename Order, int kRows>
ARGOSY_KERNEL_INLINE void dot_rows(const DotArgs& args, int64_t first) {
  for (int64_t half = 0; half < 2; ++half) {
    float acc[kRows][kTileColumns] = {};
    for (int r = 0; args.resumes && r < kRows; ++r) {
      std::memcpy(acc[r], args.scratch + (first + r) * kPanelColumns + half * kTileColumns,
                  sizeof(acc[r]));
    }
    const std::byte* tile = args.panel + half * Order::kHalf;
    for (int64_t k = 0; k < args.k; k += kBlockK) {
      float x[kRows][kBlockK];
      for (int r = 0; r < kRows; ++r) {
        const std::byte* row = args.rows + (first + r) * args.row_stride_bytes;
        widen_block(reinterpret_cast<const typename Order::X*>(row) + k, args.k - k, x[r]);
      }
      Order::template block<kRows>(x, tile, acc);
      tile += Order::kDistance;
    }
    for (int r = 0; r < kRows; ++r) {
      float* to = args.scratch + (first + r) * kPanelColumns + half * kTileColumns;
      for (int c = 0; c < kTileColumns; ++c) to[c] = acc[r][c] + 0.0f;
    }
  }
}

#include "gemm/scaled_panel.inl"

// acc[r][c] plus a block's partials by their scales. Rows without scales have no choice to make per element.
template <int kRows>
ARGOSY_KERNEL_INLINE void add_scaled_columns(const float (&partial)[kRows][kTileColumns],
                                             const float* row_scales, const float* scales,
                                             bool are_e8m0, float (&acc)[kRows][kTileColumns]) {
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kTileColumns; ++c) {
      acc[r][c] = row_scales == nullptr ? std::fma(partial[r][c], scales[c], acc[r][c])
                                        : numeric::add_scaled(partial[r][c], row_scales[r],
                                                              scales[c], are_e8m0, acc[r][c]);
    }
  }
}

// The same with scales on either side: a partial per block, from the codes as bf16.
template <typename Order, int kRows>
ARGOSY_KERNEL_INLINE void scaled_rows(const DotArgs& args, const CodedPanel& panel, int64_t first) {
  alignas(64) std::byte room[kDecodedBlockBytes];
  alignas(64) float scales[kPanelColumns];
  float acc[2][kRows][kTileColumns] = {};
  for (int r = 0; args.resumes && r < kRows; ++r) {
    for (int half = 0; half < 2; ++half) {
      std::memcpy(acc[half][r], args.scratch + (first + r) * kPanelColumns + half * kTileColumns,
                  sizeof(acc[half][r]));
    }
  }
  const int64_t block_k = panel.block_k;
  for (int64_t begin = 0; begin < args.k; begin += block_k) {
    const int64_t end = args.k - begin < block_k ? args.k : begin + block_k;
    float partial[2][kRows][kTileColumns] = {};
    for (int64_t k = begin; k < end; k += kBlockK) {
      const std::byte* block = decoded_block(panel, k / kBlockK, room);
      float x[kRows][kBlockK];
      for (int r = 0; r < kRows; ++r) {
        const std::byte* row = args.rows + (first + r) * args.row_stride_bytes;
        widen_block(reinterpret_cast<const typename Order::X*>(row) + k, args.k - k, x[r]);
      }
      for (int half = 0; half < 2; ++half) {
        Order::template block<kRows>(x, block + half * Order::kHalf, partial[half]);
      }
    }
    load_scales(panel, begin / block_k, scales);
    const float* row_scales = panel.rows.values == nullptr
                                  ? nullptr
                                  : row_scales_at(args, panel, begin / block_k) + first;
    for (int half = 0; half < 2; ++half) {
      add_scaled_columns<kRows>(partial[half], row_scales, scales + half * kTileColumns,
                                panel.are_e8m0, acc[half]);
    }
  }
  for (int half = 0; half < 2; ++half) {
    for (int r = 0; r < kRows; ++r) {
      float* to = args.scratch + (first + r) * kPanelColumns + half * kTileColumns;
      for (int c = 0; c < kTileColumns; ++c) to[c] = acc[half][r][c] + 0.0f;
    }
  }
}

template <typename Order, int kRowTile>
ARGOSY_KERNEL_TARGET void scaled_dot(const DotArgs& args, const CodedPanel& panel) {
  int64_t row = 0;
  for (; row + kRowTile <= args.num_rows; row += kRowTile) {
    scaled_rows<Order, kRowTile>(args, panel, row);
  }
  for (; row < args.num_rows; ++row) scaled_rows<Order, 1>(args, panel, row);
}

template <typename Order, int kRowTile>
ARGOSY_KERNEL_TARGET void dot(const DotArgs& args) {
  int64_t row = 0;
  for (; row + kRowTile <= args.num_rows; row += kRowTile) dot_rows<Order, kRowTile>(args, row);
  for (; row < args.num_rows; ++row) dot_rows<Order, 1>(args, row);
}

// Row tiles (second argument): as many fp32 chains as hide the FMA latency and fit 16 vector registers of 8.
constexpr int64_t kRowBlock = 32;
template <typename Order, int kRowTile>
constexpr Dot kBf16WeightsDot{
    .run = dot<Order, kRowTile>, .row_block = kRowBlock, .run_scaled = scaled_dot<Order, kRowTile>};
constexpr KernelTable kTable{
    .bf16_amx = kBf16WeightsDot<AmxOrder, 2>,
    .bf16_vdpbf16 = kBf16WeightsDot<PairOrder<BFloat16, true>, 4>,
    .f32_bf16 = kBf16WeightsDot<PairOrder<float, false>, 4>,
    .f32_f32 = {dot<F32Order, 4>, kRowBlock},
    .store_bf16 = stores_of<BFloat16>(),
    .store_f32 = stores_of<float>(),
};
