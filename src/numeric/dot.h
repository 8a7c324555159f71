// The canonical dot products of contract 4.2 and 4.3, as naive twins: every kernel gives these
// bits.
//
// Two layers. The span functions set the floating-point environment themselves. The templates below
// them take elements from any callable and leave the environment to the caller, so that a loop over
// many outputs switches it once. In both the result has + 0 (no -0 comes out) and a NaN is
// 0x7FC00000. Test: tests/numeric/dot_test.cc.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <span>

#include "argosy/bfloat16.h"

namespace argosy::numeric {

// Precondition of all: x.size() == w.size(). K = 0 gives +0.

// TDPBF16PS: per block of 32 k two chains, even and odd k; acc = acc + (even + odd).
float dot_amx(std::span<const BFloat16> x, std::span<const BFloat16> w);

// VDPBF16PS: one chain, the odd element of a pair before the even one.
float dot_vdpbf16(std::span<const BFloat16> x, std::span<const BFloat16> w);

// One FMA chain over k ascending; bf16 weights are widened.
float dot_f32(std::span<const float> x, std::span<const float> w);
float dot_f32(std::span<const float> x, std::span<const BFloat16> w);

inline constexpr uint32_t kCanonicalNaN = 0x7FC00000u;

// The last step of every dot product.
inline float finish_dot(float acc) {
  const float sum = acc + 0.0f;
  return sum != sum ? std::bit_cast<float>(kCanonicalNaN) : sum;
}

// Precondition of the templates: platform::Denormals::kFlush is in force, and no compiler can move
// the call out of it (it is behind a call through a pointer, or a function that is not inlined).
// x(i) and w(i) give element i of [0, k) as fp32.

template <typename X, typename W>
float dot_amx_of(int64_t k, X x, W w) {
  float acc = 0.0f;
  for (int64_t block = 0; block < k; block += 32) {
    float even = 0.0f;
    float odd = 0.0f;
    for (int64_t i = block; i < k && i < block + 32; ++i) {
      float& chain = i % 2 == 0 ? even : odd;
      chain = std::fma(x(i), w(i), chain);
    }
    acc = acc + (even + odd);
  }
  return finish_dot(acc);
}

template <typename X, typename W>
float dot_vdpbf16_of(int64_t k, X x, W w) {
  float acc = 0.0f;
  for (int64_t i = 0; i < k; i += 2) {
    if (i + 1 < k) acc = std::fma(x(i + 1), w(i + 1), acc);
    acc = std::fma(x(i), w(i), acc);
  }
  return finish_dot(acc);
}

template <typename X, typename W>
float dot_f32_of(int64_t k, X x, W w) {
  float acc = 0.0f;
  for (int64_t i = 0; i < k; ++i) acc = std::fma(x(i), w(i), acc);
  return finish_dot(acc);
}

// Block-scaled weights (contract 4.3): acc = fma(partial, scale, acc) per block of `block_k` elements, the
// last one maybe shorter. partial(first, count) is one of the dot products above over those elements: that
// it has + 0 changes nothing, for acc is finished too.
template <typename Partial, typename Scale>
float dot_scaled_of(int64_t k, int64_t block_k, Partial partial, Scale scale) {
  float acc = 0.0f;
  for (int64_t first = 0; first < k; first += block_k) {
    const int64_t count = k - first < block_k ? k - first : block_k;
    acc = std::fma(partial(first, count), scale(first / block_k), acc);
  }
  return finish_dot(acc);
}

}  // namespace argosy::numeric
