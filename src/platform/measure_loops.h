// The innermost loops of the yardsticks: instructions on registers, passes over memory.
//
// Written in assembly or intrinsics with a target of their own, so that neither the build's flags
// nor the optimiser change what is measured. Test: tests/platform/measure_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "argosy/measure.h"

namespace argosy::platform {

struct RegisterLoop {
  PeakLoop peak;
  double operations_per_pass = 0;
  void (*run)(int64_t passes) = nullptr;  // passes >= 1; needs the level's instructions
};

// Every loop of this build, rising by level.
std::span<const RegisterLoop> register_loops();

// `bytes` must be a multiple of kMemoryStep, addresses of 64 (for `copy`: any).
inline constexpr int64_t kMemoryStep = 256;
struct MemoryLoops {
  void (*read)(const std::byte* from, int64_t bytes) = nullptr;
  void (*copy)(std::byte* to, const std::byte* from, int64_t bytes) = nullptr;
  void (*streaming_copy)(std::byte* to, const std::byte* from, int64_t bytes) = nullptr;
};

// The widest this CPU has.
const MemoryLoops& memory_loops();

}  // namespace argosy::platform
