// Sums of many fp32 values over ranks, added in rank order, the same bits on every rank.
//
// A chunk at a time: every rank gets all ranks' values of its slice, adds them, and gives the sums to all, so each rank
// receives twice what it holds, however many ranks there are. No buffer is needed twice: whoever writes the next chunk's
// values has seen the flag that says the ones before were read. Test: tests/transport/rank_sum_test.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "argosy/status.h"
#include "platform/clock.h"
#include "transport/endpoint.h"

namespace argosy::transport {

class RankSum {
 public:
  static constexpr int64_t kChunkValues = int64_t{256} << 10;  // 1 MiB

  // Collective: yes. `chunk_values` of one step; the same everywhere.
  static Result<std::unique_ptr<RankSum>> create(Endpoint& endpoint, platform::Deadline deadline,
                                                 int64_t chunk_values = kChunkValues);
  ~RankSum();  // frees the window; no communication
  RankSum(const RankSum&) = delete;
  RankSum& operator=(const RankSum&) = delete;

  // values[i] = the sum of all ranks' values[i]: ((v0 + v1) + v2) + ..., denormals kept.
  //
  // Collective: yes; the same size everywhere (the caller has compared). Blocks: at most twice `step` a chunk. Allocates:
  // never. Errors: those of Endpoint::wait_all.
  Status run(std::span<float> values, std::chrono::milliseconds step);

 private:
  RankSum(Endpoint& endpoint, Window window, int64_t chunk_values);
  Status run_chunk(std::span<float> values, std::chrono::milliseconds step);
  int64_t largest_slice() const;
  // Window: flags of values, flags of sums, one line a rank each; values [R, slice]; sums [chunk].
  int64_t values_flag(int rank) const;
  int64_t sums_flag(int rank) const;
  int64_t values_offset(int rank) const;
  int64_t sums_offset(int64_t at) const;

  Endpoint& endpoint_;
  Window window_;
  int64_t chunk_values_;
  uint64_t epoch_ = 0;
  std::vector<WaitItem> values_items_, sums_items_;  // [R]
};

}  // namespace argosy::transport
