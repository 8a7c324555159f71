// Small collectives over an Endpoint: all ranks give a few bytes, all get everybody's, in rank order.
//
// Two halves (issue, wait), an epoch in every flag, double-buffered by epoch parity: a rank can run at most
// one epoch ahead of the slowest, because it needs everybody's bytes to finish its own. Several AllGathers
// of one group may be in flight. Test: tests/transport/collectives_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "argosy/status.h"
#include "platform/clock.h"
#include "transport/endpoint.h"

namespace argosy::transport {

class AllGather {
 public:
  // Collective: yes. `max_bytes` is the most one rank may give.
  static Result<std::unique_ptr<AllGather>> create(Endpoint& endpoint, int64_t max_bytes,
                                                   platform::Deadline deadline);
  ~AllGather();  // frees the window; no communication

  // Sends `mine` (size <= max_bytes, the same size on every rank of one epoch) to everybody.
  // Allocates: never. Precondition: the previous issue was waited for.
  Status issue(std::span<const std::byte> mine);
  // Blocks until everybody's bytes are here. They stay readable through from() until the next issue().
  Status wait(platform::Deadline deadline, std::string_view what);
  std::span<const std::byte> from(int rank) const;

  uint64_t epoch() const { return epoch_; }

 private:
  AllGather(Endpoint& endpoint, Window window, int64_t max_bytes);
  int64_t slot_offset(int rank, uint64_t epoch) const;

  Endpoint& endpoint_;
  Window window_;
  int64_t max_bytes_;
  uint64_t epoch_ = 0;
  int64_t size_bytes_ = 0;
  std::vector<WaitItem> items_;
};

// Sums of `values` over ranks, added in rank order (so repeatable for one number of ranks). Blocks.
// Errors: kInvalidArgument when the ranks' lengths differ.
Status reduce_sum(AllGather& gather, std::span<double> values, platform::Deadline deadline);
Status reduce_sum(AllGather& gather, std::span<int64_t> values, platform::Deadline deadline);

}  // namespace argosy::transport
