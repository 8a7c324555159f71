// The inner loops over one row: largest magnitude of each block, scales, casts.
//
// One table per instruction set, picked at run time; all give the same bytes. Callers set the floating-point
// environment (denormals kept) and see to sizes. Floors: docs/perf/quantise.md. Test: tests/quant/kernel_test.cc.
#pragma once

#include <cstdint>
#include <span>

#include "argosy/cpu.h"
#include "argosy/number_formats.h"

namespace argosy::quant {

struct AmaxArgs {
  const std::byte* x = nullptr;  // n values, bf16 or fp32
  int64_t n = 0;
  int64_t block = 0;  // the last one may be partial
  uint32_t* amax =
      nullptr;  // [ceil(n / block)] fp32 bits of the largest magnitude; Inf or more: NaN or Inf inside
};

// How a format's e8m0 scale follows from amax: field(amax) - largest_exponent, and one more where the rule is ceil and
// the mantissa is beyond that of the largest element.
struct E8M0Args {
  const uint32_t* amax = nullptr;
  int64_t num_blocks = 0;
  int largest_exponent = 8;
  uint32_t ceil_above = kMantissaMask;  // mantissa bits; the floor rule: none is above this
  uint8_t zero_block_code = kE8M0One;
  uint8_t* codes = nullptr;
  float* factors = nullptr;  // 1 / scale

  static constexpr uint32_t kMantissaMask = 0x7FFFFF;
};

// fp32 scales of e4m3 codes: amax / 448, 1 for a block of zeros, at least 2^-149, NaN for a block that is not finite.
struct F32ScaleArgs {
  const uint32_t* amax = nullptr;
  int64_t num_blocks = 0;
  float* scales = nullptr;
};

struct EncodeArgs {
  const std::byte* x = nullptr;
  int64_t n = 0;
  int64_t block = 0;
  const float* scales = nullptr;  // per block: q = x / scale; NaN: the block becomes NaN
  bool reciprocal = false;        // scales hold exact reciprocals: q = x * scale
  // Per block, where scale = amax / 448 by the rule of contract 5; null for other scales.
  const uint32_t* amax = nullptr;
  ElementFormat element = ElementFormat::kE4M3;  // or kE2M1
  bool nan_overflow = false;
  bool stream = false;  // past the caches where whole lines can be
  // So many bytes after each line another is asked for: the cast is arithmetic only, and the memory would rest. A chunk's, so that
  // what follows a shorter one at a row's end is not left out. 0: none.
  int64_t ahead = 0;
  uint8_t* codes = nullptr;
};

struct DecodeArgs {
  const uint8_t* codes = nullptr;
  int64_t n = 0;
  int64_t block = 0;
  const float* scales = nullptr;
  bool power_of_two = false;  // every scale is one, or NaN
  ElementFormat element = ElementFormat::kE4M3;
  bool stream = false;
  std::byte* out = nullptr;
};

struct Kernel {
  Level level;  // that the CPU must have
  bool vbmi;    // and AVX512_VBMI beside it
  void (*amax_bf16)(const AmaxArgs& args);
  void (*amax_f32)(const AmaxArgs& args);
  void (*scales_f32)(const F32ScaleArgs& args);
  void (*scales_e8m0)(const E8M0Args& args);
  // The values of e8m0 scales; returns the largest word of them, as an unsigned number.
  uint32_t (*values_e8m0)(const uint8_t* codes, int64_t num_blocks, float* values);
  void (*encode_bf16)(const EncodeArgs& args);
  void (*encode_f32)(const EncodeArgs& args);
  void (*decode_bf16)(const DecodeArgs& args);
  void (*decode_f32)(const DecodeArgs& args);
};

extern const Kernel kKernelBase;
extern const Kernel kKernelAvx2;
extern const Kernel kKernelAvx512;
extern const Kernel kKernelVbmi;

// Those that this CPU can run, rising.
std::span<const Kernel* const> kernels();

// The best one of them of at most `level`.
const Kernel& kernel_for(Level level);

}  // namespace argosy::quant
