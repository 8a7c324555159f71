// See quantise_tensors.h. Test: tests/cli/quantise_test.cc.
#include "tools/quantise_tensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "tools/tensor_values.h"

namespace argosy::tools {
namespace {

constexpr std::string_view kTag = ".tag";

using File = std::shared_ptr<SafetensorsFile>;

Status invalid(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}

Status in_tensor(const TensorSelection& selection, std::string_view name, const Status& status) {
  return Status(status.code(),
                fmt::format("{}: tensor '{}': {}", selection.file, name, status.message()));
}

std::string shown(const TensorInfo& info) {
  return fmt::format("{} [{}]", name_of(info.dtype), fmt::join(info.shape, ", "));
}

bool is_pattern(const std::string& pattern) {
  return pattern.empty() || pattern.find_first_of("*?[") != std::string::npos;
}

bool selects(const TensorSelection& selection, const std::string& name) {
  if (selection.pattern.empty() || selection.pattern == name) return true;
  return fnmatch(selection.pattern.c_str(), name.c_str(), 0) == 0;
}

Status none_selected(const TensorSelection& selection, const SafetensorsFile& file,
                     std::string_view what) {
  return Status(
      StatusCode::kNotFound,
      fmt::format("{}: none of {} tensors {}{}", selection.file, file.tensors().size(), what,
                  selection.pattern.empty() ? std::string()
                                            : fmt::format(" and matches '{}'", selection.pattern)));
}

bool is_float_matrix(const TensorInfo& info) {
  return info.shape.size() == 2 && is_fp32_or_bf16(info.dtype);
}

Status add_quantised(const TensorInfo& info, const SafetensorsFile& file,
                     const QuantiseSettings& settings, Conversion* conversion) {
  ARGOSY_ASSIGN_OR_RETURN(const Tensor values, file.read(info.name));
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                          quantised_layout(settings.format, info.shape[0], info.shape[1]));
  ARGOSY_ASSIGN_OR_RETURN(QuantisedTensor made, QuantisedTensor::create(layout));
  QuantiseOptions options;
  options.on_non_finite = settings.non_finite;
  options.pool = settings.pool;
  ARGOSY_RETURN_IF_ERROR(quantise(options, values.view(), made.view()));
  ARGOSY_ASSIGN_OR_RETURN(const QuantiseError error, measure_error(values.view(), made.view()));
  ARGOSY_ASSIGN_OR_RETURN(const uint64_t word, make_payload_tag(settings.format, layout.cols));
  ARGOSY_ASSIGN_OR_RETURN(Tensor tag, Tensor::zeros(DType::kU64, {1}));
  *tag.view().as<uint64_t>() = word;
  const ConstQuantisedView view = made.view();
  conversion->output.push_back({info.name + ".codes", view.codes});
  conversion->output.push_back({info.name + ".scales", view.scales});
  if (layout.num_tensor_scales > 0) {
    conversion->output.push_back({info.name + ".tensor_scales", view.tensor_scales});
  }
  conversion->output.push_back({info.name + std::string(kTag), tag.view()});
  const int64_t bytes = layout.code_bytes() + layout.scale_bytes();
  conversion->tensors.push_back(
      {info.name, settings.format, layout.rows, layout.cols, bytes, error});
  conversion->owned.push_back(std::move(tag));
  conversion->owned_quantised.push_back(std::move(made));
  return {};
}

// Format and width by the tag of `name`.
Result<std::pair<BlockFormat, int64_t>> read_tag(const std::string& name,
                                                 const SafetensorsFile& file) {
  const TensorInfo* const info = file.find(name + std::string(kTag));
  if (info->dtype != DType::kU64 || info->shape != std::vector<int64_t>{1}) {
    return invalid(fmt::format("the tag is {}, expected U64 [1]", shown(*info)));
  }
  ARGOSY_ASSIGN_OR_RETURN(const Tensor tag, file.read(info->name));
  const uint64_t word = *tag.view().as<uint64_t>();
  const auto format = static_cast<BlockFormat>(word >> 32 & 0xFF);
  const auto cols = static_cast<int64_t>(word & 0xFFFFFFFF);
  if (format == BlockFormat::kUnset) {
    return Status(StatusCode::kCorruptData, fmt::format("{:#018x} is no tag", word));
  }
  ARGOSY_RETURN_IF_ERROR(check_payload_tag(word, format, cols));
  return std::pair(format, cols);
}

Status read_part(const SafetensorsFile& file, const std::string& name, const TensorView& part) {
  const TensorInfo* const info = file.find(name);
  const std::vector<int64_t> shape(part.shape.begin(), part.shape.begin() + part.num_dims);
  if (info == nullptr) {
    return Status(StatusCode::kNotFound,
                  fmt::format("no tensor '{}', expected {}", name, describe(part)));
  }
  if (info->dtype != part.dtype || info->shape != shape) {
    return invalid(fmt::format("'{}' is {}, expected {}", name, shown(*info), describe(part)));
  }
  const int64_t bytes = part.num_elements() * size_of(part.dtype);
  return file.read_into(name, 0, {part.data, static_cast<size_t>(bytes)});
}

Status add_dequantised(const std::string& name, const SafetensorsFile& file,
                       const QuantiseSettings& settings, Conversion* conversion) {
  ARGOSY_ASSIGN_OR_RETURN(const auto tag, read_tag(name, file));
  const auto [format, cols] = tag;
  const TensorInfo* const codes = file.find(name + ".codes");
  const int64_t rows = codes == nullptr || codes->shape.empty() ? 0 : codes->shape[0];
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout, quantised_layout(format, rows, cols));
  // Nothing is allocated before the file is known to hold as much.
  const int64_t stored = codes == nullptr ? 0 : codes->end - codes->begin;
  if (codes != nullptr && stored != layout.code_bytes()) {
    return invalid(fmt::format("'{}' is {}, expected {} [{}] for {} columns of {}", codes->name,
                               shown(*codes), name_of(info_of(format).code_dtype),
                               fmt::join(layout.codes, ", "), cols, name_of(format)));
  }
  ARGOSY_ASSIGN_OR_RETURN(QuantisedTensor made, QuantisedTensor::create(layout));
  const QuantisedView view = made.view();
  ARGOSY_RETURN_IF_ERROR(read_part(file, name + ".codes", view.codes));
  ARGOSY_RETURN_IF_ERROR(read_part(file, name + ".scales", view.scales));
  if (layout.num_tensor_scales > 0) {
    ARGOSY_RETURN_IF_ERROR(read_part(file, name + ".tensor_scales", view.tensor_scales));
  }
  ARGOSY_ASSIGN_OR_RETURN(Tensor values, Tensor::zeros(settings.dtype, {rows, cols}));
  DequantiseOptions options;
  options.on_nan_scale = settings.non_finite;
  options.pool = settings.pool;
  ARGOSY_RETURN_IF_ERROR(dequantise(options, view, values.view()));
  conversion->output.push_back({name, values.view()});
  const int64_t bytes = layout.code_bytes() + layout.scale_bytes();
  conversion->tensors.push_back({name, format, rows, cols, bytes, {}});
  conversion->owned.push_back(std::move(values));
  return {};
}

}  // namespace

TensorSelection parse_selection(const std::string& word) {
  std::error_code error;
  const size_t colon = word.rfind(':');
  if (colon == std::string::npos || std::filesystem::exists(word, error)) return {word, ""};
  return {word.substr(0, colon), word.substr(colon + 1)};
}

Result<Conversion> quantise_tensors(const TensorSelection& selection,
                                    const QuantiseSettings& settings) {
  ARGOSY_ASSIGN_OR_RETURN(const File file, SafetensorsFile::open(selection.file));
  const bool exact = !is_pattern(selection.pattern) || file->find(selection.pattern) != nullptr;
  if (exact) {
    // For its error, which lists near names.
    if (file->find(selection.pattern) == nullptr) return file->read(selection.pattern).error();
  }
  Conversion conversion;
  for (const TensorInfo& info : file->tensors()) {
    if (exact ? info.name != selection.pattern : !selects(selection, info.name)) continue;
    if (!is_float_matrix(info)) {
      if (exact) {
        return in_tensor(
            selection, info.name,
            invalid(fmt::format("is {}, expected BF16 or F32 [rows, cols]", shown(info))));
      }
      conversion.skipped.push_back(info.name);
      continue;
    }
    const Status added = add_quantised(info, *file, settings, &conversion);
    if (!added.ok()) return in_tensor(selection, info.name, added);
  }
  if (conversion.tensors.empty()) {
    return none_selected(selection, *file, "is a BF16 or F32 matrix");
  }
  return conversion;
}

Result<Conversion> dequantise_tensors(const TensorSelection& selection,
                                      const QuantiseSettings& settings) {
  ARGOSY_ASSIGN_OR_RETURN(const File file, SafetensorsFile::open(selection.file));
  Conversion conversion;
  for (const TensorInfo& info : file->tensors()) {
    if (!info.name.ends_with(kTag) || info.name.size() == kTag.size()) continue;
    const std::string name = info.name.substr(0, info.name.size() - kTag.size());
    if (!selects(selection, name)) continue;
    const Status added = add_dequantised(name, *file, settings, &conversion);
    if (!added.ok()) return in_tensor(selection, name, added);
  }
  if (conversion.tensors.empty()) return none_selected(selection, *file, "has a .tag beside it");
  return conversion;
}

}  // namespace argosy::tools
