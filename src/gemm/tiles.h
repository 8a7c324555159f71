// The tasks of one grouped GEMM: tiles of rows by ranges of panels, numbered without a list of them.
//
// Tasks cover every (row of a group, panel) exactly once. With several threads big tiles get the low
// numbers, so that what is left at the end is small. Nothing is allocated. Test:
// tests/gemm/tiles_test.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace argosy::gemm {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b == 0 ? 0 : 1); }

// Part `at` of `total` things cut into `parts` nearly equal ones, larger ones first.
struct Part {
  int64_t first = 0;
  int64_t count = 0;
};
constexpr Part part_of(int64_t total, int64_t parts, int64_t at) {
  const int64_t each = total / parts;
  const int64_t larger = total % parts;
  return {at * each + std::min(at, larger), each + (at < larger ? 1 : 0)};
}

struct Tile {
  int64_t group = 0;
  Part rows;  // from the start of the group
  Part panels;
};

class Tiles {
 public:
  struct Limits {
    int64_t tile_rows = 1;
    int64_t num_panels = 1;
    int64_t num_threads = 1;
    int64_t tasks_per_thread = 1;
  };

  // `sizes`: rows of each group; must outlive this.
  Tiles(std::span<const int64_t> sizes, const Limits& limits) : sizes_(sizes), limits_(limits) {
    int64_t tiles = 0;
    for (const int64_t size : sizes) tiles += ceil_div(size, limits.tile_rows);
    const bool share = limits.num_threads > 1 && tiles > 0;
    const int64_t wanted =
        share ? ceil_div(limits.tasks_per_thread * limits.num_threads, tiles) : 1;
    chunks_ = std::min(wanted, limits.num_panels);
    num_classes_ = share ? kClasses : 1;
    num_tasks_ = tiles * chunks_;
  }

  int64_t num_tasks() const { return num_tasks_; }

  // Where a thread is in the numbering.
  struct Cursor {
    int64_t size_class = 0;
    size_t group = 0;
    int64_t first_task = 0;  // of the group
  };

  // Precondition: task in [0, num_tasks()), not below that of an earlier call with this cursor.
  Tile at(int64_t task, Cursor* cursor) const {
    for (;; advance(cursor)) {
      const int64_t tiles = tiles_in_class(cursor->group, cursor->size_class);
      const int64_t index = task - cursor->first_task;
      if (index < tiles * chunks_) {
        const int64_t size = sizes_[cursor->group];
        return {static_cast<int64_t>(cursor->group), part_of(size, tiles, index / chunks_),
                part_of(limits_.num_panels, chunks_, index % chunks_)};
      }
      cursor->first_task += tiles * chunks_;
    }
  }

 private:
  static constexpr int64_t kClasses = 4;

  // The number of tiles of a group if it is of that class, else 0.
  int64_t tiles_in_class(size_t group, int64_t size_class) const {
    const int64_t size = sizes_[group];
    if (size == 0) return 0;
    const int64_t tiles = ceil_div(size, limits_.tile_rows);
    if (num_classes_ == 1) return tiles;
    const int64_t quarters = size / tiles * kClasses / limits_.tile_rows;
    return size_class == kClasses - 1 - std::min(quarters, kClasses - 1) ? tiles : 0;
  }

  void advance(Cursor* cursor) const {
    if (++cursor->group < sizes_.size()) return;
    cursor->group = 0;
    ++cursor->size_class;
  }

  std::span<const int64_t> sizes_;
  Limits limits_;
  int64_t chunks_ = 1;
  int64_t num_classes_ = 1;
  int64_t num_tasks_ = 0;
};

}  // namespace argosy::gemm
