// Every rank's rows on every rank, in rank order: for gradients of what every rank holds, whose chain goes over global token
// order. In chunks; made for one host. Test: tests/moe/backward_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "argosy/group.h"
#include "argosy/tensor.h"
#include "transport/collectives.h"

namespace argosy {

class RowGather {
 public:
  // Collective: yes.
  static Result<std::unique_ptr<RowGather>> create(Group& group);

  // rows[r] of rank r, each `row_bytes` (`mine` holds rows[own]); *all gets them in rank order. With one rank nothing is
  // copied: *all is `mine`. Valid until the next call with the same `room`.
  //
  // Collective: yes; same row_bytes and counts everywhere. Blocks: at most step_deadline a chunk. Errors: those of a wait;
  // kOutOfMemory.
  Status gather(std::span<const int64_t> rows, int64_t row_bytes, const std::byte* mine,
                AlignedBuffer* room, const std::byte** all);

 private:
  RowGather(Group& group, std::unique_ptr<transport::AllGather> gather)
      : group_(group), gather_(std::move(gather)) {}
  Group& group_;
  std::unique_ptr<transport::AllGather> gather_;
};

}  // namespace argosy
