// See segments.h.
#include "quant/segments.h"

#include <algorithm>

#include "base/error.h"

namespace argosy::quant {
namespace {

std::vector<Segment> segments_of(const RowGroups& groups, int64_t block) {
  std::vector<Segment> segments;
  int64_t first_block = 0;
  for (size_t g = 0; g < groups.sizes.size(); ++g) {
    // Blocks of one element are the elements: their scales lie where the elements do.
    const int64_t begin = groups.offsets[g];
    segments.push_back(
        {begin, groups.sizes[g], block == 1 ? begin : first_block, static_cast<int64_t>(g)});
    first_block += ceil_div(groups.sizes[g], block);
  }
  return segments;
}

}  // namespace

Status check_groups(const RowGroups& groups, int64_t side) {
  const size_t num_groups = groups.sizes.size();
  const size_t num_offsets = groups.offsets.size();
  if (num_offsets != num_groups && num_offsets != num_groups + 1) {
    return base::invalid("{} group_offsets for {} group_sizes", num_offsets, num_groups);
  }
  int64_t end = 0;
  for (size_t g = 0; g < num_groups; ++g) {
    const int64_t begin = groups.offsets[g], size = groups.sizes[g];
    if (size < 0 || begin < 0 || begin > side || size > side - begin) {
      return base::invalid("group {} is {} rows from {}, the side has {}", g, size, begin, side);
    }
    if (begin < end) {
      return base::invalid("group {} begins at {}, the one before ends at {}", g, begin, end);
    }
    end = begin + size;
  }
  return {};
}

Status check_even_offsets(const RowGroups& groups) {
  for (size_t g = 0; g < groups.sizes.size(); ++g) {
    if (groups.offsets[g] % 2 != 0) {
      return base::invalid("group {} begins at {}: two codes share a byte, offsets must be even", g,
                           groups.offsets[g]);
    }
  }
  return {};
}

Tasks::Tasks(const BlockFormatInfo& info, int64_t rows, int64_t cols, const RowGroups& groups,
             GroupAxis axis, int64_t rows_per_task)
    : row_segments_{Segment{0, rows, 0, 0}},
      col_segments_{Segment{0, cols, 0, 0}},
      rows_per_task_(rows_per_task) {
  if (is_grouped(groups)) {
    if (axis == GroupAxis::kRows) row_segments_ = segments_of(groups, info.block_rows);
    if (axis == GroupAxis::kCols) col_segments_ = segments_of(groups, info.block_cols);
  }
  first_task_.push_back(0);
  for (const Segment& segment : row_segments_) {
    first_task_.push_back(first_task_.back() + ceil_div(segment.size, rows_per_task));
  }
}

Task Tasks::operator[](int64_t index) const {
  const int64_t per_col_segment = first_task_.back();
  const int64_t at = index % per_col_segment;
  const auto next = std::upper_bound(first_task_.begin(), first_task_.end(), at);
  const auto segment = static_cast<size_t>(next - first_task_.begin() - 1);
  Task task;
  task.rows = &row_segments_[segment];
  task.cols = &col_segments_[static_cast<size_t>(index / per_col_segment)];
  const int64_t inside = (at - first_task_[segment]) * rows_per_task_;
  task.row = task.rows->begin + inside;
  task.num_rows = std::min(rows_per_task_, task.rows->size - inside);
  return task;
}

}  // namespace argosy::quant
