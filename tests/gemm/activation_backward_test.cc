// Activations: accuracy of value and slope against fp64, every level against the scalar twin, the
// weight inside, the kept pre-activations, what is refused.
//
// Mutations tried, each makes a test fail: the square's rounding error left out of the normal tail,
// a clamp's gradient multiplied instead of selected, d_up without the weight.
#include <cmath>
#include <limits>

#include "gemm/backward_case.h"
#include "numeric/activation.h"
#include "platform/float_env.h"

namespace argosy {
namespace {

using testing::below;
using testing::expect_error;
using testing::TestGroups;
using testing::TestMatrix;
using testing::Values;

constexpr ActivationKind kKinds[] = {ActivationKind::kSwiGlu, ActivationKind::kClampedSwiGlu,
                                     ActivationKind::kGeGlu, ActivationKind::kGeGluTanh,
                                     ActivationKind::kRelu2Glu};
static_assert(std::size(kKinds) == kNumActivations);

// Of one element, by the twin.
struct Element {
  float value = 0, slope = 0, h = 0, t = 0, d_gate = 0, d_up = 0;
};

template <typename Act>
__attribute__((noinline)) Element element_with(const Activation& activation, float gate, float up,
                                               float d_h, float weight) {
  const numeric::ActivationConstants c{activation.limit, activation.alpha};
  const numeric::ValueAndSlope both = Act::value_and_slope(c, gate);
  Element e{both.value, both.slope};
  const float value = Act::value(c, gate);
  EXPECT_TRUE(value == both.value || (value != value && both.value != both.value));
  const float weighted = weight * e.value;
  e.h = Act::join(c, weighted, up);
  e.t = d_h * Act::up_factor(c, up);
  e.d_gate = Act::select_gate(c, gate, (weight * e.t) * e.slope);
  e.d_up = Act::select_up(c, up, d_h * weighted);
  return e;
}

Element element(const Activation& activation, float gate, float up = 1, float d_h = 1,
                float weight = 1) {
  const platform::ScopedFloatEnv keep(platform::Denormals::kKeep);
  switch (activation.kind) {
    case ActivationKind::kSwiGlu:
      return element_with<numeric::SwiGlu>(activation, gate, up, d_h, weight);
    case ActivationKind::kClampedSwiGlu:
      return element_with<numeric::ClampedSwiGlu>(activation, gate, up, d_h, weight);
    case ActivationKind::kGeGlu:
      return element_with<numeric::GeGlu>(activation, gate, up, d_h, weight);
    case ActivationKind::kGeGluTanh:
      return element_with<numeric::GeGluTanh>(activation, gate, up, d_h, weight);
    case ActivationKind::kRelu2Glu:
      return element_with<numeric::Relu2Glu>(activation, gate, up, d_h, weight);
  }
  return {};
}

// act and act' in fp64, from the textbook.
struct Exact {
  double value = 0, slope = 0;
};
Exact exact(const Activation& activation, double g) {
  const auto silu = [](double x, double alpha) {
    const double s = 1 / (1 + std::exp(-alpha * x));
    return Exact{x * s, s + alpha * x * s * (1 / (1 + std::exp(alpha * x)))};
  };
  switch (activation.kind) {
    case ActivationKind::kSwiGlu:
      return silu(g, 1);
    case ActivationKind::kClampedSwiGlu:
      return silu(std::min(g, double{activation.limit}), activation.alpha);
    case ActivationKind::kGeGlu: {
      const double phi = 0.5 * std::erfc(-g / std::sqrt(2.0));
      return {g * phi, phi + g * std::exp(-g * g / 2) / std::sqrt(2 * M_PI)};
    }
    case ActivationKind::kGeGluTanh: {
      const double slope = 2 * std::sqrt(2 / M_PI);
      const double z = slope * (g + 0.044715 * g * g * g);
      const double s = 1 / (1 + std::exp(-z)), c = 1 / (1 + std::exp(z));
      return {g * s, s + g * s * c * slope * (1 + 3 * 0.044715 * g * g)};
    }
    case ActivationKind::kRelu2Glu:
      return {g > 0 ? g * g : 0, g > 0 ? 2 * g : 0};
  }
  return {};
}

// How far a value may be off, in halves of an ulp. A sigmoid's argument of size z, rounded, costs z
// more each time; the normal tail's square has its rounding error corrected, so it does not grow.
double half_ulps(ActivationKind kind, double g, double z) {
  if (kind == ActivationKind::kGeGlu) return g > 0 ? 4 : 8;
  return 6 + (kind == ActivationKind::kGeGluTanh ? 3 : 2) * z;
}

TEST(ActivationBackward, ValueAndSlopeAgreeWithFp64) {
  for (const ActivationKind kind : kKinds) {
    const Activation activation{kind, 7.0f, 1.702f};
    double worst_value = 0, worst_slope = 0;
    for (int i = -40000; i <= 40000; ++i) {
      const float g = static_cast<float>(i) * 0x1.4p-12f * (i % 3 == 0 ? 1.0f : 0.31f);
      const Element got = element(activation, g);
      const Exact want = exact(activation, g);
      const double z = kind == ActivationKind::kGeGluTanh
                           ? 1.6 * std::fabs(g) * (1 + 0.0447 * double{g} * g)
                           : 1.71 * std::fabs(g);
      const double unit = 0x1p-24 * half_ulps(kind, g, z);
      const double value_error = std::fabs(got.value - want.value);
      const double slope_error = std::fabs(got.slope - want.slope);
      const double slope_size = std::fabs(want.slope) + std::fabs(want.value) * (1 + z) * 0.5;
      // Exponentials that are denormal are rounded before they are multiplied by gate and more.
      const double least = 0x1p-149 * (1 + std::fabs(g)) * (1 + z);
      worst_value = std::max(worst_value, value_error / (unit * std::fabs(want.value) + least));
      worst_slope = std::max(worst_slope, slope_error / (unit * slope_size + least));
    }
    EXPECT_LE(worst_value, 1) << name_of(kind);
    EXPECT_LE(worst_slope, 1) << name_of(kind);
  }
}

TEST(ActivationBackward, SlopeIsTheDifferenceQuotient) {
  for (const ActivationKind kind : kKinds) {
    const Activation activation{kind, 7.0f, 1.702f};
    for (double g = -6; g < 6; g += 0.37) {
      constexpr double kStep = 1e-5;
      const double want =
          (exact(activation, g + kStep).value - exact(activation, g - kStep).value) / (2 * kStep);
      EXPECT_NEAR(exact(activation, g).slope, want, 1e-8) << name_of(kind) << " " << g;
      EXPECT_NEAR(element(activation, static_cast<float>(g)).slope, want, 1e-5)
          << name_of(kind) << " " << g;
    }
  }
}

TEST(ActivationBackward, ExtremesAndNaN) {
  constexpr float kHuge = 1e30f;
  for (const ActivationKind kind : kKinds) {
    const Activation activation{kind, 7.0f, 1.702f};
    const Element far_below = element(activation, -kHuge);
    EXPECT_EQ(far_below.value, 0.0f) << name_of(kind);
    EXPECT_EQ(far_below.slope, 0.0f) << name_of(kind);
    EXPECT_TRUE(std::isnan(element(activation, NAN).value)) << name_of(kind);
    EXPECT_TRUE(std::isnan(element(activation, NAN).slope)) << name_of(kind);
    EXPECT_EQ(element(activation, 0.0f).value, 0.0f) << name_of(kind);
  }
  for (const ActivationKind kind :
       {ActivationKind::kSwiGlu, ActivationKind::kGeGlu, ActivationKind::kGeGluTanh}) {
    EXPECT_EQ(element({kind}, kHuge).value, kHuge) << name_of(kind);
    EXPECT_EQ(element({kind}, kHuge).slope, 1.0f) << name_of(kind);
    EXPECT_EQ(element({kind}, 0.0f).slope, 0.5f) << name_of(kind);
  }
  // A clamp selects: what is not a number upstream does not pass, and at the limit the gradient
  // flows.
  const Activation clamped{ActivationKind::kClampedSwiGlu, 7.0f, 1.702f};
  EXPECT_EQ(element(clamped, 8.0f, 1.0f, NAN).d_gate, 0.0f);
  EXPECT_EQ(element(clamped, 1.0f, 7.5f, NAN).d_up, 0.0f);
  EXPECT_EQ(element(clamped, 1.0f, -7.5f, NAN).d_up, 0.0f);
  EXPECT_NE(element(clamped, 7.0f).d_gate, 0.0f);
  EXPECT_NE(element(clamped, 1.0f, -7.0f).d_up, 0.0f);
}

// Rows of random dtypes through a level.
struct RowsCase {
  Activation activation;
  TestGroups groups;
  int64_t columns;
  TestMatrix gate, up, d_h;
  std::vector<float> weights;
  DType out;

  RowsCase(std::mt19937& rng, ActivationKind kind, Values values)
      : activation{kind, 1.25f, 1.702f},
        groups(rng, {below(rng, 5), 0, 1 + below(rng, 20)}),
        columns(1 + below(rng, 50)),
        gate(groups.random_rows(rng, values, dtype(rng), columns)),
        up(groups.random_rows(rng, values, dtype(rng), columns)),
        d_h(groups.random_rows(rng, values, dtype(rng), columns)),
        out(dtype(rng)) {
    if (rng() % 3 == 0) return;
    weights.assign(static_cast<size_t>(groups.num_rows), NAN);
    groups.for_each_row([&](size_t, int64_t row) {
      weights[static_cast<size_t>(row)] = std::bit_cast<float>(testing::random_bits(rng, values));
    });
  }

  static DType dtype(std::mt19937& rng) { return rng() % 2 == 0 ? DType::kF32 : DType::kBF16; }
  ActivationRows rows() const {
    return {gate.view(), up.view(), groups.offsets, groups.sizes, weights};
  }
};

struct Outputs {
  TestMatrix d_gate, d_up, h;
  std::vector<float> d_weights;

  explicit Outputs(const RowsCase& one)
      : d_gate(one.out, one.groups.num_rows, one.columns, 1),
        d_up(d_gate),
        h(d_gate),
        d_weights(static_cast<size_t>(one.groups.num_rows), -7.0f) {}
  std::vector<uint32_t> weight_bits() const {
    std::vector<uint32_t> bits;
    for (const float weight : d_weights) bits.push_back(testing::bits_of(weight));
    return bits;
  }
};

Outputs run(const RowsCase& one, Level level, ThreadPool* pool) {
  Outputs out(one);
  const GemmOptions options{.level = level, .pool = pool, .activation = one.activation};
  const Status status =
      activation_backward(options, one.rows(), one.d_h.view(),
                          {out.d_gate.view(), out.d_up.view(), out.h.view(), out.d_weights});
  EXPECT_TRUE(status.ok()) << status.to_string();
  TestMatrix h(one.out, one.groups.num_rows, one.columns, 1);
  EXPECT_TRUE(activation_forward(options, one.rows(), h.view()).ok());
  EXPECT_TRUE(h.bytes() == out.h.bytes());
  return out;
}

__attribute__((noinline)) float fma_of(float a, float b, float c) { return std::fma(a, b, c); }

Outputs expected(const RowsCase& one) {
  Outputs out(one);
  one.groups.for_each_row([&](size_t, int64_t row) {
    const auto at = static_cast<size_t>(row);
    const float weight = one.weights.empty() ? 1.0f : one.weights[at];
    float lanes[16] = {};
    for (int64_t c = 0; c < one.columns; ++c) {
      const Element e = element(one.activation, one.gate.get(row, c), one.up.get(row, c),
                                one.d_h.get(row, c), weight);
      out.d_gate.set(row, c, e.d_gate);
      out.d_up.set(row, c, e.d_up);
      out.h.set(row, c, e.h);
      lanes[c % 16] = fma_of(e.t, e.value, lanes[c % 16]);
    }
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    out.d_weights[at] =
        lanes[0] != lanes[0] ? std::bit_cast<float>(numeric::kCanonicalNaN) : lanes[0];
  });
  return out;
}

TEST(ActivationBackward, EveryLevelGivesTheTwinsBits) {
  constexpr uint32_t kSeed = 20241110;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(3);
  for (const ActivationKind kind : kKinds) {
    for (int round = 0; round < 80; ++round) {
      const Values values = testing::kAllValues[static_cast<size_t>(round % 4)];
      const RowsCase one(rng, kind, values);
      const Outputs want = expected(one);
      for (const Level level : testing::usable_levels()) {
        SCOPED_TRACE(fmt::format("{} {} round {}", name_of(kind), name_of(level), round));
        const Outputs got = run(one, level, round % 2 == 0 ? nullptr : pool.get());
        ASSERT_TRUE(got.d_gate.bytes() == want.d_gate.bytes());
        ASSERT_TRUE(got.d_up.bytes() == want.d_up.bytes());
        ASSERT_TRUE(got.h.bytes() == want.h.bytes());
        ASSERT_EQ(got.weight_bits(), want.weight_bits());
      }
    }
  }
}

// d_weight against fp64, with a weight of 0: its gradient flows (contract 1, backward).
TEST(ActivationBackward, GradientOfAZeroWeightFlows) {
  const std::vector<float> gate = {1, -2, 0.5f}, up = {2, 3, -1}, d_h = {1, 0.5f, 4};
  const std::vector<float> weights = {0};
  const std::vector<int64_t> offsets = {0}, sizes = {1};
  double want = 0;
  for (size_t i = 0; i < 3; ++i) {
    want += double{d_h[i]} * exact({}, gate[i]).value * double{up[i]};
  }
  const auto view = [](const std::vector<float>& values) {
    return ConstTensorView(values.data(), DType::kF32, {1, 3});
  };
  for (const Level level : testing::usable_levels()) {
    std::vector<float> d_gate(3, 9), d_up(3, 9), d_weight(1);
    ASSERT_TRUE(activation_backward({.level = level},
                                    {view(gate), view(up), offsets, sizes, weights}, view(d_h),
                                    {TensorView(d_gate.data(), DType::kF32, {1, 3}),
                                     TensorView(d_up.data(), DType::kF32, {1, 3}),
                                     {},
                                     d_weight})
                    .ok());
    EXPECT_NEAR(double{d_weight[0]}, want, 1e-6) << name_of(level);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(std::fabs(d_gate[i]) + std::fabs(d_up[i]), 0.0f);
  }
}

// gate, up and h in one pass equal the plain product of each matrix, and the fused forward; h again
// from fp32 pre-activations is the same bits.
TEST(Preactivation, EqualsThePlainProductsAndTheFusedForward) {
  constexpr uint32_t kSeed = 20241111;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(2);
  for (testing::GemmSpec spec : testing::all_arithmetics()) {
    if (spec.kind != PackedWeights::Kind::kGateUp) continue;
    for (const int64_t k : {33, 1100}) {
      spec.n = 1 + below(rng, 70);
      spec.k = k;
      spec.sizes = {3, 0, 14 + below(rng, 20)};
      spec.gaps = {1, 0, 2};
      spec.tail = 1;
      spec.seed = static_cast<uint32_t>(rng());
      spec.activation.kind = kKinds[static_cast<size_t>(below(rng, kNumActivations))];
      SCOPED_TRACE(spec.text());
      const testing::GemmCase gemm(spec);
      for (const Level level : testing::usable_levels()) {
        SCOPED_TRACE(name_of(level));
        TestMatrix gate(DType::kF32, gemm.num_rows(), spec.n, 1),
            up = gate, again(spec.rows, gemm.num_rows(), spec.n);
        TestMatrix h(spec.rows, gemm.num_rows(), spec.n, spec.out_padding);
        const GemmOptions options{.level = level,
                                  .dot_order = spec.order,
                                  .pool = rng() % 2 == 0 ? pool.get() : nullptr,
                                  .activation = spec.activation};
        const Status status = grouped_gemm_preactivation(options, gemm.ragged(), gemm.weights(),
                                                         gate.view(), up.view(), h.view());
        ASSERT_TRUE(status.ok()) << status.to_string();
        ASSERT_TRUE(h.bytes() == gemm.run(level));
        const ActivationRows rows{std::as_const(gate).view(), std::as_const(up).view(),
                                  gemm.offsets(), spec.sizes};
        ASSERT_TRUE(activation_forward(options, rows, again.view()).ok());
        ASSERT_TRUE(again.bytes() == h.bytes());
        for (size_t g = 0; g < spec.sizes.size(); ++g) {
          for (int64_t row = gemm.offsets()[g]; row < gemm.offsets()[g] + spec.sizes[g]; ++row) {
            for (int64_t n = 0; n < spec.n; ++n) {
              ASSERT_EQ(testing::bits_of(gate.get(row, n)),
                        testing::bits_of(gemm.gate_product(g, row, n)));
              ASSERT_EQ(testing::bits_of(up.get(row, n)),
                        testing::bits_of(gemm.up_product(g, row, n)));
            }
          }
        }
      }
    }
  }
}

TEST(Preactivation, LargeOutputsGiveTheSameBits) {
  testing::GemmSpec spec;
  for (const testing::GemmSpec& one : testing::all_arithmetics()) {
    if (one.kind == PackedWeights::Kind::kGateUp && one.rows == DType::kBF16) spec = one;
  }
  spec.bias = false;
  spec.n = 521;
  spec.k = 33;
  spec.sizes = {1500, 0, 560};
  spec.gaps = {1, 0, 2};
  spec.seed = 20261130;
  spec.values = Values::kSpecial;
  SCOPED_TRACE(spec.text());
  const testing::GemmCase gemm(spec);
  testing::expect_levels_agree([&](Level level, ThreadPool* pool) {
    TensorView gate, up;
    const Tensor gates = testing::large_output(gemm.num_rows(), spec.n, &gate);
    const Tensor ups = testing::large_output(gemm.num_rows(), spec.n, &up);
    TestMatrix h(spec.rows, gemm.num_rows(), spec.n, 1);
    const GemmOptions options{
        .level = level, .dot_order = spec.order, .pool = pool, .activation = spec.activation};
    const Status status =
        grouped_gemm_preactivation(options, gemm.ragged(), gemm.weights(), gate, up, h.view());
    EXPECT_TRUE(status.ok()) << status.to_string();
    std::vector<std::byte> all(gates.bytes().begin(), gates.bytes().end());
    all.insert(all.end(), ups.bytes().begin(), ups.bytes().end());
    all.insert(all.end(), h.bytes().begin(), h.bytes().end());
    return all;
  });
}

TEST(ActivationBackward, RefusesWhatDoesNotFit) {
  std::mt19937 rng(9);
  RowsCase one(rng, ActivationKind::kSwiGlu, Values::kOrdinary);
  Outputs out(one);
  const GemmOptions options{.level = Level::kGeneric};
  const StatusCode kInvalid = StatusCode::kInvalidArgument;
  const TestMatrix narrow(DType::kF32, one.groups.num_rows, one.columns + 1);
  const ActivationGradients to{out.d_gate.view(), out.d_up.view()};
  expect_error(activation_backward(options, one.rows(), narrow.view(), to), kInvalid,
               {"d_h is F32"});
  const TestMatrix longer(DType::kF32, one.groups.num_rows + 1, one.columns);
  expect_error(activation_backward(options, one.rows(), longer.view(), to), kInvalid,
               {"d_h is F32", "gate is", "shapes must be equal"});
  ActivationGradients same{out.d_gate.view(), out.d_gate.view()};
  expect_error(activation_backward(options, one.rows(), one.d_h.view(), same), kInvalid,
               {"overlaps"});
  const std::vector<float> one_weight = {1.0f};
  ActivationRows rows = one.rows();
  rows.weights = one_weight;
  expect_error(activation_backward(options, rows, one.d_h.view(), to), kInvalid, {"1 weights for"});
  GemmOptions unknown = options;
  unknown.activation.kind = static_cast<ActivationKind>(kNumActivations);
  expect_error(activation_backward(unknown, one.rows(), one.d_h.view(), to), kInvalid,
               {"activation 5 is unknown"});
  ActivationGradients short_weights = to;
  short_weights.d_weights = std::span<float>(out.d_weights).first(1);
  expect_error(activation_backward(options, one.rows(), one.d_h.view(), short_weights), kInvalid,
               {"d_weights has 1 values"});
  // In place is fine: element for element.
  TestMatrix gate = one.gate;
  rows = one.rows();
  rows.gate = std::as_const(gate).view();
  ActivationGradients in_place{gate.view(), out.d_up.view()};
  EXPECT_TRUE(activation_backward(options, rows, one.d_h.view(), in_place).ok());
}

}  // namespace
}  // namespace argosy
