// Rows as they travel, by the kernels of quantise() and dequantise(), a chunk of columns at a time. Test:
// tests/quant/payload_test.cc.
#include "argosy/payload.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "platform/float_env.h"
#include "quant/kernel.h"
#include "quant/payload_encoder.h"
#include "quant/run.h"
#include "quant/scales.h"

namespace argosy {
namespace {

using namespace quant;

struct Named {
  std::string_view name;
  BlockFormat format;
};
constexpr std::array<Named, 4> kNames{{{"bf16", BlockFormat::kUnset},
                                       {"fp8_128", BlockFormat::kE4M3Row128},
                                       {"fp8_128_e8m0", BlockFormat::kE4M3Row128E8M0},
                                       {"mxfp8", BlockFormat::kMxfp8}}};

constexpr uint64_t kRawMark =
    0x4152;  // rows as they are; quantised ones have the mark of make_payload_tag

const Kernel& best_kernel() { return *kernels().back(); }

int64_t blocks_before(const BlockFormatInfo& info, int64_t column) {
  return column / info.block_cols;
}

}  // namespace

Result<PayloadLayout> payload_layout(DType dtype, BlockFormat format, int64_t hidden) {
  if (dtype != DType::kBF16 && dtype != DType::kF32) {
    return base::invalid("payload rows are {}, must be BF16 or F32", name_of(dtype));
  }
  if (hidden < 1 || hidden > std::numeric_limits<int32_t>::max()) {
    return base::invalid("hidden is {}, must be in [1, 2^31)", hidden);
  }
  PayloadLayout layout;
  layout.format = format;
  layout.dtype = dtype;
  layout.hidden = hidden;
  layout.code_bytes = layout.scales_at = layout.num_bytes = hidden * size_of(dtype);
  if (format == BlockFormat::kUnset) return layout;
  const bool travels =
      std::ranges::any_of(kNames, [&](const Named& one) { return one.format == format; });
  if (!travels) {
    return base::error(
        StatusCode::kUnsupported,
        "rows do not travel as {}, only as bf16, e4m3_1x128, e4m3_1x128_e8m0 or mxfp8",
        name_of(format));
  }
  if (dtype != DType::kBF16) {
    return base::invalid("a payload of {} is decoded to BF16 rows, the rows are {}",
                         name_of(format), name_of(dtype));
  }
  const BlockFormatInfo info = info_of(format);
  layout.code_bytes = hidden;
  layout.scales_at = ceil_div(hidden, 4) * 4;
  layout.num_bytes =
      layout.scales_at + ceil_div(hidden, info.block_cols) * size_of(info.scale_dtype);
  return layout;
}

quant::PayloadEncoder::PayloadEncoder(const PayloadLayout& layout)
    : layout_(layout), kernel_(best_kernel()), rule_(rule_of(layout.format, {})) {}

// Values and codes of it stay in L1.
constexpr int64_t kMaxRowChunk = 4 * kChunkCols;

void quant::PayloadEncoder::encode(const std::byte* row, std::byte* out) const {
  uint32_t amax[kMaxChunkBlocks];
  float factors[kMaxChunkBlocks];
  // As much at a time as there is room for: a chunk's cast waits for its largest magnitudes.
  const int64_t chunk = std::min(kMaxRowChunk, kMaxChunkBlocks * rule_.info.block_cols);
  for (int64_t at = 0; at < layout_.hidden; at += chunk) {
    const int64_t n = std::min(chunk, layout_.hidden - at);
    const std::byte* const x = row + at * size_of(layout_.dtype);
    const int64_t num_blocks = ceil_div(n, rule_.info.block_cols);
    kernel_.amax_bf16({x, n, rule_.info.block_cols, amax});
    std::byte* const scales =
        out + layout_.scales_at + blocks_before(rule_.info, at) * size_of(rule_.info.scale_dtype);
    store_scales(kernel_, rule_, 1.0f, amax, num_blocks, scales, factors);
    EncodeArgs args;
    args.x = x;
    args.n = n;
    args.block = rule_.info.block_cols;
    args.scales = factors;
    args.reciprocal = rule_.info.scale_dtype == DType::kE8M0;
    args.amax = args.reciprocal ? nullptr : amax;
    args.element = rule_.info.element;
    args.ahead = n * size_of(layout_.dtype);  // of this row, or the next token's
    args.codes = reinterpret_cast<uint8_t*>(out + at);
    kernel_.encode_bf16(args);
  }
}

void encode_payload(const PayloadLayout& layout, const std::byte* row, std::byte* out) {
  if (!layout.is_quantised()) {
    std::memcpy(out, row, static_cast<size_t>(layout.num_bytes));
    return;
  }
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  quant::PayloadEncoder(layout).encode(row, out);
}

void decode_payload(const PayloadLayout& layout, const std::byte* in, std::byte* row) {
  if (!layout.is_quantised()) {
    std::memcpy(row, in, static_cast<size_t>(layout.num_bytes));
    return;
  }
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  const Kernel& kernel = best_kernel();
  const BlockFormatInfo info = info_of(layout.format);
  float factors[kMaxChunkBlocks];
  for (int64_t at = 0; at < layout.hidden; at += kChunkCols) {
    const int64_t n = std::min(kChunkCols, layout.hidden - at);
    const std::byte* const scales =
        in + layout.scales_at + blocks_before(info, at) * size_of(info.scale_dtype);
    load_scales(kernel, info, 1.0f, scales, ceil_div(n, info.block_cols), false, factors);
    DecodeArgs args;
    args.codes = reinterpret_cast<const uint8_t*>(in + at);
    args.n = n;
    args.block = info.block_cols;
    args.scales = factors;
    args.power_of_two = info.scale_dtype == DType::kE8M0;
    args.element = info.element;
    args.out = row + at * size_of(layout.dtype);
    kernel.decode_bf16(args);
  }
}

uint64_t payload_tag(const PayloadLayout& layout) {
  if (layout.is_quantised()) return *make_payload_tag(layout.format, layout.hidden);
  return kRawMark << 48 | static_cast<uint64_t>(layout.dtype) << 32 |
         static_cast<uint64_t>(layout.hidden);
}

Status check_payload_tag(uint64_t tag, const PayloadLayout& layout) {
  if (tag == payload_tag(layout)) return {};
  if (layout.is_quantised() && tag >> 48 != kRawMark) {
    return check_payload_tag(tag, layout.format, layout.hidden);
  }
  return base::invalid("payload tag is {:#018x}, expected {:#018x} ({} rows of {})", tag,
                       payload_tag(layout), name_of(layout), layout.hidden);
}

std::string_view name_of(const PayloadLayout& layout) {
  if (!layout.is_quantised()) return layout.dtype == DType::kF32 ? "fp32" : "bf16";
  return std::ranges::find(kNames, layout.format, &Named::format)->name;
}

Result<BlockFormat> parse_payload(std::string_view name) {
  for (const Named& one : kNames) {
    if (one.name == name) return one.format;
  }
  return base::error(StatusCode::kNotFound,
                     "no payload '{}'; there are bf16, fp8_128, fp8_128_e8m0, mxfp8", name);
}

}  // namespace argosy
