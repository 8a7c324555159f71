// The activations of an expert and their slopes, one fp32 element at a time, in explicit steps
// (contract 4.4).
//
// Every SIMD level computes exactly these operations in this order (gemm/vec_activation.inl).
// Denormals must be kept while they run. `value` is act(gate); h = join(weight * act(gate), up);
// dh/dgate = weight * up_factor(up)
// * slope, dh/dup = weight * value where `up` moves h. Inline as in elementary.h. Test:
// tests/gemm/activation_test.cc.
#pragma once

#include "numeric/elementary.h"

namespace argosy::numeric {

struct ActivationConstants {
  float limit = 0;  // both read by ClampedSwiGlu only
  float alpha = 0;
};

// act(gate) and its derivative.
struct ValueAndSlope {
  float value = 0;
  float slope = 0;
};

// sigmoid(x) and sigmoid(-x), each accurate where it is small.
struct Sigmoids {
  float of = 0;
  float of_negated = 0;
};
ARGOSY_INLINE Sigmoids sigmoids_f32(float x) {
  const bool is_positive = x > 0.0f;
  const float e = exp_f32(is_positive ? -x : x);
  return {(is_positive ? 1.0f : e) / (1.0f + e), (is_positive ? e : 1.0f) / (1.0f + e)};
}

// P(X > t) and e^(-t^2 / 2) of the standard normal X, for t >= 0. With r = 1 / (t + 4.25) and u = 1
// - 8.5 r in
// [-1, 0.6], P(X > t) e^(t^2 / 2) / r is a polynomial of degree 9 in u (6.3e-9 relative); t^2 is
// taken with its rounding error. Below 1 it is 1/2 - t q(t^2), Taylor of degree 7 (6e-9). Relative
// error: 1.5 ulp below 1, 3.5 above; beyond 15 both are 0 in fp32.
struct NormalTail {
  float above = 0;
  float exponential = 0;
};
ARGOSY_INLINE NormalTail normal_tail_f32(float t) {
  const float x = t > 15.0f ? 15.0f : t;
  const float square = x * x;
  const float error = __builtin_fmaf(x, x, -square);
  const float e = exp_f32(-0.5f * square);
  const float exponential = __builtin_fmaf(e, -0.5f * error, e);
  const float r = 1.0f / (x + 4.25f);
  const float u = __builtin_fmaf(-8.5f, r, 1.0f);
  float p = -0x1.f3222cp-13f;
  p = __builtin_fmaf(p, u, -0x1.85a7f8p-12f);
  p = __builtin_fmaf(p, u, 0x1.1e38e8p-9f);
  p = __builtin_fmaf(p, u, -0x1.8777fep-11f);
  p = __builtin_fmaf(p, u, -0x1.3d4942p-6f);
  p = __builtin_fmaf(p, u, 0x1.5d4564p-4f);
  p = __builtin_fmaf(p, u, -0x1.c39da4p-3f);
  p = __builtin_fmaf(p, u, 0x1.ac43dcp-2f);
  p = __builtin_fmaf(p, u, -0x1.401102p-1f);
  p = __builtin_fmaf(p, u, 0x1.84e44ap-1f);
  float q = -0x1.62226ap-25f;
  q = __builtin_fmaf(q, square, 0x1.658a22p-21f);
  q = __builtin_fmaf(q, square, -0x1.3ce8fap-17f);
  q = __builtin_fmaf(q, square, 0x1.e42b0ep-14f);
  q = __builtin_fmaf(q, square, -0x1.374040p-10f);
  q = __builtin_fmaf(q, square, 0x1.46d042p-7f);
  q = __builtin_fmaf(q, square, -0x1.105838p-4f);
  q = __builtin_fmaf(q, square, 0x1.988454p-2f);
  const float near_zero = __builtin_fmaf(-x, q, 0.5f);
  return {x < 1.0f ? near_zero : p * r * exponential, exponential};
}

// Of all but the clamped one: h = a * up.
struct GatedActivation {
  ARGOSY_INLINE float join(const ActivationConstants&, float a, float up) { return a * up; }
  ARGOSY_INLINE float up_factor(const ActivationConstants&, float up) { return up; }
  // `gradient` where gate, where up moves h, else 0.
  ARGOSY_INLINE float select_gate(const ActivationConstants&, float, float gradient) {
    return gradient;
  }
  ARGOSY_INLINE float select_up(const ActivationConstants&, float, float gradient) {
    return gradient;
  }
};

struct SwiGlu : GatedActivation {
  ARGOSY_INLINE float value(const ActivationConstants&, float gate) { return silu_f32(gate); }
  ARGOSY_INLINE ValueAndSlope value_and_slope(const ActivationConstants&, float gate) {
    const Sigmoids s = sigmoids_f32(gate);
    const float a = gate * s.of;
    return {a, __builtin_fmaf(a, s.of_negated, s.of)};
  }
};

struct ClampedSwiGlu {
  ARGOSY_INLINE float clamped_up(const ActivationConstants& c, float up) {
    return up > c.limit ? c.limit : (up < -c.limit ? -c.limit : up);
  }
  ARGOSY_INLINE float value(const ActivationConstants& c, float gate) {
    const float g = gate > c.limit ? c.limit : gate;
    return g * sigmoid_f32(c.alpha * g);
  }
  ARGOSY_INLINE ValueAndSlope value_and_slope(const ActivationConstants& c, float gate) {
    const float g = gate > c.limit ? c.limit : gate;
    const Sigmoids s = sigmoids_f32(c.alpha * g);
    const float a = g * s.of;
    return {a, __builtin_fmaf(c.alpha * a, s.of_negated, s.of)};
  }
  ARGOSY_INLINE float join(const ActivationConstants& c, float a, float up) {
    return __builtin_fmaf(a, clamped_up(c, up), a);
  }
  ARGOSY_INLINE float up_factor(const ActivationConstants& c, float up) {
    return clamped_up(c, up) + 1.0f;
  }
  ARGOSY_INLINE float select_gate(const ActivationConstants& c, float gate, float gradient) {
    return gate > c.limit ? 0.0f : gradient;
  }
  ARGOSY_INLINE float select_up(const ActivationConstants& c, float up, float gradient) {
    return up > c.limit || up < -c.limit ? 0.0f : gradient;
  }
};

// gate * Phi(gate): the smaller tail is computed, so that no digits cancel.
struct GeGlu : GatedActivation {
  ARGOSY_INLINE float cdf(float gate, const NormalTail& tail) {
    return gate > 0.0f ? 1.0f - tail.above : tail.above;
  }
  ARGOSY_INLINE float value(const ActivationConstants&, float gate) {
    return gate * cdf(gate, normal_tail_f32(gate > 0.0f ? gate : -gate));
  }
  ARGOSY_INLINE ValueAndSlope value_and_slope(const ActivationConstants&, float gate) {
    constexpr float kInvSqrtTwoPi = 0x1.988454p-2f;
    const NormalTail tail = normal_tail_f32(gate > 0.0f ? gate : -gate);
    const float phi = cdf(gate, tail);
    // The clamp: Inf by a density of 0 is no number.
    const float g = gate > 15.0f ? 15.0f : (gate < -15.0f ? -15.0f : gate);
    return {gate * phi, __builtin_fmaf(g, tail.exponential * kInvSqrtTwoPi, phi)};
  }
};

// tanh form: 0.5 (1 + tanh(y)) = sigmoid(2 y).
struct GeGluTanh : GatedActivation {
  static constexpr float kLinear = 0x1.988454p+0f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0x1.2444f2p-4f;   // that by 0.044715
  ARGOSY_INLINE float argument(float gate) {
    return gate * __builtin_fmaf(kCubic, gate * gate, kLinear);
  }
  ARGOSY_INLINE float value(const ActivationConstants&, float gate) {
    return gate * sigmoid_f32(argument(gate));
  }
  ARGOSY_INLINE ValueAndSlope value_and_slope(const ActivationConstants&, float gate) {
    const Sigmoids s = sigmoids_f32(argument(gate));
    // The clamp: beyond, one sigmoid is 0, and Inf by 0 is no number.
    const float g = gate > 30.0f ? 30.0f : (gate < -30.0f ? -30.0f : gate);
    const float rise = g * __builtin_fmaf(3.0f * kCubic, g * g, kLinear);
    return {gate * s.of, __builtin_fmaf(s.of * s.of_negated, rise, s.of)};
  }
};

struct Relu2Glu : GatedActivation {
  ARGOSY_INLINE float value(const ActivationConstants&, float gate) {
    const float positive = gate < 0.0f ? 0.0f : gate;
    return positive * positive;
  }
  ARGOSY_INLINE ValueAndSlope value_and_slope(const ActivationConstants&, float gate) {
    const float positive = gate < 0.0f ? 0.0f : gate;
    return {positive * positive, 2.0f * positive};
  }
};

}  // namespace argosy::numeric
