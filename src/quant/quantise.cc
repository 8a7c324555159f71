// Quantise and transpose-quantise: tasks of whole rows, tiles of a chunk of columns.
//
// A tile is seen as stored; of a transposed matrix it is gathered first, so that both directions run the same kernels
// and give the same bytes. Test: tests/quant/block_test.cc, grouped_test.cc.
#include <algorithm>
#include <limits>
#include <vector>

#include "argosy/quantise.h"
#include "base/error.h"
#include "quant/element.h"
#include "quant/run.h"
#include "quant/scales.h"
#include "quant/view_checks.h"

namespace argosy {
namespace {

using namespace quant;

constexpr int64_t kNoBlock = std::numeric_limits<int64_t>::max();
constexpr int64_t kGatherRows = 128;  // stored rows and columns of a gathered tile
constexpr int64_t kGatherCols = 128;

class Quantiser {
 public:
  Quantiser(const QuantiseOptions& options, const Kernel& kernel, const ConstTensorView& values,
            const QuantisedView& out, bool transposed)
      : options_(options),
        kernel_(kernel),
        rule_(rule_of(out.format, options)),
        values_(values),
        out_(out),
        transposed_(transposed),
        bf16_(values.dtype == DType::kBF16),
        stream_(out.codes.num_elements() >= kStreamBytes) {}

  Status run(const Tasks& tasks) {
    if (rule_.info.has_tensor_scale) {
      std::vector<std::atomic<uint32_t>> amax(static_cast<size_t>(out_.tensor_scales.dim(0)));
      group_amax_ = &amax;
      run_tasks(options_.pool, tasks, false, [this](const Task& task) { do_task(task, true); });
      for (size_t g = 0; g < amax.size(); ++g) {
        out_.tensor_scales.as<float>()[g] = tensor_scale(amax[g].load(std::memory_order_relaxed));
      }
      group_amax_ = nullptr;
    }
    run_tasks(options_.pool, tasks, stream_, [this](const Task& task) { do_task(task, false); });
    return status();
  }

 private:
  // Stored rows [row, row + num_rows) and columns [col, col + num_cols), `row_bytes` apart.
  struct Tile {
    const std::byte* data = nullptr;
    int64_t row_bytes = 0;
    int64_t row = 0, num_rows = 0;
    int64_t col = 0, num_cols = 0;
    int64_t block_row = 0, block_col = 0;  // of the scales
    int64_t group = 0;
  };

  int64_t element_bytes() const { return size_of(values_.dtype); }
  int64_t chunk_cols() const {
    return rule_.info.block_rows == 1 && bf16_ ? kChunkCols : kChunkCols / 2;
  }

  void do_task(const Task& task, bool amax_only) {
    if (transposed_) return do_gathered(task, amax_only);
    const int64_t block_rows = rule_.info.block_rows;
    const int64_t chunk = chunk_cols();
    for (int64_t row = task.row; row < task.row + task.num_rows; row += block_rows) {
      const int64_t num_rows = std::min(block_rows, task.row + task.num_rows - row);
      for (int64_t at = 0; at < task.cols->size; at += chunk) {
        Tile tile = tile_at(task, row, num_rows, at, std::min(chunk, task.cols->size - at));
        tile.data = values_.row(row) + tile.col * element_bytes();
        tile.row_bytes = values_.stride(0) * element_bytes();
        do_tile(tile, amax_only);
      }
    }
  }

  void do_gathered(const Task& task, bool amax_only) {
    alignas(64) std::byte buffer[kGatherRows * kGatherCols * sizeof(float)];
    const int64_t block_rows = rule_.info.block_rows;
    for (int64_t row = task.row; row < task.row + task.num_rows; row += kGatherRows) {
      const int64_t num_rows = std::min(kGatherRows, task.row + task.num_rows - row);
      for (int64_t at = 0; at < task.cols->size; at += kGatherCols) {
        const int64_t num_cols = std::min(kGatherCols, task.cols->size - at);
        gather(row, num_rows, task.cols->begin + at, num_cols, buffer);
        for (int64_t i = 0; i < num_rows; i += block_rows) {
          Tile tile = tile_at(task, row + i, std::min(block_rows, num_rows - i), at, num_cols);
          tile.row_bytes = kGatherCols * element_bytes();
          tile.data = buffer + i * tile.row_bytes;
          do_tile(tile, amax_only);
        }
      }
    }
  }

  Tile tile_at(const Task& task, int64_t row, int64_t num_rows, int64_t at,
               int64_t num_cols) const {
    Tile tile;
    tile.row = row;
    tile.num_rows = num_rows;
    tile.col = task.cols->begin + at;
    tile.num_cols = num_cols;
    tile.block_row = task.rows->first_block + (row - task.rows->begin) / rule_.info.block_rows;
    tile.block_col = task.cols->first_block + at / rule_.info.block_cols;
    tile.group = task.group();
    return tile;
  }

  void gather(int64_t row, int64_t num_rows, int64_t col, int64_t num_cols, std::byte* to) const {
    if (bf16_) return gather_as<uint16_t>(row, num_rows, col, num_cols, to);
    gather_as<uint32_t>(row, num_rows, col, num_cols, to);
  }

  template <typename T>
  void gather_as(int64_t row, int64_t num_rows, int64_t col, int64_t num_cols,
                 std::byte* to) const {
    T* const out = reinterpret_cast<T*>(to);
    for (int64_t c = 0; c < num_cols; ++c) {
      const T* const from = reinterpret_cast<const T*>(values_.row(col + c)) + row;
      for (int64_t r = 0; r < num_rows; ++r) out[r * kGatherCols + c] = from[r];
    }
  }

  void do_tile(const Tile& tile, bool amax_only) {
    uint32_t amax[kMaxChunkBlocks];
    float factors[kMaxChunkBlocks];
    const int64_t num_blocks = ceil_div(tile.num_cols, rule_.info.block_cols);
    amax_of(tile, num_blocks, amax);
    if (amax_only) return note_amax(tile, num_blocks, amax);
    if (options_.on_non_finite == OnNonFinite::kError) note_non_finite(tile, num_blocks, amax);
    const float tensor =
        rule_.info.has_tensor_scale ? out_.tensor_scales.as<float>()[tile.group] : 1.0f;
    std::byte* const scales =
        out_.scales.row(tile.block_row) + tile.block_col * size_of(rule_.info.scale_dtype);
    store_scales(kernel_, rule_, tensor, amax, num_blocks, scales, factors);
    EncodeArgs args;
    args.n = tile.num_cols;
    args.block = rule_.info.block_cols;
    args.scales = factors;
    args.reciprocal = rule_.info.scale_dtype == DType::kE8M0;
    args.amax = rule_.info.scale_dtype == DType::kF32 ? amax : nullptr;
    args.element = rule_.info.element;
    args.nan_overflow = options_.overflow == Overflow::kNaN;
    args.stream = stream_;
    // A gathered tile, or one of many rows, is in the caches as a whole.
    if (!transposed_ && rule_.info.block_rows == 1) args.ahead = chunk_cols() * element_bytes();
    const int64_t per_byte = rule_.info.element == ElementFormat::kE2M1 ? 2 : 1;
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      args.x = tile.data + r * tile.row_bytes;
      args.codes = reinterpret_cast<uint8_t*>(out_.codes.row(tile.row + r) + tile.col / per_byte);
      bf16_ ? kernel_.encode_bf16(args) : kernel_.encode_f32(args);
    }
  }

  void amax_of(const Tile& tile, int64_t num_blocks, uint32_t* amax) const {
    uint32_t of_row[kMaxChunkBlocks];
    AmaxArgs args;
    args.n = tile.num_cols;
    args.block = rule_.info.block_cols;
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      args.x = tile.data + r * tile.row_bytes;
      args.amax = r == 0 ? amax : of_row;
      bf16_ ? kernel_.amax_bf16(args) : kernel_.amax_f32(args);
      for (int64_t b = 0; r > 0 && b < num_blocks; ++b) amax[b] = std::max(amax[b], of_row[b]);
    }
  }

  void note_amax(const Tile& tile, int64_t num_blocks, const uint32_t* amax) {
    uint32_t largest = 0;
    for (int64_t b = 0; b < num_blocks; ++b) {
      if (amax[b] < kInfBits) largest = std::max(largest, amax[b]);
    }
    raise_to(&(*group_amax_)[static_cast<size_t>(tile.group)], largest);
  }

  void note_non_finite(const Tile& tile, int64_t num_blocks, const uint32_t* amax) {
    for (int64_t b = 0; b < num_blocks; ++b) {
      if (amax[b] < kInfBits) continue;
      return lower_to(&first_bad_, tile.block_row * out_.scales.dim(1) + tile.block_col + b);
    }
  }

  Status status() const {
    const int64_t bad = first_bad_.load(std::memory_order_relaxed);
    if (bad == kNoBlock) return {};
    const int64_t per_row = out_.scales.dim(1);
    return base::error(StatusCode::kNonFinite, "NaN or Inf in {} {}, block {} ({}, {} x {})",
                       rule_.info.block_rows == 1 ? "row" : "row of blocks", bad / per_row,
                       bad % per_row, name_of(rule_.format), rule_.info.block_rows,
                       rule_.info.block_cols);
  }

  const QuantiseOptions& options_;
  const Kernel& kernel_;
  const ScaleRule rule_;
  const ConstTensorView values_;
  const QuantisedView out_;
  const bool transposed_;
  const bool bf16_;
  const bool stream_;
  std::vector<std::atomic<uint32_t>>* group_amax_ = nullptr;  // [G]
  std::atomic<int64_t> first_bad_{kNoBlock};                  // index of a scale
};

Status quantise_matrix(const QuantiseOptions& options, const ConstTensorView& values,
                       const QuantisedView& out, const RowGroups& groups, bool transposed) {
  if (options.zero_block_code != kE8M0One && options.zero_block_code != 0) {
    return base::invalid("zero_block_code is {}, expected 127 or 0", options.zero_block_code);
  }
  const GroupAxis axis = transposed ? GroupAxis::kCols : GroupAxis::kRows;
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                          quantised_layout(out.format, out.rows, out.cols, groups, axis));
  ARGOSY_RETURN_IF_ERROR(check_quantised_view(out, layout));
  ARGOSY_RETURN_IF_ERROR(check_distinct_rows("codes", out.codes));
  ARGOSY_RETURN_IF_ERROR(check_distinct_rows("scales", out.scales));
  ARGOSY_RETURN_IF_ERROR(
      check_values(values, transposed ? out.cols : out.rows, transposed ? out.rows : out.cols));
  ARGOSY_ASSIGN_OR_RETURN(const Level level, resolve_level(options.level));
  const BlockFormatInfo info = info_of(out.format);
  const int64_t task_rows = transposed ? kGatherRows : rows_per_task(info.block_rows, out.cols);
  const Tasks tasks(info, out.rows, out.cols, groups, axis, task_rows);
  return Quantiser(options, kernel_for(level), values, out, transposed).run(tasks);
}

}  // namespace

Status quantise(const QuantiseOptions& options, const ConstTensorView& values,
                const QuantisedView& out, const RowGroups& groups) {
  return quantise_matrix(options, values, out, groups, false);
}

Status transpose_quantise(const QuantiseOptions& options, const ConstTensorView& values,
                          const QuantisedView& out, const RowGroups& groups) {
  return quantise_matrix(options, values, out, groups, true);
}

}  // namespace argosy
