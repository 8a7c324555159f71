// Names, facts and tags of the block formats. Test: tests/quant/layout_test.cc.
#include <string>
#include <utility>

#include "argosy/quantise.h"
#include "base/error.h"

namespace argosy {
namespace {

constexpr std::pair<BlockFormat, std::string_view> kNames[] = {
    {BlockFormat::kE4M3Row128, "e4m3_1x128"},
    {BlockFormat::kE4M3Row128E8M0, "e4m3_1x128_e8m0"},
    {BlockFormat::kE4M3Block128, "e4m3_128x128"},
    {BlockFormat::kMxfp8, "mxfp8"},
    {BlockFormat::kMxfp8Ceil, "mxfp8_ceil"},
    {BlockFormat::kMxfp4, "mxfp4"},
    {BlockFormat::kNvfp4, "nvfp4"}};

// Tag: bits 0..31 width, 32..39 format, 40..47 version, 48..63 a mark that no count or size has by chance.
constexpr uint64_t kTagMark = 0xA95F;
constexpr uint64_t kTagVersion = 1;

}  // namespace

std::string_view name_of(BlockFormat format) {
  for (const auto& [known, name] : kNames) {
    if (known == format) return name;
  }
  return "unset";
}

Result<BlockFormat> parse_block_format(std::string_view name) {
  std::string known_names;
  for (const auto& [format, known] : kNames) {
    if (known == name) return format;
    known_names += (known_names.empty() ? "" : ", ") + std::string(known);
  }
  return base::error(StatusCode::kNotFound, "no block format '{}'; there are {}", name,
                     known_names);
}

BlockFormatInfo info_of(BlockFormat format) {
  switch (format) {
    case BlockFormat::kE4M3Row128:
      return {ElementFormat::kE4M3, DType::kE4M3, DType::kF32, 1, 128, false};
    case BlockFormat::kE4M3Row128E8M0:
      return {ElementFormat::kE4M3, DType::kE4M3, DType::kE8M0, 1, 128, false};
    case BlockFormat::kE4M3Block128:
      return {ElementFormat::kE4M3, DType::kE4M3, DType::kF32, 128, 128, false};
    case BlockFormat::kMxfp8:
    case BlockFormat::kMxfp8Ceil:
      return {ElementFormat::kE4M3, DType::kE4M3, DType::kE8M0, 1, 32, false};
    case BlockFormat::kMxfp4:
      return {ElementFormat::kE2M1, DType::kU8, DType::kE8M0, 1, 32, false};
    case BlockFormat::kNvfp4:
      return {ElementFormat::kE2M1, DType::kU8, DType::kE4M3, 1, 16, true};
    case BlockFormat::kUnset:
      break;
  }
  return {};
}

Result<uint64_t> make_payload_tag(BlockFormat format, int64_t cols) {
  if (info_of(format).block_cols == 0) return base::invalid("a payload needs a format, not unset");
  if (cols < 0 || cols >> 32 != 0) {
    return base::invalid("a payload row has {} columns, a tag holds 0 to 2^32 - 1", cols);
  }
  return kTagMark << 48 | kTagVersion << 40 | static_cast<uint64_t>(format) << 32 |
         static_cast<uint64_t>(cols);
}

Status check_payload_tag(uint64_t tag, BlockFormat format, int64_t cols) {
  if (tag >> 48 != kTagMark) {
    return base::error(StatusCode::kCorruptData, "payload tag is {:#018x}: no tag of a payload",
                       tag);
  }
  if ((tag >> 40 & 0xFF) != kTagVersion) {
    return base::error(StatusCode::kUnsupported, "payload tag has version {}, this build knows {}",
                       tag >> 40 & 0xFF, kTagVersion);
  }
  const auto seen = static_cast<BlockFormat>(tag >> 32 & 0xFF);
  if (info_of(seen).block_cols == 0) {
    return base::error(StatusCode::kUnsupported, "payload tag names format {}, unknown here",
                       tag >> 32 & 0xFF);
  }
  if (seen != format) {
    return base::invalid("payload is {}, expected {}", name_of(seen), name_of(format));
  }
  const auto seen_cols = static_cast<int64_t>(tag & 0xFFFFFFFFu);
  if (seen_cols != cols) {
    return base::invalid("payload rows have {} columns, expected {}", seen_cols, cols);
  }
  return {};
}

}  // namespace argosy
