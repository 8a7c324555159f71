// exp and friends: one polynomial each, in explicit FMA steps (contract 4.4).
//
// Every path of the project (router, activation, every SIMD level) computes exactly these
// operations in this order, so the bits agree. fp32 for activations; fp64 for the router, whose
// selection must agree with exact arithmetic to one fp32 ulp. Denormals must be kept while they run
// (MXCSR without FTZ, DAZ). Functions are static and always inlined, and call builtins instead of
// std:: templates: a copy compiled for a higher instruction set must never be picked by the linker
// for code that runs on a lower one. Test: tests/numeric/elementary_test.cc.
#pragma once

#include <cstdint>

namespace argosy::numeric {

#define ARGOSY_INLINE static inline __attribute__((always_inline, unused))

// e^x, relative error below 1.1 ulp, denormal results rounded once; NaN -> NaN.
//
// Range reduction x = n ln 2 + r with |r| <= 0.3466 and ln 2 split in two, then the Taylor
// polynomial of degree 7 (truncation 7e-9 relative), then two exact powers of two.
ARGOSY_INLINE float exp_f32(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2High = 0x1.62e400p-1f;  // 12 trailing zero bits: n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;  // ln 2 - kLn2High
  constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  // Outside [-104, 89] the result is 0 or Inf; the clamp keeps n in int range. NaN passes both
  // tests.
  const float clamped = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);
  if (clamped != clamped) return __builtin_nanf("");
  const float shifted = __builtin_fmaf(clamped, kLog2E, kRoundMagic);
  const float n = shifted - kRoundMagic;
  float r = __builtin_fmaf(n, -kLn2High, clamped);
  r = __builtin_fmaf(n, -kLn2Low, r);
  float p = 1.0f / 5040.0f;
  p = __builtin_fmaf(p, r, 1.0f / 720.0f);
  p = __builtin_fmaf(p, r, 1.0f / 120.0f);
  p = __builtin_fmaf(p, r, 1.0f / 24.0f);
  p = __builtin_fmaf(p, r, 1.0f / 6.0f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  const int32_t exponent = static_cast<int32_t>(n);  // in [-150, 128]
  const int32_t half = exponent / 2;
  const float scale_a = __builtin_bit_cast(float, (half + 127) << 23);
  const float scale_b = __builtin_bit_cast(float, (exponent - half + 127) << 23);
  return p * scale_a * scale_b;
}

// 1 / (1 + e^-x), accurate down to the smallest denormal.
ARGOSY_INLINE float sigmoid_f32(float x) {
  const float e = exp_f32(x > 0.0f ? -x : x);
  return (x > 0.0f ? 1.0f : e) / (1.0f + e);
}

// x * sigmoid(x).
ARGOSY_INLINE float silu_f32(float x) { return x * sigmoid_f32(x); }

// ActivationKind::kClampedSwiGlu: with g = min(gate, limit), u = up clamped to [-limit, limit] and
// a = g * sigmoid(alpha * g), a * (u + 1) as one FMA. A NaN passes the clamps. limit > 0.
ARGOSY_INLINE float clamped_swiglu_f32(float gate, float up, float limit, float alpha) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : (up < -limit ? -limit : up);
  const float a = g * sigmoid_f32(alpha * g);
  return __builtin_fmaf(a, u, a);
}

// e^x for finite x <= 0, relative error below 1e-15; 0 below -708, where an fp32 user sees 0
// anyway.
//
// As exp_f32, Taylor of degree 12 (truncation 2e-16 relative).
ARGOSY_INLINE double exp_nonpositive_f64(double x) {
  constexpr double kLog2E = 0x1.71547652b82fep+0;
  constexpr double kLn2High = 0x1.62e42fee00000p-1;  // 21 trailing zero bits: n * kLn2High is exact
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;  // ln 2 - kLn2High
  constexpr double kRoundMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double clamped = x < -708.0 ? -708.0 : x;
  const double shifted = __builtin_fma(clamped, kLog2E, kRoundMagic);
  const double n = shifted - kRoundMagic;
  double r = __builtin_fma(n, -kLn2High, clamped);
  r = __builtin_fma(n, -kLn2Low, r);
  double p = 1.0 / 479001600.0;
  p = __builtin_fma(p, r, 1.0 / 39916800.0);
  p = __builtin_fma(p, r, 1.0 / 3628800.0);
  p = __builtin_fma(p, r, 1.0 / 362880.0);
  p = __builtin_fma(p, r, 1.0 / 40320.0);
  p = __builtin_fma(p, r, 1.0 / 5040.0);
  p = __builtin_fma(p, r, 1.0 / 720.0);
  p = __builtin_fma(p, r, 1.0 / 120.0);
  p = __builtin_fma(p, r, 1.0 / 24.0);
  p = __builtin_fma(p, r, 1.0 / 6.0);
  p = __builtin_fma(p, r, 0.5);
  p = __builtin_fma(p, r, 1.0);
  p = __builtin_fma(p, r, 1.0);
  // The low mantissa bits of `shifted` are n, in [-1022, 0]: the shift leaves the biased exponent
  // of 2^n.
  const uint64_t biased = __builtin_bit_cast(uint64_t, shifted) + 1023u;
  const double scale = __builtin_bit_cast(double, biased << 52);
  return x < -708.0 ? 0.0 : p * scale;
}

// log(1 + f) / f for f in [0, 1], relative error below 1e-15; 1 at f = 0. The quotient, because it
// stays accurate where f itself has underflowed.
//
// 2 atanh(s) / f with s = f / (2 + f) <= 1/3, series up to s^32 (truncation 6e-18 relative).
ARGOSY_INLINE double log1p_quotient_f64(double f) {
  const double s = f / (2.0 + f);
  const double s2 = s * s;
  double p = 1.0 / 33.0;
  p = __builtin_fma(p, s2, 1.0 / 31.0);
  p = __builtin_fma(p, s2, 1.0 / 29.0);
  p = __builtin_fma(p, s2, 1.0 / 27.0);
  p = __builtin_fma(p, s2, 1.0 / 25.0);
  p = __builtin_fma(p, s2, 1.0 / 23.0);
  p = __builtin_fma(p, s2, 1.0 / 21.0);
  p = __builtin_fma(p, s2, 1.0 / 19.0);
  p = __builtin_fma(p, s2, 1.0 / 17.0);
  p = __builtin_fma(p, s2, 1.0 / 15.0);
  p = __builtin_fma(p, s2, 1.0 / 13.0);
  p = __builtin_fma(p, s2, 1.0 / 11.0);
  p = __builtin_fma(p, s2, 1.0 / 9.0);
  p = __builtin_fma(p, s2, 1.0 / 7.0);
  p = __builtin_fma(p, s2, 1.0 / 5.0);
  p = __builtin_fma(p, s2, 1.0 / 3.0);
  p = __builtin_fma(p, s2, 1.0);
  return 2.0 * p / (2.0 + f);
}

}  // namespace argosy::numeric
