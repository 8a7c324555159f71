// The activation of rows: checks, tasks of rows, and the kernels of plain C++ in two builds. Test:
// tests/gemm/activation_backward_test.cc.
#include "gemm/activation_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "argosy/bfloat16.h"
#include "argosy/gemm_backward.h"
#include "base/error.h"
#include "gemm/check_arguments.h"
#include "gemm/kernels.h"
#include "gemm/packed_layout.h"
#include "gemm/tiles.h"
#include "numeric/activation.h"
#include "numeric/dot.h"
#include "platform/float_env.h"

namespace argosy {
namespace gemm {
namespace {

// One lane, by the operations of numeric/activation.h.
struct Vec {
  using F = float;
  static constexpr int kLanes = 1;
#define ARGOSY_LANE static inline __attribute__((always_inline))
  ARGOSY_LANE F zero() { return 0.0f; }
  ARGOSY_LANE F splat(float x) { return x; }
  ARGOSY_LANE F load(const float* x) { return *x; }
  ARGOSY_LANE void store(float* to, F x) { *to = x; }
  ARGOSY_LANE F mul(F a, F b) { return a * b; }
  ARGOSY_LANE F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
#undef ARGOSY_LANE
};
using Constants = numeric::ActivationConstants;
using numeric::ClampedSwiGlu;
using numeric::GeGlu;
using numeric::GeGluTanh;
using numeric::Relu2Glu;
using numeric::SwiGlu;
using numeric::ValueAndSlope;

#define ARGOSY_KERNEL_INLINE __attribute__((always_inline)) inline

template <typename Out, size_t kCount>
ARGOSY_KERNEL_INLINE void store_16(std::byte* to, Out*, const float (&x)[kCount], int64_t count) {
  const int64_t live = std::min<int64_t>(count, kCount);
  for (int64_t i = 0; i < live; ++i) {
    if constexpr (sizeof(Out) == 2) {
      const BFloat16 rounded = BFloat16::from_float(x[i]);
      std::memcpy(to + i * 2, &rounded, sizeof(rounded));
    } else {
      const float value = x[i] != x[i] ? std::bit_cast<float>(numeric::kCanonicalNaN) : x[i];
      std::memcpy(to + i * 4, &value, sizeof(value));
    }
  }
}

namespace base_build {
#define ARGOSY_KERNEL_TARGET
#include "gemm/activation_rows.inl"
#undef ARGOSY_KERNEL_TARGET
}  // namespace base_build

namespace fma_build {
#define ARGOSY_KERNEL_TARGET __attribute__((target("avx2,fma")))
#include "gemm/activation_rows.inl"
#undef ARGOSY_KERNEL_TARGET
}  // namespace fma_build

}  // namespace

const ActivationRowKernels& base_activation_rows() { return base_build::kRows; }
const ActivationRowKernels& fma_activation_rows() { return fma_build::kRows; }

const ActivationRowKernels& activation_rows_for(Level level) {
  if (level >= Level::kAvx512) return avx512_activation_rows();
  if (level >= Level::kAvx2) return avx2_activation_rows();
  const Result<const CpuInfo*> info = cpu_info();
  const bool has_fma = info.has_value() && (*info)->has(Level::kAvx2);
  return level == Level::kGeneric && has_fma ? fma_activation_rows() : base_activation_rows();
}

namespace {

// Tensors of an activation, by name: [S, F] each.
Status check_tensor(const char* name, const ActivationRows& rows, const ConstTensorView& view) {
  ARGOSY_RETURN_IF_ERROR(check_matrix(name, view, rows.gate.dim(1)));
  if (view.dim(0) != rows.gate.dim(0)) {
    return base::invalid("{} is {}, gate is {}: the shapes must be equal", name, describe(view),
                         describe(rows.gate));
  }
  return {};
}

Status check_rows(const GemmOptions& options, const ActivationRows& rows) {
  ARGOSY_RETURN_IF_ERROR(kernels_for(options.level).error());
  ARGOSY_RETURN_IF_ERROR(validate(options.activation));
  ARGOSY_RETURN_IF_ERROR(check_matrix("gate", rows.gate, rows.gate.dim(1)));
  ARGOSY_RETURN_IF_ERROR(check_tensor("up", rows, rows.up));
  if (!rows.weights.empty() && std::ssize(rows.weights) != rows.gate.dim(0)) {
    return base::invalid("{} weights for {} rows", rows.weights.size(), rows.gate.dim(0));
  }
  return check_groups(rows.offsets, rows.sizes, rows.gate.dim(0), std::ssize(rows.sizes));
}

// An output may take the place of an input, element for element.
Status check_output(const char* name, const ActivationRows& rows, const TensorView& out,
                    std::initializer_list<const ConstTensorView*> inputs) {
  ARGOSY_RETURN_IF_ERROR(check_tensor(name, rows, out));
  ARGOSY_RETURN_IF_ERROR(check_output_rows(out));
  for (const ConstTensorView* in : inputs) {
    const bool in_place =
        in->data == out.data && in->dtype == out.dtype && in->stride(0) == out.stride(0);
    if (!in_place) ARGOSY_RETURN_IF_ERROR(check_apart(*in, out));
  }
  return {};
}

template <typename Byte>
ActivationRow<Byte> row_of(const BasicTensorView<Byte>& view, int64_t row) {
  if (view.data == nullptr) return {};
  return {view.row(row), view.dtype == DType::kF32};
}

// What every row needs; null pointers are not there.
struct RowWork {
  const GemmOptions& options;
  const ActivationRows& rows;
  ActivationRowKernel kernel = nullptr;
  const ConstTensorView* d_h = nullptr;
  const ActivationGradients* out = nullptr;
  const TensorView* h = nullptr;

  void run(int64_t row) const {
    const auto at = static_cast<size_t>(row);
    ActivationRowArgs args;
    args.gate = row_of(rows.gate, row);
    args.up = row_of(rows.up, row);
    args.h = row_of(*h, row);
    args.weight = rows.weights.empty() ? 1.0f : rows.weights[at];
    args.columns = rows.gate.dim(1);
    args.limit = options.activation.limit;
    args.alpha = options.activation.alpha;
    if (out != nullptr) {
      args.d_h = row_of(*d_h, row);
      args.d_gate = row_of(out->d_gate, row);
      args.d_up = row_of(out->d_up, row);
      args.d_weight = out->d_weights.empty() ? nullptr : &out->d_weights[at];
    }
    kernel(args);
  }
};

// Tasks of up to 16 rows of a group; rows are independent.
void run_rows(const RowWork& work) {
  const Tiles tiles(work.rows.sizes, {.tile_rows = 16});
  const auto run_tile = [&](const Tile& tile) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    const int64_t first = work.rows.offsets[static_cast<size_t>(tile.group)] + tile.rows.first;
    for (int64_t row = first; row < first + tile.rows.count; ++row) work.run(row);
  };
  ThreadPool* const pool = work.options.pool;
  const int64_t workers =
      std::min<int64_t>(tiles.num_tasks(), pool == nullptr ? 1 : pool->num_threads());
  const auto take_part = [&](int64_t worker, int) {
    const Part tasks = part_of(tiles.num_tasks(), workers, worker);
    Tiles::Cursor cursor;
    for (int64_t task = tasks.first; task < tasks.first + tasks.count; ++task) {
      run_tile(tiles.at(task, &cursor));
    }
  };
  if (workers > 1) {
    pool->parallel_for(workers, take_part);
  } else if (workers == 1) {
    take_part(0, 0);
  }
}

}  // namespace
}  // namespace gemm

Status activation_forward(const GemmOptions& options, const ActivationRows& rows,
                          const TensorView& h) {
  ARGOSY_RETURN_IF_ERROR(gemm::check_rows(options, rows));
  ARGOSY_RETURN_IF_ERROR(gemm::check_output("h", rows, h, {&rows.gate, &rows.up}));
  const auto kind = static_cast<size_t>(options.activation.kind);
  gemm::RowWork work{.options = options, .rows = rows};
  work.kernel = gemm::activation_rows_for(options.level).forward[kind];
  work.h = &h;
  gemm::run_rows(work);
  return {};
}

Status activation_backward(const GemmOptions& options, const ActivationRows& rows,
                           const ConstTensorView& d_h, const ActivationGradients& out) {
  ARGOSY_RETURN_IF_ERROR(gemm::check_rows(options, rows));
  ARGOSY_RETURN_IF_ERROR(gemm::check_tensor("d_h", rows, d_h));
  const std::initializer_list<const ConstTensorView*> inputs = {&rows.gate, &rows.up, &d_h};
  ARGOSY_RETURN_IF_ERROR(gemm::check_output("d_gate", rows, out.d_gate, inputs));
  ARGOSY_RETURN_IF_ERROR(gemm::check_output("d_up", rows, out.d_up, inputs));
  ARGOSY_RETURN_IF_ERROR(gemm::check_apart(out.d_gate, out.d_up));
  if (out.h.data != nullptr) {
    ARGOSY_RETURN_IF_ERROR(gemm::check_output("h", rows, out.h, inputs));
    ARGOSY_RETURN_IF_ERROR(gemm::check_apart(out.d_gate, out.h));
    ARGOSY_RETURN_IF_ERROR(gemm::check_apart(out.d_up, out.h));
  }
  if (!out.d_weights.empty() && std::ssize(out.d_weights) != rows.gate.dim(0)) {
    return base::invalid("d_weights has {} values for {} rows", out.d_weights.size(),
                         rows.gate.dim(0));
  }
  const auto kind = static_cast<size_t>(options.activation.kind);
  gemm::RowWork work{.options = options, .rows = rows};
  work.kernel = gemm::activation_rows_for(options.level).backward[kind];
  work.d_h = &d_h;
  work.out = &out;
  work.h = &out.h;
  gemm::run_rows(work);
  return {};
}

}  // namespace argosy
