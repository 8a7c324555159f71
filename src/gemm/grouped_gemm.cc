// The driver of the grouped GEMM: checks every argument first, then the threads take tasks = (group,
// tile of rows, range of panels) from one counter. Tasks write disjoint outputs and no sum crosses a
// task, so bits do not depend on threads. Nothing is allocated. Test: tests/gemm/.
#include <algorithm>
#include <atomic>

#include "argosy/gemm.h"
#include "base/error.h"
#include "gemm/heuristics.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
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
      return avx512_bf16_kernels();
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

Status check_matrix(const char* name, const ConstTensorView& view, int64_t columns) {
  if (view.num_dims != 2) return base::invalid("{} is {}, not a matrix", name, describe(view));
  if (view.dtype != DType::kBF16 && view.dtype != DType::kF32) {
    return base::invalid("{} is {}, its dtype must be BF16 or F32", name, describe(view));
  }
  if (view.dim(0) < 0 || view.dim(1) != columns) {
    return base::invalid("{} is {}, the weights ask for {} columns", name, describe(view), columns);
  }
  if (view.dim(1) > 1 && view.stride(1) != 1) {
    return base::invalid("{} is {}, its columns must have stride 1", name, describe(view));
  }
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  if (address % static_cast<uintptr_t>(size_of(view.dtype)) != 0) {
    return base::invalid("{} starts at address {:#x}, which is not aligned to {} bytes", name,
                         address, size_of(view.dtype));
  }
  if (view.data == nullptr && view.dim(0) > 0) {
    return base::invalid("{} {} has no data", name, describe(view));
  }
  // No memory is so large; addresses are computed without a check from here on.
  int64_t bytes = 0;
  const bool overflows = __builtin_mul_overflow(view.dim(0), view.stride(0), &bytes) ||
                         __builtin_mul_overflow(bytes, size_of(view.dtype), &bytes) ||
                         __builtin_mul_overflow(view.dim(1), size_of(view.dtype), &bytes);
  if (overflows) return base::invalid("{} is {}: more than 2^63 bytes", name, describe(view));
  return {};
}

// First and last byte address + 1 that the view can touch. Precondition: not empty.
std::pair<uintptr_t, uintptr_t> byte_range(const ConstTensorView& view) {
  const auto base = reinterpret_cast<uintptr_t>(view.data);
  const auto last = reinterpret_cast<uintptr_t>(view.row(view.dim(0) - 1));
  const auto row_bytes = static_cast<uintptr_t>(view.dim(1) * size_of(view.dtype));
  return {std::min(base, last), std::max(base, last) + row_bytes};
}

Status check_output(const ConstTensorView& rows, const ConstTensorView& out) {
  if (out.dtype != rows.dtype || out.dim(0) != rows.dim(0)) {
    return base::invalid("out is {}, the rows are {}: dtype and number of rows must be equal",
                         describe(out), describe(rows));
  }
  if (out.dim(0) > 1 && out.stride(0) < out.dim(1) && -out.stride(0) < out.dim(1)) {
    return base::invalid("out has row stride {} and {} columns: its rows overlap", out.stride(0),
                         out.dim(1));
  }
  if (out.dim(0) == 0) return {};
  const auto [x_begin, x_end] = byte_range(rows);
  const auto [out_begin, out_end] = byte_range(out);
  if (x_begin < out_end && out_begin < x_end) {
    return base::invalid("out [{:#x}, {:#x}) overlaps the rows [{:#x}, {:#x})", out_begin, out_end,
                         x_begin, x_end);
  }
  return {};
}

Status check_groups(const RaggedRows& x, int64_t num_groups) {
  const auto groups = static_cast<size_t>(num_groups);
  if (x.sizes.size() != groups || (x.offsets.size() != groups && x.offsets.size() != groups + 1)) {
    return base::invalid("{} sizes and {} offsets for {} groups of weights (offsets: {} or {})",
                         x.sizes.size(), x.offsets.size(), groups, groups, groups + 1);
  }
  const int64_t num_rows = x.rows.dim(0);
  int64_t end = 0;
  for (size_t g = 0; g < groups; ++g) {
    const int64_t offset = x.offsets[g];
    const int64_t size = x.sizes[g];
    if (offset < 0 || size < 0 || offset > num_rows || size > num_rows - offset) {
      return base::invalid("group {} has offset {} and size {}, outside of the {} rows", g, offset,
                           size, num_rows);
    }
    if (offset < end) {
      return base::invalid("group {} starts at row {}, before the end {} of the groups before it",
                           g, offset, end);
    }
    end = offset + size;
  }
  if (x.offsets.size() > groups && x.offsets[groups] < end) {
    return base::invalid("the last offset is {}, before the end {} of the groups",
                         x.offsets[groups], end);
  }
  return {};
}

Status check_weights(const GemmOptions& options, DType rows, const PackedWeights& w) {
  if (w.dtype() == DType::kUnset) return base::invalid("the weights were never created");
  if (w.num_groups() > 0 && w.panel(0, 0) == nullptr) {
    return base::invalid("the weights of {} groups have no data (moved from)", w.num_groups());
  }
  if (rows == DType::kBF16 && w.dtype() == DType::kF32) {
    return base::invalid("BF16 rows with F32 weights: fp32 weights need fp32 rows");
  }
  if (rows == DType::kBF16 && options.dot_order != DotOrder::kAmx &&
      options.dot_order != DotOrder::kVdpbf16) {
    return base::invalid("dot_order is {}; bf16 rows need amx or vdpbf16",
                         name_of(options.dot_order));
  }
  return {};
}

Dot dot_of(const KernelTable& table, DType rows, const PackedWeights& w, DotOrder order) {
  if (rows == DType::kF32) return w.dtype() == DType::kF32 ? table.f32_f32 : table.f32_bf16;
  const Dot& dot = order == DotOrder::kAmx ? table.bf16_amx : table.bf16_vdpbf16;
  const bool is_quantised = w.format() != BlockFormat::kUnset;
  return is_quantised && dot.run_scaled == nullptr ? *dot.few : dot;
}

// Without a panel; layout.block_k 0 for weights that are not quantised.
CodedPanel coded_of(Level level, const PackedWeights& w) {
  CodedPanel coded;
  coded.layout = coded_layout(w.format());
  const Decoders& decoders = decoders_for(level);
  coded.decode = coded.layout.is_e2m1 ? decoders.e2m1 : decoders.e4m3;
  return coded;
}

StoreKernel store_of(const KernelTable& table, DType out, const PackedWeights& w,
                     ActivationKind activation) {
  const Stores& stores = out == DType::kF32 ? table.store_f32 : table.store_bf16;
  const size_t bias = w.has_bias() ? 1 : 0;
  if (w.kind() == PackedWeights::Kind::kPlain) return stores.plain[bias];
  return stores.gate_up[static_cast<size_t>(activation)][bias];
}

// What every task needs.
struct Work {
  const RaggedRows* x = nullptr;
  const PackedWeights* w = nullptr;
  TensorView out;
  Dot dot;
  CodedPanel coded;
  StoreKernel store = nullptr;
  Activation activation;
  GemmHeuristics heuristics;
  std::byte* staging = nullptr;  // [workers][staging_bytes]
  int64_t staging_bytes = 0;     // what the largest tile takes
  int64_t decoded_bytes = 0;     // of them, at the end: a panel of codes as bf16
};

// What a worker has for itself.
struct Scratch {
  float* products = nullptr;  // [kMaxRowBlock][32]
  std::byte* staged = nullptr;
  std::byte* decoded = nullptr;  // [decoded_bytes]
};

// Bytes that a row takes when it is staged.
int64_t staged_row_bytes(const Dot& dot, int64_t padded_k) {
  return dot.stage == nullptr ? 0 : padded_k / kBlockK * dot.staged_bytes;
}

// Of a tile, whichever kernel takes it.
int64_t staging_bytes_for(const Dot& dot, int64_t padded_k, int64_t tile_rows) {
  const int64_t few = dot.few == nullptr ? 0 : dot.few_rows * staged_row_bytes(*dot.few, padded_k);
  return std::max(few, tile_rows * staged_row_bytes(dot, padded_k));
}

// What a block of rows fetches ahead while it goes over a panel.
struct Prefetch {
  uintptr_t from = 0;
  int64_t lines_per_block = 0;
};

// Few rows: the same panels, some way ahead. Else part `at` of `parts` of the next panel.
Prefetch prefetch_of(const Work& work, const Tile& tile, int64_t panel, int64_t parts, int64_t at) {
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
  const int64_t lines_per_block = ceil_div(lines, parts);
  const int64_t done = at * lines_per_block * kLineBytes * k_blocks;
  return {current + static_cast<uintptr_t>(work.w->panel_bytes() + done), lines_per_block};
}

// Where the results of a tile and panel go.
struct Output {
  std::byte* first = nullptr;  // row 0 of the tile, first column of the panel
  int64_t row_stride_bytes = 0;
  int64_t num_columns = 0;
};

Output output_of(const Work& work, const Tile& tile, int64_t panel) {
  const int64_t element = size_of(work.out.dtype);
  const bool gate_up = work.w->kind() == PackedWeights::Kind::kGateUp;
  const int64_t panel_width = gate_up ? kTileColumns : kPanelColumns;
  const int64_t first_column = panel * panel_width;
  const int64_t first_row = work.x->offsets[static_cast<size_t>(tile.group)] + tile.rows.first;
  return {work.out.data + (row_offset(first_row, work.out.stride(0)) + first_column) * element,
          work.out.stride(0) * element, std::min(panel_width, work.w->n() - first_column)};
}

// The rows of a tile as its kernel takes them, in blocks.
struct TileRows {
  const Dot* dot = nullptr;
  const std::byte* first = nullptr;
  int64_t row_bytes = 0;  // from one row of `first` to the next; staged, on average
  int64_t count = 0;
  int64_t num_blocks = 0;

  Part block(int64_t at) const { return part_of(count, num_blocks, at); }
};

TileRows rows_of(const Work& work, const Tile& tile, std::byte* staged) {
  const ConstTensorView& x = work.x->rows;
  const int64_t element = size_of(x.dtype);
  const int64_t first_row = work.x->offsets[static_cast<size_t>(tile.group)] + tile.rows.first;
  TileRows rows;
  rows.dot = &work.dot.for_rows(tile.rows.count);
  rows.first = x.data + row_offset(first_row, x.stride(0)) * element;
  rows.row_bytes = x.stride(0) * element;
  rows.count = tile.rows.count;
  rows.num_blocks = ceil_div(rows.count, rows.dot->row_block);
  if (rows.dot->stage == nullptr) return rows;
  const int64_t staged_bytes = staged_row_bytes(*rows.dot, work.w->padded_k());
  for (int64_t at = 0; at < rows.num_blocks; ++at) {
    const Part block = rows.block(at);
    rows.dot->stage({
        .rows = rows.first + block.first * rows.row_bytes,
        .row_stride_bytes = rows.row_bytes,
        .num_rows = block.count,
        .k = work.w->k(),
        .staged = staged + block.first * staged_bytes,
    });
  }
  rows.first = staged;
  rows.row_bytes = staged_bytes;
  return rows;
}

// The panel's codes as bf16 in `room`, for all blocks of rows; not worth it for a single one.
CodedPanel coded_panel_of(const Work& work, const TileRows& rows, const std::byte* panel,
                          std::byte* room) {
  CodedPanel coded = work.coded;
  coded.panel = panel;
  if (coded.layout.block_k == 0 || rows.num_blocks == 1) return coded;
  for (int64_t block = 0; block < work.w->padded_k() / kBlockK; ++block) {
    coded.decode(panel + codes_offset(coded.layout, block), room + block * kDecodedBlockBytes);
  }
  coded.decoded = room;
  return coded;
}

// All rows of the tile by one panel: the products, to products[row of the tile][0..31].
void multiply_panel(const Work& work, const Tile& tile, const TileRows& rows, int64_t panel,
                    std::byte* decoded, float* products) {
  const Output output = output_of(work, tile, panel);
  const std::byte* weights = work.w->panel(tile.group, panel);
  const CodedPanel coded = coded_panel_of(work, rows, weights, decoded);
  for (int64_t at = 0; at < rows.num_blocks; ++at) {
    const Part block = rows.block(at);
    const Prefetch prefetch = prefetch_of(work, tile, panel, rows.num_blocks, at);
    // Lines that the stores would find missing: fetched while the products are computed. Not by few rows: their
    // weights need the miss buffers.
    const bool is_few = rows.count <= work.heuristics.few_rows;
    for (int64_t r = block.first; !is_few && r < block.first + block.count; ++r) {
      __builtin_prefetch(output.first + r * output.row_stride_bytes, 1, 3);
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
    if (coded.layout.block_k == 0) {
      rows.dot->run(args);
    } else {
      rows.dot->run_scaled(args, coded);
    }
  }
}

// The products of one panel, plus bias, through the activation, to the output.
void store_panel(const Work& work, const Tile& tile, int64_t panel, const float* products) {
  const Output output = output_of(work, tile, panel);
  work.store({
      .scratch = products,
      .bias = work.w->bias_of_panel(tile.group, panel),
      .limit = work.activation.limit,
      .alpha = work.activation.alpha,
      .num_rows = tile.rows.count,
      .num_columns = output.num_columns,
      .out = output.first,
      .row_stride_bytes = output.row_stride_bytes,
  });
}

// As many panels at a time as the scratch holds: few rows would else change the floating-point environment,
// and drain the core, at every panel.
void run_tile(const Work& work, const Tile& tile, const Scratch& scratch) {
  const TileRows rows = rows_of(work, tile, scratch.staged);
  const int64_t at_once = std::max<int64_t>(1, kMaxRowBlock / tile.rows.count);
  const int64_t panel_floats = tile.rows.count * kPanelColumns;
  for (int64_t done = 0; done < tile.panels.count; done += at_once) {
    const int64_t first = tile.panels.first + done;
    const int64_t count = std::min(at_once, tile.panels.count - done);
    {
      const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
      for (int64_t i = 0; i < count; ++i) {
        multiply_panel(work, tile, rows, first + i, scratch.decoded,
                       scratch.products + i * panel_floats);
      }
    }
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    for (int64_t i = 0; i < count; ++i) {
      store_panel(work, tile, first + i, scratch.products + i * panel_floats);
    }
  }
}

// Takes tasks until there are none left.
void run_tasks(const Work& work, const Tiles& tiles, int64_t worker,
               std::atomic<int64_t>* next_task) {
  alignas(64) float products[kMaxRowBlock * kPanelColumns];
  std::byte* const staged = work.staging + worker * work.staging_bytes;
  const Scratch scratch{products, staged, staged + work.staging_bytes - work.decoded_bytes};
  Tiles::Cursor cursor;
  // Relaxed: the counter only hands out numbers; parallel_for publishes the rest.
  for (int64_t task = next_task->fetch_add(1, std::memory_order_relaxed); task < tiles.num_tasks();
       task = next_task->fetch_add(1, std::memory_order_relaxed)) {
    run_tile(work, tiles.at(task, &cursor), scratch);
  }
}

}  // namespace
}  // namespace gemm

Status grouped_gemm(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                    const TensorView& out) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_matrix("rows", x.rows, w.k()));
  ARGOSY_RETURN_IF_ERROR(gemm::check_weights(options, x.rows.dtype, w));
  if (w.kind() == PackedWeights::Kind::kGateUp) {
    ARGOSY_RETURN_IF_ERROR(validate(options.activation));
  }
  ARGOSY_RETURN_IF_ERROR(gemm::check_matrix("out", out, w.n()));
  ARGOSY_RETURN_IF_ERROR(gemm::check_output(x.rows, out));
  ARGOSY_RETURN_IF_ERROR(gemm::check_groups(x, w.num_groups()));

  gemm::Work work;
  work.x = &x;
  work.w = &w;
  work.out = out;
  work.dot = gemm::dot_of(*table, x.rows.dtype, w, options.dot_order);
  work.coded = gemm::coded_of(options.level, w);
  work.store = gemm::store_of(*table, out.dtype, w, options.activation.kind);
  work.activation = options.activation;
  work.heuristics = gemm::heuristics_for(options.level);

  const int64_t threads = options.pool == nullptr ? 1 : options.pool->num_threads();
  const int64_t staged_bytes = gemm::staged_row_bytes(work.dot, w.padded_k());
  const int64_t row_bytes = std::max(w.k() * size_of(x.rows.dtype), staged_bytes);
  const int64_t tile_rows = gemm::tile_rows_for(work.heuristics, row_bytes, work.dot.row_block);
  const gemm::Tiles tiles(x.sizes, {.tile_rows = tile_rows,
                                    .num_panels = w.num_panels(),
                                    .num_threads = threads,
                                    .tasks_per_thread = work.heuristics.tasks_per_thread});
  const int64_t workers = std::min(threads, tiles.num_tasks());
  thread_local AlignedBuffer staging;  // kept, so that a steady state does not allocate
  const bool is_quantised = w.format() != BlockFormat::kUnset;
  work.decoded_bytes = is_quantised ? w.padded_k() / gemm::kBlockK * gemm::kDecodedBlockBytes : 0;
  work.staging_bytes =
      gemm::staging_bytes_for(work.dot, w.padded_k(), tile_rows) + work.decoded_bytes;
  ARGOSY_RETURN_IF_ERROR(staging.reserve(workers * work.staging_bytes));
  work.staging = staging.data();
  std::atomic<int64_t> next_task{0};
  if (workers <= 1) {
    gemm::run_tasks(work, tiles, 0, &next_task);
  } else {
    options.pool->parallel_for(
        workers, [&](int64_t worker, int) { gemm::run_tasks(work, tiles, worker, &next_task); });
  }
  return {};
}

}  // namespace argosy
