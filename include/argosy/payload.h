// How a row travels on dispatch: as it is, or quantised row by row (contract 3.9, 5).
//
// A quantised row is its codes, then its scales, and is decoded to bf16 before the first product. Every routed
// row goes through it, also one that stays on its rank. Encoding and decoding give the bytes of quantise() and
// dequantise(). Test: tests/quant/payload_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "argosy/quantise.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

struct PayloadLayout {
  BlockFormat format = BlockFormat::kUnset;  // kUnset: the row as it is
  DType dtype = DType::kUnset;               // of the row before and after
  int64_t hidden = 0;
  int64_t code_bytes = 0;  // kUnset: of the row
  int64_t scales_at = 0;   // where the scales start, a multiple of 4
  int64_t num_bytes = 0;   // of codes, gap and scales: what travels

  bool is_quantised() const { return format != BlockFormat::kUnset; }
};

// dtype kBF16 or kF32 with kUnset, kBF16 with kE4M3Row128, kE4M3Row128E8M0 or kMxfp8. Any hidden >= 1: the last
// block of a row may be partial. Errors: kInvalidArgument (dtype, hidden); kUnsupported for another format.
Result<PayloadLayout> payload_layout(DType dtype, BlockFormat format, int64_t hidden);

// One row [hidden] to `layout.num_bytes` at `out`, which is 4-byte aligned. A block with NaN or Inf becomes NaN.
void encode_payload(const PayloadLayout& layout, const std::byte* row, std::byte* out);
// Back to a row. Any bytes give some row.
void decode_payload(const PayloadLayout& layout, const std::byte* in, std::byte* row);

// One word that travels with a row: a receiver that expects another format, dtype or width learns it from the word.
uint64_t payload_tag(const PayloadLayout& layout);
// Errors: kInvalidArgument, kUnsupported or kCorruptData, naming what came and what was expected.
Status check_payload_tag(uint64_t tag, const PayloadLayout& layout);

// "bf16", "fp32", "fp8_128", "fp8_128_e8m0", "mxfp8".
std::string_view name_of(const PayloadLayout& layout);
// "bf16" is kUnset: rows as they are. kNotFound names the word and the known ones.
Result<BlockFormat> parse_payload(std::string_view name);

}  // namespace argosy
