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

// acc plus a block's partial by the scales of both sides (contract 5; 1 of a side that has none). `are_e8m0`: the
// exponents are added as integers, and 0 stands for code 0, 2^-127, which fp32 arithmetic that flushes cannot hold.
inline float add_scaled(float partial, float scale_x, float scale_w, bool are_e8m0, float acc) {
  constexpr float kLargest = 0x1p127f;
  float scale = scale_x * scale_w;
  bool is_above = scale > kLargest;
  if (are_e8m0) {
    constexpr int kNaNCode = 255, kBias = 127;
    const auto code_x = static_cast<int>(std::bit_cast<uint32_t>(scale_x) >> 23);
    const auto code_w = static_cast<int>(std::bit_cast<uint32_t>(scale_w) >> 23);
    const int code = code_x + code_w - kBias;
    const bool is_nan = code_x == kNaNCode || code_w == kNaNCode;
    is_above = !is_nan && code >= kNaNCode;
    if (!is_nan && !is_above) {
      scale = std::bit_cast<float>(code <= 0 ? 0u : static_cast<uint32_t>(code) << 23);
    }
  }
  return is_above ? std::fma(partial * scale_x, scale_w, acc) : std::fma(partial, scale, acc);
}

// Block-scaled inputs (contract 4.3): per block of `block_k` elements, the last one maybe shorter,
// acc = add(partial, first element, acc). partial(first, count) is one of the dot products above over those
// elements: that it has + 0 changes nothing, for acc is finished too.
template <typename Partial, typename Add>
float dot_blocks_of(int64_t k, int64_t block_k, Partial partial, Add add) {
  float acc = 0.0f;
  for (int64_t first = 0; first < k; first += block_k) {
    const int64_t count = k - first < block_k ? k - first : block_k;
    acc = add(partial(first, count), first, acc);
  }
  return finish_dot(acc);
}

}  // namespace argosy::numeric
