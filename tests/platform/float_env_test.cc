// ScopedFloatEnv: what it sets is in force, what was there comes back (contract 4.5).
#include "platform/float_env.h"

#include <gtest/gtest.h>
#include <immintrin.h>

namespace argosy::platform {
namespace {

constexpr float kDenormal = 0x1p-140f;

float halved_smallest_normal() {
  volatile float x = 0x1p-126f;
  return x * 0.5f;
}

bool reads_denormal() {
  volatile float x = kDenormal;
  return x * 0x1p100f != 0.0f;
}

TEST(FloatEnv, SetsAndRestores) {
  // Every kind of visitor: default, flushing as inside a host framework, other rounding, no masks.
  for (const unsigned visitor : {0x1F80u, 0x9FC0u, 0x7F80u, 0x1F80u | 0x8000u, 0x1F80u | 0x0040u}) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(visitor);
    bool kept = false, flushed = false;
    {
      const ScopedFloatEnv keep(Denormals::kKeep);
      kept = halved_smallest_normal() != 0.0f && reads_denormal() && (_mm_getcsr() & 0xE040u) == 0;
      {
        const ScopedFloatEnv flush(Denormals::kFlush);
        flushed = halved_smallest_normal() == 0.0f && !reads_denormal();
      }
      kept = kept && reads_denormal();
    }
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_TRUE(kept) << visitor;
    EXPECT_TRUE(flushed) << visitor;
    EXPECT_EQ(after, visitor);
  }
}

TEST(FloatEnv, RoundsToNearestInside) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x6000u);  // towards zero
  float rounded = 0.0f;
  {
    const ScopedFloatEnv keep(Denormals::kKeep);
    volatile float x = 1.0f;
    rounded = x + 0x1.8p-24f;
  }
  _mm_setcsr(before);
  EXPECT_EQ(rounded, 0x1.000002p+0f);
}

}  // namespace
}  // namespace argosy::platform
