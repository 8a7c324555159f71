// The floating-point environment belongs to the caller (contract 4.5): save, set what the operation
// needs, restore. Test: tests/platform/float_env_test.cc.
#pragma once

#include <immintrin.h>

namespace argosy::platform {

enum class Denormals {
  kKeep,   // routing, bias, activation, combine, casts
  kFlush,  // dot products of contract 4.2 and 4.3: FTZ and DAZ
};

// Round to nearest even, all exceptions masked, denormals as asked, until the end of the scope.
class ScopedFloatEnv {
 public:
  explicit ScopedFloatEnv(Denormals denormals) : saved_(_mm_getcsr()) {
    _mm_setcsr(denormals == Denormals::kFlush ? kMaskAll | kFlushBits : kMaskAll);
  }
  ~ScopedFloatEnv() { _mm_setcsr(saved_); }
  ScopedFloatEnv(const ScopedFloatEnv&) = delete;
  ScopedFloatEnv& operator=(const ScopedFloatEnv&) = delete;

 private:
  static constexpr unsigned kMaskAll = 0x1F80;
  static constexpr unsigned kFlushBits = 0x8040;  // FTZ, DAZ
  unsigned saved_;
};

}  // namespace argosy::platform
