// The activation of one row, forward and backward, 16 columns at a time, included into the
// anonymous namespace of a level's file after `Vec`, its activations (with `Constants` and
// `ValueAndSlope`) and store_16. The columns of a partial 16 count as zeros: they add zero to the
// sums. Test: tests/gemm/activation_backward_test.cc.

constexpr int kLanes16 = 16;
constexpr int kVectors16 = kLanes16 / Vec::kLanes;

struct Lanes {
  Vec::F of[kVectors16];
};

ARGOSY_KERNEL_INLINE Lanes load_lanes(const ActivationRow<const std::byte>& row, int64_t column,
                                      int64_t count) {
  alignas(64) float values[kLanes16];
  const int64_t element = row.is_f32 ? 4 : 2;
  const std::byte* from = row.data + column * element;
  alignas(64) std::byte padded[kLanes16 * 4];
  if (count < kLanes16) {
    std::memset(padded, 0, sizeof(padded));
    std::memcpy(padded, from, static_cast<size_t>(count * element));
    from = padded;
  }
  if (row.is_f32) {
    std::memcpy(values, from, sizeof(values));
  } else {
    uint16_t halves[kLanes16];
    std::memcpy(halves, from, sizeof(halves));
    for (int i = 0; i < kLanes16; ++i) {
      values[i] = std::bit_cast<float>(static_cast<uint32_t>(halves[i]) << 16);
    }
  }
  Lanes lanes;
  for (int v = 0; v < kVectors16; ++v) lanes.of[v] = Vec::load(values + v * Vec::kLanes);
  return lanes;
}

ARGOSY_KERNEL_INLINE void store_lanes(const ActivationRow<std::byte>& row, int64_t column,
                                      int64_t count, const Lanes& x) {
  if (row.is_f32) {
    store_16(row.data + column * 4, static_cast<float*>(nullptr), x.of, count);
  } else {
    store_16(row.data + column * 2, static_cast<BFloat16*>(nullptr), x.of, count);
  }
}

template <typename Act>
ARGOSY_KERNEL_TARGET void forward_row(const ActivationRowArgs& args) {
  const Constants constants{args.limit, args.alpha};
  const Vec::F weight = Vec::splat(args.weight);
  for (int64_t c = 0; c < args.columns; c += kLanes16) {
    const int64_t count = args.columns - c;
    const Lanes gate = load_lanes(args.gate, c, count), up = load_lanes(args.up, c, count);
    Lanes h;
    for (int v = 0; v < kVectors16; ++v) {
      h.of[v] = Act::join(constants, Vec::mul(weight, Act::value(constants, gate.of[v])), up.of[v]);
    }
    store_lanes(args.h, c, count, h);
  }
}

// Lanes i and i + 8, then i + 4, + 2, + 1.
ARGOSY_KERNEL_INLINE float sum_of_lanes(const Lanes& x) {
  alignas(64) float lanes[kLanes16];
  for (int v = 0; v < kVectors16; ++v) Vec::store(lanes + v * Vec::kLanes, x.of[v]);
  for (int half = kLanes16 / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return lanes[0] != lanes[0] ? std::bit_cast<float>(numeric::kCanonicalNaN) : lanes[0];
}

template <typename Act>
ARGOSY_KERNEL_TARGET void backward_row(const ActivationRowArgs& args) {
  const Constants constants{args.limit, args.alpha};
  const Vec::F weight = Vec::splat(args.weight);
  Lanes sums;
  for (int v = 0; v < kVectors16; ++v) sums.of[v] = Vec::zero();
  for (int64_t c = 0; c < args.columns; c += kLanes16) {
    const int64_t count = args.columns - c;
    const Lanes gate = load_lanes(args.gate, c, count), up = load_lanes(args.up, c, count);
    const Lanes d_h = load_lanes(args.d_h, c, count);
    Lanes d_gate, d_up, h;
    for (int v = 0; v < kVectors16; ++v) {
      const ValueAndSlope act = Act::value_and_slope(constants, gate.of[v]);
      const Vec::F weighted = Vec::mul(weight, act.value);
      const Vec::F t = Vec::mul(d_h.of[v], Act::up_factor(constants, up.of[v]));
      d_gate.of[v] =
          Act::select_gate(constants, gate.of[v], Vec::mul(Vec::mul(weight, t), act.slope));
      d_up.of[v] = Act::select_up(constants, up.of[v], Vec::mul(d_h.of[v], weighted));
      h.of[v] = Act::join(constants, weighted, up.of[v]);
      sums.of[v] = Vec::fma(t, act.value, sums.of[v]);
    }
    store_lanes(args.d_gate, c, count, d_gate);
    store_lanes(args.d_up, c, count, d_up);
    if (args.h.data != nullptr) store_lanes(args.h, c, count, h);
  }
  if (args.d_weight != nullptr) *args.d_weight = sum_of_lanes(sums);
}

template <typename... Acts>
constexpr ActivationRowKernels rows_with() {
  static_assert(sizeof...(Acts) == kNumActivations);
  return {.forward = {forward_row<Acts>...}, .backward = {backward_row<Acts>...}};
}

// In the order of ActivationKind.
constexpr ActivationRowKernels kRows =
    rows_with<SwiGlu, ClampedSwiGlu, GeGlu, GeGluTanh, Relu2Glu>();
