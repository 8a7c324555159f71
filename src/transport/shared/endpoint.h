// The one Endpoint over memory that all ranks can load and store: a put is a memcpy, a signal a release
// store and a ring. inproc/ and shm/ give it pages and window memory.
//
// One thread of a rank calls alloc, free, barrier and wait_all; put and signal may be called by any thread
// that the rank orders before its next signal. Test: tests/transport/endpoint_test.cc.
#pragma once

#include <memory>
#include <string>

#include "transport/endpoint.h"
#include "transport/shared/ranks.h"
#include "transport/shared/window_memory.h"

namespace argosy::transport::shared {

struct Attachment {
  std::string name;  // of the back end
  int rank = 0;
  std::shared_ptr<Ranks> ranks;
  std::unique_ptr<WindowMemory> memory;
  std::shared_ptr<void> keep_alive;  // whatever else must live as long as the endpoint
};

// Waits until every rank has taken its seat, then makes the barrier's window. Collective. Errors: kTimeout
// naming the ranks that did not come; the reason, as it is, when another rank could not join.
Result<std::unique_ptr<Endpoint>> attach(Attachment attachment, platform::Deadline deadline);

}  // namespace argosy::transport::shared
