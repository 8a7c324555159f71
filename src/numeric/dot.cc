// Compilers do not model MXCSR: without the barriers below they may move arithmetic to the far side
// of a change of it. Each barrier makes the arithmetic depend on a volatile statement inside the
// scope. Test: tests/numeric/dot_test.cc, which holds denormals against the golden bits at every -O
// level.
#include "numeric/dot.h"

#include "base/check.h"
#include "platform/float_env.h"

namespace argosy::numeric {
namespace {

// The returned pointer is known to the compiler only from here on.
template <typename T>
const T* pinned(const T* pointer) {
  __asm__ volatile("" : "+r"(pointer) : : "memory");
  return pointer;
}

// The value must exist before this statement.
float pinned(float value) {
  __asm__ volatile("" : "+x"(value) : : "memory");
  return value;
}

float widened(float value) { return value; }
float widened(BFloat16 value) { return value.to_float(); }

// `dot` over x and w with denormals flushed.
template <typename X, typename W, typename Dot>
float flushed(std::span<const X> x, std::span<const W> w, Dot dot) {
  ARGOSY_CHECK(x.size() == w.size(), "x has {} elements, w has {}", x.size(), w.size());
  const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
  const X* x_data = pinned(x.data());
  const W* w_data = pinned(w.data());
  const auto x_at = [x_data](int64_t i) { return widened(x_data[i]); };
  const auto w_at = [w_data](int64_t i) { return widened(w_data[i]); };
  return pinned(dot(std::ssize(x), x_at, w_at));
}

}  // namespace

float dot_amx(std::span<const BFloat16> x, std::span<const BFloat16> w) {
  return flushed(x, w, [](int64_t k, auto x_at, auto w_at) { return dot_amx_of(k, x_at, w_at); });
}

float dot_vdpbf16(std::span<const BFloat16> x, std::span<const BFloat16> w) {
  return flushed(x, w,
                 [](int64_t k, auto x_at, auto w_at) { return dot_vdpbf16_of(k, x_at, w_at); });
}

float dot_f32(std::span<const float> x, std::span<const float> w) {
  return flushed(x, w, [](int64_t k, auto x_at, auto w_at) { return dot_f32_of(k, x_at, w_at); });
}

float dot_f32(std::span<const float> x, std::span<const BFloat16> w) {
  return flushed(x, w, [](int64_t k, auto x_at, auto w_at) { return dot_f32_of(k, x_at, w_at); });
}

}  // namespace argosy::numeric
