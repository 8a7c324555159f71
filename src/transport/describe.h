// Texts of transport errors: bounded lists of ranks. Test: tests/transport/describe_test.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace argosy::transport {

// "0, 2-4, 7" of rising rank numbers.
std::string describe_ranks(std::span<const int> ranks);

// What one silent peer still owes. Without `want` only its number is shown.
struct Silence {
  int peer = 0;
  uint64_t have = 0;
  uint64_t want = 0;
};

// "rank 2 (have 4, want 5), rank 3 (have 3, want 5)": numbers for the first 16 peers, after those
// the ranks alone. Precondition: rising peers, each once.
std::string describe_silences(std::span<const Silence> silences);

}  // namespace argosy::transport
