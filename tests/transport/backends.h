// The back ends that the endpoint and collectives tests run against. A new back end adds one row.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "platform/local_socket.h"
#include "support/rank_threads.h"
#include "transport/endpoint.h"
#include "transport/inproc/endpoint.h"
#include "transport/shm/endpoint.h"
#include "transport/sim/sim.h"

namespace argosy::transport {

using platform::Deadline;
using std::chrono::milliseconds;

// Long enough for a loaded machine; a test that waits for it fails.
inline Deadline ample() { return Deadline::after(milliseconds(60'000)); }

struct Backend {
  std::string name;
  // Attaches num_ranks ranks, runs body(endpoint) for each on its own thread, detaches.
  std::function<void(int num_ranks, const std::function<void(Endpoint&)>& body)> run;
};

inline void run_inproc(int num_ranks, const std::function<void(Endpoint&)>& body) {
  const std::shared_ptr<InprocWorld> world = InprocWorld::create(num_ranks).value();
  testing::run_ranks(num_ranks, [&](int rank) {
    Result<std::unique_ptr<Endpoint>> endpoint = inproc::attach(world, rank, num_ranks, ample());
    ASSERT_TRUE(endpoint.has_value()) << endpoint.error().to_string();
    body(**endpoint);
  });
}

// Ranks as threads that meet and map memory as processes do.
inline void run_shm(int num_ranks, const std::function<void(Endpoint&)>& body) {
  static std::atomic<int> num_jobs{0};
  const std::string job =
      "test-" + std::to_string(platform::own_pid()) + "-" + std::to_string(num_jobs.fetch_add(1));
  testing::run_ranks(num_ranks, [&](int rank) {
    const shm::Seat seat{job, 0, rank, num_ranks, int64_t{1} << 30};
    Result<std::unique_ptr<Endpoint>> endpoint = shm::attach(seat, {}, ample());
    ASSERT_TRUE(endpoint.has_value()) << endpoint.error().to_string();
    body(**endpoint);
  });
}

// Messages late and out of order between peers, ranks late. Its copies allocate.
inline constexpr const char* kSimBackend = "sim";
inline void run_sim(int num_ranks, const std::function<void(Endpoint&)>& body) {
  const sim::Trouble trouble = sim::parse("seed=11,delay_us=300,pause_us=100").value();
  const std::shared_ptr<InprocWorld> world = InprocWorld::create(num_ranks).value();
  testing::run_ranks(num_ranks, [&](int rank) {
    Result<std::unique_ptr<Endpoint>> endpoint = inproc::attach(world, rank, num_ranks, ample());
    ASSERT_TRUE(endpoint.has_value()) << endpoint.error().to_string();
    body(*sim::wrap(std::move(*endpoint), trouble));
  });
}

inline std::vector<Backend> all_backends() {
  return {{"inproc", run_inproc}, {"shm", run_shm}, {kSimBackend, run_sim}};
}

struct BackendAndRanks {
  Backend backend;
  int num_ranks;

  friend void PrintTo(const BackendAndRanks& param, std::ostream* out) {
    *out << param.backend.name << " with " << param.num_ranks << " ranks";
  }
};

inline std::vector<BackendAndRanks> all_backends_and_ranks() {
  std::vector<BackendAndRanks> all;
  for (const Backend& backend : all_backends()) {
    for (const int num_ranks : {1, 2, 3, 4, 7, 8, 16}) {
      if (backend.name == kSimBackend && num_ranks > 4) continue;  // its sleeps add up
      all.push_back({backend, num_ranks});
    }
  }
  return all;
}

inline std::string name_of_param(const ::testing::TestParamInfo<BackendAndRanks>& info) {
  return info.param.backend.name + "_" + std::to_string(info.param.num_ranks);
}

class BackendTest : public ::testing::TestWithParam<BackendAndRanks> {
 protected:
  int num_ranks() const { return GetParam().num_ranks; }
  void run(const std::function<void(Endpoint&)>& body) const {
    GetParam().backend.run(num_ranks(), body);
  }
};

inline std::vector<WaitItem> items_for_all(int num_ranks, int64_t stride, uint64_t value) {
  std::vector<WaitItem> items;
  for (int peer = 0; peer < num_ranks; ++peer) items.push_back({peer, peer * stride, value});
  return items;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace argosy::transport
