// See model_writer.h.
#include "io/model_writer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>

namespace argosy::test {

nlohmann::json minimal_config(const std::string& family) {
  nlohmann::json config = {{"model_type", family},
                           {"num_hidden_layers", 3},
                           {"hidden_size", 6},
                           {"num_experts_per_tok", 2},
                           {"hidden_act", "silu"}};
  const bool is_deepseek = family.starts_with("deepseek");
  const bool narrow = family == "mixtral" || family == "olmoe";
  config[narrow ? "intermediate_size" : "moe_intermediate_size"] = 4;
  if (!narrow) config["intermediate_size"] = 99;  // of dense layers: must not be taken
  config[is_deepseek           ? "n_routed_experts"
         : family == "mixtral" ? "num_local_experts"
                               : "num_experts"] = 8;
  if (family != "mixtral") config["norm_topk_prob"] = family != "deepseek_v2";
  if (!is_deepseek) return config;
  config["first_k_dense_replace"] = 1;
  config["n_shared_experts"] = 2;
  config["routed_scaling_factor"] = 2.5;
  config["n_group"] = 1;
  config["topk_group"] = 1;
  return config;
}

TestModel::TestModel(const ModelLayout& layout, uint64_t seed)
    : config(minimal_config(layout.family)), layout_(layout), state_(seed) {
  for (const char* field : {"n_routed_experts", "num_local_experts", "num_experts"}) {
    if (config.contains(field)) config[field] = layout.num_experts;
  }
  for (const char* field : {"intermediate_size", "moe_intermediate_size"}) {
    if (config.contains(field) && config[field] == 4) config[field] = layout.width;
  }
  config["hidden_size"] = layout.hidden;
  config["num_hidden_layers"] = layout.num_layers;
  tensors[layout.prefix + "embed_tokens.weight"] = random_blob({3, layout.hidden}, layout.dtype);
  const bool first_is_dense = layout.family.starts_with("deepseek");
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    const std::string name =
        fmt::format("{}layers.{}.self_attn.q_proj.weight", layout.prefix, layer);
    tensors[name] = random_blob({2, 2}, layout.dtype);
    if (layer == 0 && first_is_dense) {
      const std::string dense = fmt::format("{}layers.0.mlp.gate_proj.weight", layout.prefix);
      tensors[dense] = random_blob({2, 2}, layout.dtype);
    } else {
      add_layer(layer);
    }
  }
}

std::string TestModel::block(int64_t layer) const {
  const bool old_mixtral = layout_.family == "mixtral" && !layout_.fused;
  return fmt::format("{}layers.{}.{}.", layout_.prefix, layer,
                     old_mixtral ? "block_sparse_moe" : "mlp");
}

int64_t TestModel::expert_bytes() const {
  return 3 * layout_.hidden * layout_.width * size_of(layout_.dtype);
}

Blob TestModel::random_blob(std::vector<int64_t> shape, DType dtype) {
  Blob blob{dtype, std::move(shape), {}};
  int64_t bytes = size_of(dtype);
  for (const int64_t dim : blob.shape) bytes *= dim;
  for (int64_t i = 0; i < bytes; ++i) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    blob.bytes.push_back(static_cast<std::byte>(state_ >> 56));
  }
  return blob;
}

void TestModel::add_layer(int64_t layer) {
  const int64_t num_experts = layout_.num_experts;
  gates[layer] = random_blob({num_experts, layout_.hidden}, layout_.dtype);
  tensors[block(layer) + "gate.weight"] = gates[layer];
  if (layout_.family == "deepseek_v3") {
    tensors[block(layer) + "gate.e_score_correction_bias"] =
        random_blob({num_experts}, DType::kF32);
  }
  if (layout_.family.starts_with("deepseek")) {
    const int64_t width = 2 * layout_.width;
    ExpertBlobs& mlp = shared[layer];
    mlp.gate = random_blob({width, layout_.hidden}, layout_.dtype);
    mlp.up = random_blob({width, layout_.hidden}, layout_.dtype);
    mlp.down = random_blob({layout_.hidden, width}, layout_.dtype);
    tensors[block(layer) + "shared_experts.gate_proj.weight"] = mlp.gate;
    tensors[block(layer) + "shared_experts.up_proj.weight"] = mlp.up;
    tensors[block(layer) + "shared_experts.down_proj.weight"] = mlp.down;
  }
  add_experts(layer);
}

void TestModel::add_experts(int64_t layer) {
  const int64_t num_experts = layout_.num_experts, hidden = layout_.hidden, width = layout_.width;
  const bool mixtral = layout_.family == "mixtral";
  Blob gate_up{layout_.dtype, {num_experts, 2 * width, hidden}, {}};
  Blob down{layout_.dtype, {num_experts, hidden, width}, {}};
  for (int64_t e = 0; e < num_experts; ++e) {
    ExpertBlobs& expert = experts[{layer, e}];
    expert.gate = random_blob({width, hidden}, layout_.dtype);
    expert.up = random_blob({width, hidden}, layout_.dtype);
    expert.down = random_blob({hidden, width}, layout_.dtype);
    gate_up.bytes.insert(gate_up.bytes.end(), expert.gate.bytes.begin(), expert.gate.bytes.end());
    gate_up.bytes.insert(gate_up.bytes.end(), expert.up.bytes.begin(), expert.up.bytes.end());
    down.bytes.insert(down.bytes.end(), expert.down.bytes.begin(), expert.down.bytes.end());
    if (layout_.fused) continue;
    const std::string name = fmt::format("{}experts.{}.", block(layer), e);
    tensors[name + (mixtral ? "w1" : "gate_proj") + ".weight"] = expert.gate;
    tensors[name + (mixtral ? "w3" : "up_proj") + ".weight"] = expert.up;
    tensors[name + (mixtral ? "w2" : "down_proj") + ".weight"] = expert.down;
  }
  if (!layout_.fused) return;
  tensors[block(layer) + "experts.gate_up_proj"] = gate_up;
  tensors[block(layer) + "experts.down_proj"] = down;
}

void TestModel::write(const std::string& dir) const {
  std::ofstream(dir + "/config.json") << config;
  std::map<std::string, std::vector<NamedTensor>> shards;
  std::map<std::string, std::string> map;
  int next = 0;
  for (const auto& [name, blob] : tensors) {
    std::string shard = "model.safetensors";
    if (layout_.num_shards > 1) {
      shard = fmt::format("model-{:05}-of-{:05}.safetensors", next++ % layout_.num_shards + 1,
                          layout_.num_shards);
    }
    map[name] = shard;
    shards[shard].push_back({name, ConstTensorView(blob.bytes.data(), blob.dtype, blob.shape)});
  }
  for (const auto& [shard, named] : shards) {
    const Status written = write_safetensors(dir + "/" + shard, named);
    ASSERT_TRUE(written.ok()) << written.message();
  }
  if (layout_.num_shards == 1) return;
  const nlohmann::json index = {{"metadata", {{"total_size", 1}}},
                                {"weight_map", weight_map.empty() ? map : weight_map}};
  std::ofstream(dir + "/model.safetensors.index.json") << index;
}

}  // namespace argosy::test
