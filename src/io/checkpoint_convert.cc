// quantise_checkpoint: experts by Checkpoint, everything else by name and file. A layer's matrices are quantised
// and written before the next layer is read. Test: tests/io/checkpoint_convert_test.cc.
#include "argosy/checkpoint_convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "argosy/checkpoint.h"
#include "base/error.h"
#include "io/families.h"
#include "io/file.h"
#include "io/json.h"
#include "io/layer_layout.h"
#include "io/partial_file.h"
#include "io/quantised_matrix.h"
#include "io/tensor_directory.h"

namespace argosy {
namespace {

namespace fs = std::filesystem;
using Entry = io::TensorDirectory::Entry;
using Json = nlohmann::json;

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;
constexpr int64_t kPackedBlock = 32;

struct MethodWords {
  BlockFormat format;
  const char* method;
  std::array<int64_t, 2> block;
};
constexpr std::array<MethodWords, 5> kMethods = {{{BlockFormat::kE4M3Block128, "fp8", {128, 128}},
                                                  {BlockFormat::kE4M3Row128, "fp8", {1, 128}},
                                                  {BlockFormat::kMxfp8, "mxfp8", {1, 32}},
                                                  {BlockFormat::kMxfp8Ceil, "mxfp8", {1, 32}},
                                                  {BlockFormat::kMxfp4, "mxfp4", {1, 32}}}};

Result<const MethodWords*> method_of(BlockFormat format) {
  for (const MethodWords& words : kMethods) {
    if (words.format == format) return &words;
  }
  return base::invalid("no quantization_config can name format {}",
                       format == BlockFormat::kUnset ? "kUnset" : name_of(format));
}

Status io_error(std::string_view action, const std::string& path, const std::error_code& reason) {
  return base::error(StatusCode::kIo, "cannot {} {}: {}", action, path, reason.message());
}

// Owns what one shard is written from.
struct Shard {
  std::vector<NamedTensor> named;
  std::vector<Tensor> tensors;
  std::vector<QuantisedTensor> matrices;
};

// Scales as checkpoints keep them: e8m0 under the name of its bytes.
ConstTensorView stored_scales(ConstTensorView scales) {
  if (scales.dtype == DType::kE8M0) scales.dtype = DType::kU8;
  return scales;
}

// A folder that is removed again unless it was kept.
class NewFolder {
 public:
  explicit NewFolder(std::string path) : path_(std::move(path)) {}
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  ~NewFolder() {
    std::error_code ignored;
    if (state_ == State::kKept || state_ == State::kNone) return;
    for (const std::string& name : names_) fs::remove(path_ + "/" + name, ignored);
    if (state_ == State::kMade) fs::remove(path_, ignored);
  }

  Status create() {
    std::error_code error;
    if (fs::create_directory(path_, error)) {
      state_ = State::kMade;
      return {};
    }
    if (error) return io_error("make folder", path_, error);
    const bool empty = fs::is_empty(path_, error);
    if (error) return io_error("read folder", path_, error);
    if (!empty) return base::invalid("{} exists and is not empty", path_);
    state_ = State::kFound;
    return {};
  }
  // The path of a file that is about to be written.
  std::string add(const std::string& name) {
    names_.push_back(name);
    return path_ + "/" + name;
  }
  void keep() { state_ = State::kKept; }

 private:
  enum class State { kNone, kMade, kFound, kKept };
  std::string path_;
  std::vector<std::string> names_;
  State state_ = State::kNone;
};

class Converter {
 public:
  Converter(const ConvertOptions& options, const MethodWords& words, const Checkpoint& source,
            const io::TensorDirectory& tensors, NewFolder& target)
      : options_(options),
        words_(words),
        source_(source),
        config_(source.config()),
        family_(*io::find_family(source.config().family)),
        tensors_(tensors),
        target_(target) {}

  Result<ConvertReport> run() {
    ARGOSY_RETURN_IF_ERROR(find_parts());
    report_.num_shards = static_cast<int64_t>(layers_.size() + rest_.size());
    for (const auto& [layer, layout] : layers_) {
      ARGOSY_RETURN_IF_ERROR(convert_layer(layer, layout));
    }
    for (const auto& [file, entries] : rest_) ARGOSY_RETURN_IF_ERROR(copy_entries(entries));
    ARGOSY_RETURN_IF_ERROR(write_text("model.safetensors.index.json", index_.dump(2)));
    ARGOSY_RETURN_IF_ERROR(write_config());
    ARGOSY_RETURN_IF_ERROR(copy_small_files());
    return report_;
  }

 private:
  bool is_converted(std::string_view name) const {
    if (name.ends_with("_bias")) return false;
    return std::any_of(prefixes_.begin(), prefixes_.end(),
                       [&](const std::string& prefix) { return name.starts_with(prefix); });
  }

  Status find_parts() {
    ARGOSY_ASSIGN_OR_RETURN(std::vector<io::LayerLayout> layouts,
                            io::find_layer_layouts(tensors_, config_, family_));
    for (const int64_t layer : config_.moe_layers()) {
      io::LayerLayout& layout = layouts[static_cast<size_t>(layer)];
      if (layout.block.empty()) continue;  // nothing of it is in the source
      ARGOSY_RETURN_IF_ERROR(layout.problem);
      prefixes_.push_back(layout.block + "experts.");
      if (config_.shared_intermediate > 0) {
        prefixes_.push_back(fmt::format("{}{}.", layout.block, family_.shared_module));
      }
      layers_.emplace_back(layer, std::move(layout));
    }
    if (layers_.empty()) return base::invalid("{} has no layer of experts", source_.dir());
    for (const Entry& entry : tensors_.with_prefix("")) {
      if (!is_converted(entry.name())) rest_[entry.file->path()].push_back(&entry);
    }
    return {};
  }

  Result<const QuantisedTensor*> quantise_matrix(const std::string& name, const Tensor& values,
                                                 Shard* shard) {
    const ConstTensorView view = values.view();
    ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                            quantised_layout(words_.format, view.dim(0), view.dim(1)));
    ARGOSY_ASSIGN_OR_RETURN(QuantisedTensor made, QuantisedTensor::create(layout));
    Status done = quantise(options_.quantise, view, made.view());
    if (done.ok() && options_.on_matrix) done = options_.on_matrix(name, view, made.view());
    if (!done.ok()) return Status(done.code(), fmt::format("{}: {}", name, done.message()));
    ++report_.num_matrices;
    report_.bytes_before += values.num_bytes();
    report_.bytes_after += layout.code_bytes() + layout.scale_bytes();
    shard->matrices.push_back(std::move(made));
    return &shard->matrices.back();
  }

  Status add_mlp(const std::string& prefix, const io::MatrixNames& names, const ExpertTensors& mlp,
                 Shard* shard) {
    const std::pair<std::string_view, const Tensor*> matrices[] = {
        {names.gate, &mlp.gate}, {names.up, &mlp.up}, {names.down, &mlp.down}};
    for (const auto& [matrix, values] : matrices) {
      const std::string name = prefix + std::string(matrix);
      ARGOSY_ASSIGN_OR_RETURN(const QuantisedTensor* const made,
                              quantise_matrix(name, *values, shard));
      const ConstQuantisedView view = made->view();
      shard->named.push_back({name + ".weight", view.codes});
      shard->named.push_back(
          {name + std::string(io::kScaleSuffixes[0]), stored_scales(view.scales)});
    }
    return {};
  }

  // gpt_oss's own layout of mxfp4. It has no partial groups.
  bool is_packed() const {
    return words_.format == BlockFormat::kMxfp4 &&
           family_.fused_layout == io::FusedLayout::kInterleavedTransposed &&
           config_.hidden % kPackedBlock == 0 && config_.intermediate % kPackedBlock == 0;
  }

  Status add_packed(int64_t layer, const std::string& block, Shard* shard) {
    const int64_t num_experts = config_.router.num_experts;
    const auto add = [&](const char* name, int64_t rows, int64_t cols) -> Status {
      const int64_t groups = cols / kPackedBlock;
      const std::string prefix = fmt::format("{}experts.{}", block, name);
      ARGOSY_ASSIGN_OR_RETURN(
          Tensor blocks, Tensor::zeros(DType::kU8, {num_experts, rows, groups, kPackedBlock / 2}));
      ARGOSY_ASSIGN_OR_RETURN(Tensor scales,
                              Tensor::zeros(DType::kU8, {num_experts, rows, groups}));
      shard->named.push_back({prefix + "_blocks", blocks.view()});
      shard->named.push_back({prefix + "_scales", scales.view()});
      shard->tensors.push_back(std::move(blocks));
      shard->tensors.push_back(std::move(scales));
      return {};
    };
    ARGOSY_RETURN_IF_ERROR(add("gate_up_proj", 2 * config_.intermediate, config_.hidden));
    ARGOSY_RETURN_IF_ERROR(add("down_proj", config_.hidden, config_.intermediate));
    for (int64_t e = 0; e < num_experts; ++e) {
      ARGOSY_ASSIGN_OR_RETURN(const ExpertTensors expert, source_.read_expert(layer, e));
      const std::string prefix = fmt::format("{}experts.{}.", block, e);
      Shard one;
      one.matrices.reserve(3);
      ARGOSY_ASSIGN_OR_RETURN(const auto* const gate,
                              quantise_matrix(prefix + "gate_proj", expert.gate, &one));
      ARGOSY_ASSIGN_OR_RETURN(const auto* const up,
                              quantise_matrix(prefix + "up_proj", expert.up, &one));
      ARGOSY_ASSIGN_OR_RETURN(const auto* const down,
                              quantise_matrix(prefix + "down_proj", expert.down, &one));
      place_rows(gate->view(), e, 0, 2, &shard->tensors[0], &shard->tensors[1]);
      place_rows(up->view(), e, 1, 2, &shard->tensors[0], &shard->tensors[1]);
      place_rows(down->view(), e, 0, 1, &shard->tensors[2], &shard->tensors[3]);
    }
    return {};
  }

  // Row i goes to row first + i * step of expert `expert`.
  static void place_rows(const ConstQuantisedView& from, int64_t expert, int64_t first,
                         int64_t step, Tensor* blocks, Tensor* scales) {
    const auto code_bytes = static_cast<size_t>(from.codes.dim(1));
    const auto scale_bytes = static_cast<size_t>(from.scales.dim(1));
    for (int64_t row = 0; row < from.rows; ++row) {
      const auto at = static_cast<size_t>(expert * blocks->view().dim(1) + first + row * step);
      std::memcpy(blocks->view().data + at * code_bytes, from.codes.row(row), code_bytes);
      std::memcpy(scales->view().data + at * scale_bytes, from.scales.row(row), scale_bytes);
    }
  }

  Status convert_layer(int64_t layer, const io::LayerLayout& layout) {
    Shard shard;
    const int64_t num_experts = config_.router.num_experts;
    if (is_packed()) {
      ARGOSY_RETURN_IF_ERROR(add_packed(layer, layout.block, &shard));
    } else {
      // Views into the matrices stand in `named`; a QuantisedTensor that moves keeps its memory.
      for (int64_t e = 0; e < num_experts; ++e) {
        ARGOSY_ASSIGN_OR_RETURN(const ExpertTensors expert, source_.read_expert(layer, e));
        const std::string prefix = fmt::format("{}experts.{}.", layout.block, e);
        ARGOSY_RETURN_IF_ERROR(add_mlp(prefix, family_.expert, expert, &shard));
      }
    }
    if (config_.shared_intermediate > 0) {
      ARGOSY_ASSIGN_OR_RETURN(const SharedTensors shared, source_.read_shared(layer));
      const std::string prefix = fmt::format("{}{}.", layout.block, family_.shared_module);
      ARGOSY_RETURN_IF_ERROR(add_mlp(prefix, io::kProjections, *shared.shared, &shard));
    }
    return write_shard(shard);
  }

  Status copy_entries(const std::vector<const Entry*>& entries) {
    Shard shard;
    for (const Entry* entry : entries) {
      ARGOSY_ASSIGN_OR_RETURN(Tensor tensor, entry->file->read(entry->name()));
      shard.named.push_back({entry->name(), tensor.view()});
      shard.tensors.push_back(std::move(tensor));
      constexpr std::string_view kWeight = ".weight";
      if (entry->name().ends_with(kWeight) && entry->info->shape.size() > 1) {
        const size_t length = entry->name().size() - kWeight.size();
        kept_modules_.push_back(entry->name().substr(0, length));
      }
    }
    return write_shard(shard);
  }

  Status write_shard(const Shard& shard) {
    const std::string name =
        fmt::format("model-{:05}-of-{:05}.safetensors", ++num_written_, report_.num_shards);
    for (const NamedTensor& tensor : shard.named) {
      index_["weight_map"][tensor.name] = name;
      total_bytes_ += tensor.tensor.num_elements() * size_of(tensor.tensor.dtype);
    }
    index_["metadata"]["total_size"] = total_bytes_;
    return write_safetensors(target_.add(name), shard.named);
  }

  Status write_text(const std::string& name, std::string text) {
    text += '\n';
    io::PartialFile file(target_.add(name));
    ARGOSY_RETURN_IF_ERROR(file.create());
    ARGOSY_RETURN_IF_ERROR(file.write(std::as_bytes(std::span(text))));
    return file.rename_to_target();
  }

  Status write_config() {
    const std::string path = source_.dir() + "/config.json";
    ARGOSY_ASSIGN_OR_RETURN(const std::string text, io::read_text(path, kMaxConfigBytes));
    ARGOSY_ASSIGN_OR_RETURN(Json config, io::parse_json(text, path));
    const bool is_mxfp4 = words_.format == BlockFormat::kMxfp4;
    Json said = {{"quant_method", words_.method},
                 {"fmt", is_mxfp4 ? "e2m1" : "e4m3"},
                 {"weight_block_size", words_.block},
                 {"modules_to_not_convert", kept_modules_}};
    if (!is_mxfp4) said["activation_scheme"] = "dynamic";
    config["quantization_config"] = std::move(said);
    return write_text("config.json", config.dump(2));
  }

  Status copy_small_files() {
    constexpr std::array<std::string_view, 4> kSuffixes = {".json", ".txt", ".model", ".jinja"};
    std::error_code error;
    for (fs::directory_iterator file(source_.dir(), error), end; !error && file != end;
         file.increment(error)) {
      const std::string name = file->path().filename().string();
      const std::string suffix = file->path().extension().string();
      const bool is_small =
          std::find(kSuffixes.begin(), kSuffixes.end(), suffix) != kSuffixes.end();
      if (!is_small || name == "config.json" || name == "model.safetensors.index.json") continue;
      std::error_code failure;
      fs::copy_file(file->path(), target_.add(name), failure);
      if (failure) return io_error("copy", file->path().string(), failure);
    }
    return error ? io_error("read folder", source_.dir(), error) : Status();
  }

  const ConvertOptions& options_;
  const MethodWords& words_;
  const Checkpoint& source_;
  const ModelConfig& config_;
  const io::Family& family_;
  const io::TensorDirectory& tensors_;
  NewFolder& target_;

  std::vector<std::pair<int64_t, io::LayerLayout>> layers_;
  std::vector<std::string> prefixes_;                      // of what becomes codes and scales
  std::map<std::string, std::vector<const Entry*>> rest_;  // by file
  std::vector<std::string> kept_modules_;
  Json index_ = {{"metadata", Json::object()}, {"weight_map", Json::object()}};
  int64_t total_bytes_ = 0;
  int64_t num_written_ = 0;
  ConvertReport report_;
};

}  // namespace

Result<ConvertReport> quantise_checkpoint(const std::string& dir, const std::string& target,
                                          const ConvertOptions& options) {
  ARGOSY_ASSIGN_OR_RETURN(const MethodWords* const words, method_of(options.format));
  ARGOSY_ASSIGN_OR_RETURN(const Checkpoint source, Checkpoint::open(dir));
  if (source.config().quantisation.has_value()) {
    return base::invalid("{} is quantised already: {}", dir,
                         name_of(source.config().quantisation->format));
  }
  ARGOSY_ASSIGN_OR_RETURN(const io::TensorDirectory tensors, io::TensorDirectory::open(dir, {}));
  NewFolder folder(target);
  ARGOSY_RETURN_IF_ERROR(folder.create());
  Converter converter(options, *words, source, tensors, folder);
  ARGOSY_ASSIGN_OR_RETURN(const ConvertReport report, converter.run());
  folder.keep();
  return report;
}

}  // namespace argosy
