// Block-scaled tensors: quantise, dequantise, the transposed and the grouped way (contract 5).
//
// A quantised matrix is codes, scales and a format tag that travels with them. Bytes do not depend on level or
// threads. Element casts: argosy/number_formats.h; all rules: docs/formats.md. Test: tests/quant/.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "argosy/cpu.h"
#include "argosy/number_formats.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "argosy/thread_pool.h"

namespace argosy {

// The numbers are part of the tag on the wire and in files: never reuse one.
enum class BlockFormat : uint8_t {
  kUnset = 0,
  kE4M3Row128 = 1,      // scale fp32 per 128 of a row: amax / 448
  kE4M3Row128E8M0 = 2,  // scale e8m0: 2^ceil(log2(amax / 448))
  kE4M3Block128 = 3,    // scale fp32 per 128 x 128: DeepSeek's weights, weight_scale_inv
  kMxfp8 = 4,           // e4m3 and e8m0 per 32 of a row: 2^(floor(log2 amax) - 8)
  kMxfp8Ceil = 5,       // the same with 2^ceil(log2(amax / 448)): Transformer Engine's rule
  kMxfp4 = 6,           // e2m1 and e8m0 per 32 of a row: 2^(floor(log2 amax) - 2)
  kNvfp4 = 7,           // e2m1 and e4m3 per 16 of a row, and fp32 per tensor: amax / 2688
};

// "e4m3_1x128", "e4m3_1x128_e8m0", "e4m3_128x128", "mxfp8", "mxfp8_ceil", "mxfp4", "nvfp4".
std::string_view name_of(BlockFormat format);
// kNotFound names the word and the known names.
Result<BlockFormat> parse_block_format(std::string_view name);

// What a format fixes.
struct BlockFormatInfo {
  ElementFormat element = ElementFormat::kE4M3;
  DType code_dtype = DType::kUnset;   // kE4M3; kU8 for two e2m1 codes per byte
  DType scale_dtype = DType::kUnset;  // kF32, kE8M0 or kE4M3
  int64_t block_rows = 1;
  int64_t block_cols = 0;
  bool has_tensor_scale = false;  // fp32, one per group
};
// Precondition: format is not kUnset.
BlockFormatInfo info_of(BlockFormat format);

// Groups of rows in one buffer: group g is rows [offsets[g], offsets[g] + sizes[g]). Rows outside are never read
// and what belongs to them is never written (contract 3.3). Neither offsets nor sizes: one group of all rows. No group at all: one offset.
struct RowGroups {
  std::span<const int64_t> offsets;  // [G] or [G + 1], rising, exclusive
  std::span<const int64_t> sizes;    // [G], real counts
};

// Which side of a stored matrix the groups lie along: kRows as quantised, kCols as transpose-quantised.
enum class GroupAxis : uint8_t { kRows, kCols };

// Shapes of a stored matrix [rows, cols]: the one function for planning and for running, in both directions.
//
// A scale never spans two groups. Along the grouped side, blocks longer than 1 are counted from each group's
// start: group g has ceil(size / block) of them, groups in order, and the scales have their sum. The
// blocks of group g begin at index `first_block[g]` ([G + 1]; empty where blocks along that side are 1 long).
struct QuantisedLayout {
  BlockFormat format = BlockFormat::kUnset;
  int64_t rows = 0;
  int64_t cols = 0;
  std::array<int64_t, 2> codes{};   // [rows, cols]; [rows, ceil(cols / 2)] for e2m1
  std::array<int64_t, 2> scales{};  // [rows / block_rows, cols / block_cols], partial blocks count
  int64_t num_tensor_scales = 0;    // G, or 0
  std::vector<int64_t> first_block;

  // Of codes and scales, dense; an odd last e2m1 code fills its byte with 0.
  int64_t code_bytes() const;
  int64_t scale_bytes() const;
};
// Errors: kInvalidArgument for kUnset, sizes below 0 or beyond int64, groups that overlap or leave the
// side they lie along; with e2m1 codes along kCols, an offset that is not even (two groups would share a byte).
Result<QuantisedLayout> quantised_layout(BlockFormat format, int64_t rows, int64_t cols,
                                         const RowGroups& groups = {},
                                         GroupAxis axis = GroupAxis::kRows);

// The most blocks of `block` that `num_groups` groups of `total` rows in sum can have, whatever their sizes: what
// a buffer needs before the sizes are known. Precondition: nothing negative, block >= 1.
int64_t max_group_blocks(int64_t total, int64_t num_groups, int64_t block);

template <typename Byte>
struct BasicQuantisedView {
  BlockFormat format = BlockFormat::kUnset;  // the tag
  int64_t rows = 0;
  int64_t cols = 0;
  BasicTensorView<Byte> codes;          // dtype and shape of the layout; any row stride
  BasicTensorView<Byte> scales;         // likewise
  BasicTensorView<Byte> tensor_scales;  // fp32 [G], dense, with kNvfp4 only

  BasicQuantisedView() = default;
  template <typename Other>
  requires(std::is_const_v<Byte> && !std::is_const_v<Other>)
      BasicQuantisedView(  // NOLINT(google-explicit-constructor)
          const BasicQuantisedView<Other>& other)
      : format(other.format),
        rows(other.rows),
        cols(other.cols),
        codes(other.codes),
        scales(other.scales),
        tensor_scales(other.tensor_scales) {}
};
using QuantisedView = BasicQuantisedView<std::byte>;
using ConstQuantisedView = BasicQuantisedView<const std::byte>;

// Owns codes and scales, dense. Moved from, it is empty.
class QuantisedTensor {
 public:
  QuantisedTensor() = default;
  // Zeros. Errors: those of Tensor::zeros.
  static Result<QuantisedTensor> create(const QuantisedLayout& layout);

  QuantisedView view();
  ConstQuantisedView view() const;

 private:
  BlockFormat format_ = BlockFormat::kUnset;
  int64_t rows_ = 0, cols_ = 0;
  Tensor codes_, scales_, tensor_scales_;
};

// A block that holds NaN or Inf, when quantising; a scale that is NaN, when dequantising.
enum class OnNonFinite : uint8_t {
  kNaN,    // the block becomes NaN: scale NaN, e4m3 codes 0x7F, e2m1 codes 0
  kError,  // kNonFinite names row and block
};

struct QuantiseOptions {
  Overflow overflow = Overflow::kSaturate;
  OnNonFinite on_non_finite = OnNonFinite::kNaN;
  uint8_t zero_block_code =
      kE8M0One;  // e8m0 scale of an all-zero block: 127, or 0 as Transformer Engine
  std::optional<E8M0Rule> e8m0_rule;  // none: the format's own
  std::optional<Level> level;         // none: the best there is
  ThreadPool* pool = nullptr;         // null: the calling thread
};

// Quantises a matrix.
//
// in   values  bf16 or fp32 [rows, cols]; unit stride in cols, any row stride
// out  out     shapes of quantised_layout(format, rows, cols, groups); out.format says which
// An all-zero block has scale 1 and keeps its signs. A tensor scale is taken over the group's blocks that are
// finite. Blocks: no. Allocates: a few numbers per group; with kE4M3Block128 and kNvfp4 nothing per element.
// Errors: kInvalidArgument (shapes, dtypes, strides, groups, zero_block_code), kNonFinite (the first block in
// row-major order), kUnsupported (level).
Status quantise(const QuantiseOptions& options, const ConstTensorView& values,
                const QuantisedView& out, const RowGroups& groups = {});

// Quantises the transpose: scales run along the other side, and the result is stored [cols, rows]. The
// same bytes as quantise() of the transposed matrix. Groups of values' rows become groups of stored columns
// (GroupAxis::kCols).
//
// out  out  shapes of quantised_layout(format, cols, rows, groups, GroupAxis::kCols)
// Errors: as quantise(); row and block of a message are those of the stored matrix.
Status transpose_quantise(const QuantiseOptions& options, const ConstTensorView& values,
                          const QuantisedView& out, const RowGroups& groups = {});

struct DequantiseOptions {
  OnNonFinite on_nan_scale = OnNonFinite::kNaN;
  std::optional<Level> level;
  ThreadPool* pool = nullptr;
};

// values = code * scale: one fp32 product (kNvfp4: code * (block scale * tensor scale)), then one rounding to bf16
// where values are. NaN comes out as 0x7FC0 or 0x7FC00000.
//
// in   in      as stored; groups and axis as they were given when it was made
// out  values  bf16 or fp32 [in.rows, in.cols]; unit stride in cols, any row stride
// Errors: kInvalidArgument (shapes, dtypes: fp32 scales where e8m0 is due are refused, not truncated),
// kCorruptData for a scale outside the format's rule (negative or Inf; names row and block), kNonFinite,
// kUnsupported.
Status dequantise(const DequantiseOptions& options, const ConstQuantisedView& in,
                  const TensorView& values, const RowGroups& groups = {},
                  GroupAxis axis = GroupAxis::kRows);

// Shapes, dtypes and scales of `in`, as dequantise() checks them: for readers of files and of peers' bytes.
Status check_quantised(const DequantiseOptions& options, const ConstQuantisedView& in,
                       const RowGroups& groups = {}, GroupAxis axis = GroupAxis::kRows);

// The tag as one word for the wire: format, width of a row, version. A receiver that expects another format or
// width learns it from the word, not from wrong numbers. cols must lie in [0, 2^32).
Result<uint64_t> make_payload_tag(BlockFormat format, int64_t cols);
// Errors: kCorruptData for a word that is no tag, kUnsupported for another version or an unknown format,
// kInvalidArgument for another format or width than expected; each names both.
Status check_payload_tag(uint64_t tag, BlockFormat format, int64_t cols);

}  // namespace argosy
