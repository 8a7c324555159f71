// How fast this machine is: the yardsticks that Argosy's speed is held against.
//
// A peak is an instruction in a loop that touches registers only; a memory rate is a pass over
// random data in memory far larger than the last cache (lines of zeros move faster). Virtual
// machines change speed within minutes: a yardstick counts only next to the measurement, in one
// run, the two in turn. So each function here takes one sample, and medians are the caller's.
// Test: tests/platform/measure_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/cpu.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

// One instruction that multiplies and adds, and how fast it can go at all.
struct PeakLoop {
  Level level = Level::kGeneric;   // the level that computes with it
  std::string_view instruction;    // "vdpbf16ps zmm"
  DType operands = DType::kUnset;  // kBF16 or kF32
};

// The loops this CPU has, rising by level, none above `highest`. Never empty. Errors: those of
// cpu_info().
Result<std::vector<PeakLoop>> peak_loops(Level highest);

// Runs the loop for about `seconds` on `num_threads` pinned threads at a time, the caller first.
// Returns operations a second of all threads together; a multiply-add is two. Errors:
// kInvalidArgument for num_threads < 1, seconds outside [0, 60] or a loop this CPU lacks; kOutOfMemory for threads.
Result<double> sample_peak(const PeakLoop& loop, int num_threads, double seconds);

// Memory to pass over. Every thread has its own part, first touched by it, in huge pages where the
// system allows them. Passes go on where the last one ended, so that none finds its data in a cache.
class MemoryProbe {
 public:
  // `bytes` for all threads together; 0: eight times the last cache, at least 512 MiB. Errors:
  // kInvalidArgument, kOutOfMemory.
  static Result<std::unique_ptr<MemoryProbe>> create(int num_threads, int64_t bytes = 0);
  ~MemoryProbe();

  // Each moves about `bytes` by all threads together (a whole pass at most) and returns bytes a
  // second. A copied byte counts once, though it is read and written. `num_threads`: only that many
  // of the threads, each over its own part; 0: all. Errors: kOutOfMemory; kInvalidArgument for more
  // threads than the probe has.
  Result<double> sample_read(int64_t bytes, int num_threads = 0);
  Result<double> sample_copy(int64_t bytes, int num_threads = 0);            // plain stores
  Result<double> sample_streaming_copy(int64_t bytes, int num_threads = 0);  // past the caches

  int64_t num_bytes() const;

 private:
  struct State;
  explicit MemoryProbe(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Copies by plain stores of the widest registers, never past the caches. Must not overlap.
void copy_by_plain_stores(std::byte* to, const std::byte* from, int64_t bytes);

// Medians of samples taken in turn.
struct MachineRates {
  struct Peak {
    PeakLoop loop;
    double one_thread = 0;  // operations a second
    double all_threads = 0;
  };
  struct Memory {
    double read = 0;  // bytes a second
    double copy = 0;
    double streaming_copy = 0;
  };
  std::vector<Peak> peaks;  // rising by level
  size_t best_bf16 = 0;     // index of the fastest for bf16 products: any, as bf16 widens to fp32
  int num_threads = 1;      // of "all"
  int64_t memory_bytes = 0;
  Memory one_thread;
  Memory all_threads;
};

struct MeasureOptions {
  int num_threads = 0;  // of "all"; 0: every usable core
  int num_samples = 15;
  double peak_seconds = 0.004;      // of one sample of a peak
  int64_t memory_bytes = 0;         // as for MemoryProbe
  int64_t sample_bytes = 64 << 20;  // of one sample of memory
};

// Errors: those of the functions above; kInvalidArgument for options below 1.
Result<MachineRates> measure_machine(const MeasureOptions& options = {});

}  // namespace argosy
