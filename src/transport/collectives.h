// Small collectives over an Endpoint: all ranks give a few bytes, all get everybody's, in rank
// order.
//
// Two halves (issue, wait), an epoch in every flag, double-buffered by epoch parity: a rank can run
// at most one epoch ahead of the slowest, because it needs everybody's bytes to finish its own.
// Several AllGathers of one group may be in flight. Test: tests/transport/collectives_test.cc.
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
  // Collective: yes. `max_bytes` is the most one rank may give; it is rounded up to a multiple
  // of 64.
  static Result<std::unique_ptr<AllGather>> create(Endpoint& endpoint, int64_t max_bytes,
                                                   platform::Deadline deadline);
  ~AllGather();  // frees the window; no communication
  AllGather(const AllGather&) = delete;
  AllGather& operator=(const AllGather&) = delete;

  // Sends `mine` to everybody; it may be reused on return. Ranks may give different sizes. More
  // than max_bytes() sends the size alone: then wait() fails on every rank, and the group stays
  // usable. Allocates: never. Errors: kInvalidArgument when the previous issue was not waited for;
  // kAborted.
  Status issue(std::span<const std::byte> mine);
  // Blocks until everybody's bytes are here. They stay readable through from() until the next
  // issue(). Allocates: only for errors. Errors: kInvalidArgument, the same on every rank, naming
  // the rank that gave too much; those of Endpoint::wait_all. `waited_ns`: [num_ranks] as WaitItem has it, or empty.
  Status wait(platform::Deadline deadline, std::string_view what,
              std::span<int64_t> waited_ns = {});
  // What `rank` gave, 64-byte aligned.
  std::span<const std::byte> from(int rank) const;

  uint64_t epoch() const { return epoch_; }
  int num_ranks() const { return endpoint_.num_ranks(); }
  int64_t max_bytes() const { return max_bytes_; }

 private:
  AllGather(Endpoint& endpoint, Window window, int64_t max_bytes);
  int64_t slot_offset(int rank, uint64_t epoch) const;

  Endpoint& endpoint_;
  Window window_;
  int64_t max_bytes_;
  uint64_t epoch_ = 0;
  bool is_issued_ = false;
  std::vector<WaitItem> items_;
  std::vector<std::span<const std::byte>> received_;  // [num_ranks] of the epoch waited for last
};

// Sums of `values` over ranks, added in rank order (so repeatable for one number of ranks). Blocks.
// Errors: kInvalidArgument when the ranks' lengths differ, when they exceed the gather's max_bytes,
// or when an integer sum leaves int64; the same on every rank.
Status reduce_sum(AllGather& gather, std::span<double> values, platform::Deadline deadline);
Status reduce_sum(AllGather& gather, std::span<int64_t> values, platform::Deadline deadline);

}  // namespace argosy::transport
