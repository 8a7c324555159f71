// See rendezvous.h. Messages are plain structs between processes of one build; a magic number and a version
// tell strangers apart. Test: tests/transport/shm_test.cc.
#include "transport/shm/rendezvous.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "base/error.h"
#include "platform/local_socket.h"
#include "transport/describe.h"

namespace argosy::transport::shm {
namespace {

using platform::Deadline;
using platform::Descriptor;
using platform::LocalListener;
using platform::LocalSocket;
using platform::SocketMessage;

constexpr uint64_t kMagic = 0x31'59'53'4F'47'52'41;  // "ARGOSY1"
constexpr uint32_t kVersion = 1;

// How long a meeting that has failed still tells those who come late: about how far apart the ranks of one
// launch start on a busy host.
constexpr std::chrono::milliseconds kRefusalTime{1000};

struct Hello {
  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t rank = 0;
  int32_t num_ranks = 0;
  int32_t code = 0;  // StatusCode of what the rank could do by itself
  int64_t heap_bytes = 0;
  char text[1024] = {};
};

struct Welcome {
  uint64_t magic = kMagic;
  int32_t code = 0;
  int32_t num_ranks = 0;
  char text[2040] = {};
};

template <size_t N>
void copy_text(const std::string& from, char (&to)[N]) {
  const size_t bytes = std::min(from.size(), N - 1);
  std::memcpy(to, from.data(), bytes);
  to[bytes] = '\0';
}

template <typename Message>
std::optional<Message> parse(const SocketMessage& received) {
  Message message;
  if (received.bytes.size() != sizeof(message)) return std::nullopt;
  std::memcpy(&message, received.bytes.data(), sizeof(message));
  if (message.magic != kMagic) return std::nullopt;
  message.text[sizeof(message.text) - 1] = '\0';
  return message;
}

// Rank 0 gives up a little earlier than the others, so that they hear from it whom it missed.
Deadline host_deadline(Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left =
      std::chrono::duration_cast<milliseconds>(deadline.at() - platform::Clock::now());
  return Deadline::after(std::max(milliseconds(1), left - std::min(milliseconds(500), left / 10)));
}

struct Guest {
  LocalSocket socket;
  int pid = 0;
  Descriptor memory;
  Descriptor pidfd;
};

// Rank 0's side.
class Host {
 public:
  Host(const Seat& seat, LocalListener listener, Descriptor own_pidfd)
      : seat_(seat), listener_(std::move(listener)), own_pidfd_(std::move(own_pidfd)) {
    guests_.resize(static_cast<size_t>(seat.num_ranks));
  }

  Result<Meeting> gather(const Status& own, Descriptor memory, Deadline deadline) {
    Status status = own.ok() ? collect(deadline)
                             : base::error(own.code(), "rank 0 could not join: {}", own.message());
    if (status.ok()) status = send_welcome(memory);
    if (!status.ok()) {
      refuse(status, deadline);
      return own.ok() ? status : own;
    }
    Meeting meeting;
    meeting.memories.push_back(std::move(memory));
    meeting.pidfds.emplace_back();
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      meeting.memories.push_back(std::move(guests_[rank]->memory));
      meeting.pidfds.push_back(std::move(guests_[rank]->pidfd));
    }
    return meeting;
  }

 private:
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      if (!guests_[rank].has_value()) ranks.push_back(static_cast<int>(rank));
    }
    return ranks;
  }

  Status collect(Deadline deadline) {
    while (!missing().empty()) {
      std::vector<int> descriptors = {listener_.descriptor()};
      for (const LocalSocket& socket : arrived_) descriptors.push_back(socket.descriptor());
      std::vector<size_t> seated;
      for (size_t rank = 1; rank < guests_.size(); ++rank) {
        if (!guests_[rank].has_value()) continue;
        seated.push_back(rank);
        descriptors.push_back(guests_[rank]->socket.descriptor());
      }
      const std::vector<size_t> ready = platform::wait_readable(descriptors, deadline);
      if (ready.empty()) {
        return base::error(StatusCode::kTimeout, "joining the group: rank 0 waited {} ms for {} {}",
                           deadline.span().count(), missing().size() == 1 ? "rank" : "ranks",
                           describe_ranks(missing()));
      }
      ARGOSY_RETURN_IF_ERROR(serve(ready, seated, deadline));
    }
    return {};
  }

  // Indices count the listener, then those who have said nothing yet, then the seated.
  Status serve(const std::vector<size_t>& ready, const std::vector<size_t>& seated,
               Deadline deadline) {
    const size_t num_arrived = arrived_.size();
    std::vector<size_t> heard;
    for (const size_t index : ready) {
      if (index == 0) {
        ARGOSY_RETURN_IF_ERROR(accept_guest());
      } else if (index <= num_arrived) {
        heard.push_back(index - 1);
      } else {
        // A seated rank has nothing to say before it is welcomed: it has gone.
        const size_t rank = seated[index - 1 - num_arrived];
        return base::error(StatusCode::kPeerLost, "joining the group: rank {} (pid {}) has gone",
                           rank, guests_[rank]->pid);
      }
    }
    for (LocalSocket& socket : take_arrived(heard)) {
      ARGOSY_RETURN_IF_ERROR(seat_guest(std::move(socket), deadline));
    }
    return {};
  }

  // Errors: kOutOfMemory. One that came and went, or belongs to another user, is none of this job.
  Status accept_guest() {
    Result<LocalSocket> socket = listener_.accept();
    if (!socket.has_value()) return joining_error(socket.error());
    if (socket->peer().uid == platform::own_uid()) arrived_.push_back(std::move(*socket));
    return {};
  }

  static Status joining_error(const Status& status) {
    if (status.code() != StatusCode::kOutOfMemory) return {};
    return base::error(status.code(), "joining the group: rank 0: {}", status.message());
  }

  // Removes those of arrived_ at `indices`, which rise.
  std::vector<LocalSocket> take_arrived(const std::vector<size_t>& indices) {
    std::vector<LocalSocket> taken;
    for (const size_t index : indices) taken.push_back(std::move(arrived_[index]));
    for (size_t i = indices.size(); i-- > 0;) {
      arrived_.erase(arrived_.begin() + static_cast<std::ptrdiff_t>(indices[i]));
    }
    return taken;
  }

  Status seat_guest(LocalSocket socket, Deadline deadline) {
    Result<SocketMessage> message = socket.receive(sizeof(Hello), deadline);
    if (!message.has_value()) return joining_error(message.error());
    const std::optional<Hello> hello = parse<Hello>(*message);
    if (!hello.has_value()) return {};
    const int pid = socket.peer().pid;
    Status verdict = judge(*hello, pid, message->descriptors.size());
    if (!verdict.ok()) {
      offender_ = std::move(socket);
      offender_rank_ = hello->rank;
      return verdict;
    }
    Guest guest{std::move(socket), pid, std::move(message->descriptors[0]),
                std::move(message->descriptors[1])};
    guests_[static_cast<size_t>(hello->rank)] = std::move(guest);
    return {};
  }

  Status judge(const Hello& hello, int pid, size_t num_descriptors) const {
    const int num_ranks = seat_.num_ranks;
    const auto differs = [&](const char* field, auto mine, auto theirs) {
      return base::error(StatusCode::kDisagree,
                         "{} differs: rank 0 has {}, rank {} (pid {}) has {}", field, mine,
                         hello.rank, pid, theirs);
    };
    if (hello.version != kVersion) return differs("protocol version", kVersion, hello.version);
    if (hello.code != 0) {
      return base::error(static_cast<StatusCode>(hello.code), "rank {} could not join: {}",
                         hello.rank, std::string(hello.text));
    }
    if (hello.num_ranks != num_ranks) return differs("num_ranks", num_ranks, hello.num_ranks);
    if (hello.heap_bytes != seat_.heap_bytes) {
      return differs("heap_bytes", seat_.heap_bytes, hello.heap_bytes);
    }
    if (hello.rank < 0 || hello.rank >= num_ranks) {
      return base::invalid("rank {} (pid {}) is outside [0, {})", hello.rank, pid, num_ranks);
    }
    if (hello.rank == 0 || guests_[static_cast<size_t>(hello.rank)].has_value()) {
      const int first =
          hello.rank == 0 ? platform::own_pid() : guests_[static_cast<size_t>(hello.rank)]->pid;
      return base::invalid("rank {} of {} is taken twice, by pid {} and pid {}", hello.rank,
                           num_ranks, first, pid);
    }
    if (num_descriptors != 2) {
      return base::error(StatusCode::kCorruptData,
                         "rank {} (pid {}) brought {} descriptors, want 2", hello.rank, pid,
                         num_descriptors);
    }
    return {};
  }

  Status send_welcome(const Descriptor& own_memory) {
    std::vector<int> descriptors = {own_memory.get()};
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      descriptors.push_back(guests_[rank]->memory.get());
    }
    descriptors.push_back(own_pidfd_.get());
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      descriptors.push_back(guests_[rank]->pidfd.get());
    }
    Welcome welcome;
    welcome.num_ranks = seat_.num_ranks;
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      const Status sent =
          guests_[rank]->socket.send(std::as_bytes(std::span(&welcome, 1)), descriptors);
      if (!sent.ok()) {
        return base::error(StatusCode::kPeerLost,
                           "joining the group: rank {} (pid {}) has gone: {}", rank,
                           guests_[rank]->pid, sent.message());
      }
    }
    return {};
  }

  // Tells every rank; also those still on their way, if they come within kRefusalTime. A guest that has
  // gone needs no answer.
  void refuse(const Status& why, Deadline deadline) {
    Welcome welcome;
    welcome.code = static_cast<int32_t>(why.code());
    copy_text(why.message(), welcome.text);
    const auto bytes = std::as_bytes(std::span(&welcome, 1));
    std::set<int> told;
    const auto note_told = [&](int rank) {
      if (rank > 0 && rank < seat_.num_ranks) told.insert(rank);
    };
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      if (!guests_[rank].has_value()) continue;
      (void)guests_[rank]->socket.send(bytes, {});
      note_told(static_cast<int>(rank));
    }
    if (offender_.has_value()) {
      (void)offender_->send(bytes, {});
      note_told(offender_rank_);
    }
    const Deadline end = deadline.at() < platform::Clock::now() + kRefusalTime
                             ? deadline
                             : Deadline::after(kRefusalTime);
    while (static_cast<int>(told.size()) < seat_.num_ranks - 1) {
      std::vector<int> descriptors = {listener_.descriptor()};
      for (const LocalSocket& socket : arrived_) descriptors.push_back(socket.descriptor());
      std::vector<size_t> ready = platform::wait_readable(descriptors, end);
      if (ready.empty()) return;
      const bool has_guest = ready[0] == 0;
      if (has_guest) ready.erase(ready.begin());
      for (size_t& index : ready) --index;
      for (LocalSocket& socket : take_arrived(ready)) {
        const Result<SocketMessage> message = socket.receive(sizeof(Hello), end);
        if (!message.has_value()) continue;
        (void)socket.send(bytes, {});
        const std::optional<Hello> hello = parse<Hello>(*message);
        if (hello.has_value()) note_told(hello->rank);
      }
      if (has_guest && !accept_guest().ok()) return;
    }
  }

  const Seat& seat_;
  LocalListener listener_;
  std::vector<LocalSocket> arrived_;          // connected, have said nothing yet
  std::vector<std::optional<Guest>> guests_;  // [R]
  std::optional<LocalSocket> offender_;
  int offender_rank_ = 0;  // as it says
  Descriptor own_pidfd_;
};

Result<LocalSocket> connect_in_time(const Seat& seat, Deadline deadline) {
  const std::string name = socket_name(seat);
  auto pause = std::chrono::milliseconds(1);
  while (true) {
    Result<LocalSocket> socket = LocalSocket::connect(name);
    if (socket.has_value() || socket.error().code() != StatusCode::kNotFound) return socket;
    if (deadline.passed()) {
      return base::error(
          StatusCode::kTimeout,
          "joining the group: rank {} waited {} ms for rank 0 of job {} (socket @{})", seat.rank,
          deadline.span().count(), seat.job, name);
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(20));
  }
}

Result<Meeting> visit(const Seat& seat, const Status& own, const Descriptor& memory,
                      const Descriptor& pidfd, Deadline deadline) {
  ARGOSY_ASSIGN_OR_RETURN(LocalSocket socket, connect_in_time(seat, deadline));
  const platform::PeerCredentials host = socket.peer();
  if (host.uid != platform::own_uid()) {
    return base::error(StatusCode::kDisagree,
                       "socket @{} of job {} belongs to pid {} of user {}, this is user {}",
                       socket_name(seat), seat.job, host.pid, host.uid, platform::own_uid());
  }
  Hello hello;
  hello.rank = seat.rank;
  hello.num_ranks = seat.num_ranks;
  hello.heap_bytes = seat.heap_bytes;
  hello.code = static_cast<int32_t>(own.code());
  copy_text(own.message(), hello.text);
  std::vector<int> descriptors;
  if (own.ok()) descriptors = {memory.get(), pidfd.get()};
  ARGOSY_RETURN_IF_ERROR(socket.send(std::as_bytes(std::span(&hello, 1)), descriptors));
  if (!own.ok()) return own;
  Result<SocketMessage> answer = socket.receive(sizeof(Welcome), deadline);
  if (!answer.has_value()) {
    return base::error(answer.error().code(),
                       "joining the group: rank {} got no answer of pid {}, which holds rank 0's "
                       "socket @{} of job {}: {}",
                       seat.rank, host.pid, socket_name(seat), seat.job, answer.error().message());
  }
  const std::optional<Welcome> welcome = parse<Welcome>(*answer);
  if (!welcome.has_value()) {
    return base::error(
        StatusCode::kCorruptData,
        "socket @{} of job {} is held by pid {}, which is no rank of Argosy: it sent {} "
        "bytes that make no sense",
        socket_name(seat), seat.job, host.pid, answer->bytes.size());
  }
  if (welcome->code != 0) {
    return Status(static_cast<StatusCode>(welcome->code), welcome->text);
  }
  const auto ranks = static_cast<size_t>(seat.num_ranks);
  if (welcome->num_ranks != seat.num_ranks || answer->descriptors.size() != 2 * ranks) {
    return base::error(StatusCode::kCorruptData, "rank 0 sent {} descriptors for {} ranks, want {}",
                       answer->descriptors.size(), welcome->num_ranks, 2 * ranks);
  }
  Meeting meeting;
  for (size_t i = 0; i < ranks; ++i) {
    meeting.memories.push_back(std::move(answer->descriptors[i]));
    meeting.pidfds.push_back(std::move(answer->descriptors[ranks + i]));
  }
  meeting.pidfds[static_cast<size_t>(seat.rank)].reset();
  return meeting;
}

}  // namespace

std::string socket_name(const Seat& seat) {
  const XXH128_hash_t hash = XXH3_128bits(seat.job.data(), seat.job.size());
  return fmt::format("argosy.{}.{:016x}{:016x}.{}", platform::own_uid(), hash.high64, hash.low64,
                     seat.generation);
}

Result<Meeting> meet(const Seat& seat, const Status& own, Descriptor memory, Descriptor pidfd,
                     Deadline deadline) {
  if (seat.rank != 0) return visit(seat, own, memory, pidfd, deadline);
  Result<LocalListener> listener = LocalListener::listen(socket_name(seat));
  if (listener.has_value()) {
    Host host(seat, std::move(*listener), std::move(pidfd));
    return host.gather(own, std::move(memory), host_deadline(deadline));
  }
  if (listener.error().code() != StatusCode::kDisagree) return listener.error();
  // Somebody is rank 0 already, or a stranger holds the name: ask, so that both sides learn it.
  return visit(seat, own, memory, pidfd, deadline);
}

}  // namespace argosy::transport::shm
