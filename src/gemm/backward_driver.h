// The driver of the backward's products, and of the forward that keeps its pre-activations: tiles
// of rows by panels, both made by a Source, multiplied by the forward's kernels.
//
// A contraction longer than a chunk is summed chunk by chunk; the sums rest in fp32 between, so the
// chain is one chain. Tasks write disjoint outputs and no sum crosses a task: bits do not depend on
// threads. Test: tests/gemm/dgrad_test.cc, wgrad_test.cc.
//
// A Source offers, for group g and blocks of 32 of the contraction:
//   int64_t num_blocks(g)                              0: the sums are 0
//   void load(tile, blocks, TileRows*)                 puts the tile's rows, by TileRows::put
//   const std::byte* panel(tile, panel, blocks, room)  the panel's blocks; `room` is there to make them in
//   void fetch_output(tile, panel, rows)               prefetches where rows of it go
//   void store(tile, panel, products)                  [tile.rows.count][32] finished sums, denormals kept
//   bool moves_sums(tile)                              store() does no arithmetic: it may run with denormals flushed,
//                                                      row block by row block between the products
//   void finish_tile(tile)                             after the last store
//   Prefetch ahead(tile, panel, blocks, share)         optional, where panels come from memory: what a row block fetches
//                                                      of the next panel's blocks while it is multiplied
// A Source with kIsScaled has a scale per block of 32 on both sides: load() puts the rows' to
// TileRows::scales_of too, and the panel begins with its own, [block][32] in fp32, as RowScales wants
// them; its blocks follow at kPanelScaleBytes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>

#include "argosy/gemm.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "gemm/tiles.h"
#include "platform/float_env.h"

namespace argosy::gemm {

inline constexpr int64_t kMaxChunkBlocks = 32;
inline constexpr int64_t kPanelScaleBytes = kMaxChunkBlocks * kPanelColumns * 4;

// Sizes of a worker's room. Rows, a panel and sums share an L2 of 1 MiB.
struct BackwardLimits {
  int64_t tile_rows = 0;     // in whole row blocks
  int64_t chunk_blocks = 0;  // of 32 of the contraction: the tile's rows stay in L2
  int64_t at_once = 0;       // panels whose sums rest while chunks go by
  int64_t value_stride =
      0;  // bytes of a row that is not staged; a line more, for rows 4 KiB apart share an L1 set

  // Bytes from the room's start, in this order; all multiples of 64.
  // The values come first; scales only of scaled operands.
  int64_t staged = 0, scales = 0, panel = 0, products = 0, total = 0;
};
// `max_blocks`: of the longest contraction. `needs_values`: rows are put together before they are
// staged.
BackwardLimits backward_limits(const Dot& dot, DType rows, DType panels, int64_t max_blocks,
                               bool needs_values, bool is_scaled = false);

// A tile's rows as its Dot reads them, one chunk of the contraction at a time.
struct TileRows {
  const Dot* dot = nullptr;
  int64_t element = 0;  // bytes
  int64_t count = 0;
  int64_t num_row_blocks = 0;
  int64_t chunk_blocks = 0;  // of the chunk they hold
  int64_t value_stride = 0;
  std::byte* values = nullptr;  // [count][chunk], row-major; unused by kernels that stage
  std::byte* staged = nullptr;
  float* scales = nullptr;  // of scaled operands

  // Of a row block: [block of the chunk][row].
  float* scales_of(const Part& block) const { return scales + block.first * chunk_blocks; }

  Part row_block(int64_t at) const { return part_of(count, num_row_blocks, at); }
  const std::byte* rows_of(const Part& block) const {
    if (dot->stage == nullptr) return values + block.first * value_stride;
    return staged + block.first * chunk_blocks * dot->staged_bytes;
  }

  // Elements [0, k) of all rows as the chunk's blocks from `first_block` on; zeros fill the last.
  // `from` may be `values` itself, if what follows k there is zero.
  void put(int64_t first_block, int64_t k, const std::byte* from, int64_t stride) const;
};

// A worker's room, carved.
struct BackwardRoom {
  TileRows rows;  // without a tile
  std::byte* panel = nullptr;
  float* products = nullptr;
};

template <typename Source>
concept ScaledSource = Source::kIsScaled;

template <typename Source>
class BackwardProduct {
 public:
  BackwardProduct(const Source& source, const Dot& dot, const BackwardLimits& limits)
      : source_(source), dot_(dot), limits_(limits) {}

  void run_tile(const Tile& tile, std::byte* room) const {
    TileRows rows;
    rows.dot = &dot_.for_rows(tile.rows.count);
    rows.element = source_.row_element();
    rows.count = tile.rows.count;
    rows.num_row_blocks = ceil_div(rows.count, rows.dot->row_block);
    rows.value_stride = limits_.value_stride;
    rows.values = room;
    rows.staged = room + limits_.staged;
    rows.scales = reinterpret_cast<float*>(room + limits_.scales);
    auto* const products = reinterpret_cast<float*>(room + limits_.products);
    const int64_t num_blocks = source_.num_blocks(tile.group);
    const bool one_chunk = num_blocks <= limits_.chunk_blocks;
    if (one_chunk && num_blocks > 0) load(tile, {0, num_blocks}, &rows);
    // A single chunk's rows stay: panels are stored at once, but for few rows, whose floating-point
    // environment would else change too often.
    const int64_t fitting = limits_.tile_rows / rows.count;
    const int64_t at_once =
        one_chunk ? std::clamp<int64_t>(fitting, 1, limits_.at_once) : limits_.at_once;
    const bool stores_between = num_blocks > 0 && source_.moves_sums(tile);
    for (int64_t done = 0; done < tile.panels.count; done += at_once) {
      const Part panels{tile.panels.first + done, std::min(at_once, tile.panels.count - done)};
      multiply(tile, panels, {num_blocks, stores_between}, room + limits_.panel, &rows, products);
      if (stores_between) continue;
      const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
      for (int64_t i = 0; i < panels.count; ++i) {
        source_.store(tile, panels.first + i, products + i * rows.count * kPanelColumns);
      }
    }
    source_.finish_tile(tile);
  }

 private:
  void load(const Tile& tile, const Part& blocks, TileRows* rows) const {
    rows->chunk_blocks = blocks.count;
    source_.load(tile, blocks, *rows);
  }

  struct Contraction {
    int64_t num_blocks = 0;
    // Sums go to the output as soon as they are finished: memory takes them while the next are made.
    bool stores_between = false;
  };

  // The finished sums of some panels.
  void multiply(const Tile& tile, const Part& panels, const Contraction& over,
                std::byte* panel_room, TileRows* rows, float* products) const {
    const int64_t num_blocks = over.num_blocks;
    const int64_t panel_floats = rows->count * kPanelColumns;
    if (num_blocks == 0) {
      std::fill_n(products, panels.count * panel_floats, 0.0f);
      return;
    }
    const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
    const int64_t num_chunks = ceil_div(num_blocks, limits_.chunk_blocks);
    for (int64_t at = 0; at < num_chunks; ++at) {
      const Part blocks = part_of(num_blocks, num_chunks, at);
      if (num_chunks > 1) load(tile, blocks, rows);
      for (int64_t i = 0; i < panels.count; ++i) {
        const int64_t panel = panels.first + i;
        const std::byte* weights = source_.panel(tile, panel, blocks, panel_room);
        const Chunk chunk{blocks, at > 0, over.stores_between && at + 1 == num_chunks};
        multiply_panel(tile, panel, weights, chunk, *rows, products + i * panel_floats);
      }
    }
  }

  struct Chunk {
    Part blocks;
    bool resumes = false;
    bool stores = false;  // it is the last, and sums are stored between the products
  };

  void multiply_panel(const Tile& tile, int64_t panel, const std::byte* weights, const Chunk& chunk,
                      const TileRows& rows, float* products) const {
    for (int64_t at = 0; at < rows.num_row_blocks; ++at) {
      const Part block = rows.row_block(at);
      source_.fetch_output(tile, panel, block);
      DotArgs args{
          .rows = rows.rows_of(block),
          .row_stride_bytes = rows.value_stride,
          .num_rows = block.count,
          .k = rows.chunk_blocks * kBlockK,
          .panel = weights,
          .scratch = products + block.first * kPanelColumns,
          .resumes = chunk.resumes,
      };
      if constexpr (requires { source_.ahead(tile, panel, chunk.blocks, Share()); }) {
        const Prefetch ahead = source_.ahead(tile, panel, chunk.blocks, {at, rows.num_row_blocks});
        args.prefetch = ahead.from;
        args.prefetch_lines = ahead.lines_per_block;
        args.prefetch_stride = ahead.stride;
      }
      if constexpr (ScaledSource<Source>) {
        rows.dot->run_scaled(args, scaled_panel(weights, rows.scales_of(block)));
      } else {
        rows.dot->run(args);
      }
      if (!chunk.stores) continue;
      Tile part = tile;
      part.rows = {tile.rows.first + block.first, block.count};
      source_.store(part, panel, args.scratch);
    }
  }

  static CodedPanel scaled_panel(const std::byte* panel, const float* row_scales) {
    CodedPanel coded;
    coded.layout = {kBlockK, kPanelColumns * 4, 0, false};
    coded.panel = panel;
    coded.decoded = panel + kPanelScaleBytes;
    coded.block_k = kBlockK;
    coded.are_e8m0 = true;
    coded.rows.values = row_scales;
    return coded;
  }

  const Source& source_;
  const Dot& dot_;
  const BackwardLimits& limits_;
};

// Prefetches the first `lines` of each row for writing.
inline void fetch_rows(const std::byte* first, int64_t stride_bytes, const Part& rows, int lines) {
  for (int64_t r = rows.first; r < rows.first + rows.count; ++r) {
    for (int line = 0; line < lines; ++line) {
      __builtin_prefetch(first + r * stride_bytes + line * 64, 1, 3);
    }
  }
}

// `sizes`: rows of each group's products; `num_panels`: of their columns.
template <typename Source>
Status run_backward(const GemmOptions& options, const Source& source, const Dot& dot,
                    const BackwardLimits& limits, std::span<const int64_t> sizes,
                    int64_t num_panels) {
  constexpr int64_t kTasksPerThread = 16;
  const int64_t threads = options.pool == nullptr ? 1 : options.pool->num_threads();
  const Tiles tiles(sizes, {.tile_rows = limits.tile_rows,
                            .num_panels = num_panels,
                            .num_threads = threads,
                            .tasks_per_thread = kTasksPerThread});
  const int64_t workers = std::min(threads, tiles.num_tasks());
  thread_local AlignedBuffer rooms;  // kept, so that a steady state does not allocate
  ARGOSY_RETURN_IF_ERROR(rooms.reserve(workers * limits.total));
  std::byte* const all_rooms = rooms.data();
  std::atomic<int64_t> next_task{0};
  const BackwardProduct<Source> product(source, dot, limits);
  // Relaxed: the counter only hands out numbers; parallel_for publishes the rest.
  const auto work = [&](int64_t worker, int) {
    Tiles::Cursor cursor;
    for (int64_t task = next_task.fetch_add(1, std::memory_order_relaxed); task < tiles.num_tasks();
         task = next_task.fetch_add(1, std::memory_order_relaxed)) {
      product.run_tile(tiles.at(task, &cursor), all_rooms + worker * limits.total);
    }
  };
  if (workers <= 1) {
    work(0, 0);
  } else {
    options.pool->parallel_for(workers, work);
  }
  return {};
}

}  // namespace argosy::gemm
