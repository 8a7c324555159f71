// Sizes and packing of weights and biases. Padding is zeroed once and never written again, so a group may be
// set anew. Test: tests/gemm/packed_weights_test.cc.
#include <cstring>
#include <utility>

#include "argosy/gemm.h"
#include "base/error.h"
#include "gemm/pack_quantised.h"
#include "gemm/packed_layout.h"

namespace argosy {
namespace gemm {
namespace {

// User address space of x86-64 with four-level page tables; more is refused without asking the
// allocator.
constexpr int64_t kMaxBytes = int64_t{1} << 47;

int64_t padded(int64_t value, int64_t multiple) {
  return value / multiple * multiple + (value % multiple == 0 ? 0 : multiple);
}

// Panels and bytes. layout.block_k 0: no scales.
Result<PackedShape> shape_of(PackedWeights::Kind kind, int64_t num_groups, int64_t n, int64_t k,
                             const CodedLayout& layout) {
  if (num_groups < 0 || n < 1 || k < 1) {
    return base::invalid("packed weights need num_groups >= 0, n >= 1, k >= 1; got {}, {}, {}",
                         num_groups, n, k);
  }
  // Above 2^47 nothing fits; below it the rounding up cannot overflow.
  if (n > kMaxBytes || k > kMaxBytes || num_groups > kMaxBytes) {
    return base::invalid("packed weights of {} groups [{}, {}] exceed 2^47 bytes", num_groups, n,
                         k);
  }
  const int64_t columns = kind == PackedWeights::Kind::kGateUp ? kTileColumns : kPanelColumns;
  PackedShape shape;
  shape.num_panels = padded(n, columns) / columns;
  shape.padded_k = padded(k, kBlockK);
  shape.panel_bytes = shape.padded_k / kBlockK * layout.code_bytes;
  if (layout.block_k > 0) {
    shape.panel_bytes += padded(k, layout.block_k) / layout.block_k * layout.scale_bytes;
  }
  if (__builtin_mul_overflow(shape.panel_bytes, shape.num_panels, &shape.total_bytes) ||
      __builtin_mul_overflow(shape.total_bytes, num_groups, &shape.total_bytes)) {
    return base::invalid("packed weights of {} groups [{}, {}] need more than 2^63 bytes",
                         num_groups, n, k);
  }
  if (shape.total_bytes > kMaxBytes) {
    return base::error(StatusCode::kOutOfMemory,
                       "packed weights of {} groups [{}, {}] need {} bytes", num_groups, n, k,
                       shape.total_bytes);
  }
  return shape;
}

}  // namespace

Result<PackedShape> packed_shape(PackedWeights::Kind kind, DType dtype, int64_t num_groups,
                                 int64_t n, int64_t k) {
  if (dtype != DType::kBF16 && dtype != DType::kF32) {
    return base::invalid("packed weights are BF16 or F32, not {}", name_of(dtype));
  }
  return shape_of(kind, num_groups, n, k, {0, 0, kBlockK * kPanelColumns * size_of(dtype), false});
}

Result<PackedShape> packed_shape(PackedWeights::Kind kind, BlockFormat format, int64_t num_groups,
                                 int64_t n, int64_t k) {
  if (info_of(format).block_cols == 0) return base::invalid("quantised weights need a format");
  const CodedLayout layout = coded_layout(format);
  if (layout.block_k == 0) {
    return base::error(StatusCode::kUnsupported, "weights in {} cannot be multiplied",
                       name_of(format));
  }
  return shape_of(kind, num_groups, n, k, layout);
}

namespace {

// Copies row `n` of `w` (any strides, any alignment) into one column of its panel.
template <int kBytes, typename Offset>
void pack_column(const ConstTensorView& w, int64_t n, std::byte* panel, int64_t column,
                 Offset offset) {
  const std::byte* from = w.data + row_offset(n, w.stride(0)) * kBytes;
  const int64_t step = w.stride(1) * kBytes;
  for (int64_t k = 0; k < w.dim(1); ++k) {
    std::memcpy(panel + offset(k, column) * kBytes, from + k * step, kBytes);
  }
}

void pack_matrix(const ConstTensorView& w, std::byte* group_data, int64_t panel_bytes,
                 ColumnOf column_of) {
  for (int64_t n = 0; n < w.dim(0); ++n) {
    const PanelColumn at = column_of(n);
    std::byte* panel = group_data + panel_offset(0, at.panel, 0, panel_bytes);
    if (w.dtype == DType::kBF16) {
      pack_column<2>(w, n, panel, at.column, bf16_offset_in_panel);
    } else {
      pack_column<4>(w, n, panel, at.column, f32_offset_in_panel);
    }
  }
}

Status check_matrix(const PackedWeights& packed, const char* name, const ConstTensorView& w) {
  if (packed.format() != BlockFormat::kUnset) {
    return base::invalid("{} is {}, the packed weights hold {} [{}, {}] with scales", name,
                         describe(w), argosy::name_of(packed.format()), packed.n(), packed.k());
  }
  if (w.dtype != packed.dtype() || w.num_dims != 2 || w.dim(0) != packed.n() ||
      w.dim(1) != packed.k()) {
    return base::invalid("{} is {}, the packed weights hold {} [{}, {}]", name, describe(w),
                         name_of(packed.dtype()), packed.n(), packed.k());
  }
  if (w.data == nullptr) return base::invalid("{} {} has no data", name, describe(w));
  return {};
}

Status check_bias(const PackedWeights& packed, const char* name, const ConstTensorView& bias) {
  if (!packed.has_bias()) return base::invalid("{} is given, but add_bias was not called", name);
  if ((bias.dtype != DType::kBF16 && bias.dtype != DType::kF32) || bias.num_dims != 1 ||
      bias.dim(0) != packed.n()) {
    return base::invalid("{} is {}, the packed weights take BF16 or F32 [{}]", name, describe(bias),
                         packed.n());
  }
  if (bias.data == nullptr) return base::invalid("{} {} has no data", name, describe(bias));
  return {};
}

// Writes element n of `bias`, widened, to its panel's column.
void pack_bias(const ConstTensorView& bias, float* group_bias, ColumnOf column_of) {
  const int64_t element = size_of(bias.dtype);
  for (int64_t n = 0; n < bias.dim(0); ++n) {
    const std::byte* from = bias.data + row_offset(n, bias.stride(0)) * element;
    const PanelColumn at = column_of(n);
    float* to = group_bias + at.panel * kPanelColumns + at.column;
    if (bias.dtype == DType::kF32) {
      std::memcpy(to, from, sizeof(float));
    } else {
      BFloat16 value;
      std::memcpy(&value, from, sizeof(value));
      *to = value.to_float();
    }
  }
}

Status check_group(const PackedWeights& packed, int64_t group, PackedWeights::Kind kind) {
  if (group < 0 || group >= packed.num_groups()) {
    return base::invalid("group {} is outside [0, {})", group, packed.num_groups());
  }
  if (packed.kind() != kind) {
    return base::invalid("packed weights are {}, the call is for {}",
                         kind == PackedWeights::Kind::kPlain ? "gate_up" : "plain",
                         kind == PackedWeights::Kind::kPlain ? "plain" : "gate_up");
  }
  return {};
}

}  // namespace
}  // namespace gemm

Result<PackedWeights> PackedWeights::create(Kind kind, DType dtype, int64_t num_groups, int64_t n,
                                            int64_t k) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::PackedShape shape,
                          gemm::packed_shape(kind, dtype, num_groups, n, k));
  PackedWeights weights(kind, num_groups, n, k);
  weights.dtype_ = dtype;
  ARGOSY_RETURN_IF_ERROR(weights.allocate(shape));
  return weights;
}

Result<PackedWeights> PackedWeights::create_quantised(Kind kind, BlockFormat format,
                                                      int64_t num_groups, int64_t n, int64_t k) {
  ARGOSY_ASSIGN_OR_RETURN(const gemm::PackedShape shape,
                          gemm::packed_shape(kind, format, num_groups, n, k));
  PackedWeights weights(kind, num_groups, n, k);
  weights.dtype_ = info_of(format).code_dtype;
  weights.format_ = format;
  ARGOSY_RETURN_IF_ERROR(weights.allocate(shape));
  if (!gemm::coded_layout(format).is_e2m1) {
    const int64_t bytes = num_groups * shape.num_panels * (shape.padded_k / gemm::kBlockK) * 2;
    ARGOSY_ASSIGN_OR_RETURN(weights.plain_lines_, AlignedBuffer::allocate(bytes));
    if (bytes > 0) std::memset(weights.plain_lines_.data(), 0, static_cast<size_t>(bytes));
  }
  return weights;
}

Status PackedWeights::allocate(const gemm::PackedShape& shape) {
  ARGOSY_ASSIGN_OR_RETURN(data_, AlignedBuffer::allocate(shape.total_bytes));
  if (shape.total_bytes > 0) {
    std::memset(data_.data(), 0, static_cast<size_t>(shape.total_bytes));
  }
  num_panels_ = shape.num_panels;
  padded_k_ = shape.padded_k;
  panel_bytes_ = shape.panel_bytes;
  return {};
}

Status PackedWeights::set_group(int64_t group, const ConstTensorView& w) {
  ARGOSY_RETURN_IF_ERROR(gemm::check_group(*this, group, Kind::kPlain));
  ARGOSY_RETURN_IF_ERROR(gemm::check_matrix(*this, "w", w));
  gemm::pack_matrix(w, group_data(group), panel_bytes_, gemm::plain_column);
  return {};
}

Status PackedWeights::set_group(int64_t group, const ConstTensorView& gate,
                                const ConstTensorView& up) {
  ARGOSY_RETURN_IF_ERROR(gemm::check_group(*this, group, Kind::kGateUp));
  ARGOSY_RETURN_IF_ERROR(gemm::check_matrix(*this, "gate", gate));
  ARGOSY_RETURN_IF_ERROR(gemm::check_matrix(*this, "up", up));
  gemm::pack_matrix(gate, group_data(group), panel_bytes_, gemm::gate_column);
  gemm::pack_matrix(up, group_data(group), panel_bytes_, gemm::up_column);
  return {};
}

Status PackedWeights::set_group(int64_t group, const ConstQuantisedView& w) {
  ARGOSY_RETURN_IF_ERROR(gemm::check_group(*this, group, Kind::kPlain));
  ARGOSY_RETURN_IF_ERROR(gemm::check_quantised_matrix(*this, "w", w));
  gemm::pack_quantised(w, group_data(group), panel_bytes_, gemm::plain_column);
  mark_plain_lines(group);
  return {};
}

Status PackedWeights::set_group(int64_t group, const ConstQuantisedView& gate,
                                const ConstQuantisedView& up) {
  ARGOSY_RETURN_IF_ERROR(gemm::check_group(*this, group, Kind::kGateUp));
  ARGOSY_RETURN_IF_ERROR(gemm::check_quantised_matrix(*this, "gate", gate));
  ARGOSY_RETURN_IF_ERROR(gemm::check_quantised_matrix(*this, "up", up));
  gemm::pack_quantised(gate, group_data(group), panel_bytes_, gemm::gate_column);
  gemm::pack_quantised(up, group_data(group), panel_bytes_, gemm::up_column);
  mark_plain_lines(group);
  return {};
}

Status PackedWeights::add_bias() {
  if (dtype_ == DType::kUnset) return base::invalid("add_bias: the weights were never created");
  if (has_bias_) return {};
  // A panel's biases are fewer bytes than the panel, whose total fits.
  const int64_t bytes =
      num_groups_ * num_panels_ * gemm::kPanelColumns * static_cast<int64_t>(sizeof(float));
  ARGOSY_ASSIGN_OR_RETURN(bias_, AlignedBuffer::allocate(bytes));
  if (bytes > 0) std::memset(bias_.data(), 0, static_cast<size_t>(bytes));
  has_bias_ = true;
  return {};
}

Status PackedWeights::set_bias(int64_t group, const ConstTensorView& bias) {
  ARGOSY_RETURN_IF_ERROR(gemm::check_group(*this, group, Kind::kPlain));
  ARGOSY_RETURN_IF_ERROR(gemm::check_bias(*this, "bias", bias));
  gemm::pack_bias(bias, group_bias(group), gemm::plain_column);
  return {};
}

Status PackedWeights::set_bias(int64_t group, const ConstTensorView& gate,
                               const ConstTensorView& up) {
  ARGOSY_RETURN_IF_ERROR(gemm::check_group(*this, group, Kind::kGateUp));
  ARGOSY_RETURN_IF_ERROR(gemm::check_bias(*this, "gate bias", gate));
  ARGOSY_RETURN_IF_ERROR(gemm::check_bias(*this, "up bias", up));
  gemm::pack_bias(gate, group_bias(group), gemm::gate_column);
  gemm::pack_bias(up, group_bias(group), gemm::up_column);
  return {};
}

std::byte* PackedWeights::group_data(int64_t group) {
  return data_.data() + gemm::panel_offset(group, 0, num_panels_, panel_bytes_);
}

uint16_t* PackedWeights::plain_lines(int64_t group, int64_t panel) {
  return const_cast<uint16_t*>(plain_lines_of_panel(group, panel));
}

void PackedWeights::mark_plain_lines(int64_t group) {
  if (plain_lines_.size_bytes() == 0) return;
  const gemm::CodedLayout layout = gemm::coded_layout(format_);
  for (int64_t p = 0; p < num_panels_; ++p) {
    gemm::find_plain_lines(layout, panel(group, p), padded_k_ / gemm::kBlockK,
                           plain_lines(group, p));
  }
}

float* PackedWeights::group_bias(int64_t group) {
  return reinterpret_cast<float*>(bias_.data()) +
         gemm::panel_offset(group, 0, num_panels_, gemm::kPanelColumns);
}

}  // namespace argosy
