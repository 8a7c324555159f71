// The driver of the grouped GEMM: checks every argument first, then runs tasks = (group, block of
// rows, range of panels). Tasks write disjoint outputs and no sum crosses a task, so bits do not
// depend on threads. Nothing is allocated: a task finds its place by walking the group sizes. Test:
// tests/gemm/.
#include <algorithm>

#include "argosy/gemm.h"
#include "base/error.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "platform/float_env.h"

namespace argosy {
namespace gemm {

Result<const KernelTable*> kernels_for(Level level) {
  ARGOSY_RETURN_IF_ERROR(resolve_level(level).error());
  if (level == Level::kReference) return &reference_kernels();
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* info, cpu_info());
  return info->has(Level::kAvx2) ? &generic_fma_kernels() : &generic_kernels();
}

namespace {

constexpr int64_t kTasksPerThread = 4;

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b == 0 ? 0 : 1); }

// What every task needs.
struct Work {
  const RaggedRows* x = nullptr;
  const PackedWeights* w = nullptr;
  TensorView out;
  DotKernel dot = nullptr;
  StoreKernel store = nullptr;
  int64_t row_block = 0;
  int64_t panels_per_task = 0;
  int64_t chunks_per_block = 0;
};

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

DotKernel dot_kernel(const KernelTable& table, DType rows, DType weights, DotOrder order) {
  if (rows == DType::kF32) {
    return weights == DType::kF32 ? table.dot_f32_f32 : table.dot_f32_bf16;
  }
  return order == DotOrder::kAmx ? table.dot_bf16_amx : table.dot_bf16_vdpbf16;
}

StoreKernel store_kernel(const KernelTable& table, DType out, PackedWeights::Kind kind) {
  if (kind == PackedWeights::Kind::kPlain) {
    return out == DType::kF32 ? table.store_plain_f32 : table.store_plain_bf16;
  }
  return out == DType::kF32 ? table.store_gate_up_f32 : table.store_gate_up_bf16;
}

// One block of rows of one group by one panel.
void run_block(const Work& work, int64_t group, int64_t first_row, int64_t num_rows,
               int64_t panel) {
  alignas(64) float scratch[kMaxRowBlock * kPanelColumns];
  const ConstTensorView& rows = work.x->rows;
  const int64_t element = size_of(rows.dtype);
  const bool gate_up = work.w->kind() == PackedWeights::Kind::kGateUp;
  const int64_t panel_width = gate_up ? kTileColumns : kPanelColumns;
  const int64_t first_column = panel * panel_width;

  const DotArgs dot_args{
      .rows = rows.data + row_offset(first_row, rows.stride(0)) * element,
      .row_stride_bytes = rows.stride(0) * element,
      .num_rows = num_rows,
      .k = work.w->k(),
      .panel = work.w->panel(group, panel),
      .scratch = scratch,
  };
  {
    const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
    work.dot(dot_args);
  }
  const StoreArgs store_args{
      .scratch = scratch,
      .num_rows = num_rows,
      .num_columns = std::min(panel_width, work.w->n() - first_column),
      .out = work.out.data + (row_offset(first_row, work.out.stride(0)) + first_column) * element,
      .row_stride_bytes = work.out.stride(0) * element,
  };
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  work.store(store_args);
}

void run_task(const Work& work, int64_t task) {
  const int64_t chunk = task % work.chunks_per_block;
  int64_t block = task / work.chunks_per_block;
  int64_t group = 0;
  for (;; ++group) {
    const int64_t blocks = ceil_div(work.x->sizes[static_cast<size_t>(group)], work.row_block);
    if (block < blocks) break;
    block -= blocks;
  }
  const auto at = static_cast<size_t>(group);
  const int64_t done = block * work.row_block;
  const int64_t num_rows = std::min(work.row_block, work.x->sizes[at] - done);
  const int64_t first_panel = chunk * work.panels_per_task;
  const int64_t last_panel = std::min(first_panel + work.panels_per_task, work.w->num_panels());
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    run_block(work, group, work.x->offsets[at] + done, num_rows, panel);
  }
}

}  // namespace
}  // namespace gemm

Status grouped_gemm(const GemmOptions& options, const RaggedRows& x, const PackedWeights& w,
                    const TensorView& out) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::KernelTable* table, gemm::kernels_for(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::check_matrix("rows", x.rows, w.k()));
  ARGOSY_RETURN_IF_ERROR(gemm::check_weights(options, x.rows.dtype, w));
  ARGOSY_RETURN_IF_ERROR(gemm::check_matrix("out", out, w.n()));
  ARGOSY_RETURN_IF_ERROR(gemm::check_output(x.rows, out));
  ARGOSY_RETURN_IF_ERROR(gemm::check_groups(x, w.num_groups()));

  int64_t num_blocks = 0;
  for (const int64_t size : x.sizes) num_blocks += gemm::ceil_div(size, table->row_block);
  if (num_blocks == 0) return {};

  const int64_t threads = options.pool == nullptr ? 1 : options.pool->num_threads();
  const int64_t wanted_chunks =
      threads == 1 ? 1 : gemm::ceil_div(gemm::kTasksPerThread * threads, num_blocks);
  gemm::Work work;
  work.x = &x;
  work.w = &w;
  work.out = out;
  work.dot = gemm::dot_kernel(*table, x.rows.dtype, w.dtype(), options.dot_order);
  work.store = gemm::store_kernel(*table, out.dtype, w.kind());
  work.row_block = table->row_block;
  work.panels_per_task = gemm::ceil_div(w.num_panels(), std::min(wanted_chunks, w.num_panels()));
  work.chunks_per_block = gemm::ceil_div(w.num_panels(), work.panels_per_task);

  const int64_t num_tasks = num_blocks * work.chunks_per_block;
  if (options.pool == nullptr) {
    for (int64_t task = 0; task < num_tasks; ++task) gemm::run_task(work, task);
  } else {
    options.pool->parallel_for(num_tasks,
                               [&work](int64_t task, int) { gemm::run_task(work, task); });
  }
  return {};
}

}  // namespace argosy
