// How operands of the backward are turned into the forward's layouts: blocks of 32 by 32, by three
// primitives.
//
// Moves are exact: no bit changes, and no NaN is touched. Test: tests/gemm/backward_moves_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "argosy/cpu.h"
#include "argosy/tensor.h"

namespace argosy::gemm {

// Strides in bytes. Nothing needs alignment but `to`: 64 bytes, its stride too.
struct MoveKernels {
  // 16 by 16 words of 32 bits: to[j][i] = from[i][j].
  void (*transpose)(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride);
  // 2 * num_pairs rows of 32 bf16 to pairs of rows, a block of a panel: line i of each of two tiles of 16 columns is
  // rows 2 i and 2 i + 1, interleaved.
  void (*interleave)(const std::byte* from, int64_t from_stride, int64_t num_pairs, std::byte* to);
  // A tile of packed bf16 weights, 16 lines of 16 columns n by a pair of k, to pairs of n: line i of each of two tiles
  // is columns 2 i and 2 i + 1 by 16 k. `from` is aligned as `to` is.
  void (*turn_pairs)(const std::byte* from, std::byte* to);
};
const MoveKernels& base_moves();
const MoveKernels& avx2_moves();
const MoveKernels& avx512_moves();
// What `level` may use.
const MoveKernels& moves_for(Level level);

// Block `k_block` of 32 k of 16 columns n of a panel, as half `half` of a block of 32 n of the
// transposed panel: what was k is now the column. `panel` begins with column 0, `tile` counts 16
// columns.
void transpose_weights(const MoveKernels& moves, DType dtype, const std::byte* panel, int64_t tile,
                       int64_t k_block, int64_t half, std::byte* to_block);

// Rows and columns of a matrix in the caller's memory.
struct MatrixBlock {
  const std::byte* first = nullptr;
  int64_t stride_bytes = 0;
  int64_t num_rows = 0;     // in [1, 32]; the others count as zero
  int64_t num_columns = 0;  // likewise
};

// As a block of a panel whose contraction is over the matrix's rows.
void pack_rows(const MoveKernels& moves, DType dtype, const MatrixBlock& from, std::byte* to_block);

// Transposed: column c of the matrix to 32 elements at `to` + c * to_stride, for all 32 columns.
void transpose_rows(const MoveKernels& moves, DType dtype, const MatrixBlock& from, std::byte* to,
                    int64_t to_stride);

}  // namespace argosy::gemm
