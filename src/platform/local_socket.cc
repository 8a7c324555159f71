// SOCK_SEQPACKET over AF_UNIX, SCM_RIGHTS, poll. Test: tests/platform/local_socket_test.cc.
#include "platform/local_socket.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace argosy::platform {
namespace {

using base::error;

constexpr size_t kMaxName = 100;

struct Address {
  sockaddr_un address{};
  socklen_t length = 0;
};

// The first byte of an abstract name is 0; the rest is not terminated.
Result<Address> abstract_address(const std::string& name) {
  if (name.empty() || name.size() > kMaxName) {
    return base::invalid("socket name \"{}\" has {} bytes, 1 to {} fit", name, name.size(),
                         kMaxName);
  }
  Address result;
  result.address.sun_family = AF_UNIX;
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

Result<Descriptor> open_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (socket.is_open()) return socket;
  return error(StatusCode::kIo, "cannot open a Unix socket: {}", std::strerror(errno));
}

int milliseconds_left(Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::ceil<milliseconds>(deadline.at() - Clock::now()).count();
  return static_cast<int>(std::clamp<decltype(left)>(left, 0, 1'000'000));
}

union Control {
  char bytes[CMSG_SPACE(kMaxMessageDescriptors * sizeof(int))];
  cmsghdr align;
};

void take_descriptors(msghdr& header, std::vector<Descriptor>* descriptors) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      descriptors->emplace_back(fd);
    }
  }
}

// "; this process may have 1024 open files (ulimit -n)".
std::string open_files_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return fmt::format("; this process may have {} open files (ulimit -n)", limit.rlim_cur);
}

}  // namespace

Result<LocalSocket> LocalSocket::connect(const std::string& name) {
  ARGOSY_ASSIGN_OR_RETURN(const Address to, abstract_address(name));
  ARGOSY_ASSIGN_OR_RETURN(Descriptor socket, open_socket());
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to.address), to.length) != 0) {
    const bool nobody = errno == ECONNREFUSED || errno == ENOENT || errno == EAGAIN;
    return error(nobody ? StatusCode::kNotFound : StatusCode::kIo, "socket @{}: {}", name,
                 std::strerror(errno));
  }
  return LocalSocket(std::move(socket));
}

Status LocalSocket::send(std::span<const std::byte> bytes, std::span<const int> descriptors) {
  if (descriptors.size() > kMaxMessageDescriptors) {
    return base::invalid("{} descriptors in one message, at most {} fit", descriptors.size(),
                         kMaxMessageDescriptors);
  }
  iovec data{const_cast<std::byte*>(bytes.data()), bytes.size()};
  Control control{};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    header.msg_control = control.bytes;
    header.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size() * sizeof(int));
  }
  while (::sendmsg(socket_.get(), &header, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    const bool gone = errno == EPIPE || errno == ECONNRESET;
    return error(gone ? StatusCode::kPeerLost : StatusCode::kIo, "cannot send {} bytes: {}",
                 bytes.size(), std::strerror(errno));
  }
  return {};
}

Result<SocketMessage> LocalSocket::receive(size_t max_bytes, Deadline deadline) {
  const int own = socket_.get();
  if (wait_readable(std::span(&own, 1), deadline).empty()) {
    return error(StatusCode::kTimeout, "no message within {} ms", deadline.span().count());
  }
  SocketMessage message;
  message.bytes.resize(max_bytes);
  iovec data{message.bytes.data(), message.bytes.size()};
  Control control{};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes;
  header.msg_controllen = sizeof(control.bytes);
  ssize_t size = -1;
  do {
    size = ::recvmsg(own, &header, MSG_CMSG_CLOEXEC);
  } while (size < 0 && errno == EINTR);
  if (size > 0) take_descriptors(header, &message.descriptors);
  if (size == 0 || (size < 0 && errno == ECONNRESET)) {
    return error(StatusCode::kPeerLost, "the other end closed the connection");
  }
  if (size < 0) return error(StatusCode::kIo, "cannot receive: {}", std::strerror(errno));
  if ((header.msg_flags & MSG_TRUNC) != 0) {
    return error(StatusCode::kCorruptData, "a message is longer than {} bytes", max_bytes);
  }
  // There is room for as many as one message may have: this process could take no more of them.
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    return error(StatusCode::kOutOfMemory, "cannot take the descriptors of a message{}",
                 open_files_limit());
  }
  message.bytes.resize(static_cast<size_t>(size));
  return message;
}

PeerCredentials LocalSocket::peer() const {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return {};
  return {credentials.pid, static_cast<int>(credentials.uid)};
}

Result<LocalListener> LocalListener::listen(const std::string& name) {
  ARGOSY_ASSIGN_OR_RETURN(const Address at, abstract_address(name));
  LocalListener listener;
  ARGOSY_ASSIGN_OR_RETURN(listener.socket_, open_socket());
  const int fd = listener.socket_.get();
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&at.address), at.length) != 0) {
    return error(errno == EADDRINUSE ? StatusCode::kDisagree : StatusCode::kIo, "socket @{}: {}",
                 name, std::strerror(errno));
  }
  if (::listen(fd, 128) != 0) {
    return error(StatusCode::kIo, "socket @{}: {}", name, std::strerror(errno));
  }
  return listener;
}

Result<LocalSocket> LocalListener::accept() {
  Descriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket.is_open()) {
    const bool is_full = errno == EMFILE || errno == ENFILE || errno == ENOMEM;
    return error(is_full ? StatusCode::kOutOfMemory : StatusCode::kIo,
                 "cannot accept a connection: {}{}", std::strerror(errno), open_files_limit());
  }
  return LocalSocket(std::move(socket));
}

std::vector<size_t> wait_readable(std::span<const int> descriptors, Deadline deadline) {
  // A crowd that always has something to say must not outlast the deadline.
  if (deadline.passed()) return {};
  std::vector<pollfd> polls;
  for (const int fd : descriptors) polls.push_back({fd, POLLIN, 0});
  std::vector<size_t> ready;
  while (ready.empty()) {
    const int count = ::poll(polls.data(), polls.size(), milliseconds_left(deadline));
    if (count < 0 && errno != EINTR) return ready;
    for (size_t i = 0; count > 0 && i < polls.size(); ++i) {
      if (polls[i].revents != 0) ready.push_back(i);
    }
    if (deadline.passed()) break;
  }
  return ready;
}

int own_uid() { return static_cast<int>(::getuid()); }
int own_pid() { return static_cast<int>(::getpid()); }

}  // namespace argosy::platform
