// Every rank's bytes to one rank, in chunks, over an Endpoint. The public door is Group::gather.
//
// Made for results at the end of a job, not for the steady state: it allocates its windows per
// call. Test: tests/transport/gather_test.cc.
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

#include "argosy/status.h"
#include "transport/endpoint.h"

namespace argosy::transport {

// The root's window holds this much for all ranks together, and at least 64 bytes for each.
inline constexpr int64_t kGatherWindowBytes = int64_t{4} << 20;

// See Group::gather. `step` is the deadline of each wait.
Status gather(Endpoint& endpoint, int root, std::span<const std::byte> mine,
              std::vector<std::vector<std::byte>>* all, std::chrono::milliseconds step);

}  // namespace argosy::transport
