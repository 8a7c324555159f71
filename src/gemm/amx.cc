// Level `amx`: TDPBF16PS in the order it computes natively, 32 rows by 32 columns in four accumulators;
// all else, quantised weights too, is level avx512 (VDPBF16PS is slower than FMA where there is AMX).
//
// One TDPBF16PS is one block of 32 k of the order `amx`, and blocks are added in rising k, so the bits
// are the instruction's own. Accumulators rest in the scratch between chunks of k: a round trip of
// fp32 changes nothing. Tiles are configured and released in every call, so no state of another user
// of the tile registers is trusted or kept. Test: tests/gemm/kernels_test.cc.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "gemm/kernels.h"
#include "gemm/packed_layout.h"

namespace argosy::gemm {
namespace {

#define ARGOSY_KERNEL_TARGET __attribute__((target("avx512f,amx-tile,amx-bf16")))
#define ARGOSY_KERNEL_INLINE ARGOSY_KERNEL_TARGET __attribute__((always_inline)) inline

constexpr int64_t kTileRows = 16;
constexpr int64_t kPairRows = 2 * kTileRows;
constexpr int64_t kRowBytes = 64;  // of a tile
constexpr int64_t kBlockBytes = kTileElements * 4;
// 16 blocks: 32 KiB of weights, which stay in the L1 cache while the rows go by.
constexpr int64_t kChunkBlocks = 16;
// Below, a tile has too little to do for what it costs: FMA reads weights as fast.
constexpr int64_t kFmaRows = 2;

// Tiles 0..3 sum rows 0..15 and 16..31 by columns 0..15 and 16..31; 4 and 5 are rows, 6 and 7
// weights.

// The 64-byte operand of LDTILECFG, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// For `num_rows` in [1, 32] rows. A tile of no rows stays unconfigured and must not be used.
ARGOSY_KERNEL_INLINE void configure(int64_t num_rows) {
  const int64_t upper = std::min(num_rows, kTileRows);
  const int64_t lower = num_rows - upper;
  const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(rows[tile]);
    config.row_bytes[tile] = rows[tile] > 0 ? kRowBytes : 0;
  }
  // Compilers do not see that LDTILECFG reads the structure and would drop the stores above.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// A block of up to 32 rows on its way through k.
struct RowBlock {
  const std::byte* rows = nullptr;
  int64_t row_stride_bytes = 0;
  int64_t num_rows = 0;
  float* sums = nullptr;
  uintptr_t prefetch = 0;
  int64_t prefetch_lines = 0;   // per block of 32 k
  int64_t prefetch_stride = 0;  // from one block's to the next's
};

template <bool kLower>
ARGOSY_KERNEL_INLINE void load_sums(const float* sums) {
  _tile_loadd(0, sums, kPanelColumns * 4);
  _tile_loadd(1, sums + kTileColumns, kPanelColumns * 4);
  if constexpr (kLower) {
    _tile_loadd(2, sums + kTileRows * kPanelColumns, kPanelColumns * 4);
    _tile_loadd(3, sums + kTileRows * kPanelColumns + kTileColumns, kPanelColumns * 4);
  }
}

template <bool kLower>
ARGOSY_KERNEL_INLINE void store_sums(float* sums) {
  _tile_stored(0, sums, kPanelColumns * 4);
  _tile_stored(1, sums + kTileColumns, kPanelColumns * 4);
  if constexpr (kLower) {
    _tile_stored(2, sums + kTileRows * kPanelColumns, kPanelColumns * 4);
    _tile_stored(3, sums + kTileRows * kPanelColumns + kTileColumns, kPanelColumns * 4);
  }
}

template <bool kLower>
ARGOSY_KERNEL_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kLower) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// One block of 32 k. Rows stream past the L1 cache, where the weights of the chunk stay.
template <bool kLower>
ARGOSY_KERNEL_INLINE void multiply_block(const std::byte* rows, int64_t stride,
                                         const std::byte* w) {
  _tile_loadd(6, w, kPairStride);
  _tile_loadd(7, w + kTileStride, kPairStride);
  _tile_stream_loadd(4, rows, stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kLower) {
    _tile_stream_loadd(5, rows + kTileRows * stride, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The `rest` elements past the last whole block of each row, padded with zeros.
ARGOSY_KERNEL_INLINE void multiply_rest(const RowBlock& block, int64_t k, const std::byte* w,
                                        bool has_lower) {
  alignas(64) std::byte padded[kPairRows * kRowBytes] = {};
  const int64_t rest = k % kBlockK;
  for (int64_t r = 0; r < block.num_rows; ++r) {
    std::memcpy(padded + r * kRowBytes, block.rows + r * block.row_stride_bytes + (k - rest) * 2,
                static_cast<size_t>(rest * 2));
  }
  // Nor do they see that a tile load reads memory.
  __asm__ volatile("" : : "r"(padded) : "memory");
  if (has_lower) {
    multiply_block<true>(padded, kRowBytes, w);
  } else {
    multiply_block<false>(padded, kRowBytes, w);
  }
}

// Blocks of 32 k [first, last) of one block of rows. The partial block counts as one.
template <bool kLower>
ARGOSY_KERNEL_INLINE void run_chunk(const RowBlock& block, const DotArgs& args, int64_t first,
                                    int64_t last) {
  if (first == 0 && !args.resumes) {
    zero_sums<kLower>();
  } else {
    load_sums<kLower>(block.sums);
  }
  const int64_t num_full = args.k / kBlockK;
  for (int64_t at = first; at < std::min(last, num_full); ++at) {
    for (int64_t line = 0; line < block.prefetch_lines; ++line) {
      const auto ahead = static_cast<uintptr_t>(at * block.prefetch_stride + line * 64);
      __builtin_prefetch(reinterpret_cast<const void*>(block.prefetch + ahead), 0, 2);
    }
    multiply_block<kLower>(block.rows + at * kRowBytes, block.row_stride_bytes,
                           args.panel + at * kBlockBytes);
  }
  if (last > num_full) multiply_rest(block, args.k, args.panel + num_full * kBlockBytes, kLower);
  store_sums<kLower>(block.sums);
}

RowBlock row_block_of(const DotArgs& args, int64_t at) {
  const int64_t num_blocks = (args.num_rows + kPairRows - 1) / kPairRows;
  const int64_t k_blocks = (args.k + kBlockK - 1) / kBlockK;
  RowBlock block;
  block.rows = args.rows + at * kPairRows * args.row_stride_bytes;
  block.row_stride_bytes = args.row_stride_bytes;
  block.num_rows = std::min(kPairRows, args.num_rows - at * kPairRows);
  block.sums = args.scratch + at * kPairRows * kPanelColumns;
  block.prefetch_lines = (args.prefetch_lines + num_blocks - 1) / num_blocks;
  // Of lines that follow one another each row block takes its share after that of the last.
  const int64_t bytes = block.prefetch_lines * 64;
  const bool follow = args.prefetch_stride == 0;
  block.prefetch_stride = follow ? bytes : args.prefetch_stride;
  block.prefetch = args.prefetch + static_cast<uintptr_t>(at * bytes * (follow ? k_blocks : 1));
  return block;
}

ARGOSY_KERNEL_TARGET void dot_tiles(const DotArgs& args) {
  const int64_t k_blocks = (args.k + kBlockK - 1) / kBlockK;
  const int64_t full_blocks = args.num_rows / kPairRows;
  if (full_blocks > 0) {
    configure(kPairRows);
    for (int64_t first = 0; first < k_blocks; first += kChunkBlocks) {
      const int64_t last = std::min(first + kChunkBlocks, k_blocks);
      for (int64_t at = 0; at < full_blocks; ++at) {
        run_chunk<true>(row_block_of(args, at), args, first, last);
      }
    }
  }
  const int64_t rest = args.num_rows % kPairRows;
  if (rest > 0) {
    configure(rest);
    const RowBlock block = row_block_of(args, full_blocks);
    if (rest > kTileRows) {
      run_chunk<true>(block, args, 0, k_blocks);
    } else {
      run_chunk<false>(block, args, 0, k_blocks);
    }
  }
  _tile_release();
  __asm__ volatile("" : : "r"(args.scratch) : "memory");
  for (int64_t i = 0; i < args.num_rows * kPanelColumns; i += 16) {
    _mm512_store_ps(args.scratch + i,
                    _mm512_add_ps(_mm512_load_ps(args.scratch + i), _mm512_setzero_ps()));
  }
}

}  // namespace

const KernelTable& amx_kernels() {
  static const KernelTable table = [] {
    KernelTable with_tiles = avx512_kernels();
    with_tiles.bf16_amx = {.run = dot_tiles,
                           .row_block = kMaxRowBlock,
                           .few_rows = kFmaRows,
                           .few = &avx512_kernels().bf16_amx};
    return with_tiles;
  }();
  return table;
}

}  // namespace argosy::gemm
