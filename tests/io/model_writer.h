// Writes small random checkpoints of every family in every known layout, and remembers what each
// expert is.
//
// Independent of the reader's tables: names are spelled out here once more. Guarded by
// checkpoint_test.cc, which compares what it wrote with testdata/ (real checkpoints).
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "argosy/checkpoint.h"

namespace argosy::test {

struct Blob {
  DType dtype = DType::kUnset;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

struct ModelLayout {
  std::string family;
  bool fused = false;  // gpt_oss always is
  std::string prefix = "model.";
  int num_shards = 1;  // more than 1: with an index
  DType dtype = DType::kBF16;
  int64_t num_experts = 5;
  int64_t hidden = 6;
  int64_t width = 4;
  int64_t num_layers = 3;
};

struct ExpertBlobs {
  Blob gate, up, down;
  Blob gate_bias, up_bias, down_bias;  // gpt_oss only; else without shape
};

class TestModel {
 public:
  TestModel(const ModelLayout& layout, uint64_t seed);

  // Writes config.json, shards and index into `dir`.
  void write(const std::string& dir) const;

  const ModelLayout& layout() const { return layout_; }
  // "model.layers.1.mlp." of the router.
  std::string block(int64_t layer) const;
  // "model.layers.1.mlp.gate", without ".weight".
  std::string router(int64_t layer) const;
  int64_t expert_bytes() const;

  nlohmann::json config;
  std::map<std::string, Blob> tensors;                         // what is written
  std::map<std::string, std::string> weight_map;               // tensor -> shard, when sharded
  std::map<std::pair<int64_t, int64_t>, ExpertBlobs> experts;  // by (layer, expert)
  std::map<int64_t, ExpertBlobs> shared;                       // by layer; empty: no shared experts
  std::map<int64_t, Blob> gates, gate_biases,
      shared_gates;  // by layer; empty where a family has none

 private:
  Blob random_blob(std::vector<int64_t> shape, DType dtype);
  void add_layer(int64_t layer);
  void add_shared(int64_t layer, const std::string& module);
  void add_experts(int64_t layer);
  void add_interleaved_experts(int64_t layer);

  ModelLayout layout_;
  uint64_t state_;
};

// A config.json of `family` with every required field; two layers' worth of nothing optional.
nlohmann::json minimal_config(const std::string& family);

}  // namespace argosy::test
