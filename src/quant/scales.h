// From the largest magnitude of a block to its scale, and from stored scales to factors.
//
// Contract 5; every quotient is one IEEE division. Test: tests/quant/block_test.cc.
#pragma once

#include <cstdint>

#include "argosy/quantise.h"
#include "quant/kernel.h"

namespace argosy::quant {

// What a call fixes for all its blocks.
struct ScaleRule {
  BlockFormat format = BlockFormat::kUnset;
  BlockFormatInfo info;
  E8M0Rule e8m0_rule = E8M0Rule::kFloor;
  uint8_t zero_block_code = kE8M0One;
};
ScaleRule rule_of(BlockFormat format, const QuantiseOptions& options);

// NVFP4: amax / 2688 over the tensor's finite blocks, 1 for a tensor of zeros, at least 2^-149.
float tensor_scale(uint32_t amax);

// Stores `num_blocks` scales in the format's dtype at `scales`, and what kernels divide (or, with e8m0, multiply) by.
void store_scales(const Kernel& kernel, const ScaleRule& rule, float tensor, const uint32_t* amax,
                  int64_t num_blocks, std::byte* scales, float* factors);

enum class ScaleFault { kNone, kOutsideRule, kNaN };
ScaleFault fault_of(float scale);

// The values of stored scales times `tensor`. Returns the index of the first that breaks its format's rule, or
// that is NaN where `nan_is_fault`; -1 when there is none.
int64_t load_scales(const Kernel& kernel, const BlockFormatInfo& info, float tensor,
                    const std::byte* scales, int64_t num_blocks, bool nan_is_fault, float* factors);

// One stored scale.
float scale_at(const BlockFormatInfo& info, const std::byte* scales, int64_t index);

}  // namespace argosy::quant
