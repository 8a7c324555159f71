// The inproc back end of transport/endpoint.h: ranks are threads of one process, a put is a memcpy.
//
// One thread of a rank calls alloc, free, barrier and wait_all; put and signal may be called by any
// thread that the rank orders before its next signal. Test: tests/transport/endpoint_test.cc.
#pragma once

#include <memory>

#include "argosy/group.h"
#include "transport/endpoint.h"

namespace argosy::transport::inproc {

// Takes the seat and waits until every rank has come, in any order. Errors: kInvalidArgument for a
// rank outside the world or taken twice; kDisagree when num_ranks is not the world's; kTimeout
// naming the ranks that did not come. While the group is joining every rank gets the same error.
Result<std::unique_ptr<Endpoint>> attach(std::shared_ptr<InprocWorld> world, int rank,
                                         int num_ranks, platform::Deadline deadline);

}  // namespace argosy::transport::inproc
