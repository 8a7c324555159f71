// See courier.h. Test: tests/transport/sim_test.cc.
#include "transport/sim/courier.h"

#include <algorithm>
#include <utility>

namespace argosy::transport::sim {

Courier::Courier(int num_peers)
    : parcels_(static_cast<size_t>(num_peers)), thread_([this] { loop(); }) {}

Courier::~Courier() {
  drain();
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Courier::send(int peer, std::chrono::microseconds delay, std::function<void()> deliver) {
  {
    const std::lock_guard lock(mutex_);
    std::deque<Parcel>& queue = parcels_[static_cast<size_t>(peer)];
    platform::Clock::time_point due = platform::Clock::now() + delay;
    if (!queue.empty()) due = std::max(due, queue.back().due);
    queue.push_back({due, std::move(deliver)});
  }
  changed_.notify_all();
}

void Courier::drain() {
  std::unique_lock lock(mutex_);
  is_hurried_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] {
    return !is_delivering_ && std::ranges::all_of(parcels_, &std::deque<Parcel>::empty);
  });
  is_hurried_ = false;
}

void Courier::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    std::deque<Parcel>* next = nullptr;
    for (std::deque<Parcel>& queue : parcels_) {
      if (queue.empty()) continue;
      if (next == nullptr || queue.front().due < next->front().due) next = &queue;
    }
    if (next == nullptr) {
      if (is_stopping_) return;
      changed_.wait(lock);
      continue;
    }
    const platform::Clock::time_point due = next->front().due;
    if (!is_hurried_ && platform::Clock::now() < due) {
      changed_.wait_until(lock, due);
      continue;
    }
    const std::function<void()> deliver = std::move(next->front().deliver);
    next->pop_front();
    is_delivering_ = true;
    lock.unlock();
    deliver();
    lock.lock();
    is_delivering_ = false;
    changed_.notify_all();
  }
}

}  // namespace argosy::transport::sim
