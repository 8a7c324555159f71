// The shm back end of transport/endpoint.h: ranks are processes of one host.
//
// The end of a peer's process is noticed by its pidfd and ends every wait with kPeerLost; a stopped peer is
// found by the deadline. Nothing has a name in the file system. Test: tests/transport/endpoint_test.cc,
// tests/transport/shm_test.cc.
#pragma once

#include <memory>

#include "transport/endpoint.h"
#include "transport/shm/rendezvous.h"

namespace argosy::transport::shm {

// Virtual size of a rank's memfd; pages exist once touched.
inline constexpr int64_t kDefaultHeapBytes = int64_t{64} << 30;

// Joins the group of the seat's job; see meet() for `own` and the errors.
Result<std::unique_ptr<Endpoint>> attach(const Seat& seat, const Status& own,
                                         platform::Deadline deadline);

}  // namespace argosy::transport::shm
