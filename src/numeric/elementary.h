// exp, sigmoid, silu, softplus in fp32: one polynomial each, in explicit FMA steps (contract 4.4).
//
// Every path of the project (router, activation, every SIMD level) computes exactly these operations in
// this order, so the bits agree. Denormals must be kept while they run (MXCSR without FTZ and DAZ).
// Functions are static and always inlined: a copy compiled for a higher instruction set must never be
// picked by the linker for code that runs on a lower one. Test: tests/numeric/elementary_test.cc.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace argosy::numeric {

#define ARGOSY_INLINE static inline __attribute__((always_inline, unused))

// e^x, relative error below 1.1 ulp, denormal results rounded once; NaN -> NaN.
//
// Range reduction x = n ln 2 + r with |r| <= 0.3466 and ln 2 split in two, then the Taylor polynomial of
// degree 7 (truncation 7e-9 relative), then two exact powers of two.
ARGOSY_INLINE float exp_f32(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2High = 0x1.62e400p-1f;   // 12 trailing zero bits: n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;   // ln 2 - kLn2High
  constexpr float kRoundMagic = 12582912.0f;   // 1.5 * 2^23: adding it rounds to an integer
  // Outside [-104, 89] the result is 0 or Inf; the clamp keeps n in int range. NaN passes both tests.
  const float clamped = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);
  if (clamped != clamped) return std::numeric_limits<float>::quiet_NaN();
  const float shifted = std::fma(clamped, kLog2E, kRoundMagic);
  const float n = shifted - kRoundMagic;
  float r = std::fma(n, -kLn2High, clamped);
  r = std::fma(n, -kLn2Low, r);
  float p = 1.0f / 5040.0f;
  p = std::fma(p, r, 1.0f / 720.0f);
  p = std::fma(p, r, 1.0f / 120.0f);
  p = std::fma(p, r, 1.0f / 24.0f);
  p = std::fma(p, r, 1.0f / 6.0f);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  const int32_t exponent = static_cast<int32_t>(n);  // in [-150, 128]
  const int32_t half = exponent / 2;
  const float scale_a = std::bit_cast<float>((half + 127) << 23);
  const float scale_b = std::bit_cast<float>((exponent - half + 127) << 23);
  return p * scale_a * scale_b;
}

// 1 / (1 + e^-x), accurate down to the smallest denormal.
ARGOSY_INLINE float sigmoid_f32(float x) {
  const float e = exp_f32(x > 0.0f ? -x : x);
  return (x > 0.0f ? 1.0f : e) / (1.0f + e);
}

// x * sigmoid(x).
ARGOSY_INLINE float silu_f32(float x) { return x * sigmoid_f32(x); }

// log(1 + f) for f in [0, 1], small relative error down to denormals: 2 atanh(s), s = f / (2 + f).
ARGOSY_INLINE float log1p_unit_f32(float f) {
  const float s = f / (2.0f + f);
  const float s2 = s * s;
  float p = 1.0f / 17.0f;
  p = std::fma(p, s2, 1.0f / 15.0f);
  p = std::fma(p, s2, 1.0f / 13.0f);
  p = std::fma(p, s2, 1.0f / 11.0f);
  p = std::fma(p, s2, 1.0f / 9.0f);
  p = std::fma(p, s2, 1.0f / 7.0f);
  p = std::fma(p, s2, 1.0f / 5.0f);
  p = std::fma(p, s2, 1.0f / 3.0f);
  const float twice = s + s;
  return std::fma(twice * s2, p, twice);
}

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|).
ARGOSY_INLINE float softplus_f32(float x) {
  const float positive = x > 0.0f ? x : 0.0f;
  return positive + log1p_unit_f32(exp_f32(x > 0.0f ? -x : x));
}

}  // namespace argosy::numeric
