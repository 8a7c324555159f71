// Runs one function per rank, each on its own thread, and waits for all. Used by every multi-rank
// test.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

namespace argosy::testing {

// body(rank) for rank in [0, num_ranks).
template <typename Body>
void run_ranks(int num_ranks, Body&& body) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

inline void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// A generator of its own for every rank of a seeded test.
inline std::mt19937_64 rank_rng(uint64_t seed, int rank) {
  return std::mt19937_64(seed * 1000003u + static_cast<uint64_t>(rank));
}

// Sometimes nothing, sometimes a yield, seldom up to 2 ms: spreads the ranks over the protocol's
// steps.
inline void random_pause(std::mt19937_64& rng) {
  const uint64_t draw = rng() % 64;
  if (draw == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 2000));
  if (draw < 16) std::this_thread::yield();
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderSanitizer = true;
#else
inline constexpr bool kUnderSanitizer = false;
#endif

}  // namespace argosy::testing
