// See backward_moves.h. A bf16 transposition is one of pairs (32-bit words) and an interleaving of
// rows, in either order.
#include "gemm/backward_moves.h"

#include <cstring>

#include "gemm/packed_layout.h"

namespace argosy::gemm {
namespace {

void transpose(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride) {
  for (int64_t i = 0; i < kTileColumns; ++i) {
    for (int64_t j = 0; j < kTileColumns; ++j) {
      std::memcpy(to + j * to_stride + i * 4, from + i * from_stride + j * 4, 4);
    }
  }
}

void interleave(const std::byte* from, int64_t from_stride, int64_t num_pairs, std::byte* to) {
  for (int64_t row = 0; row < 2 * num_pairs; ++row) {
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      std::byte* tile = to + c / kTileColumns * kTileStride;
      std::memcpy(tile + row / 2 * kPairStride + c % kTileColumns * 4 + row % 2 * 2,
                  from + row * from_stride + c * 2, 2);
    }
  }
}

void turn_pairs(const std::byte* from, std::byte* to) {
  for (int64_t n = 0; n < kTileColumns; ++n) {
    for (int64_t k = 0; k < kBlockK; ++k) {
      std::byte* tile = to + k / kTileColumns * kTileStride;
      std::memcpy(tile + n / 2 * kPairStride + k % kTileColumns * 4 + n % 2 * 2,
                  from + k / 2 * kPairStride + n * 4 + k % 2 * 2, 2);
    }
  }
}

// A whole block of 32 by 32 in memory of its own, where the caller's is smaller.
class WholeBlock {
 public:
  WholeBlock(const MatrixBlock& block, int64_t element) : first_(block.first) {
    stride_bytes_ = block.stride_bytes;
    if (block.num_rows == kBlockK && block.num_columns == kPanelColumns) return;
    std::memset(copy_, 0, static_cast<size_t>(kBlockK * kPanelColumns * element));
    for (int64_t r = 0; r < block.num_rows; ++r) {
      std::memcpy(copy_ + r * kPanelColumns * element, block.first + r * block.stride_bytes,
                  static_cast<size_t>(block.num_columns * element));
    }
    first_ = copy_;
    stride_bytes_ = kPanelColumns * element;
  }

  const std::byte* first() const { return first_; }
  int64_t stride_bytes() const { return stride_bytes_; }

 private:
  const std::byte* first_;
  int64_t stride_bytes_;
  alignas(64) std::byte copy_[kBlockK * kPanelColumns * 4];  // not set where it is not needed
};

// Four transpositions: 32 by 32 words.
void transpose_block(const MoveKernels& moves, const std::byte* from, int64_t from_stride,
                     std::byte* to, int64_t to_stride) {
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      moves.transpose(from + i * kTileColumns * from_stride + j * 64, from_stride,
                      to + j * kTileColumns * to_stride + i * 64, to_stride);
    }
  }
}

}  // namespace

const MoveKernels& base_moves() {
  static constexpr MoveKernels kMoves{transpose, interleave, turn_pairs};
  return kMoves;
}

const MoveKernels& moves_for(Level level) {
  if (level >= Level::kAvx512) return avx512_moves();
  return level >= Level::kAvx2 ? avx2_moves() : base_moves();
}

void transpose_weights(const MoveKernels& moves, DType dtype, const std::byte* panel, int64_t tile,
                       int64_t k_block, int64_t half, std::byte* to_block) {
  if (dtype == DType::kF32) {
    constexpr int64_t kRowBytes = kPanelColumns * 4;
    const std::byte* from = panel + k_block * kBlockK * kRowBytes + tile * 64;
    std::byte* to = to_block + half * kTileColumns * kRowBytes;
    for (int64_t i = 0; i < 2; ++i) {
      moves.transpose(from + i * kTileColumns * kRowBytes, kRowBytes, to + i * 64, kRowBytes);
    }
    return;
  }
  moves.turn_pairs(panel + k_block * kDecodedBlockBytes + tile * kTileStride,
                   to_block + half * (kDecodedBlockBytes / 2));
}

void pack_rows(const MoveKernels& moves, DType dtype, const MatrixBlock& from,
               std::byte* to_block) {
  const WholeBlock whole(from, size_of(dtype));
  if (dtype == DType::kBF16) {
    return moves.interleave(whole.first(), whole.stride_bytes(), kBlockK / 2, to_block);
  }
  for (int64_t r = 0; r < kBlockK; ++r) {
    std::memcpy(to_block + r * kPanelColumns * 4, whole.first() + r * whole.stride_bytes(),
                kPanelColumns * 4);
  }
}

void transpose_rows(const MoveKernels& moves, DType dtype, const MatrixBlock& from, std::byte* to,
                    int64_t to_stride) {
  const WholeBlock whole(from, size_of(dtype));
  if (dtype == DType::kF32) {
    return transpose_block(moves, whole.first(), whole.stride_bytes(), to, to_stride);
  }
  alignas(64) std::byte pairs[kDecodedBlockBytes];  // [16 pairs of rows][2 tiles of 16 columns]
  moves.interleave(whole.first(), whole.stride_bytes(), kBlockK / 2, pairs);
  for (int64_t tile = 0; tile < 2; ++tile) {
    moves.transpose(pairs + tile * kTileStride, kPairStride, to + tile * kTileColumns * to_stride,
                    to_stride);
  }
}

}  // namespace argosy::gemm
