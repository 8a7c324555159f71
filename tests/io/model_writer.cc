// See model_writer.h.
#include "io/model_writer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

namespace argosy::test {

nlohmann::json minimal_config(const std::string& family) {
  nlohmann::json config = {{"model_type", family},
                           {"num_hidden_layers", 3},
                           {"hidden_size", 6},
                           {"num_experts_per_tok", 2},
                           {"hidden_act", "silu"}};
  const bool is_deepseek = family.starts_with("deepseek");
  const bool narrow = family == "mixtral" || family == "olmoe" || family == "gpt_oss";
  const bool local = family == "mixtral" || family == "gpt_oss";
  config[narrow ? "intermediate_size" : "moe_intermediate_size"] = 4;
  if (!narrow) config["intermediate_size"] = 99;  // of dense layers: must not be taken
  config[is_deepseek ? "n_routed_experts" : local ? "num_local_experts" : "num_experts"] = 8;
  if (!local) config["norm_topk_prob"] = family != "deepseek_v2";
  if (family == "qwen2_moe") config["shared_expert_intermediate_size"] = 7;
  if (family == "gpt_oss") config["swiglu_limit"] = 2.5;
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
  if (layout.family == "qwen2_moe") config["shared_expert_intermediate_size"] = 2 * layout.width;
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

std::string TestModel::router(int64_t layer) const {
  return block(layer) + (layout_.family == "gpt_oss" ? "router" : "gate");
}

int64_t TestModel::expert_bytes() const {
  int64_t elements = 3 * layout_.hidden * layout_.width;
  if (layout_.family == "gpt_oss") elements += 2 * layout_.width + layout_.hidden;
  return elements * size_of(layout_.dtype);
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
  tensors[router(layer) + ".weight"] = gates[layer];
  if (layout_.family == "deepseek_v3") {
    tensors[block(layer) + "gate.e_score_correction_bias"] =
        random_blob({num_experts}, DType::kF32);
  }
  if (layout_.family.starts_with("deepseek")) add_shared(layer, "shared_experts.");
  if (layout_.family == "qwen2_moe") {
    add_shared(layer, "shared_expert.");
    shared_gates[layer] = random_blob({1, layout_.hidden}, layout_.dtype);
    tensors[block(layer) + "shared_expert_gate.weight"] = shared_gates[layer];
  }
  if (layout_.family == "gpt_oss") {
    gate_biases[layer] = random_blob({num_experts}, layout_.dtype);
    tensors[router(layer) + ".bias"] = gate_biases[layer];
    return add_interleaved_experts(layer);
  }
  add_experts(layer);
}

void TestModel::add_shared(int64_t layer, const std::string& module) {
  const int64_t width = 2 * layout_.width;
  ExpertBlobs& mlp = shared[layer];
  mlp.gate = random_blob({width, layout_.hidden}, layout_.dtype);
  mlp.up = random_blob({width, layout_.hidden}, layout_.dtype);
  mlp.down = random_blob({layout_.hidden, width}, layout_.dtype);
  tensors[block(layer) + module + "gate_proj.weight"] = mlp.gate;
  tensors[block(layer) + module + "up_proj.weight"] = mlp.up;
  tensors[block(layer) + module + "down_proj.weight"] = mlp.down;
}

// Element by element, from what the reader must give back to where gpt_oss keeps it.
void TestModel::add_interleaved_experts(int64_t layer) {
  const int64_t num_experts = layout_.num_experts, hidden = layout_.hidden, width = layout_.width;
  Blob gate_up = random_blob({num_experts, hidden, 2 * width}, layout_.dtype);
  Blob down = random_blob({num_experts, width, hidden}, layout_.dtype);
  Blob gate_up_bias = random_blob({num_experts, 2 * width}, layout_.dtype);
  Blob down_bias = random_blob({num_experts, hidden}, layout_.dtype);
  const int64_t bytes = size_of(layout_.dtype);
  const auto copy = [bytes](const Blob& from, int64_t from_at, Blob* to, int64_t to_at) {
    std::copy_n(from.bytes.begin() + from_at * bytes, bytes, to->bytes.begin() + to_at * bytes);
  };
  for (int64_t e = 0; e < num_experts; ++e) {
    ExpertBlobs& expert = experts[{layer, e}];
    expert.gate = random_blob({width, hidden}, layout_.dtype);
    expert.up = random_blob({width, hidden}, layout_.dtype);
    expert.down = random_blob({hidden, width}, layout_.dtype);
    expert.gate_bias = random_blob({width}, layout_.dtype);
    expert.up_bias = random_blob({width}, layout_.dtype);
    expert.down_bias = random_blob({hidden}, layout_.dtype);
    for (int64_t f = 0; f < width; ++f) {
      for (int64_t h = 0; h < hidden; ++h) {
        copy(expert.gate, f * hidden + h, &gate_up, (e * hidden + h) * 2 * width + 2 * f);
        copy(expert.up, f * hidden + h, &gate_up, (e * hidden + h) * 2 * width + 2 * f + 1);
        copy(expert.down, h * width + f, &down, (e * width + f) * hidden + h);
      }
      copy(expert.gate_bias, f, &gate_up_bias, e * 2 * width + 2 * f);
      copy(expert.up_bias, f, &gate_up_bias, e * 2 * width + 2 * f + 1);
    }
    for (int64_t h = 0; h < hidden; ++h) copy(expert.down_bias, h, &down_bias, e * hidden + h);
  }
  tensors[block(layer) + "experts.gate_up_proj"] = gate_up;
  tensors[block(layer) + "experts.gate_up_proj_bias"] = gate_up_bias;
  tensors[block(layer) + "experts.down_proj"] = down;
  tensors[block(layer) + "experts.down_proj_bias"] = down_bias;
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
