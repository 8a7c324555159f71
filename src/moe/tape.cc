// See tape.h and argosy/moe_backward.h. Sizes: tape_size.cc.
#include "moe/tape.h"

#include <array>
#include <cstring>

#include <fmt/format.h>

#include "argosy/moe.h"
#include "base/error.h"
#include "moe/layer_state.h"

namespace argosy {
namespace {

constexpr BlockFormat kFormat = BlockFormat::kE4M3Row128;
constexpr int64_t kBlock = 128;
constexpr auto kScaleBytes = static_cast<int64_t>(sizeof(float));

int64_t num_blocks(int64_t cols) { return (cols + kBlock - 1) / kBlock; }

constexpr std::array<const char*, 4> kKeepNames{"save", "recompute", "fp8", "offload"};

}  // namespace

const char* name_of(Keep keep) { return kKeepNames[static_cast<size_t>(keep)]; }

Result<Keep> parse_keep(std::string_view name) {
  for (const Keep keep : {Keep::kSave, Keep::kRecompute, Keep::kFp8, Keep::kOffload}) {
    if (name == name_of(keep)) return keep;
  }
  return base::error(StatusCode::kNotFound,
                     "no way to keep a tensor is '{}'; there are save, recompute, fp8, offload",
                     name);
}

std::string to_string(const TapePolicy& policy) {
  return fmt::format("rows {}, preactivation {}, h {}, results {}", name_of(policy.rows),
                     name_of(policy.preactivation), name_of(policy.h), name_of(policy.results));
}

MoeTape::MoeTape(const TapePolicy& policy) : state_(std::make_unique<State>()) {
  state_->policy = policy;
}
MoeTape::~MoeTape() = default;
MoeTape::MoeTape(MoeTape&&) noexcept = default;
MoeTape& MoeTape::operator=(MoeTape&&) noexcept = default;

void MoeTape::set_offload(std::span<std::byte> buffer) { state_->offload = buffer; }
const TapePolicy& MoeTape::policy() const { return state_->policy; }
const DispatchPlan& MoeTape::plan() const { return state_->plan; }
const Routing& MoeTape::routing() const { return state_->routing; }
const TapeShape& MoeTape::shape() const { return state_->shape; }

int64_t MoeTape::num_bytes() const {
  const State& s = *state_;
  int64_t bytes = s.logits.size_bytes() + s.weights.size_bytes();
  for (const KeptMatrix* const kept : {&s.rows, &s.gate, &s.up, &s.h, &s.results}) {
    bytes += kept->own.size_bytes();
  }
  return bytes;
}

int64_t kept_bytes(Keep keep, DType dtype, int64_t rows, int64_t cols) {
  switch (keep) {
    case Keep::kSave:
    case Keep::kOffload:
      return rows * cols * size_of(dtype);
    case Keep::kFp8:
      return rows == 0 ? 0 : whole_lines(rows * cols) + rows * num_blocks(cols) * kScaleBytes;
    case Keep::kRecompute:
      break;
  }
  return 0;
}

QuantisedView KeptMatrix::codes(int64_t first, int64_t count) const {
  QuantisedView view;
  view.format = kFormat;
  view.rows = count;
  view.cols = cols;
  view.codes = TensorView(data, DType::kE4M3, {rows, cols}).rows(first, count);
  view.scales = TensorView(data + whole_lines(rows * cols), DType::kF32, {rows, num_blocks(cols)})
                    .rows(first, count);
  return view;
}

Status MoeTape::State::reserve() {
  const int64_t s = shape.num_slots, wide = shape.hidden, inner = shape.intermediate;
  const struct {
    KeptMatrix& matrix;
    Keep keep;
    DType dtype;
    int64_t cols;
  } all[] = {
      {rows, policy.rows, shape.dtype, wide},
      {gate, policy.preactivation, DType::kF32, inner},
      {up, policy.preactivation, DType::kF32, inner},
      {h, policy.h, shape.dtype, inner},
      {results, shape.weights_inside ? Keep::kRecompute : policy.results, shape.dtype, wide}};
  const int64_t need = size_tape(policy, shape).offload_bytes;
  if (need > static_cast<int64_t>(offload.size())) {
    return base::error(StatusCode::kCapacity,
                       "the tape's offload buffer has {} bytes, {} slots of received rows need {}",
                       offload.size(), s, need);
  }
  if (need > 0 && reinterpret_cast<uintptr_t>(offload.data()) % 64 != 0) {
    return base::invalid("the tape's offload buffer starts {} bytes past a multiple of 64",
                         reinterpret_cast<uintptr_t>(offload.data()) % 64);
  }
  ARGOSY_RETURN_IF_ERROR(
      logits.reserve(shape.num_tokens * shape.num_experts * size_of(DType::kF32)));
  if (shape.weights_inside) ARGOSY_RETURN_IF_ERROR(weights.reserve(s * size_of(DType::kF32)));
  std::byte* free = offload.data();
  for (const auto& one : all) {
    KeptMatrix& matrix = one.matrix;
    matrix.keep = one.keep;
    matrix.dtype = one.dtype;
    matrix.rows = s;
    matrix.cols = one.cols;
    const int64_t bytes = kept_bytes(one.keep, one.dtype, s, one.cols);
    if (one.keep == Keep::kOffload) {
      matrix.data = free;
      free += whole_lines(bytes);
    } else {
      ARGOSY_RETURN_IF_ERROR(matrix.own.reserve(bytes));
      matrix.data = matrix.own.data();
    }
  }
  return {};
}

Status keep_groups(const ConstTensorView& rows, const ReceivedRows& groups, int64_t base,
                   ThreadPool* pool, KeptMatrix* to) {
  if (to->is_plain()) {
    const int64_t row_bytes = to->cols * size_of(to->dtype);
    copy_groups(rows, groups, row_bytes, to->data + base * row_bytes);
    return {};
  }
  if (to->keep != Keep::kFp8) return {};
  QuantiseOptions options;
  options.pool = pool;
  return quantise(options, rows, to->codes(base, rows.dim(0)),
                  {groups.group_offsets, groups.group_sizes});
}

Status decode_groups(const KeptMatrix& kept, int64_t base, const RowGroups& groups,
                     ThreadPool* pool, const TensorView& out) {
  if (out.dim(0) == 0) return {};
  DequantiseOptions options;
  options.pool = pool;
  return dequantise(options, kept.codes(base, out.dim(0)), out, groups);
}

}  // namespace argosy
