// The driver of the grouped GEMM: checks every argument first, then the threads take tasks = (group,
// tile of rows, range of panels) from one counter. Tasks write disjoint outputs and no sum crosses a
// task, so bits do not depend on threads. Nothing is allocated. Test: tests/gemm/.
#include <algorithm>
#include <atomic>
#include <bit>

#include "argosy/gemm_backward.h"
#include "gemm/check_arguments.h"
#include "gemm/heuristics.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "gemm/row_codes.h"
#include "gemm/tiles.h"
#include "platform/float_env.h"

namespace argosy {
namespace gemm {

const KernelTable& kernels_of(Level level) {
  switch (level) {
    case Level::kReference:
      return reference_kernels();
    case Level::kGeneric:
      return generic_kernels();
    case Level::kAvx2:
      return avx2_kernels();
    case Level::kAvx512:
      return avx512_kernels();
    case Level::kAvx512Bf16:
      return is_half_width_core() ? avx512_bf16_half_width_kernels() : avx512_bf16_kernels();
    case Level::kAmx:
      return amx_kernels();
  }
  return reference_kernels();
}

Result<const KernelTable*> kernels_for(Level level) {
  ARGOSY_RETURN_IF_ERROR(resolve_level(level).error());
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* info, cpu_info());
  if (level == Level::kGeneric && info->has(Level::kAvx2)) return &generic_fma_kernels();
  return &kernels_of(level);
}

namespace {

Dot dot_of(const KernelTable& table, const GroupedRows& x, const PackedWeights& w, DotOrder order) {
  if (x.dtype() == DType::kF32) return w.dtype() == DType::kF32 ? table.f32_f32 : table.f32_bf16;
  const Dot& dot = order == DotOrder::kAmx ? table.bf16_amx : table.bf16_vdpbf16;
  const bool is_scaled = x.has_scales() || w.format() != BlockFormat::kUnset;
  return is_scaled && dot.run_scaled == nullptr ? *dot.few : dot;
}

bool has_e8m0_scales(BlockFormat format) { return info_of(format).scale_dtype == DType::kE8M0; }

// log2 of how many of the short blocks a long one holds.
int shift_of(int64_t long_block, int64_t short_block) {
  return std::countr_zero(static_cast<uint64_t>(long_block / short_block));
}

// Without a panel and scales; block_k 0 where neither side has scales.
CodedPanel coded_of(Level level, const GroupedRows& x, const PackedWeights& w) {
  CodedPanel coded;
  coded.layout = coded_layout(w.format());
  const bool is_coded = coded.layout.block_k > 0;
  if (is_coded) {
    const Decoders& decoders = decoders_for(level);
    coded.decode = coded.layout.is_e2m1 ? decoders.e2m1 : decoders.e4m3;
    coded.block_k = coded.layout.block_k;
  }
  if (!x.has_scales()) return coded;
  const int64_t row_block = info_of(x.format).block_cols;
  coded.block_k = is_coded ? std::min(coded.block_k, row_block) : row_block;
  coded.block_shift = is_coded ? shift_of(coded.layout.block_k, coded.block_k) : 0;
  coded.rows.block_shift = shift_of(row_block, coded.block_k);
  coded.are_e8m0 = has_e8m0_scales(x.format) && (!is_coded || has_e8m0_scales(w.format()));
  return coded;
}

StoreKernel store_of(const KernelTable& table, DType out, const PackedWeights& w,
                     ActivationKind activation) {
  const Stores& stores = out == DType::kF32 ? table.store_f32 : table.store_bf16;
  const size_t bias = w.has_bias() ? 1 : 0;
  if (w.kind() == PackedWeights::Kind::kPlain) return stores.plain[bias];
  return stores.gate_up[static_cast<size_t>(activation)][bias];
}

// Bytes that a row takes when it is staged.
int64_t staged_row_bytes(const Dot& dot, int64_t padded_k) {
  return dot.stage == nullptr ? 0 : padded_k / kBlockK * dot.staged_bytes;
}

// Rows that are decoded or copied before a kernel sees them.
bool are_rows_prepared(const Dot& dot, const GroupedRows& x) {
  if (!x.is_scattered()) return x.has_scales();
  const bool all_stage = dot.stage != nullptr && (dot.few == nullptr || dot.few->stage != nullptr);
  return x.payload.is_quantised() || !all_stage;
}

// Of a prepared row, one line more than it needs: rows 4 KiB apart would share a set of the L1 cache.
int64_t value_row_bytes(const GroupedRows& x, int64_t padded_k) {
  return padded_k * size_of(x.dtype()) + 64;
}

// A worker's room for the largest tile, and where in it everything begins: multiples of 64 bytes.
struct Room {
  int64_t values = 0;   // after the staged rows: prepared rows
  int64_t scales = 0;   // and their scales
  int64_t decoded = 0;  // a panel of codes as bf16
  int64_t bytes = 0;
};

Room room_of(const Dot& dot, const GroupedRows& x, const PackedWeights& w, int64_t tile_rows) {
  const int64_t few_rows = dot.few == nullptr ? 0 : dot.few_rows;
  const int64_t few = few_rows == 0 ? 0 : few_rows * staged_row_bytes(*dot.few, w.padded_k());
  Room room;
  room.values = std::max(few, tile_rows * staged_row_bytes(dot, w.padded_k()));
  room.scales = room.values;
  if (are_rows_prepared(dot, x)) {
    // Kernels that stage take a block of rows at a time.
    const int64_t rows = dot.stage == nullptr ? tile_rows : dot.row_block;
    room.scales += ceil_div(std::max(rows, few_rows) * value_row_bytes(x, w.padded_k()), 64) * 64;
  }
  room.decoded = room.scales;
  if (x.has_scales()) {
    const int64_t floats = std::max(tile_rows, few_rows) * x.scales.dim(1);
    room.decoded += ceil_div(floats * int64_t{sizeof(float)}, 64) * 64;
  }
  room.bytes = room.decoded;
  if (w.format() != BlockFormat::kUnset) {
    room.bytes += w.padded_k() / kBlockK * kDecodedBlockBytes;
  }
  return room;
}

// Where the two products go before the activation; else null.
struct Preactivation {
  TensorView gate, up;
  StoreKernel store = nullptr;
};

// What every task needs.
struct Work {
  const GroupedRows* x = nullptr;
  const PackedWeights* w = nullptr;
  TensorView out;
  std::span<std::byte* const> out_rows;  // in place of `out`, which then has a dtype only
  Level level = Level::kReference;
  Dot dot;
  CodedPanel coded;
  StoreKernel store = nullptr;  // null: only the pre-activation is wanted
  const Preactivation* before = nullptr;
  Activation activation;
  GemmHeuristics heuristics;
  Room room;
  std::byte* rooms = nullptr;  // [workers][room.bytes]
};

// What a worker has for itself.
struct Scratch {
  float* products = nullptr;  // [kMaxRowBlock][32]
  std::byte* room = nullptr;
};

// Few rows: the same panels, some way ahead. Else a share of the next panel.
Prefetch prefetch_of(const Work& work, const Tile& tile, int64_t panel, const Share& share) {
  constexpr int64_t kLineBytes = 64;
  const int64_t k_blocks = work.w->padded_k() / kBlockK;
  const int64_t lines = work.w->panel_bytes() / k_blocks / kLineBytes;
  const auto current = reinterpret_cast<uintptr_t>(work.w->panel(tile.group, panel));
  if (tile.rows.count <= work.heuristics.few_rows) {
    // Decoding keeps the core from running far ahead: codes want the prefetches at any number of rows.
    const bool is_coded = work.coded.layout.block_k > 0;
    if (!is_coded && tile.rows.count < work.heuristics.ahead_from_rows) return {};
    return {current + static_cast<uintptr_t>(work.heuristics.ahead_bytes), lines};
  }
  if (panel + 1 == tile.panels.first + tile.panels.count) return {};
  const int64_t bytes = work.w->panel_bytes();
  return part_ahead(current + static_cast<uintptr_t>(bytes), bytes, k_blocks, share);
}

// Where the results of a tile and panel go.
struct Output {
  std::byte* first = nullptr;  // row 0 of the tile, first column of the panel
  int64_t row_stride_bytes = 0;
  std::byte* const* rows_at = nullptr;  // in place of both: every row of the tile
  int64_t column_bytes = 0;             // and the first column in it
  int64_t num_columns = 0;

  std::byte* row(int64_t r) const {
    return rows_at != nullptr ? rows_at[r] + column_bytes : first + r * row_stride_bytes;
  }
};

Output output_of(const Work& work, const Tile& tile, int64_t panel) {
  const int64_t element = size_of(work.out.dtype);
  const bool gate_up = work.w->kind() == PackedWeights::Kind::kGateUp;
  const int64_t panel_width = gate_up ? kTileColumns : kPanelColumns;
  const int64_t first_column = panel * panel_width;
  const int64_t num_columns = std::min(panel_width, work.w->n() - first_column);
  const int64_t first_row = work.x->offsets[static_cast<size_t>(tile.group)] + tile.rows.first;
  if (!work.out_rows.empty()) {
    return {.rows_at = work.out_rows.data() + first_row,
            .column_bytes = first_column * element,
            .num_columns = num_columns};
  }
  return {work.out.data + (row_offset(first_row, work.out.stride(0)) + first_column) * element,
          work.out.stride(0) * element, nullptr, 0, num_columns};
}

// The rows of a tile as its kernel takes them, in blocks.
struct TileRows {
  const Dot* dot = nullptr;
  const std::byte* first = nullptr;
  int64_t row_bytes = 0;  // from one row of `first` to the next; staged, on average
  int64_t count = 0;
  int64_t num_blocks = 0;
  // block() is part_of() without its divisions: it is asked for at every panel.
  int64_t each = 0;
  int64_t larger = 0;
  const float* scales = nullptr;  // of all blocks of rows; null: none
  int64_t scale_blocks = 0;       // of a row

  Part block(int64_t at) const {
    return {at * each + std::min(at, larger), each + (at < larger ? 1 : 0)};
  }
};

// Rows of bf16 or fp32 in memory, to be staged or read where they are.
struct RowsInMemory {
  const std::byte* first = nullptr;
  int64_t stride_bytes = 0;
  const std::byte* const* rows_at = nullptr;  // in place of both; only for kernels that stage
};

// Rows [first_row, ..) of a tile's block: codes become bf16 at `values`, and their scales go to `scales`.
RowsInMemory block_rows(const Work& work, const RowRange& range, std::byte* values, float* scales) {
  const ConstTensorView& x = work.x->values;
  if (work.x->is_scattered()) {
    const std::byte* const* const rows_at = work.x->rows_at.data() + range.first;
    if (!are_rows_prepared(work.dot, *work.x)) return {.rows_at = rows_at};
    const int64_t stride_bytes = value_row_bytes(*work.x, work.w->padded_k());
    for (int64_t r = 0; r < range.count; ++r) {
      decode_payload(work.x->payload, rows_at[r], values + r * stride_bytes);
    }
    return {values, stride_bytes};
  }
  if (!work.x->has_scales()) {
    return {x.data + row_offset(range.first, x.stride(0)) * size_of(x.dtype),
            x.stride(0) * size_of(x.dtype)};
  }
  const int64_t stride_bytes = value_row_bytes(*work.x, work.w->padded_k());
  decode_rows(x, range, work.level, values, stride_bytes);
  load_row_scales(work.x->scales, range, scales);
  return {values, stride_bytes};
}

TileRows rows_of(const Work& work, const Tile& tile, std::byte* room) {
  const int64_t first_row = work.x->offsets[static_cast<size_t>(tile.group)] + tile.rows.first;
  auto* const scales = reinterpret_cast<float*>(room + work.room.scales);
  TileRows rows;
  rows.dot = &work.dot.for_rows(tile.rows.count);
  rows.count = tile.rows.count;
  rows.num_blocks = ceil_div(rows.count, rows.dot->row_block);
  rows.each = rows.count / rows.num_blocks;
  rows.larger = rows.count % rows.num_blocks;
  const bool is_staged = rows.dot->stage != nullptr;
  const int64_t staged_bytes = staged_row_bytes(*rows.dot, work.w->padded_k());
  if (work.x->has_scales()) {
    rows.scales = scales;
    rows.scale_blocks = work.x->scales.dim(1);
  }
  for (int64_t at = 0; at < rows.num_blocks; ++at) {
    const Part block = rows.block(at);
    // What is staged is not needed any more.
    const int64_t kept = is_staged ? 0 : block.first * value_row_bytes(*work.x, work.w->padded_k());
    const RowsInMemory from =
        block_rows(work, {first_row + block.first, block.count}, room + work.room.values + kept,
                   scales + block.first * rows.scale_blocks);
    if (at == 0) {
      rows.first = is_staged ? room : from.first;
      rows.row_bytes = is_staged ? staged_bytes : from.stride_bytes;
    }
    if (!is_staged) continue;
    rows.dot->stage({
        .rows = from.first,
        .row_stride_bytes = from.stride_bytes,
        .num_rows = block.count,
        .k = work.w->k(),
        .staged = room + block.first * staged_bytes,
        .rows_at = from.rows_at,
    });
  }
  return rows;
}

// The panel's codes as bf16 in `decoded`, for all blocks of rows; not worth it for a single one.
CodedPanel coded_panel_of(const Work& work, const TileRows& rows, int64_t group, int64_t at,
                          std::byte* decoded) {
  CodedPanel coded = work.coded;
  const std::byte* const panel = work.w->panel(group, at);
  coded.panel = panel;
  coded.plain_lines = work.w->plain_lines_of_panel(group, at);
  if (coded.layout.block_k == 0) coded.decoded = panel;
  if (coded.layout.block_k == 0 || rows.num_blocks == 1) return coded;
  for (int64_t block = 0; block < work.w->padded_k() / kBlockK; ++block) {
    coded.decode(panel + codes_offset(coded.layout, block), decoded + block * kDecodedBlockBytes);
  }
  coded.decoded = decoded;
  return coded;
}

// Whether the panel's output is not in the lines of the panel before.
bool begins_lines(const Output& output, const Tile& tile, int64_t panel) {
  constexpr uintptr_t kLineBytes = 64;
  return panel == tile.panels.first || reinterpret_cast<uintptr_t>(output.row(0)) % kLineBytes == 0;
}

// All rows of the tile by one panel: the products, to products[row of the tile][0..31].
void multiply_panel(const Work& work, const Tile& tile, const TileRows& rows, int64_t panel,
                    std::byte* decoded, float* products) {
  const bool has_output = work.store != nullptr;
  const Output output = has_output ? output_of(work, tile, panel) : Output{};
  const std::byte* weights = work.w->panel(tile.group, panel);
  CodedPanel coded = coded_panel_of(work, rows, tile.group, panel, decoded);
  for (int64_t at = 0; at < rows.num_blocks; ++at) {
    const Part block = rows.block(at);
    const Prefetch prefetch = prefetch_of(work, tile, panel, {at, rows.num_blocks});
    // Lines that the stores would find missing: fetched while the products are computed. Not by few rows: their
    // weights need the miss buffers.
    const bool is_few = rows.count <= work.heuristics.few_rows;
    if (has_output && !is_few && begins_lines(output, tile, panel)) {
      for (int64_t r = block.first; r < block.first + block.count; ++r) {
        __builtin_prefetch(output.row(r), 1, 3);
      }
    }
    const DotArgs args{
        .rows = rows.first + block.first * rows.row_bytes,
        .row_stride_bytes = rows.row_bytes,
        .num_rows = block.count,
        .k = work.w->k(),
        .panel = weights,
        .scratch = products + block.first * kPanelColumns,
        .prefetch = prefetch.from,
        .prefetch_lines = prefetch.lines_per_block,
    };
    if (coded.block_k == 0) {
      rows.dot->run(args);
      continue;
    }
    if (rows.scales != nullptr) coded.rows.values = rows.scales + block.first * rows.scale_blocks;
    rows.dot->run_scaled(args, coded);
  }
}

// The products of one panel plus bias, gate and up each to its place.
void store_preactivation(const Work& work, const Tile& tile, int64_t panel, const float* products) {
  const float* bias = work.w->bias_of_panel(tile.group, panel);
  const int64_t first_row = work.x->offsets[static_cast<size_t>(tile.group)] + tile.rows.first;
  const int64_t first_column = panel * kTileColumns;
  for (const TensorView* out : {&work.before->gate, &work.before->up}) {
    const int64_t column = out == &work.before->up ? kTileColumns : 0;
    work.before->store({.scratch = products + column,
                        .bias = bias == nullptr ? nullptr : bias + column,
                        .num_rows = tile.rows.count,
                        .num_columns = std::min(kTileColumns, work.w->n() - first_column),
                        .out = out->row(first_row) + first_column * size_of(out->dtype),
                        .row_stride_bytes = out->stride(0) * size_of(out->dtype)});
  }
}

// The products of one panel, plus bias, through the activation, to the output.
void store_panel(const Work& work, const Tile& tile, int64_t panel, const float* products) {
  if (work.before != nullptr) store_preactivation(work, tile, panel, products);
  if (work.store == nullptr) return;
  const Output output = output_of(work, tile, panel);
  StoreArgs args{
      .scratch = products,
      .bias = work.w->bias_of_panel(tile.group, panel),
      .limit = work.activation.limit,
      .alpha = work.activation.alpha,
      .num_rows = tile.rows.count,
      .num_columns = output.num_columns,
      .out = output.first,
      .row_stride_bytes = output.row_stride_bytes,
  };
  if (output.rows_at == nullptr) return work.store(args);
  args.num_rows = 1;
  for (int64_t r = 0; r < tile.rows.count; ++r) {
    args.scratch = products + r * kPanelColumns;
    args.out = output.row(r);
    work.store(args);
  }
}

// Fewer than the L1 cache has ways.
constexpr int64_t kStoredRows = 8;

// As many panels at a time as the scratch holds: few rows would else change the floating-point environment,
// and drain the core, at every panel.
void run_tile(const Work& work, const Tile& tile, const Scratch& scratch) {
  const TileRows rows = rows_of(work, tile, scratch.room);
  const int64_t at_once = std::max<int64_t>(1, kMaxRowBlock / tile.rows.count);
  const int64_t panel_floats = tile.rows.count * kPanelColumns;
  for (int64_t done = 0; done < tile.panels.count; done += at_once) {
    const int64_t first = tile.panels.first + done;
    const int64_t count = std::min(at_once, tile.panels.count - done);
    {
      const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
      for (int64_t i = 0; i < count; ++i) {
        multiply_panel(work, tile, rows, first + i, scratch.room + work.room.decoded,
                       scratch.products + i * panel_floats);
      }
    }
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    // Some rows by all panels: rows 4 KiB apart share one set of the L1 cache, and two panels may share a line.
    for (int64_t row = 0; row < tile.rows.count; row += kStoredRows) {
      Tile part = tile;
      part.rows = {tile.rows.first + row, std::min(kStoredRows, tile.rows.count - row)};
      for (int64_t i = 0; i < count; ++i) {
        store_panel(work, part, first + i,
                    scratch.products + i * panel_floats + row * kPanelColumns);
      }
    }
  }
}

// Takes tasks until there are none left.
void run_tasks(const Work& work, const Tiles& tiles, int64_t worker,
               std::atomic<int64_t>* next_task) {
  alignas(64) float products[kMaxRowBlock * kPanelColumns];
  const Scratch scratch{products, work.rooms + worker * work.room.bytes};
  Tiles::Cursor cursor;
  // Relaxed: the counter only hands out numbers; parallel_for publishes the rest.
  for (int64_t task = next_task->fetch_add(1, std::memory_order_relaxed); task < tiles.num_tasks();
       task = next_task->fetch_add(1, std::memory_order_relaxed)) {
    run_tile(work, tiles.at(task, &cursor), scratch);
  }
}

// Where the results go.
struct Outputs {
  TensorView out;
  std::span<std::byte* const> rows = {};  // in place of `out`, which then has a dtype only
  const Preactivation* before = nullptr;  // then `out` may be without data: not wanted
};

// Of arguments that were checked.
Status multiply(const GemmOptions& options, const KernelTable& table, const GroupedRows& x,
                const PackedWeights& w, const Outputs& outputs) {
  Work work;
  work.x = &x;
  work.w = &w;
  work.out = outputs.out;
  work.out_rows = outputs.rows;
  work.before = outputs.before;
  work.level = options.level;
  work.dot = dot_of(table, x, w, options.dot_order);
  work.coded = coded_of(options.level, x, w);
  if (work.before == nullptr || work.out.data != nullptr) {
    work.store = store_of(table, work.out.dtype, w, options.activation.kind);
  }
  work.activation = options.activation;
  work.heuristics = heuristics_for(options.level);

  const int64_t threads = options.pool == nullptr ? 1 : options.pool->num_threads();
  const int64_t staged_bytes = staged_row_bytes(work.dot, w.padded_k());
  const int64_t row_bytes = std::max(w.k() * size_of(x.dtype()), staged_bytes);
  const int64_t tile_rows = tile_rows_for(work.heuristics, row_bytes, work.dot.row_block);
  const Tiles tiles(x.sizes, {.tile_rows = tile_rows,
                              .num_panels = w.num_panels(),
                              .num_threads = threads,
                              .tasks_per_thread = work.heuristics.tasks_per_thread});
  const int64_t workers = std::min(threads, tiles.num_tasks());
  thread_local AlignedBuffer rooms;  // kept, so that a steady state does not allocate
  work.room = room_of(work.dot, x, w, tile_rows);
  ARGOSY_RETURN_IF_ERROR(rooms.reserve(workers * work.room.bytes));
  work.rooms = rooms.data();
  std::atomic<int64_t> next_task{0};
  if (workers <= 1) {
    run_tasks(work, tiles, 0, &next_task);
  } else {
    options.pool->parallel_for(
        workers, [&](int64_t worker, int) { run_tasks(work, tiles, worker, &next_task); });
  }
  return {};
}

GroupedRows grouped_rows(const RaggedQuantisedRows& x) {
  return {.values = x.rows.codes,
          .scales = x.rows.scales,
          .format = x.rows.format,
          .offsets = x.offsets,
          .sizes = x.sizes};
}

}  // namespace
}  // namespace gemm

Status grouped_gemm(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                    const TensorView& out) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_arguments(options, x, w, out));
  const gemm::GroupedRows rows{.values = x.rows, .offsets = x.offsets, .sizes = x.sizes};
  return gemm::multiply(options, *table, rows, w, {.out = out});
}

Status grouped_gemm(const GemmOptions& options, const RaggedQuantisedRows& x,
                    const PackedWeights& w, const TensorView& out) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_arguments(options, x, w, out));
  return gemm::multiply(options, *table, gemm::grouped_rows(x), w, {.out = out});
}

Status grouped_gemm_preactivation(const GemmOptions& options, const RaggedQuantisedRows& x,
                                  const PackedWeights& w, const TensorView& gate,
                                  const TensorView& up, const TensorView& h) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_quantised_preactivation(options, x, w, gate, up, h));
  const gemm::Stores& stores = gate.dtype == DType::kF32 ? table->store_f32 : table->store_bf16;
  const gemm::Preactivation before{gate, up, stores.plain[w.has_bias() ? 1 : 0]};
  return gemm::multiply(options, *table, gemm::grouped_rows(x), w, {.out = h, .before = &before});
}

Status grouped_gemm(const GemmOptions& options, const ScatteredRows& x, const PackedWeights& w,
                    const TensorView& out) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_arguments(options, x, w, out));
  const gemm::GroupedRows rows{
      .offsets = x.offsets, .sizes = x.sizes, .rows_at = x.rows, .payload = x.payload};
  return gemm::multiply(options, *table, rows, w, {.out = out});
}

Status grouped_gemm(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                    std::span<std::byte* const> out) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_arguments(options, x, w, out));
  const gemm::GroupedRows rows{.values = x.rows, .offsets = x.offsets, .sizes = x.sizes};
  TensorView dtype_only;
  dtype_only.dtype = x.rows.dtype;
  return gemm::multiply(options, *table, rows, w, {.out = dtype_only, .rows = out});
}

}  // namespace argosy
