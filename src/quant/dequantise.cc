// Dequantise, and the check of what came from outside. Test: tests/quant/block_test.cc, arguments_test.cc.
#include <algorithm>
#include <bit>
#include <limits>

#include "argosy/quantise.h"
#include "base/error.h"
#include "quant/element.h"
#include "quant/run.h"
#include "quant/scales.h"
#include "quant/view_checks.h"

namespace argosy {
namespace {

using namespace quant;

constexpr int64_t kNoScale = std::numeric_limits<int64_t>::max();

class Dequantiser {
 public:
  // `values`: nullptr to look at the scales only.
  Dequantiser(const DequantiseOptions& options, const Kernel& kernel, const ConstQuantisedView& in,
              const TensorView* values)
      : options_(options),
        kernel_(kernel),
        info_(info_of(in.format)),
        in_(in),
        values_(values),
        stream_(values != nullptr &&
                values->num_elements() * size_of(values->dtype) >= kStreamBytes) {}

  Status run(const Tasks& tasks) {
    ARGOSY_RETURN_IF_ERROR(check_tensor_scales());
    run_tasks(options_.pool, tasks, stream_, [this](const Task& task) {
      // With nothing to decode, the rows of a block share their scales.
      const int64_t step = values_ == nullptr ? info_.block_rows : 1;
      for (int64_t row = task.row; row < task.row + task.num_rows; row += step) {
        for (int64_t at = 0; at < task.cols->size; at += kChunkCols) do_chunk(task, row, at);
      }
    });
    return status();
  }

 private:
  void do_chunk(const Task& task, int64_t row, int64_t at) {
    float factors[kMaxChunkBlocks];
    const int64_t num_cols = std::min(kChunkCols, task.cols->size - at);
    const int64_t num_blocks = ceil_div(num_cols, info_.block_cols);
    const int64_t block_row = task.rows->first_block + (row - task.rows->begin) / info_.block_rows;
    const int64_t block_col = task.cols->first_block + at / info_.block_cols;
    const float tensor =
        info_.has_tensor_scale ? in_.tensor_scales.as<float>()[task.group()] : 1.0f;
    const std::byte* const scales =
        in_.scales.row(block_row) + block_col * size_of(info_.scale_dtype);
    // A chunk waits for its scales before it asks for anything else.
    constexpr int64_t kScalesAhead = 512;
    __builtin_prefetch(scales + kScalesAhead);
    const int64_t bad = load_scales(kernel_, info_, tensor, scales, num_blocks,
                                    options_.on_nan_scale == OnNonFinite::kError, factors);
    if (bad >= 0) lower_to(&first_bad_, block_row * in_.scales.dim(1) + block_col + bad);
    if (values_ == nullptr) return;
    const int64_t col = task.cols->begin + at;
    DecodeArgs args;
    const int64_t per_byte = info_.element == ElementFormat::kE2M1 ? 2 : 1;
    args.codes = reinterpret_cast<const uint8_t*>(in_.codes.row(row) + col / per_byte);
    args.n = num_cols;
    args.block = info_.block_cols;
    args.scales = factors;
    args.power_of_two = info_.scale_dtype == DType::kE8M0;
    args.element = info_.element;
    args.stream = stream_;
    args.out = values_->row(row) + col * size_of(values_->dtype);
    values_->dtype == DType::kBF16 ? kernel_.decode_bf16(args) : kernel_.decode_f32(args);
  }

  Status check_tensor_scales() const {
    for (int64_t g = 0; info_.has_tensor_scale && g < in_.tensor_scales.dim(0); ++g) {
      ARGOSY_RETURN_IF_ERROR(
          explain(in_.tensor_scales.as<float>()[g], fmt::format("tensor scale of group {}", g)));
    }
    return {};
  }

  Status explain(float scale, const std::string& what) const {
    const ScaleFault fault = fault_of(scale);
    if (fault == ScaleFault::kOutsideRule) {
      return base::error(StatusCode::kCorruptData, "{} is {}: a scale is finite and not negative",
                         what, scale);
    }
    if (fault == ScaleFault::kNaN && options_.on_nan_scale == OnNonFinite::kError) {
      return base::error(StatusCode::kNonFinite, "{} is NaN", what);
    }
    return {};
  }

  Status status() const {
    const int64_t bad = first_bad_.load(std::memory_order_relaxed);
    if (bad == kNoScale) return {};
    const int64_t per_row = in_.scales.dim(1);
    return explain(
        scale_at(info_, in_.scales.row(bad / per_row), bad % per_row),
        fmt::format("{} scale of {} {}, block {}", name_of(in_.format),
                    info_.block_rows == 1 ? "row" : "row of blocks", bad / per_row, bad % per_row));
  }

  const DequantiseOptions& options_;
  const Kernel& kernel_;
  const BlockFormatInfo info_;
  const ConstQuantisedView in_;
  const TensorView* const values_;
  const bool stream_;
  std::atomic<int64_t> first_bad_{kNoScale};  // index of a scale
};

Status dequantise_matrix(const DequantiseOptions& options, const ConstQuantisedView& in,
                         const TensorView* values, const RowGroups& groups, GroupAxis axis) {
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                          quantised_layout(in.format, in.rows, in.cols, groups, axis));
  ARGOSY_RETURN_IF_ERROR(check_quantised_view(in, layout));
  if (values != nullptr) {
    ARGOSY_RETURN_IF_ERROR(check_values(*values, in.rows, in.cols));
    ARGOSY_RETURN_IF_ERROR(check_distinct_rows("values", *values));
  }
  ARGOSY_ASSIGN_OR_RETURN(const Level level, resolve_level(options.level));
  const BlockFormatInfo info = info_of(in.format);
  const Tasks tasks(info, in.rows, in.cols, groups, axis, rows_per_task(info.block_rows, in.cols));
  return Dequantiser(options, kernel_for(level), in, values).run(tasks);
}

}  // namespace

Status dequantise(const DequantiseOptions& options, const ConstQuantisedView& in,
                  const TensorView& values, const RowGroups& groups, GroupAxis axis) {
  return dequantise_matrix(options, in, &values, groups, axis);
}

Status check_quantised(const DequantiseOptions& options, const ConstQuantisedView& in,
                       const RowGroups& groups, GroupAxis axis) {
  return dequantise_matrix(options, in, nullptr, groups, axis);
}

}  // namespace argosy
