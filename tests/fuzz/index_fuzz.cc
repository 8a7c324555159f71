// The index of a sharded checkpoint, over two shards that hold what they hold.
//
// Accepted: every entry is a tensor of the shard that the index names, and the layers classify or
// are refused. Guards src/io/tensor_directory.cc and layer_layout.cc.
#include <fmt/format.h>
#include <stdlib.h>

#include <filesystem>

#include "argosy/checkpoint.h"
#include "fuzz/fuzz_target.h"
#include "fuzz/json_mutator.h"
#include "fuzz/large_json.h"
#include "io/families.h"
#include "io/layer_layout.h"
#include "io/tensor_directory.h"

namespace argosy::testing {
namespace {

// The shards' headers are read as well; they count to the constant, and so do the names of missing
// shards in a message, at most 16 KiB.
constexpr HeapBound kBound = {.peak = 32, .constant = 32768};

constexpr std::string_view kNames[2][8] = {
    {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight",
     "model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight",
     "model.layers.0.mlp.experts.0.down_proj.weight", "layers.0.mlp.gate.weight",
     "model.layers.0.mlp.experts.00.up_proj.weight", "model.layers.0.mlp.odd"},
    {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.gate_up_proj",
     "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.1.up_proj.weight",
     "model.layers.1.mlp.experts.99999999999999999999.up_proj.weight", "model.norm.weight",
     "model.layers.2.mlp.experts.0.up_proj.weight", "lm_head.weight"}};
constexpr std::string_view kShards[2] = {"model-00001-of-00002.safetensors",
                                         "model-00002-of-00002.safetensors"};

// The folder of one process: two written shards, and an index that is a link to a file in memory.
class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "argosy_fuzz_XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
    const float value = 1.0f;
    const ConstTensorView one(&value, DType::kF32, {1});
    for (size_t shard = 0; shard < 2; ++shard) {
      std::vector<NamedTensor> tensors;
      for (const std::string_view name : kNames[shard]) tensors.push_back({std::string(name), one});
      const std::string file = fmt::format("{}/{}", path_, kShards[shard]);
      if (!write_safetensors(file, tensors).ok()) std::abort();
    }
    std::filesystem::create_symlink(index_.path(), path_ + "/model.safetensors.index.json");
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }
  void set_index(std::string_view text) const { index_.fill(text); }

 private:
  std::string path_;
  MemoryFile index_;
};

std::string check_entries(const io::TensorDirectory& directory) {
  const io::TensorDirectory::Entry* before = nullptr;
  for (const auto& entry : directory.with_prefix("")) {
    if (before != nullptr && before->name() >= entry.name()) return "names do not rise";
    before = &entry;
    if (entry.file->find(entry.name()) != entry.info) return "an entry of another shard";
    if (directory.find(entry.name()) != &entry) return "an entry that is not found";
  }
  return {};
}

std::string check_layouts(const io::TensorDirectory& directory, const ModelConfig& config) {
  const auto layouts = io::find_layer_layouts(directory, config, *io::find_family(config.family));
  if (!layouts) return refusal_problem(layouts.error(), {StatusCode::kInvalidArgument});
  for (const io::LayerLayout& layout : *layouts) {
    if (layout.problem.ok()) continue;
    std::string problem =
        refusal_problem(layout.problem, {StatusCode::kInvalidArgument, StatusCode::kNotFound});
    if (!problem.empty()) return problem;
  }
  return {};
}

std::string check(std::string_view input) {
  static const Folder folder;
  static const ModelConfig config = *parse_model_config(
      R"({"model_type":"qwen3_moe","num_hidden_layers":3,"hidden_size":1,"num_experts":2,)"
      R"("moe_intermediate_size":1,"num_experts_per_tok":1,"norm_topk_prob":true,)"
      R"("mlp_only_layers":[2]})");
  folder.set_index(input);
  return within(kBound, input.size(), [&]() -> std::string {
    const auto directory = io::TensorDirectory::open(folder.path(), {});
    if (!directory) {
      return refusal_problem(directory.error(),
                             {StatusCode::kCorruptData, StatusCode::kNotFound, StatusCode::kIo});
    }
    std::string problem = check_entries(*directory);
    return problem.empty() ? check_layouts(*directory, config) : problem;
  });
}

const std::vector<std::string_view>& words() {
  static const std::vector<std::string_view> all = [] {
    std::vector<std::string_view> list = {"weight_map", "metadata", "total_size", ".",
                                          "..",         "a/b",      "/etc/passwd"};
    for (size_t shard = 0; shard < 2; ++shard) {
      list.insert(list.end(), 4, kShards[shard]);
      list.insert(list.end(), std::begin(kNames[shard]), std::end(kNames[shard]));
    }
    return list;
  }();
  return all;
}

std::string mutate(std::string_view input, Random& random, ByteMutator bytes) {
  return mutate_json(input, words(), random, bytes);
}

std::map<std::string, std::string> seeds() {
  std::map<std::string, std::string> files;
  Tree all;
  Tree swapped;
  Tree plain;
  for (size_t shard = 0; shard < 2; ++shard) {
    for (const std::string_view name : kNames[shard]) {
      all[std::string(name)] = kShards[shard];
      swapped[std::string(name)] = kShards[1 - shard];
    }
    for (size_t i = 0; i < 3; ++i) plain[std::string(kNames[shard][i])] = kShards[shard];
  }
  files.emplace("all", dump({{"metadata", {{"total_size", 64}}}, {"weight_map", all}}));
  files.emplace("plain", dump({{"weight_map", plain}}));
  files.emplace("stale", dump({{"weight_map", swapped}}));
  files.emplace("empty", R"({"weight_map":{}})");
  files.emplace("missing",
                R"({"weight_map":{"a":"model-3.safetensors","b":"model-4.safetensors"}})");
  files.emplace("leaves_the_folder", R"({"weight_map":{"a":"../model.safetensors"}})");
  files.emplace("a_folder", R"({"weight_map":{"a":"."}})");
  files.emplace("long_name",
                fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", std::string(300, 'n')));
  files.emplace("escapes", R"({"weight_map":{"\u00e9\ud83d\ude00\n":"\/"}})");
  files.emplace("control_in_name", R"({"weight_map":{"a\u001b[2J":"b\u001b[2J"}})");
  return files;
}

std::map<std::string, std::string> large() {
  std::map<std::string, std::string> texts;
  for (const auto& [name, text] : large_json()) {
    texts.emplace(name, text);
    texts.emplace("map_" + name, "{\"weight_map\":" + text + "}");
    texts.emplace("member_" + name, "{\"weight_map\":{},\"odd\":" + text + "}");
    texts.emplace("shard_" + name, "{\"weight_map\":{\"a\":" + text + "}}");
  }
  std::string missing;
  for (size_t i = 0; i < 60'000; ++i) {
    missing += fmt::format("{}\"{}\":\"{}\"", i == 0 ? "" : ",", one_letter(i), one_letter(i));
  }
  texts.emplace("missing_shards", "{\"weight_map\":{" + missing + "}}");
  texts.emplace(
      "tensors_of_one_shard",
      "{\"weight_map\":" + one_letter_members(100'000, fmt::format("\"{}\"", kShards[0])) + "}");
  return texts;
}

}  // namespace

const FuzzTarget& index_target() {
  static const FuzzTarget target = {"index", check, mutate, seeds, large};
  return target;
}

}  // namespace argosy::testing
