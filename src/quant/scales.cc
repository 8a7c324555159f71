// See scales.h.
#include "quant/scales.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "quant/element.h"

namespace argosy::quant {
namespace {

constexpr float kE4M3Max = 448.0f;
constexpr float kE2M1Max = 6.0f;
constexpr uint32_t kAboveE4M3Max = 0x600000;  // mantissa of 448 = 1.75 * 2^8
constexpr uint32_t kAboveE2M1Max = 0x400000;  // mantissa of 6 = 1.5 * 2^2
constexpr uint8_t kE4M3One = 0x38;

float at_least_tiny(float value) { return value == 0.0f ? std::bit_cast<float>(kTinyBits) : value; }

void store_f32(const Kernel& kernel, const uint32_t* amax, int64_t num_blocks, std::byte* scales,
               float* factors) {
  kernel.scales_f32({amax, num_blocks, factors});
  std::memcpy(scales, factors, static_cast<size_t>(num_blocks) * sizeof(float));
}

void store_e8m0(const Kernel& kernel, const ScaleRule& rule, const uint32_t* amax,
                int64_t num_blocks, std::byte* scales, float* factors) {
  const bool e4m3 = rule.info.element == ElementFormat::kE4M3;
  E8M0Args args;
  args.amax = amax;
  args.num_blocks = num_blocks;
  args.largest_exponent = e4m3 ? 8 : 2;
  if (rule.e8m0_rule == E8M0Rule::kCeil) args.ceil_above = e4m3 ? kAboveE4M3Max : kAboveE2M1Max;
  args.zero_block_code = rule.zero_block_code;
  args.codes = reinterpret_cast<uint8_t*>(scales);
  args.factors = factors;
  kernel.scales_e8m0(args);
}

void store_nvfp4(float tensor, const uint32_t* amax, int64_t num_blocks, std::byte* scales,
                 float* factors) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    uint8_t code = kE4M3One;
    float factor = 1.0f;
    if (amax[b] >= kInfBits) {
      code = kE4M3Bits.nan_code;
      factor = std::numeric_limits<float>::quiet_NaN();
    } else if (amax[b] != 0) {
      code =
          encode_element(ElementFormat::kE4M3, std::bit_cast<float>(amax[b]) / kE2M1Max / tensor);
      // A block far below the tensor's largest keeps what the smallest scale can carry.
      if (code == 0) code = 1;
      factor = at_least_tiny(decode_element(ElementFormat::kE4M3, code) * tensor);
    }
    scales[b] = static_cast<std::byte>(code);
    factors[b] = factor;
  }
}

}  // namespace

ScaleRule rule_of(BlockFormat format, const QuantiseOptions& options) {
  ScaleRule rule;
  rule.format = format;
  rule.info = info_of(format);
  const bool ceil = format == BlockFormat::kE4M3Row128E8M0 || format == BlockFormat::kMxfp8Ceil;
  rule.e8m0_rule = options.e8m0_rule.value_or(ceil ? E8M0Rule::kCeil : E8M0Rule::kFloor);
  rule.zero_block_code = options.zero_block_code;
  return rule;
}

float tensor_scale(uint32_t amax) {
  return amax == 0 ? 1.0f : at_least_tiny(std::bit_cast<float>(amax) / (kE4M3Max * kE2M1Max));
}

void store_scales(const Kernel& kernel, const ScaleRule& rule, float tensor, const uint32_t* amax,
                  int64_t num_blocks, std::byte* scales, float* factors) {
  if (rule.info.scale_dtype == DType::kF32)
    return store_f32(kernel, amax, num_blocks, scales, factors);
  if (rule.info.scale_dtype == DType::kE8M0) {
    return store_e8m0(kernel, rule, amax, num_blocks, scales, factors);
  }
  store_nvfp4(tensor, amax, num_blocks, scales, factors);
}

ScaleFault fault_of(float scale) {
  if (std::isnan(scale)) return ScaleFault::kNaN;
  return scale < 0.0f || std::isinf(scale) ? ScaleFault::kOutsideRule : ScaleFault::kNone;
}

float scale_at(const BlockFormatInfo& info, const std::byte* scales, int64_t index) {
  const auto code = static_cast<uint8_t>(scales[info.scale_dtype == DType::kF32 ? 0 : index]);
  if (info.scale_dtype == DType::kE8M0) return std::bit_cast<float>(e8m0_bits(code));
  if (info.scale_dtype == DType::kE4M3) return decode_element(ElementFormat::kE4M3, code);
  float scale = 0;
  std::memcpy(&scale, scales + index * size_of(DType::kF32), sizeof(scale));
  return scale;
}

int64_t load_scales(const Kernel& kernel, const BlockFormatInfo& info, float tensor,
                    const std::byte* scales, int64_t num_blocks, bool nan_is_fault,
                    float* factors) {
  // Whole loops of one kind, so that a compiler can turn them into vectors; who is at fault is asked afterwards.
  const auto* const __restrict codes = reinterpret_cast<const uint8_t*>(scales);
  float* const __restrict to = factors;
  // As unsigned numbers, negative and non-finite ones are the largest; -0 is neither.
  uint32_t largest = 0;
  if (info.scale_dtype == DType::kE8M0) {
    largest = kernel.values_e8m0(codes, num_blocks, to);
  } else if (info.scale_dtype == DType::kF32) {
    std::memcpy(to, codes, static_cast<size_t>(num_blocks) * sizeof(float));
  } else {
    for (int64_t b = 0; b < num_blocks; ++b) {
      to[b] = decode_element(ElementFormat::kE4M3, codes[b]);
    }
  }
  for (int64_t b = 0; info.scale_dtype != DType::kE8M0 && b < num_blocks; ++b) {
    const uint32_t word = std::bit_cast<uint32_t>(to[b]);
    largest = std::max(largest, word);
  }
  int64_t first = -1;
  for (int64_t b = 0; largest >= kInfBits && first < 0 && b < num_blocks; ++b) {
    const ScaleFault fault = fault_of(to[b]);
    const bool counts = fault == ScaleFault::kOutsideRule || nan_is_fault;
    if (fault != ScaleFault::kNone && counts) first = b;
  }
  if (info.has_tensor_scale) {
    for (int64_t b = 0; b < num_blocks; ++b) to[b] *= tensor;
  }
  return first;
}

}  // namespace argosy::quant
