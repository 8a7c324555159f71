// One reader of outside bytes as the fuzzer and the replay test see it: a check, a mutator, seeds.
//
// A check returns what went wrong, or nothing: libFuzzer aborts on it (libfuzzer_main.cc), GoogleTest
// reports it (replay_test.cc). The same code runs in both.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/status.h"
#include "fuzz/heap_watch.h"

namespace argosy::testing {

// Numbers from a seed (SplitMix64); cheap to make, since libFuzzer gives one seed per mutation.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  // In [0, bound); bound >= 1.
  size_t below(size_t bound) { return static_cast<size_t>(next() % bound); }
  bool one_in(size_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

// Changes bytes without knowing what they mean: libFuzzer's own mutator, or random_bytes().
using ByteMutator = void (*)(std::string* bytes, Random& random);

// Flips, writes boundary numbers, erases, repeats. For the replay test.
void random_bytes(std::string* bytes, Random& random);

struct FuzzTarget {
  std::string_view name;  // of the folder in corpus/
  std::string (*check)(std::string_view input);
  std::string (*mutate)(std::string_view input, Random& random, ByteMutator bytes);
  std::map<std::string, std::string> (*seeds)();            // file name -> bytes
  std::map<std::string, std::string> (*large)() = nullptr;  // name -> some 1 MB that asks for much
};

const FuzzTarget& safetensors_target();
const FuzzTarget& config_target();
const FuzzTarget& index_target();
const FuzzTarget& plan_target();
const FuzzTarget& router_file_target();
const FuzzTarget& router_trace_target();
const std::vector<const FuzzTarget*>& all_targets();

// What an input of n bytes may cost: largest * n + constant in one request, peak * n + constant at
// once. What needs a large constant for large inputs has a tighter one for small ones: no more than
// small_largest * n + small_constant in one request, where that is less (docs/fuzzing.md).
struct HeapBound {
  size_t largest = 1;
  size_t peak = 0;
  size_t constant = 0;
  size_t small_largest = largest;
  size_t small_constant = constant;
};

// Empty, or which number of `use` is above the bound.
std::string over_bound(const HeapUse& use, const HeapBound& bound, size_t input_bytes);

// Runs body() -> std::string under the watch; its finding, or that of over_bound.
template <typename Body>
std::string within(const HeapBound& bound, size_t input_bytes, const Body& body) {
  start_heap_watch();
  std::string problem = body();
  const HeapUse use = stop_heap_watch();
  return problem.empty() ? over_bound(use, bound, input_bytes) : problem;
}

// Empty when `status` is a refusal as a user may see it: one of `codes`, with a message of valid
// UTF-8 without control characters (a file must not write to the terminal of who opens it).
std::string refusal_problem(const Status& status, std::initializer_list<StatusCode> codes);

// A file in memory that has a path, filled anew for every input. Aborts when the system has none.
class MemoryFile {
 public:
  MemoryFile();
  void fill(std::string_view bytes) const;
  std::string path() const;

 private:
  int descriptor_;
};

}  // namespace argosy::testing
