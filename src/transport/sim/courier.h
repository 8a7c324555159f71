// Carries a rank's puts and signals after a delay each, in order for one peer and out of order between peers.
// Test: tests/transport/sim_test.cc.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "platform/clock.h"

namespace argosy::transport::sim {

class Courier {
 public:
  explicit Courier(int num_peers);
  // Delivers what is on its way.
  ~Courier();
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // Runs `deliver` on the courier's thread after `delay`, but not before what was sent to `peer` earlier.
  void send(int peer, std::chrono::microseconds delay, std::function<void()> deliver);
  // Returns when all that was sent has been delivered; nothing is delayed further.
  void drain();

 private:
  struct Parcel {
    platform::Clock::time_point due;
    std::function<void()> deliver;
  };
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Parcel>> parcels_;  // [num_peers]
  bool is_hurried_ = false;
  bool is_stopping_ = false;
  bool is_delivering_ = false;
  std::thread thread_;
};

}  // namespace argosy::transport::sim
