// argosy quantise: matrices to codes and scales and back, or a whole checkpoint folder. Order: usage, inputs,
// work, text, files. Test: tests/cli/quantise_test.cc.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "argosy/checkpoint_convert.h"
#include "argosy/cpu.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/option_checks.h"
#include "tools/output_files.h"
#include "tools/quantise_tensors.h"
#include "tools/table.h"

namespace argosy::tools {
namespace {

using Json = nlohmann::ordered_json;

struct CommandOptions {
  std::string input;
  std::string model;
  std::string format;
  std::string output;
  std::string json;
  std::string dtype = "bf16";
  std::string non_finite = "nan";
  bool dequantise = false;
  bool dtype_is_given = false;
  int64_t num_threads = 0;  // 0: one a core
};

std::string json_file(const CommandOptions& options) {
  return options.json == "-" ? "" : options.json;
}

Status refuse(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}

Status check_usage(const CommandOptions& options) {
  if (options.input.empty() == options.model.empty()) {
    return refuse(options.input.empty() ? "--input FILE or --model DIR is missing"
                                        : "--input and --model exclude each other");
  }
  if (options.dequantise && !options.model.empty()) {
    return refuse("--dequantise takes an --input, not a --model");
  }
  if (options.dequantise != options.format.empty()) {
    return refuse(options.dequantise ? "--dequantise reads the format from the file: no --format"
                                     : "--format or --dequantise is missing");
  }
  if (options.dtype_is_given && !options.dequantise) return refuse("--dtype needs --dequantise");
  return {};
}

Result<std::unique_ptr<ThreadPool>> make_pool(const CommandOptions& options) {
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* const cpu, cpu_info());
  const int64_t wanted = options.num_threads > 0 ? options.num_threads : cpu->num_cores;
  return ThreadPool::create(static_cast<int>(std::min<int64_t>(wanted, 1024)));
}

std::string percent(int64_t part, int64_t whole) {
  if (whole == 0) return "-";
  return fmt::format("{:.2f}", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

double share(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::vector<std::string> error_cells(const QuantiseError& error) {
  return {fmt::format("{:.3e}", error.max_abs),        fmt::format("{:.3e}", error.relative_max()),
          fmt::format("{:.3e}", error.relative_rms()), percent(error.zeros, error.elements),
          percent(error.flushed, error.elements),      percent(error.saturated, error.elements),
          fmt::format("{}", error.non_finite)};
}

const std::vector<std::string> kErrorHeads = {"max error",  "of peak",      "rms error", "zeros, %",
                                              "flushed, %", "saturated, %", "non-finite"};

std::vector<std::string> line_of(std::vector<std::string> cells,
                                 const std::vector<std::string>& more) {
  cells.insert(cells.end(), more.begin(), more.end());
  return cells;
}

Json error_json(const QuantiseError& error) {
  return {{"max_abs_error", error.max_abs},
          {"peak", error.peak},
          {"max_error", error.relative_max()},
          {"rms_error", error.relative_rms()},
          {"zeros", share(error.zeros, error.elements)},
          {"flushed", share(error.flushed, error.elements)},
          {"saturated", share(error.saturated, error.elements)},
          {"non_finite", error.non_finite}};
}

std::string skipped_text(const std::vector<std::string>& skipped) {
  if (skipped.empty()) return "";
  const size_t shown = std::min<size_t>(skipped.size(), 3);
  return fmt::format(
      "left out, no BF16 or F32 matrices: {} ({}{})\n", skipped.size(),
      fmt::join(skipped.begin(), skipped.begin() + static_cast<int64_t>(shown), ", "),
      shown < skipped.size() ? ", .." : "");
}

std::string tensors_text(const Conversion& conversion, bool with_error) {
  std::vector<std::vector<std::string>> lines = {line_of(
      {"tensor", "shape", "format"}, with_error ? kErrorHeads : std::vector<std::string>())};
  for (const ConvertedTensor& tensor : conversion.tensors) {
    std::vector<std::string> cells = {tensor.name, fmt::format("{}x{}", tensor.rows, tensor.cols),
                                      std::string(name_of(tensor.format))};
    lines.push_back(with_error ? line_of(std::move(cells), error_cells(tensor.error)) : cells);
  }
  return aligned(lines) + skipped_text(conversion.skipped);
}

Json tensors_json(const CommandOptions& options, const Conversion& conversion) {
  Json tensors = Json::array();
  for (const ConvertedTensor& tensor : conversion.tensors) {
    Json one = {{"name", tensor.name},
                {"shape", {tensor.rows, tensor.cols}},
                {"format", std::string(name_of(tensor.format))},
                {"bytes", tensor.bytes}};
    if (!options.dequantise) one.update(error_json(tensor.error));
    tensors.push_back(std::move(one));
  }
  return {{"command", "quantise"},         {"input", options.input},
          {"output", options.output},      {"dequantise", options.dequantise},
          {"tensors", std::move(tensors)}, {"skipped", conversion.skipped}};
}

// Stdout first: it cannot be taken back.
Status write_report(const CommandOptions& options, const Json& json, const std::string& text,
                    OutputFiles* files) {
  ARGOSY_RETURN_IF_ERROR(write_stdout(options.json == "-" ? json_text(json) : text));
  return json_file(options).empty() ? Status() : files->add_text(options.json, json_text(json));
}

Status convert_file(const CommandOptions& options, ThreadPool* pool) {
  const TensorSelection selection = parse_selection(options.input);
  const std::array<OptionFile, 2> targets = {
      {{"--output", options.output}, {"--json", json_file(options)}}};
  const std::array<OptionFile, 1> inputs = {{{"--input", selection.file}}};
  ARGOSY_RETURN_IF_ERROR(check_targets(targets, inputs, ""));
  QuantiseSettings settings;
  settings.dtype = options.dtype == "f32" ? DType::kF32 : DType::kBF16;
  settings.non_finite = options.non_finite == "error" ? OnNonFinite::kError : OnNonFinite::kNaN;
  settings.pool = pool;
  if (!options.dequantise) {
    ARGOSY_ASSIGN_OR_RETURN(settings.format, parse_block_format(options.format));
  }
  ARGOSY_ASSIGN_OR_RETURN(const Conversion conversion, options.dequantise
                                                           ? dequantise_tensors(selection, settings)
                                                           : quantise_tensors(selection, settings));
  OutputFiles files;
  ARGOSY_RETURN_IF_ERROR(files.add_safetensors(options.output, conversion.output));
  ARGOSY_RETURN_IF_ERROR(write_report(options, tensors_json(options, conversion),
                                      tensors_text(conversion, !options.dequantise), &files));
  return files.commit();
}

// The module of a matrix up to its layer's number: "model.layers.1".
std::string layer_of(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  const size_t begin = name.find(kLayers);
  return std::string(name.substr(0, name.find('.', begin + kLayers.size())));
}

struct LayerError {
  std::string layer;
  int64_t num_matrices = 0;
  QuantiseError error;
};

std::string model_text(const ConvertReport& report, const std::vector<LayerError>& layers) {
  std::vector<std::vector<std::string>> lines = {line_of({"layer", "matrices"}, kErrorHeads)};
  for (const LayerError& one : layers) {
    lines.push_back(
        line_of({one.layer, fmt::format("{}", one.num_matrices)}, error_cells(one.error)));
  }
  return aligned(lines) + fmt::format("{} matrices, {} bytes became {}, {} shards\n",
                                      report.num_matrices, report.bytes_before, report.bytes_after,
                                      report.num_shards);
}

Json model_json(const CommandOptions& options, const ConvertReport& report,
                const std::vector<LayerError>& layers) {
  Json list = Json::array();
  for (const LayerError& one : layers) {
    Json entry = {{"layer", one.layer}, {"matrices", one.num_matrices}};
    entry.update(error_json(one.error));
    list.push_back(std::move(entry));
  }
  return {{"command", "quantise"},
          {"model", options.model},
          {"output", options.output},
          {"format", options.format},
          {"matrices", report.num_matrices},
          {"bytes_before", report.bytes_before},
          {"bytes_after", report.bytes_after},
          {"shards", report.num_shards},
          {"layers", std::move(list)}};
}

Status convert_model(const CommandOptions& options, ThreadPool* pool) {
  const std::array<OptionFile, 1> targets = {{{"--json", json_file(options)}}};
  ARGOSY_RETURN_IF_ERROR(check_targets(targets, {}, options.model));
  ConvertOptions convert;
  ARGOSY_ASSIGN_OR_RETURN(convert.format, parse_block_format(options.format));
  convert.quantise.on_non_finite =
      options.non_finite == "error" ? OnNonFinite::kError : OnNonFinite::kNaN;
  convert.quantise.pool = pool;
  std::vector<LayerError> layers;
  convert.on_matrix = [&](std::string_view name, const ConstTensorView& values,
                          const ConstQuantisedView& made) -> Status {
    ARGOSY_ASSIGN_OR_RETURN(const QuantiseError error, measure_error(values, made));
    const std::string layer = layer_of(name);
    if (layers.empty() || layers.back().layer != layer) layers.push_back({layer, 0, {}});
    ++layers.back().num_matrices;
    layers.back().error.add(error);
    return {};
  };
  ARGOSY_ASSIGN_OR_RETURN(const ConvertReport report,
                          quantise_checkpoint(options.model, options.output, convert));
  OutputFiles files;
  ARGOSY_RETURN_IF_ERROR(write_report(options, model_json(options, report, layers),
                                      model_text(report, layers), &files));
  return files.commit();
}

Status convert(const CommandOptions& options) {
  ARGOSY_RETURN_IF_ERROR(check_usage(options));
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, make_pool(options));
  return options.model.empty() ? convert_file(options, pool.get())
                               : convert_model(options, pool.get());
}

constexpr const char* kFooter =
    "Formats: e4m3_1x128, e4m3_1x128_e8m0, e4m3_128x128, mxfp8, mxfp8_ceil, mxfp4, nvfp4 "
    "(docs/formats.md). Of a tensor NAME the output holds NAME.codes, NAME.scales, NAME.tag and, "
    "with nvfp4, "
    "NAME.tensor_scales.\n\n"
    "Errors are those of the matrix: the largest one, the same by the largest value, the rms of "
    "the "
    "difference by the rms of the values. Flushed: zeros that were none. Saturated: beyond what "
    "the block's "
    "scale reaches.\n\n"
    "Examples:\n"
    "  argosy quantise --input model.safetensors --format mxfp8 --output q.safetensors\n"
    "  argosy quantise --input 'model.safetensors:*.down_proj.weight' --format mxfp4 --output "
    "q.safetensors "
    "--json -\n"
    "  argosy quantise --input q.safetensors --dequantise --dtype f32 --output back.safetensors\n"
    "  argosy quantise --model DIR --format e4m3_128x128 --output NEW_DIR";

}  // namespace

void add_quantise_command(CLI::App& app, int* exit_code) {
  CLI::App* const command = app.add_subcommand(
      "quantise", "Quantise matrices, or the experts of a checkpoint, and show the error");
  const auto options = std::make_shared<CommandOptions>();
  command
      ->add_option("--input", options->input,
                   "Matrices to convert: a file, one tensor of it, or a pattern with * and ?")
      ->type_name("FILE[:TENSOR|PATTERN]")
      ->check(not_empty());
  command->add_option("--model", options->model, "Checkpoint folder whose experts are quantised")
      ->type_name("DIR")
      ->check(not_empty());
  command->add_option("--format", options->format, "Block format, see below")
      ->type_name("NAME")
      ->check(one_of({"e4m3_1x128", "e4m3_1x128_e8m0", "e4m3_128x128", "mxfp8", "mxfp8_ceil",
                      "mxfp4", "nvfp4"}));
  command->add_flag("--dequantise", options->dequantise, "The way back; formats are in the file");
  CLI::Option* const dtype =
      command->add_option("--dtype", options->dtype, "Of dequantised tensors (default bf16)")
          ->type_name("bf16|f32")
          ->check(one_of({"bf16", "f32"}));
  command
      ->add_option("--non-finite", options->non_finite,
                   "A block with NaN or Inf becomes NaN (default), or is an error")
      ->type_name("nan|error")
      ->check(one_of({"nan", "error"}));
  command->add_option("--output", options->output, "File, or with --model a new or empty folder")
      ->type_name("FILE|DIR")
      ->required()
      ->check(not_empty());
  command
      ->add_option("--json", options->json,
                   "Write JSON to this file; - is stdout, without the table")
      ->type_name("FILE|-")
      ->check(not_empty());
  command
      ->add_option("--threads", options->num_threads,
                   "Threads (default: one a core); bytes do not depend on it")
      ->type_name("N")
      ->check(whole_number(1, 1024));
  command->footer(kFooter);
  command->callback([options, dtype, exit_code] {
    options->dtype_is_given = dtype->count() > 0;
    const Status status = convert(*options);
    *exit_code = status.ok() ? int{kExitOk} : fail(status);
  });
}

}  // namespace argosy::tools
