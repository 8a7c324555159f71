// Which buffers a layer and its backward need, and how many bytes: the one table, for running and for size_tape().
// Test: tests/moe/tape_test.cc.
#pragma once

#include <array>

#include "argosy/moe_backward.h"

namespace argosy {

struct ForwardBuffers;
struct BackwardBuffers;

struct BufferNeed {
  AlignedBuffer* buffer = nullptr;
  int64_t bytes = 0;
};

// Of forward_train, and of backward. Valid as long as the buffers.
std::array<BufferNeed, 13> forward_needs(ForwardBuffers& buffers, const TapePolicy& policy,
                                         const TapeShape& shape);
std::array<BufferNeed, 34> backward_needs(BackwardBuffers& buffers, const TapePolicy& policy,
                                          const TapeShape& shape);

// Errors: kOutOfMemory.
template <size_t kCount>
Status reserve_all(const std::array<BufferNeed, kCount>& needs) {
  for (const BufferNeed& need : needs) {
    ARGOSY_RETURN_IF_ERROR(need.buffer->reserve(need.bytes));
  }
  return {};
}

// What the buffers hold now.
template <size_t kCount>
int64_t held_bytes(const std::array<BufferNeed, kCount>& needs) {
  int64_t sum = 0;
  for (const BufferNeed& need : needs) sum += need.buffer->size_bytes();
  return sum;
}

}  // namespace argosy
