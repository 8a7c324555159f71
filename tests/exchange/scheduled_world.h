// Symmetric memory whose messages wait until a test delivers them, in any order that transport/endpoint.h allows.
//
// One thread plays all ranks, so a seed is a schedule. A put may come at any time before the next signal to the same peer,
// in two pieces, before or after any other put; a signal once every put to that peer before it has come, also before an
// earlier signal on another word. Nothing blocks: a wait whose words are not there is an error and remembered. Messages of a rank to
// itself wait as well. Test: tests/exchange/latency_schedule_test.cc, whose planted faults break the order on purpose.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "argosy/tensor.h"
#include "base/error.h"
#include "transport/endpoint.h"

namespace argosy::testing {

// Splitmix64: a schedule draws some thousand numbers, and must be the same everywhere.
class SmallRandom {
 public:
  explicit SmallRandom(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // In [0, count).
  int64_t below(int64_t count) {
    return static_cast<int64_t>(((next() >> 32) * static_cast<uint64_t>(count)) >> 32);
  }
  int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
  bool one_in(int64_t count) { return below(count) == 0; }

 private:
  uint64_t state_;
};

class ScheduledWorld {
 public:
  static constexpr int kMaxRanks = 4;

  struct Message {
    int source = 0, dest = 0;
    uint32_t window = 0;
    bool is_signal = false;
    bool is_torn = false;                      // one piece of it has come
    bool is_bound = false;                     // a put that later signals wait for
    int64_t segment = 0;                       // signals that were sent to this peer before it
    int64_t offset = 0, bytes = 0, begin = 0;  // begin: in the payloads
    uint64_t value = 0;                        // of a signal
  };
  // What planted faults change; all of it off.
  struct Fault {
    uint32_t unbound_window = 0;  // puts into it may come after a later signal
    uint64_t value_mask = ~uint64_t{0};
    uint64_t value_lag = 0;  // subtracted from every signal
  };

  ScheduledWorld() {
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      endpoints_[static_cast<size_t>(rank)].attach(this, rank);
    }
  }
  ScheduledWorld(const ScheduledWorld&) = delete;
  ScheduledWorld& operator=(const ScheduledWorld&) = delete;

  // A new world; memory is kept. `direct`: loads and stores reach the windows of peers.
  void reset(int num_ranks, bool direct, const Fault& fault) {
    num_ranks_ = num_ranks;
    direct_ = direct;
    fault_ = fault;
    num_windows_ = 0;
    num_signals_ = 0;
    windows_of_.fill(0);
    pending_.clear();
    payloads_.clear();
    for (Channel& channel : channels_) channel.clear();
    first_abort_ = {};
    blocked_ = false;
    broken_.clear();
  }

  transport::Endpoint& endpoint(int rank) { return endpoints_[static_cast<size_t>(rank)]; }
  const std::vector<Message>& pending() const { return pending_; }
  int64_t num_signals() const { return num_signals_; }
  // Whether a wait found a word missing since the last call.
  bool take_blocked() { return std::exchange(blocked_, false); }
  // A word that did not grow; "" as long as all is well.
  const std::string& broken() const { return broken_; }

  // Delivers the message, or a piece of it. False when its time has not come; nothing changes then. The place of a
  // message that is gone is taken by the last one.
  bool deliver(size_t which, SmallRandom& random) {
    Message& message = pending_[which];
    Channel& channel = channel_of(message.source, message.dest);
    if (message.is_signal) {
      if (message.segment >= channel.first_open) return false;
      set_word(message);
    } else if (!message.is_torn && message.bytes > 1 && random.one_in(3)) {
      tear(&message, random);
      return true;
    } else {
      copy(message, 0, message.bytes);
      if (message.is_bound) {
        --channel.num_puts[static_cast<size_t>(message.segment)];
        channel.advance();
      }
    }
    pending_[which] = pending_.back();
    pending_.pop_back();
    return true;
  }

 private:
  // Puts and signals of one rank to one peer. Segment s: what is sent between signal s - 1 and signal s.
  struct Channel {
    std::vector<int64_t> num_puts{0};  // [segments] under way
    int64_t first_open = 0;            // first segment with puts under way, or the last one

    void clear() {
      num_puts.assign(1, 0);
      first_open = 0;
    }
    int64_t last() const { return static_cast<int64_t>(num_puts.size()) - 1; }
    void advance() {
      while (first_open < last() && num_puts[static_cast<size_t>(first_open)] == 0) ++first_open;
    }
  };
  struct Memory {
    int64_t bytes = 0;
    std::array<AlignedBuffer, kMaxRanks> of_rank;
  };

  class RankEndpoint final : public transport::Endpoint {
   public:
    void attach(ScheduledWorld* world, int rank) {
      world_ = world;
      rank_ = rank;
    }
    std::string_view name() const override { return "scheduled"; }
    int rank() const override { return rank_; }
    int num_ranks() const override { return world_->num_ranks_; }
    Result<transport::Window> alloc(int64_t bytes, platform::Deadline) override {
      return world_->alloc(rank_, bytes);
    }
    void free(transport::Window) override {}
    std::byte* local_ptr(transport::Window window, int64_t offset) override {
      return world_->address(window.id, rank_, offset);
    }
    std::byte* peer_ptr(int peer, transport::Window window, int64_t offset) override {
      return world_->direct_ || peer == rank_ ? world_->address(window.id, peer, offset) : nullptr;
    }
    void put(int peer, transport::Window window, int64_t offset, const void* source,
             int64_t bytes) override {
      world_->send_put(
          {.source = rank_, .dest = peer, .window = window.id, .offset = offset, .bytes = bytes},
          source);
    }
    void put_multi(int peer, transport::Window window, std::span<const int64_t> offsets,
                   const void* source, int64_t bytes, transport::Reuse) override {
      for (const int64_t offset : offsets) put(peer, window, offset, source, bytes);
    }
    void signal(int peer, transport::Window window, int64_t offset, uint64_t value) override {
      world_->send_signal({.source = rank_,
                           .dest = peer,
                           .window = window.id,
                           .is_signal = true,
                           .offset = offset,
                           .value = value});
    }
    Status wait_all(transport::Window window, std::span<const transport::WaitItem> items,
                    platform::Deadline, std::string_view) override {
      for (const transport::WaitItem& item : items) {
        const uint64_t word = transport::load_word(local_ptr(window, item.offset));
        if (item.waited_ns != nullptr) *item.waited_ns = 0;
        if (word >= item.value) continue;
        world_->blocked_ = true;
        return Status(StatusCode::kTimeout, "would wait");
      }
      return health();
    }
    Status barrier(platform::Deadline) override {
      return base::error(StatusCode::kUnsupported, "no barrier in a schedule");
    }
    void abort(const Status& reason) override {
      if (world_->first_abort_.ok()) world_->first_abort_ = reason;
    }
    Status health() const override { return world_->first_abort_; }

   private:
    ScheduledWorld* world_ = nullptr;
    int rank_ = 0;
  };

  Channel& channel_of(int source, int dest) {
    return channels_[static_cast<size_t>(source * kMaxRanks + dest)];
  }
  std::byte* address(uint32_t window, int rank, int64_t offset) {
    return windows_[window - 1].of_rank[static_cast<size_t>(rank)].data() + offset;
  }

  Result<transport::Window> alloc(int rank, int64_t bytes) {
    const uint32_t id = ++windows_of_[static_cast<size_t>(rank)];
    if (id > num_windows_) {
      num_windows_ = id;
      if (windows_.size() < id) windows_.resize(id);
      windows_[id - 1].bytes = bytes;
      for (int each = 0; each < num_ranks_; ++each) {
        AlignedBuffer& memory = windows_[id - 1].of_rank[static_cast<size_t>(each)];
        ARGOSY_RETURN_IF_ERROR(memory.reserve(bytes));
        std::memset(memory.data(), 0, static_cast<size_t>(bytes));
      }
    }
    if (windows_[id - 1].bytes != bytes) {
      return base::error(StatusCode::kDisagree, "window {} is {} bytes, rank {} wants {}", id,
                         windows_[id - 1].bytes, rank, bytes);
    }
    return transport::Window{id, bytes};
  }

  void send_put(Message message, const void* source) {
    Channel& channel = channel_of(message.source, message.dest);
    message.segment = channel.last();
    message.is_bound = message.window != fault_.unbound_window;
    if (message.is_bound) ++channel.num_puts.back();
    message.begin = static_cast<int64_t>(payloads_.size());
    const auto* const bytes = static_cast<const std::byte*>(source);
    payloads_.insert(payloads_.end(), bytes, bytes + message.bytes);
    pending_.push_back(message);
  }
  void send_signal(Message message) {
    Channel& channel = channel_of(message.source, message.dest);
    message.segment = channel.last();
    message.value = (message.value & fault_.value_mask) - fault_.value_lag;
    channel.num_puts.push_back(0);
    channel.advance();
    pending_.push_back(message);
    ++num_signals_;
  }

  void copy(const Message& message, int64_t first, int64_t bytes) {
    std::memcpy(address(message.window, message.dest, message.offset + first),
                payloads_.data() + message.begin + first, static_cast<size_t>(bytes));
  }
  void tear(Message* message, SmallRandom& random) {
    const int64_t cut = random.between(1, message->bytes - 1);
    if (random.one_in(2)) {
      copy(*message, 0, cut);
      message->offset += cut;
      message->begin += cut;
      message->bytes -= cut;
    } else {
      copy(*message, cut, message->bytes - cut);
      message->bytes = cut;
    }
    message->is_torn = true;
  }
  void set_word(const Message& message) {
    std::byte* const word = address(message.window, message.dest, message.offset);
    uint64_t have = 0;
    std::memcpy(&have, word, sizeof(have));
    if (have >= message.value && broken_.empty()) {
      broken_ = fmt::format("word {} of rank {} goes from {:#x} to {:#x}, sent by rank {}",
                            message.offset, message.dest, have, message.value, message.source);
    }
    std::memcpy(word, &message.value, sizeof(message.value));
  }

  int num_ranks_ = 0;
  bool direct_ = true;
  Fault fault_;
  std::array<RankEndpoint, kMaxRanks> endpoints_;
  std::array<Channel, static_cast<size_t>(kMaxRanks) * kMaxRanks> channels_;
  std::vector<Memory> windows_;
  uint32_t num_windows_ = 0;
  std::array<uint32_t, kMaxRanks> windows_of_{};  // windows each rank has made
  std::vector<Message> pending_;
  std::vector<std::byte> payloads_;
  int64_t num_signals_ = 0;
  bool blocked_ = false;
  Status first_abort_;
  std::string broken_;
};

}  // namespace argosy::testing
