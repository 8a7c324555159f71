// A stored matrix cut into segments along one side (its groups), and the tasks of a call over it.
//
// Blocks are counted from each segment's start. Test: tests/quant/layout_test.cc, grouped_test.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "argosy/quantise.h"
#include "argosy/status.h"

namespace argosy::quant {

constexpr int64_t ceil_div(int64_t value, int64_t by) {
  return value / by + (value % by != 0 ? 1 : 0);
}

// Given at all: no groups of [1] offsets are none, no offsets are one group of everything.
inline bool is_grouped(const RowGroups& groups) {
  return !groups.offsets.empty() || !groups.sizes.empty();
}

// kInvalidArgument names the group whose range leaves [0, side] or overlaps the one before.
Status check_groups(const RowGroups& groups, int64_t side);
// kInvalidArgument names the first group that begins at an odd offset.
Status check_even_offsets(const RowGroups& groups);

struct Segment {
  int64_t begin = 0;  // element along the side
  int64_t size = 0;
  int64_t first_block = 0;  // index of its first scale along the side
  int64_t group = 0;
};

// A piece of work: rows [row, row + num_rows) of one row segment, by all columns of one column segment.
struct Task {
  const Segment* rows = nullptr;
  const Segment* cols = nullptr;
  int64_t row = 0;
  int64_t num_rows = 0;
  int64_t group() const { return rows->group + cols->group; }  // one of them is 0
};

class Tasks {
 public:
  // `rows_per_task`: a multiple of the format's block_rows.
  Tasks(const BlockFormatInfo& info, int64_t rows, int64_t cols, const RowGroups& groups,
        GroupAxis axis, int64_t rows_per_task);

  int64_t size() const { return first_task_.back() * static_cast<int64_t>(col_segments_.size()); }
  Task operator[](int64_t index) const;

 private:
  std::vector<Segment> row_segments_, col_segments_;
  std::vector<int64_t> first_task_;  // [row segments + 1], of one column segment
  int64_t rows_per_task_;
};

}  // namespace argosy::quant
