// Rows that came in several calls, brought into the order of one: by expert, source rank, source token. Test:
// tests/moe/latency_backward_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

// The place of the i-th row in that order. Every call brings its rows in it, and later calls later tokens of every source.
//
// in   rows_of   [calls, L, R] rows of each call by local expert and source rank
// out  place_of  [S], a permutation
void order_rows(std::span<const int64_t> rows_of, int64_t num_local, int num_ranks,
                std::vector<int64_t>* place_of);

// Row i to place_of[i], in place: each row is moved once. Precondition: a permutation.
void move_rows(std::span<const int64_t> place_of, int64_t row_bytes, std::byte* rows);

// reserve() that keeps the first `used` bytes. Errors: kOutOfMemory; the buffer is as before then.
Status grow(AlignedBuffer* buffer, int64_t used, int64_t bytes);

}  // namespace argosy
