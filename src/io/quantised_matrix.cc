// See quantised_matrix.h. Bytes go straight from the file into the matrix: a dtype that only names another
// reading of the same byte (U8 scales are e8m0) costs nothing. Test: tests/io/quantised_checkpoint_test.cc.
#include "io/quantised_matrix.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "io/expected_tensor.h"
#include "io/json.h"

namespace argosy::io {
namespace {

using Entry = TensorDirectory::Entry;

constexpr DType kFloatScales[] = {DType::kF32};
constexpr DType kPowerScales[] = {DType::kE8M0, DType::kU8};
constexpr DType kBytes[] = {DType::kU8};
constexpr int64_t kPackedBlock = 32;                // columns of a group
constexpr int64_t kPackedBytes = kPackedBlock / 2;  // of its codes

std::span<const DType> scale_dtypes(BlockFormat format) {
  return info_of(format).scale_dtype == DType::kF32 ? std::span<const DType>(kFloatScales)
                                                    : std::span<const DType>(kPowerScales);
}

std::span<std::byte> bytes_of(const TensorView& view) {
  return {view.data, static_cast<size_t>(view.num_elements() * size_of(view.dtype))};
}

// The scales of `matrix`: under one of two names. Errors: kNotFound, kInvalidArgument for both.
Result<std::string> find_scales(const TensorDirectory& tensors, const std::string& matrix,
                                BlockFormat format) {
  const std::string first = matrix + std::string(kScaleSuffixes[0]);
  const std::string second = matrix + std::string(kScaleSuffixes[1]);
  const bool has_first = tensors.find(first) != nullptr;
  const bool has_second = tensors.find(second) != nullptr;
  if (has_first && has_second) {
    return base::invalid("two scale tensors of one matrix: {} and {}", in_quotes(first),
                         in_quotes(second));
  }
  const bool is_float = info_of(format).scale_dtype == DType::kF32;
  if (has_second && is_float) {
    return base::invalid("tensor {}: scales of {} are expected in {}", in_quotes(second),
                         name_of(format), in_quotes(first));
  }
  if (has_first || has_second) return has_first ? first : second;
  return base::error(StatusCode::kNotFound, "no tensor {}{} in the checkpoint, the scales of {}",
                     in_quotes(first), is_float ? "" : " or " + in_quotes(second),
                     in_quotes(matrix + ".weight"));
}

Status check_scales(const QuantisedRules& rules, const std::string& name,
                    const QuantisedTensor& matrix) {
  DequantiseOptions options;
  options.on_nan_scale = rules.on_nan_scale;
  const Status checked = check_quantised(options, matrix.view());
  if (checked.ok()) return {};
  return Status(checked.code(), fmt::format("tensor {}: {}", in_quotes(name), checked.message()));
}

// `name`: without ".weight".
Result<QuantisedTensor> read_matrix(const TensorDirectory& tensors, const QuantisedRules& rules,
                                    const std::string& name, int64_t rows, int64_t cols) {
  const BlockFormat format = rules.quantisation->format;
  const DType code_dtype = info_of(format).code_dtype;
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout, quantised_layout(format, rows, cols));
  ARGOSY_ASSIGN_OR_RETURN(const Entry* const codes,
                          expect_tensor(tensors, name + ".weight", layout.codes, {&code_dtype, 1}));
  ARGOSY_ASSIGN_OR_RETURN(const std::string scale_name, find_scales(tensors, name, format));
  ARGOSY_ASSIGN_OR_RETURN(const Entry* const scales,
                          expect_tensor(tensors, scale_name, layout.scales, scale_dtypes(format)));
  ARGOSY_ASSIGN_OR_RETURN(QuantisedTensor matrix, QuantisedTensor::create(layout));
  ARGOSY_RETURN_IF_ERROR(codes->file->read_into(codes->name(), 0, bytes_of(matrix.view().codes)));
  ARGOSY_RETURN_IF_ERROR(scales->file->read_into(scale_name, 0, bytes_of(matrix.view().scales)));
  ARGOSY_RETURN_IF_ERROR(check_scales(rules, scale_name, matrix));
  return matrix;
}

Result<Tensor> dequantised(const QuantisedTensor& matrix, DType dtype) {
  const ConstQuantisedView view = matrix.view();
  ARGOSY_ASSIGN_OR_RETURN(Tensor values, Tensor::zeros(dtype, {view.rows, view.cols}));
  ARGOSY_RETURN_IF_ERROR(dequantise({}, view, values.view()));
  return values;
}

// As the caller asked for them.
Result<ExpertTensors> delivered(const QuantisedRules& rules, ExpertTensors::Quantised matrices) {
  ExpertTensors expert;
  if (rules.dequantise_to == DType::kUnset) {
    expert.quantised = std::move(matrices);
    return expert;
  }
  ARGOSY_ASSIGN_OR_RETURN(expert.gate, dequantised(matrices.gate, rules.dequantise_to));
  ARGOSY_ASSIGN_OR_RETURN(expert.up, dequantised(matrices.up, rules.dequantise_to));
  ARGOSY_ASSIGN_OR_RETURN(expert.down, dequantised(matrices.down, rules.dequantise_to));
  return expert;
}

// Where one packed matrix of all experts lies.
struct Packed {
  const Entry* blocks = nullptr;
  const Entry* scales = nullptr;
  int64_t rows = 0;
  int64_t groups = 0;  // per row
};

Result<Packed> find_packed(const TensorDirectory& tensors, const std::string& name,
                           int64_t num_experts, int64_t rows, int64_t cols) {
  if (cols % kPackedBlock != 0) {
    return base::invalid("tensor {}_blocks: rows of {} are no multiple of {}", name, cols,
                         kPackedBlock);
  }
  Packed packed{nullptr, nullptr, rows, cols / kPackedBlock};
  const std::array<int64_t, 4> shape = {num_experts, rows, packed.groups, kPackedBytes};
  ARGOSY_ASSIGN_OR_RETURN(packed.blocks, expect_tensor(tensors, name + "_blocks", shape, kBytes));
  ARGOSY_ASSIGN_OR_RETURN(packed.scales, expect_tensor(tensors, name + "_scales",
                                                       std::span(shape).first(3), kPowerScales));
  return packed;
}

// Every second row from `first` on. Row by row: gate and up alternate in the file.
void copy_alternate_rows(const Tensor& from, int64_t first, const TensorView& to) {
  const auto row_bytes = static_cast<size_t>(to.dim(1) * size_of(to.dtype));
  for (int64_t row = 0; row < to.dim(0); ++row) {
    std::memcpy(to.row(row), from.view().row(first + 2 * row), row_bytes);
  }
}

Result<QuantisedTensor> packed_matrix(int64_t rows, int64_t groups) {
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                          quantised_layout(BlockFormat::kMxfp4, rows, groups * kPackedBlock));
  return QuantisedTensor::create(layout);
}

Status read_packed_gate_up(const Packed& packed, int64_t expert, ExpertTensors::Quantised* out) {
  const int64_t first_scale = expert * packed.rows * packed.groups;
  const std::array<int64_t, 2> codes_shape = {packed.rows, packed.groups * kPackedBytes};
  const std::array<int64_t, 2> scales_shape = {packed.rows, packed.groups};
  ARGOSY_ASSIGN_OR_RETURN(const Tensor codes,
                          packed.blocks->file->read_elements(
                              packed.blocks->name(), first_scale * kPackedBytes, codes_shape));
  ARGOSY_ASSIGN_OR_RETURN(
      const Tensor scales,
      packed.scales->file->read_elements(packed.scales->name(), first_scale, scales_shape));
  int64_t first = 0;
  for (QuantisedTensor* const matrix : {&out->gate, &out->up}) {
    ARGOSY_ASSIGN_OR_RETURN(*matrix, packed_matrix(packed.rows / 2, packed.groups));
    copy_alternate_rows(codes, first, matrix->view().codes);
    copy_alternate_rows(scales, first, matrix->view().scales);
    ++first;
  }
  return {};
}

}  // namespace

Result<bool> converts_mlp(const QuantisedRules& rules, const std::string& prefix,
                          const MatrixNames& names) {
  const auto name = [&](std::string_view matrix) { return prefix + std::string(matrix); };
  const bool gate = rules.converts(name(names.gate));
  for (const std::string_view other : {names.up, names.down}) {
    if (rules.converts(name(other)) == gate) continue;
    return base::error(StatusCode::kUnsupported,
                       "by modules_to_not_convert {} is quantised but {} is not; one expert's "
                       "matrices must agree",
                       in_quotes(name(gate ? names.gate : other)),
                       in_quotes(name(gate ? other : names.gate)));
  }
  return gate;
}

Status expect_no_scales(const TensorDirectory& tensors, const std::string& prefix,
                        const MatrixNames& names) {
  for (const std::string_view matrix : {names.gate, names.up, names.down}) {
    for (const std::string_view suffix : kScaleSuffixes) {
      const std::string name = fmt::format("{}{}{}", prefix, matrix, suffix);
      if (tensors.find(name) == nullptr) continue;
      return base::invalid("tensor {} has scales of a module that modules_to_not_convert names",
                           in_quotes(name));
    }
  }
  return {};
}

Result<ExpertTensors> read_quantised_mlp(const TensorDirectory& tensors,
                                         const QuantisedRules& rules, const std::string& prefix,
                                         const MatrixNames& names, int64_t width, int64_t hidden) {
  ExpertTensors::Quantised matrices;
  const auto read = [&](std::string_view matrix, int64_t rows, int64_t cols) {
    return read_matrix(tensors, rules, prefix + std::string(matrix), rows, cols);
  };
  ARGOSY_ASSIGN_OR_RETURN(matrices.gate, read(names.gate, width, hidden));
  ARGOSY_ASSIGN_OR_RETURN(matrices.up, read(names.up, width, hidden));
  ARGOSY_ASSIGN_OR_RETURN(matrices.down, read(names.down, hidden, width));
  return delivered(rules, std::move(matrices));
}

Result<ExpertTensors> read_packed_expert(const TensorDirectory& tensors,
                                         const QuantisedRules& rules, const std::string& block,
                                         int64_t expert, const ModelConfig& config) {
  const int64_t num_experts = config.router.num_experts;
  const std::string gate_up_name = block + "experts.gate_up_proj";
  const std::string down_name = block + "experts.down_proj";
  ARGOSY_ASSIGN_OR_RETURN(
      const Packed gate_up,
      find_packed(tensors, gate_up_name, num_experts, 2 * config.intermediate, config.hidden));
  ARGOSY_ASSIGN_OR_RETURN(const Packed down, find_packed(tensors, down_name, num_experts,
                                                         config.hidden, config.intermediate));
  ExpertTensors::Quantised matrices;
  ARGOSY_RETURN_IF_ERROR(read_packed_gate_up(gate_up, expert, &matrices));
  ARGOSY_ASSIGN_OR_RETURN(matrices.down, packed_matrix(down.rows, down.groups));
  const int64_t first_scale = expert * down.rows * down.groups;
  ARGOSY_RETURN_IF_ERROR(down.blocks->file->read_into(
      down.blocks->name(), first_scale * kPackedBytes, bytes_of(matrices.down.view().codes)));
  ARGOSY_RETURN_IF_ERROR(down.scales->file->read_into(down.scales->name(), first_scale,
                                                      bytes_of(matrices.down.view().scales)));
  ARGOSY_RETURN_IF_ERROR(check_scales(rules, gate_up.scales->name(), matrices.gate));
  ARGOSY_RETURN_IF_ERROR(check_scales(rules, gate_up.scales->name(), matrices.up));
  ARGOSY_RETURN_IF_ERROR(check_scales(rules, down.scales->name(), matrices.down));
  return delivered(rules, std::move(matrices));
}

}  // namespace argosy::io
