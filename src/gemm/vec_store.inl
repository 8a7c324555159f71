// The epilogue in vectors, included into the anonymous namespace of a level's file after `Vec`. The
// operations of numeric::silu_f32 and clamped_swiglu_f32, one for one, so the bits are theirs. Test:
// tests/gemm/kernels_test.cc.

constexpr int kVectorsOf16 = static_cast<int>(kTileColumns) / Vec::kLanes;

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

ARGOSY_KERNEL_INLINE Vec::F sigmoid(Vec::F x) {
  const Vec::Mask positive = Vec::is_positive(x);
  const Vec::F one = Vec::splat(1.0f);
  const Vec::F e = exp_nonpositive(Vec::select(positive, Vec::negate(x), x));
  return Vec::div(Vec::select(positive, one, e), Vec::add(one, e));
}

struct SwiGlu {
  ARGOSY_KERNEL_INLINE static Vec::F of(const StoreArgs&, Vec::F gate, Vec::F up) {
    return Vec::mul(Vec::mul(gate, sigmoid(gate)), up);
  }
};

struct ClampedSwiGlu {
  ARGOSY_KERNEL_INLINE static Vec::F of(const StoreArgs& args, Vec::F gate, Vec::F up) {
    // A NaN, second operand of minimum and maximum, goes through.
    const Vec::F limit = Vec::splat(args.limit);
    const Vec::F g = Vec::min_or_second(limit, gate);
    const Vec::F u = Vec::max_or_second(Vec::negate(limit), Vec::min_or_second(limit, up));
    const Vec::F a = Vec::mul(g, sigmoid(Vec::mul(Vec::splat(args.alpha), g)));
    return Vec::fma(a, u, a);
  }
};

// The finished products of the columns from `column` on.
template <bool kBias>
ARGOSY_KERNEL_INLINE Vec::F products_at(const float* from, const float* bias, int64_t column) {
  const Vec::F products = Vec::load(from + column);
  if constexpr (kBias) return Vec::add(products, Vec::load(bias + column));
  return products;
}

template <typename Out, bool kBias>
ARGOSY_KERNEL_TARGET void store_plain(const StoreArgs& args) {
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const float* from = args.scratch + r * kPanelColumns;
    std::byte* to = args.out + r * args.row_stride_bytes;
    for (int64_t c = 0; c < args.num_columns; c += kTileColumns) {
      Vec::F x[kVectorsOf16];
      for (int i = 0; i < kVectorsOf16; ++i) {
        x[i] = products_at<kBias>(from, args.bias, c + i * Vec::kLanes);
      }
      store_16(to + c * int64_t{sizeof(Out)}, static_cast<Out*>(nullptr), x, args.num_columns - c);
    }
  }
}

template <typename Out, typename Act, bool kBias>
ARGOSY_KERNEL_TARGET void store_gate_up(const StoreArgs& args) {
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const float* from = args.scratch + r * kPanelColumns;
    Vec::F x[kVectorsOf16];
    for (int i = 0; i < kVectorsOf16; ++i) {
      const int64_t column = i * Vec::kLanes;
      x[i] = Act::of(args, products_at<kBias>(from, args.bias, column),
                     products_at<kBias>(from, args.bias, kTileColumns + column));
    }
    store_16(args.out + r * args.row_stride_bytes, static_cast<Out*>(nullptr), x, args.num_columns);
  }
}

#include "gemm/stores_of.inl"
