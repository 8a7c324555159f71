// Symmetric memory as one rank sees it: windows of the same size on every rank, put, signal, wait.
//
// This is the only way bytes move between ranks. Back ends: inproc/ (ranks are threads of one
// process), shm/ (processes of one host); later ucx/, sim/. Ordering: a signal to a peer is seen only after every put to
// that same peer that happened before it (also by other threads of the rank, joined before the
// signal); nothing is promised between different peers. Signals are 64-bit words that only grow
// (epochs); a word has one writer. Test: tests/transport/endpoint_test.cc runs against every back
// end.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "argosy/status.h"
#include "platform/clock.h"

namespace argosy::transport {

// Names a window on every rank; an address is (window, byte offset).
struct Window {
  uint32_t id = 0;  // 0 = none
  int64_t bytes = 0;
};

// One flag to wait for: the word at `offset` of the own window must reach `value`.
struct WaitItem {
  int peer = 0;        // who raises it, for the error
  int64_t offset = 0;  // bytes, multiple of 8
  uint64_t value = 0;
  // Where to write the nanoseconds from the start of the wait until the word was first seen there; -1 for one that
  // never was. May be null.
  int64_t* waited_ns = nullptr;
};

// The word at a multiple of 8 in the own window. seq_cst, pairs with the store of signal(): the puts before it are visible,
// and who goes to sleep after this load has told signal() so.
inline uint64_t load_word(std::byte* address) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address))
      .load(std::memory_order_seq_cst);
}

// When the receiver reads what a put brings: a hint, no promise.
enum class Reuse {
  kSoon,   // it may still find it in a cache
  kLater,  // so much comes with it that no cache will hold it
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;

  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;

  // Collective: yes. A zeroed window of `bytes` on every rank, 64-byte aligned, the same id
  // everywhere; pages are backed when first touched. Errors: kOutOfMemory (bytes), kDisagree when
  // ranks ask for different sizes, kTimeout, kAborted.
  virtual Result<Window> alloc(int64_t bytes, platform::Deadline deadline) = 0;
  // Collective in meaning: no rank may use the window afterwards; memory goes when all have freed
  // it.
  virtual void free(Window window) = 0;

  virtual std::byte* local_ptr(Window window, int64_t offset) = 0;
  // Address of a peer's window that loads and stores reach, or null. Reads need the peer's signal
  // first.
  virtual std::byte* peer_ptr(int peer, Window window, int64_t offset) = 0;

  // Copies bytes to the peer. `source` may be reused on return.
  virtual void put(int peer, Window window, int64_t offset, const void* source, int64_t bytes) = 0;
  // One row to several places of the peer: it crosses the link once.
  virtual void put_multi(int peer, Window window, std::span<const int64_t> offsets,
                         const void* source, int64_t bytes, Reuse reuse) = 0;
  // Sets the peer's word at `offset` (multiple of 8) and wakes it. Release: pairs with the acquire
  // of wait_all, and publishes every earlier put to that peer.
  virtual void signal(int peer, Window window, int64_t offset, uint64_t value) = 0;
  virtual void put_signal(int peer, Window window, int64_t offset, const void* source,
                          int64_t bytes, int64_t signal_offset, uint64_t value) {
    put(peer, window, offset, source, bytes);
    signal(peer, window, signal_offset, value);
  }

  // Blocks until every item's word in the own window is >= its value. Acquire. Errors: kTimeout
  // names the silent peers, `what`, have and want, and poisons the group; kAborted with the
  // poisoner's message; kPeerLost.
  virtual Status wait_all(Window window, std::span<const WaitItem> items,
                          platform::Deadline deadline, std::string_view what) = 0;

  // Collective: yes.
  virtual Status barrier(platform::Deadline deadline) = 0;

  // Poisons the group: every present and later wait on every rank ends with kAborted and this
  // message. The first reason stays.
  virtual void abort(const Status& reason) = 0;
  virtual Status health() const = 0;
};

}  // namespace argosy::transport
