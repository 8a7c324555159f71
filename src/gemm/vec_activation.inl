// The activations in vectors, included into the anonymous namespace of a level's file after `Vec`:
// the operations of numeric/activation.h, one for one, so the bits are theirs. Test:
// tests/gemm/kernels_test.cc, activation_backward_test.cc.

// numeric::exp_f32 for x <= 0 or NaN.
ARGOSY_KERNEL_INLINE Vec::F exp_nonpositive(Vec::F x) {
  // The clamp keeps n in [-150, 0]; a NaN, second operand of the maximum, goes through to p.
  const Vec::F clamped = Vec::max_or_second(Vec::splat(-104.0f), x);
  const Vec::F magic = Vec::splat(12582912.0f);
  const Vec::F n = Vec::sub(Vec::fma(clamped, Vec::splat(0x1.715476p+0f), magic), magic);
  Vec::F r = Vec::fma(n, Vec::splat(-0x1.62e400p-1f), clamped);
  r = Vec::fma(n, Vec::splat(-0x1.7f7d1cp-20f), r);
  Vec::F p = Vec::splat(1.0f / 5040.0f);
  p = Vec::fma(p, r, Vec::splat(1.0f / 720.0f));
  p = Vec::fma(p, r, Vec::splat(1.0f / 120.0f));
  p = Vec::fma(p, r, Vec::splat(1.0f / 24.0f));
  p = Vec::fma(p, r, Vec::splat(1.0f / 6.0f));
  p = Vec::fma(p, r, Vec::splat(0.5f));
  p = Vec::fma(p, r, Vec::splat(1.0f));
  p = Vec::fma(p, r, Vec::splat(1.0f));
  Vec::F scale_a, scale_b;
  Vec::powers_of_two(n, &scale_a, &scale_b);
  return Vec::mul(Vec::mul(p, scale_a), scale_b);
}

struct Sigmoids {
  Vec::F of, of_negated;
};
ARGOSY_KERNEL_INLINE Sigmoids sigmoids(Vec::F x) {
  const Vec::Mask positive = Vec::is_positive(x);
  const Vec::F one = Vec::splat(1.0f);
  const Vec::F e = exp_nonpositive(Vec::select(positive, Vec::negate(x), x));
  const Vec::F sum = Vec::add(one, e);
  return {Vec::div(Vec::select(positive, one, e), sum),
          Vec::div(Vec::select(positive, e, one), sum)};
}

ARGOSY_KERNEL_INLINE Vec::F sigmoid(Vec::F x) {
  const Vec::Mask positive = Vec::is_positive(x);
  const Vec::F one = Vec::splat(1.0f);
  const Vec::F e = exp_nonpositive(Vec::select(positive, Vec::negate(x), x));
  return Vec::div(Vec::select(positive, one, e), Vec::add(one, e));
}

struct NormalTail {
  Vec::F above, exponential;
};
ARGOSY_KERNEL_INLINE NormalTail normal_tail(Vec::F t) {
  const Vec::F x = Vec::min_or_second(Vec::splat(15.0f), t);
  const Vec::F square = Vec::mul(x, x);
  const Vec::F error = Vec::fma(x, x, Vec::negate(square));
  const Vec::F minus_half = Vec::splat(-0.5f);
  const Vec::F e = exp_nonpositive(Vec::mul(minus_half, square));
  const Vec::F exponential = Vec::fma(e, Vec::mul(minus_half, error), e);
  const Vec::F r = Vec::div(Vec::splat(1.0f), Vec::add(x, Vec::splat(4.25f)));
  const Vec::F u = Vec::fma(Vec::splat(-8.5f), r, Vec::splat(1.0f));
  Vec::F p = Vec::splat(-0x1.f3222cp-13f);
  p = Vec::fma(p, u, Vec::splat(-0x1.85a7f8p-12f));
  p = Vec::fma(p, u, Vec::splat(0x1.1e38e8p-9f));
  p = Vec::fma(p, u, Vec::splat(-0x1.8777fep-11f));
  p = Vec::fma(p, u, Vec::splat(-0x1.3d4942p-6f));
  p = Vec::fma(p, u, Vec::splat(0x1.5d4564p-4f));
  p = Vec::fma(p, u, Vec::splat(-0x1.c39da4p-3f));
  p = Vec::fma(p, u, Vec::splat(0x1.ac43dcp-2f));
  p = Vec::fma(p, u, Vec::splat(-0x1.401102p-1f));
  p = Vec::fma(p, u, Vec::splat(0x1.84e44ap-1f));
  Vec::F q = Vec::splat(-0x1.62226ap-25f);
  q = Vec::fma(q, square, Vec::splat(0x1.658a22p-21f));
  q = Vec::fma(q, square, Vec::splat(-0x1.3ce8fap-17f));
  q = Vec::fma(q, square, Vec::splat(0x1.e42b0ep-14f));
  q = Vec::fma(q, square, Vec::splat(-0x1.374040p-10f));
  q = Vec::fma(q, square, Vec::splat(0x1.46d042p-7f));
  q = Vec::fma(q, square, Vec::splat(-0x1.105838p-4f));
  q = Vec::fma(q, square, Vec::splat(0x1.988454p-2f));
  const Vec::F near_zero = Vec::fma(Vec::negate(x), q, Vec::splat(0.5f));
  return {Vec::select(Vec::is_greater(Vec::splat(1.0f), x), near_zero,
                      Vec::mul(Vec::mul(p, r), exponential)),
          exponential};
}

// Limit and alpha are read where an activation has them.
struct Constants {
  float limit, alpha;
};

struct ValueAndSlope {
  Vec::F value, slope;
};

// x in [-limit, limit]; a NaN, second operand of minimum and maximum, goes through.
ARGOSY_KERNEL_INLINE Vec::F clamped(Vec::F x, float limit) {
  return Vec::max_or_second(Vec::splat(-limit), Vec::min_or_second(Vec::splat(limit), x));
}

struct GatedActivation {
  ARGOSY_KERNEL_INLINE static Vec::F join(const Constants&, Vec::F a, Vec::F up) {
    return Vec::mul(a, up);
  }
  ARGOSY_KERNEL_INLINE static Vec::F up_factor(const Constants&, Vec::F up) { return up; }
  ARGOSY_KERNEL_INLINE static Vec::F select_gate(const Constants&, Vec::F, Vec::F gradient) {
    return gradient;
  }
  ARGOSY_KERNEL_INLINE static Vec::F select_up(const Constants&, Vec::F, Vec::F gradient) {
    return gradient;
  }
};

struct SwiGlu : GatedActivation {
  ARGOSY_KERNEL_INLINE static Vec::F value(const Constants&, Vec::F gate) {
    return Vec::mul(gate, sigmoid(gate));
  }
  ARGOSY_KERNEL_INLINE static ValueAndSlope value_and_slope(const Constants&, Vec::F gate) {
    const Sigmoids s = sigmoids(gate);
    const Vec::F a = Vec::mul(gate, s.of);
    return {a, Vec::fma(a, s.of_negated, s.of)};
  }
};

struct ClampedSwiGlu {
  ARGOSY_KERNEL_INLINE static Vec::F value(const Constants& c, Vec::F gate) {
    const Vec::F g = Vec::min_or_second(Vec::splat(c.limit), gate);
    return Vec::mul(g, sigmoid(Vec::mul(Vec::splat(c.alpha), g)));
  }
  ARGOSY_KERNEL_INLINE static ValueAndSlope value_and_slope(const Constants& c, Vec::F gate) {
    const Vec::F limit = Vec::splat(c.limit), alpha = Vec::splat(c.alpha);
    const Vec::F g = Vec::min_or_second(limit, gate);
    const Sigmoids s = sigmoids(Vec::mul(alpha, g));
    const Vec::F a = Vec::mul(g, s.of);
    return {a, Vec::fma(Vec::mul(alpha, a), s.of_negated, s.of)};
  }
  ARGOSY_KERNEL_INLINE static Vec::F join(const Constants& c, Vec::F a, Vec::F up) {
    return Vec::fma(a, clamped(up, c.limit), a);
  }
  ARGOSY_KERNEL_INLINE static Vec::F up_factor(const Constants& c, Vec::F up) {
    return Vec::add(clamped(up, c.limit), Vec::splat(1.0f));
  }
  ARGOSY_KERNEL_INLINE static Vec::F select_gate(const Constants& c, Vec::F gate, Vec::F gradient) {
    return Vec::select(Vec::is_greater(gate, Vec::splat(c.limit)), Vec::zero(), gradient);
  }
  ARGOSY_KERNEL_INLINE static Vec::F select_up(const Constants& c, Vec::F up, Vec::F gradient) {
    const Vec::F below =
        Vec::select(Vec::is_greater(up, Vec::splat(c.limit)), Vec::zero(), gradient);
    return Vec::select(Vec::is_greater(Vec::splat(-c.limit), up), Vec::zero(), below);
  }
};

struct GeGlu : GatedActivation {
  ARGOSY_KERNEL_INLINE static Vec::F cdf(Vec::Mask positive, const NormalTail& tail) {
    return Vec::select(positive, Vec::sub(Vec::splat(1.0f), tail.above), tail.above);
  }
  ARGOSY_KERNEL_INLINE static Vec::F value(const Constants&, Vec::F gate) {
    const Vec::Mask positive = Vec::is_positive(gate);
    return Vec::mul(gate,
                    cdf(positive, normal_tail(Vec::select(positive, gate, Vec::negate(gate)))));
  }
  ARGOSY_KERNEL_INLINE static ValueAndSlope value_and_slope(const Constants&, Vec::F gate) {
    const Vec::Mask positive = Vec::is_positive(gate);
    const NormalTail tail = normal_tail(Vec::select(positive, gate, Vec::negate(gate)));
    const Vec::F phi = cdf(positive, tail);
    const Vec::F density = Vec::mul(tail.exponential, Vec::splat(0x1.988454p-2f));
    return {Vec::mul(gate, phi), Vec::fma(clamped(gate, 15.0f), density, phi)};
  }
};

struct GeGluTanh : GatedActivation {
  static constexpr float kLinear = 0x1.988454p+0f, kCubic = 0x1.2444f2p-4f;

  ARGOSY_KERNEL_INLINE static Vec::F argument(Vec::F gate) {
    return Vec::mul(gate, Vec::fma(Vec::splat(kCubic), Vec::mul(gate, gate), Vec::splat(kLinear)));
  }
  ARGOSY_KERNEL_INLINE static Vec::F value(const Constants&, Vec::F gate) {
    return Vec::mul(gate, sigmoid(argument(gate)));
  }
  ARGOSY_KERNEL_INLINE static ValueAndSlope value_and_slope(const Constants&, Vec::F gate) {
    const Sigmoids s = sigmoids(argument(gate));
    const Vec::F g = clamped(gate, 30.0f);
    const Vec::F rise =
        Vec::mul(g, Vec::fma(Vec::splat(3.0f * kCubic), Vec::mul(g, g), Vec::splat(kLinear)));
    return {Vec::mul(gate, s.of), Vec::fma(Vec::mul(s.of, s.of_negated), rise, s.of)};
  }
};

struct Relu2Glu : GatedActivation {
  ARGOSY_KERNEL_INLINE static Vec::F value(const Constants&, Vec::F gate) {
    const Vec::F positive = Vec::max_or_second(Vec::zero(), gate);
    return Vec::mul(positive, positive);
  }
  ARGOSY_KERNEL_INLINE static ValueAndSlope value_and_slope(const Constants&, Vec::F gate) {
    const Vec::F positive = Vec::max_or_second(Vec::zero(), gate);
    return {Vec::mul(positive, positive), Vec::mul(Vec::splat(2.0f), positive)};
  }
};
