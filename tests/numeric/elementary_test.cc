// The accuracy each function of numeric/elementary.h promises, over strided sweeps of all bit
// patterns against long double.
#include "numeric/elementary.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace argosy::numeric {
namespace {

constexpr uint32_t kStride = 2003;  // prime: every exponent and all low bits turn up

// |got - want| in fp32 ulps of want, denormal ulps below 2^-126.
double ulps(float got, long double want) {
  const long double size = std::max(std::fabs(want), 0x1p-126L);
  const long double ulp = std::ldexp(1.0L, std::ilogb(size) - 23);
  return static_cast<double>(std::fabs(static_cast<long double>(got) - want) / ulp);
}

template <typename Visit>
void for_floats(Visit visit) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += kStride) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isfinite(x)) visit(x);
  }
}

TEST(ExpF32, StaysBelowTheStatedUlps) {
  double worst = 0.0;
  double worst_denormal = 0.0;
  for_floats([&](float x) {
    const long double want = std::exp(static_cast<long double>(x));
    const float got = exp_f32(x);
    if (want >= 0x1.ffffffp127L) {
      EXPECT_TRUE(std::isinf(got)) << x;
      return;
    }
    if (want >= 0x1.fffffep127L) return;  // either side of the limit is right
    double& at = want < 0x1p-126L ? worst_denormal : worst;
    at = std::max(at, ulps(got, want));
  });
  RecordProperty("worst_ulps", std::to_string(worst));
  EXPECT_LT(worst, 1.1);
  EXPECT_LT(worst_denormal, 1.1);
}

TEST(ExpF32, DenseAroundTheLimits) {
  for (const float centre : {88.72284f, -87.33654f, -103.97208f, 0.34657f, -0.34657f}) {
    float x = centre;
    for (int i = 0; i < 2000; ++i) x = std::nextafter(x, -200.0f);
    for (int i = 0; i < 4000; ++i, x = std::nextafter(x, 200.0f)) {
      const long double want = std::exp(static_cast<long double>(x));
      if (want >= 0x1.fffffep127L) continue;
      ASSERT_LT(ulps(exp_f32(x), want), 1.1) << x;
    }
  }
}

TEST(ExpF32, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_f32(0.0f), 1.0f);
  EXPECT_EQ(exp_f32(-0.0f), 1.0f);
  EXPECT_EQ(exp_f32(inf), inf);
  EXPECT_EQ(exp_f32(-inf), 0.0f);
  EXPECT_TRUE(std::isnan(exp_f32(std::numeric_limits<float>::quiet_NaN())));
}

TEST(SigmoidF32, AccurateDownToTheSmallestDenormal) {
  double worst = 0.0;
  for_floats([&](float x) {
    const long double e = std::exp(-static_cast<long double>(std::fabs(x)));
    const long double want = (x > 0 ? 1.0L : e) / (1.0L + e);
    worst = std::max(worst, ulps(sigmoid_f32(x), want));
  });
  RecordProperty("worst_ulps", std::to_string(worst));
  EXPECT_LT(worst, 2.5);
  EXPECT_EQ(sigmoid_f32(0.0f), 0.5f);
}

TEST(SiluF32, AgreesWithLongDouble) {
  for_floats([&](float x) {
    const long double wide = x;
    const long double e = std::exp(-std::fabs(wide));
    const long double want = wide * (x > 0 ? 1.0L : e) / (1.0L + e);
    // Where the sigmoid is denormal its half ulp is multiplied by x.
    const long double tolerance = std::max(3e-7L * std::fabs(want), 105 * 0x1p-149L);
    ASSERT_LE(std::fabs(silu_f32(x) - want), tolerance) << x;
  });
}

TEST(ExpNonpositiveF64, StaysBelowTheStatedError) {
  long double worst = 0.0;
  for_floats([&](float x) {
    const double at = -std::fabs(static_cast<double>(x)) * 1.0000000123;
    const long double want = std::exp(static_cast<long double>(at));
    const double got = exp_nonpositive_f64(at);
    if (at < -708.0) {
      EXPECT_EQ(got, 0.0) << at;
      return;
    }
    worst = std::max(worst, std::fabs(got - want) / want);
  });
  EXPECT_LT(worst, 1e-15L);
  EXPECT_EQ(exp_nonpositive_f64(0.0), 1.0);
  EXPECT_EQ(exp_nonpositive_f64(-std::numeric_limits<double>::max()), 0.0);
}

TEST(Log1pQuotientF64, StaysBelowTheStatedError) {
  long double worst = 0.0;
  for_floats([&](float x) {
    if (x <= 0.0f || x > 1.0f) return;
    const long double want = std::log1p(static_cast<long double>(x)) / static_cast<long double>(x);
    worst = std::max(worst, std::fabs(log1p_quotient_f64(static_cast<double>(x)) - want) / want);
  });
  EXPECT_LT(worst, 1e-15L);
  EXPECT_EQ(log1p_quotient_f64(0.0), 1.0);
}

}  // namespace
}  // namespace argosy::numeric
