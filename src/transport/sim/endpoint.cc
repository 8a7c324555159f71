// The endpoint of sim.h. With a delay, bytes of a put are copied at once: its source may be reused.
// Test: tests/transport/sim_test.cc.
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "platform/process.h"
#include "transport/sim/courier.h"
#include "transport/sim/sim.h"

namespace argosy::transport::sim {
namespace {

// The finaliser of splitmix64: a bijection that spreads neighbouring numbers.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class SimEndpoint final : public Endpoint {
 public:
  SimEndpoint(std::unique_ptr<Endpoint> inner, const Trouble& trouble)
      : inner_(std::move(inner)), trouble_(trouble) {
    if (trouble.max_delay.count() > 0) courier_ = std::make_unique<Courier>(inner_->num_ranks());
  }

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int num_ranks() const override { return inner_->num_ranks(); }

  Result<Window> alloc(int64_t bytes, platform::Deadline deadline) override {
    const int64_t step = begin_step();
    Result<Window> window = inner_->alloc(bytes, deadline);
    if (!window.has_value()) return explained(window.error(), step);
    return window;
  }
  void free(Window window) override {
    if (courier_ != nullptr) courier_->drain();
    inner_->free(window);
  }
  std::byte* local_ptr(Window window, int64_t offset) override {
    return inner_->local_ptr(window, offset);
  }
  std::byte* peer_ptr(int peer, Window window, int64_t offset) override {
    return inner_->peer_ptr(peer, window, offset);
  }

  void put(int peer, Window window, int64_t offset, const void* source, int64_t bytes) override {
    put_multi(peer, window, {&offset, 1}, source, bytes, Reuse::kSoon);
  }
  void put_multi(int peer, Window window, std::span<const int64_t> offsets, const void* source,
                 int64_t bytes, Reuse reuse) override {
    const int64_t step = begin_step();
    if (courier_ == nullptr) {
      inner_->put_multi(peer, window, offsets, source, bytes, reuse);
      return;
    }
    const auto* const from = static_cast<const std::byte*>(source);
    courier_->send(
        peer, delay_of(step),
        [this, peer, window, reuse, to = std::vector<int64_t>(offsets.begin(), offsets.end()),
         row = std::vector<std::byte>(from, from + bytes)] {
          inner_->put_multi(peer, window, to, row.data(), static_cast<int64_t>(row.size()), reuse);
        });
  }
  void signal(int peer, Window window, int64_t offset, uint64_t value) override {
    const int64_t step = begin_step();
    if (courier_ == nullptr) {
      inner_->signal(peer, window, offset, value);
      return;
    }
    courier_->send(peer, delay_of(step), [this, peer, window, offset, value] {
      inner_->signal(peer, window, offset, value);
    });
  }

  Status wait_all(Window window, std::span<const WaitItem> items, platform::Deadline deadline,
                  std::string_view what) override {
    const int64_t step = begin_step();
    return explained(inner_->wait_all(window, items, deadline, what), step);
  }
  // The barrier's own signals are not delayed; what was sent before it must not come after it.
  Status barrier(platform::Deadline deadline) override {
    const int64_t step = begin_step();
    if (courier_ != nullptr) courier_->drain();
    return explained(inner_->barrier(deadline), step);
  }
  void abort(const Status& reason) override { inner_->abort(reason); }
  Status health() const override { return inner_->health(); }

 private:
  uint64_t draw(int64_t step, uint64_t salt) const {
    return mix(mix(mix(trouble_.seed + salt) + static_cast<uint64_t>(rank())) +
               static_cast<uint64_t>(step));
  }
  // One in two is not delayed at all.
  std::chrono::microseconds delay_of(int64_t step) const {
    const uint64_t random = draw(step, 1);
    const auto span = static_cast<uint64_t>(trouble_.max_delay.count()) + 1;
    return std::chrono::microseconds(random % 2 == 0 ? 0 : random / 2 % span);
  }

  int64_t begin_step() {
    // Relaxed: several threads of a rank may put; only the number counts.
    const int64_t step = next_step_.fetch_add(1, std::memory_order_relaxed);
    if (trouble_.max_pause.count() > 0) {
      const uint64_t random = draw(step, 2);
      const auto span = static_cast<uint64_t>(trouble_.max_pause.count()) + 1;
      if (random % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random / 4 % span));
      }
    }
    if (trouble_.fault == Fault::kNone || step != trouble_.step || rank() != trouble_.rank) {
      return step;
    }
    switch (trouble_.fault) {
      case Fault::kKill:
        platform::kill_self();
        break;
      case Fault::kStop:
        platform::stop_self();
        break;
      case Fault::kThrow:
        throw std::runtime_error(
            fmt::format("thrown on purpose by rank {}, {}", rank(), to_string(trouble_)));
      case Fault::kPause:
        std::this_thread::sleep_for(trouble_.pause);
        break;
      case Fault::kNone:
        break;
    }
    return step;
  }

  Status explained(const Status& status, int64_t step) const {
    if (status.ok()) return status;
    return Status(status.code(), fmt::format("{} (simulated: {}; step {} of rank {})",
                                             status.message(), to_string(trouble_), step, rank()));
  }

  std::unique_ptr<Endpoint> inner_;
  const Trouble trouble_;
  std::atomic<int64_t> next_step_{0};
  std::unique_ptr<Courier> courier_;  // goes first: it delivers to inner_
};

}  // namespace

std::unique_ptr<Endpoint> wrap(std::unique_ptr<Endpoint> endpoint, const Trouble& trouble) {
  return std::make_unique<SimEndpoint>(std::move(endpoint), trouble);
}

}  // namespace argosy::transport::sim
