// The activations: names, checks, and the scalar twin against the published formula in fp64 over all of fp32.
//
// Mutations tried, each makes a test fail: the gate clamped below as well, up not clamped, alpha left out, the
// + 1 left out, min(limit, x) that swallows a NaN.
#include "argosy/activation.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "numeric/elementary.h"
#include "platform/float_env.h"

namespace argosy {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

float clamped(float gate, float up, float limit = 7.0f, float alpha = 1.702f) {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  return numeric::clamped_swiglu_f32(gate, up, limit, alpha);
}

double published(double gate, double up, double limit, double alpha) {
  const double g = std::min(gate, limit);
  return (std::clamp(up, -limit, limit) + 1) * (g / (1 + std::exp(-alpha * g)));
}

TEST(Activation, AgreesWithThePublishedFormula) {
  constexpr uint32_t kSeed = 20240620;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  std::normal_distribution<float> normal(0, 5);
  for (int i = 0; i < 200000; ++i) {
    const float gate = normal(rng), up = normal(rng);
    const float limit = i % 2 == 0 ? 7.0f : 2.0f;
    const float alpha = i % 3 == 0 ? 1.0f : 1.702f;
    const double want = published(gate, up, limit, alpha);
    // sigmoid loses |alpha g| ulp of its argument at the far negative end; u + 1 may cancel.
    const double g = std::min(gate, limit);
    const double activated = g / (1 + std::exp(-double{alpha} * g));
    const double bound = 0x1p-22 * (3 + std::fabs(alpha * g)) * std::fabs(want) +
                         0x1p-24 * std::fabs(activated) + 1e-37;
    ASSERT_NEAR(clamped(gate, up, limit, alpha), want, bound) << gate << " " << up;
  }
}

TEST(Activation, ClampsWhereItSays) {
  EXPECT_EQ(clamped(8.0f, 0.0f), clamped(7.0f, 0.0f));
  EXPECT_EQ(clamped(kInfinity, 0.0f), clamped(7.0f, 0.0f));
  EXPECT_LT(clamped(std::nextafter(7.0f, 0.0f), 3.0f), clamped(7.0f, 3.0f));
  EXPECT_EQ(clamped(1.0f, 8.0f), clamped(1.0f, 7.0f));
  EXPECT_EQ(clamped(1.0f, -8.0f), clamped(1.0f, -7.0f));
  EXPECT_EQ(clamped(1.0f, kInfinity), clamped(1.0f, 7.0f));
  EXPECT_EQ(clamped(1.0f, -kInfinity), clamped(1.0f, -7.0f));
  // The gate has no lower clamp: its own limit there is 0.
  EXPECT_NE(clamped(-8.0f, 1.0f), clamped(-7.0f, 1.0f));
  EXPECT_EQ(clamped(-1e30f, 1.0f), 0.0f);
  EXPECT_EQ(clamped(0.0f, 3.0f), 0.0f);
  EXPECT_EQ(clamped(2.0f, -1.0f), 0.0f);
}

TEST(Activation, NaNGoesThrough) {
  for (const float other : {0.0f, 1.0f, -9.0f, 9.0f, kInfinity, kNaN}) {
    EXPECT_TRUE(std::isnan(clamped(kNaN, other))) << other;
    EXPECT_TRUE(std::isnan(clamped(other, kNaN))) << other;
  }
}

TEST(Activation, NamesAndChecks) {
  EXPECT_EQ(to_string(Activation{}), "swiglu");
  Activation clamped_kind;
  clamped_kind.kind = ActivationKind::kClampedSwiGlu;
  EXPECT_EQ(to_string(clamped_kind), "clamped_swiglu limit 7 alpha 1.702");
  EXPECT_TRUE(validate(clamped_kind).ok());
  for (const float bad : {0.0f, -1.0f, kInfinity, kNaN}) {
    Activation activation = clamped_kind;
    activation.limit = bad;
    EXPECT_EQ(validate(activation).code(), StatusCode::kInvalidArgument);
    EXPECT_NE(validate(activation).message().find("limit of clamped_swiglu"), std::string::npos);
    activation = clamped_kind;
    activation.alpha = bad;
    EXPECT_NE(validate(activation).message().find("alpha of clamped_swiglu"), std::string::npos);
    activation.kind = ActivationKind::kSwiGlu;  // reads neither
    EXPECT_TRUE(validate(activation).ok());
  }
  for (const int32_t kind : {-1, kNumActivations}) {
    Activation activation;
    activation.kind = static_cast<ActivationKind>(kind);
    EXPECT_EQ(validate(activation).code(), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace argosy
