// Quantised rows on their way to a kernel: codes become bf16, exactly, scales become fp32.
//
// Both once per tile; kernels then see bf16 rows. Test: tests/gemm/quantised_rows_test.cc.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "argosy/cpu.h"
#include "argosy/quantise.h"

namespace argosy::gemm {

// The formats that grouped_gemm takes rows in: e4m3 codes, scales along the row.
bool are_rows_multiplied(BlockFormat format);

// Rows [first, first + count) of `codes` [S, K].
struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};
// values[r]: bf16 [K], `stride_bytes` apart.
void decode_rows(const ConstTensorView& codes, const RowRange& range, Level level,
                 std::byte* values, int64_t stride_bytes);

// An e8m0 code as RowScales wants it: code 0 is 0 and NaN keeps its exponent, what
// numeric::add_scaled takes.
inline float row_scale_of(std::byte code) {
  const auto bits = static_cast<uint32_t>(code);
  return std::bit_cast<float>(bits == kE8M0NaN ? 0x7FC00000u : bits << 23);
}

// to[block][r], as RowScales wants them. `scales` [S, blocks], fp32 or e8m0.
void load_row_scales(const ConstTensorView& scales, const RowRange& range, float* to);

}  // namespace argosy::gemm
