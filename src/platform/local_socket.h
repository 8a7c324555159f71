// Unix sockets of one host in the abstract name space: messages with descriptors, every wait with a
// deadline. Names vanish with their socket, so nothing is left behind. Test:
// tests/platform/local_socket_test.cc.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "argosy/status.h"
#include "platform/clock.h"
#include "platform/descriptor.h"

namespace argosy::platform {

// Who is at the other end, by the kernel's word.
struct PeerCredentials {
  int pid = 0;
  int uid = 0;
};

struct SocketMessage {
  std::vector<std::byte> bytes;
  std::vector<Descriptor> descriptors;
};

inline constexpr size_t kMaxMessageDescriptors = 128;

// A connection that keeps message borders.
class LocalSocket {
 public:
  LocalSocket() = default;
  // kNotFound when nobody listens under the name; kIo otherwise.
  static Result<LocalSocket> connect(const std::string& name);

  // Errors: kPeerLost when the other end is gone, kIo.
  Status send(std::span<const std::byte> bytes, std::span<const int> descriptors);
  // Errors: kTimeout, kPeerLost when the other end closed, kCorruptData for a message longer than
  // `max_bytes`, kOutOfMemory when its descriptors do not fit this process, naming the limit; kIo.
  Result<SocketMessage> receive(size_t max_bytes, Deadline deadline);
  PeerCredentials peer() const;
  int descriptor() const { return socket_.get(); }

 private:
  friend class LocalListener;
  explicit LocalSocket(Descriptor socket) : socket_(std::move(socket)) {}
  Descriptor socket_;
};

class LocalListener {
 public:
  LocalListener() = default;
  // kNotFound is never returned; kInvalidArgument for a name longer than 100 bytes; kDisagree when the
  // name is taken; kIo.
  static Result<LocalListener> listen(const std::string& name);
  // Precondition: the listener is readable (wait_readable). Errors: kOutOfMemory naming the limit of open files;
  // kIo, also when the other end has gone meanwhile.
  Result<LocalSocket> accept();
  int descriptor() const { return socket_.get(); }

 private:
  Descriptor socket_;
};

// Waits until one of the descriptors can be read or its other end is closed; indices of those, rising. Empty
// when the deadline has passed, also when it had before the call.
std::vector<size_t> wait_readable(std::span<const int> descriptors, Deadline deadline);

int own_uid();
int own_pid();

}  // namespace argosy::platform
