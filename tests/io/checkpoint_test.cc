// K23, tensor mapping: random small models of every family in every layout, read for every number
// of ranks; shards that are missing, superfluous or renamed (C214, C216, C229); the bytes that a
// rank reads.
//
// Mutations tried, each makes a test fail: gate and up exchanged in the fused layout, down read
// transposed, the expert's offset dropped, the index ignored, no check for both layouts, an unknown
// tensor passed over.
#include "argosy/checkpoint.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>

#include "io/model_writer.h"
#include "io/temp_folder.h"

namespace argosy {
namespace {

using test::expect_error;
using test::ModelLayout;
using test::TempFolder;
using test::TestModel;

const char* const kFamilyNames[] = {"deepseek_v3", "deepseek_v2", "mixtral", "qwen2_moe",
                                    "qwen3_moe",   "olmoe",       "gpt_oss"};

void expect_same(const Tensor& tensor, const test::Blob& blob) {
  ASSERT_EQ(describe(tensor.view()),
            describe(ConstTensorView(blob.bytes.data(), blob.dtype, blob.shape)));
  EXPECT_TRUE(std::equal(tensor.bytes().begin(), tensor.bytes().end(), blob.bytes.begin()));
}

void expect_same(const ExpertTensors& expert, const test::ExpertBlobs& blobs) {
  expect_same(expert.gate, blobs.gate);
  expect_same(expert.up, blobs.up);
  expect_same(expert.down, blobs.down);
  ASSERT_EQ(expert.down_bias.empty(), blobs.down_bias.shape.empty());
  ASSERT_EQ(expert.gate_bias.empty(), expert.down_bias.empty());
  ASSERT_EQ(expert.up_bias.empty(), expert.down_bias.empty());
  if (expert.down_bias.empty()) return;
  expect_same(expert.gate_bias, blobs.gate_bias);
  expect_same(expert.up_bias, blobs.up_bias);
  expect_same(expert.down_bias, blobs.down_bias);
}

std::vector<ModelLayout> every_layout() {
  std::vector<ModelLayout> layouts;
  for (const char* family : kFamilyNames) {
    for (const bool fused : {false, true}) {
      if (family == std::string("gpt_oss") && !fused) continue;
      for (const int num_shards : {1, 3}) {
        for (const bool square : {false, true}) {
          ModelLayout layout{.family = family, .fused = fused, .num_shards = num_shards};
          layout.width = square ? layout.hidden : 4;
          layout.dtype = num_shards == 1 ? DType::kBF16 : DType::kF32;
          layout.prefix = square ? (fused ? "model.language_model." : "") : "model.";
          layouts.push_back(layout);
        }
      }
    }
  }
  return layouts;
}

std::string name_of_layout(const ModelLayout& layout) {
  return fmt::format("{} fused {} shards {} width {} prefix '{}'", layout.family, layout.fused,
                     layout.num_shards, layout.width, layout.prefix);
}

TEST(Checkpoint, EveryExpertOfEveryLayoutComesBack) {
  uint64_t seed = 100;
  for (const ModelLayout& layout : every_layout()) {
    SCOPED_TRACE(testing::Message() << name_of_layout(layout) << " seed " << seed);
    const TempFolder folder;
    const TestModel model(layout, seed++);
    model.write(folder.path());
    const auto checkpoint = Checkpoint::open(folder.path());
    ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message();
    EXPECT_EQ(checkpoint->bytes_read(), 0);
    for (const auto& [place, blobs] : model.experts) {
      const int64_t before = checkpoint->bytes_read();
      const auto expert = checkpoint->read_expert(place.first, place.second);
      ASSERT_TRUE(expert.has_value()) << expert.error().message();
      expect_same(*expert, blobs);
      EXPECT_EQ(checkpoint->bytes_read() - before, model.expert_bytes());
    }
    for (const auto& [layer, gate] : model.gates) {
      const auto shared = checkpoint->read_shared(layer);
      ASSERT_TRUE(shared.has_value()) << shared.error().message();
      expect_same(shared->gate, gate);
      ASSERT_EQ(shared->gate_bias.empty(), layout.family != "gpt_oss");
      if (!shared->gate_bias.empty()) expect_same(shared->gate_bias, model.gate_biases.at(layer));
      ASSERT_EQ(shared->shared_gate.empty(), layout.family != "qwen2_moe");
      if (!shared->shared_gate.empty()) {
        expect_same(shared->shared_gate, model.shared_gates.at(layer));
      }
      ASSERT_EQ(shared->shared.has_value(), model.shared.contains(layer));
      if (shared->shared) expect_same(*shared->shared, model.shared.at(layer));
      ASSERT_EQ(shared->selection_bias.empty(), layout.family != "deepseek_v3");
      if (shared->selection_bias.empty()) continue;
      expect_same(shared->selection_bias,
                  model.tensors.at(model.block(layer) + "gate.e_score_correction_bias"));
    }
  }
}

// Rank r of R owns [r*E/R, (r+1)*E/R): together they read every expert's bytes once, whatever R is.
TEST(Checkpoint, RanksReadTheirOwnExpertsOnly) {
  for (const bool fused : {false, true}) {
    const TempFolder folder;
    const TestModel model({.family = "olmoe", .fused = fused}, 5);
    model.write(folder.path());
    const int64_t num_experts = model.layout().num_experts;
    for (int64_t num_ranks = 1; num_ranks <= 7; ++num_ranks) {
      for (int64_t rank = 0; rank < num_ranks; ++rank) {
        const auto checkpoint = Checkpoint::open(folder.path());
        ASSERT_TRUE(checkpoint.has_value());
        const int64_t first = rank * num_experts / num_ranks;
        const int64_t last = (rank + 1) * num_experts / num_ranks;
        for (int64_t e = first; e < last; ++e) {
          expect_same(*checkpoint->read_expert(1, e), model.experts.at({1, e}));
        }
        EXPECT_EQ(checkpoint->bytes_read(), (last - first) * model.expert_bytes());
      }
    }
  }
}

TEST(Checkpoint, LayersAndExpertsOutOfRangeAreRefused) {
  const TempFolder folder;
  TestModel({.family = "deepseek_v3"}, 1).write(folder.path());
  const auto checkpoint = *Checkpoint::open(folder.path());
  for (const int64_t layer : {INT64_MIN, int64_t{-1}, int64_t{3}, INT64_MAX}) {
    expect_error(checkpoint.read_shared(layer), StatusCode::kInvalidArgument,
                 {std::to_string(layer), "0 to 2", "[1, 2]"});
  }
  expect_error(checkpoint.read_expert(0, 0), StatusCode::kInvalidArgument,
               {"layer 0", "no experts", "[1, 2]"});
  for (const int64_t expert : {INT64_MIN, int64_t{-1}, int64_t{5}, INT64_MAX}) {
    expect_error(checkpoint.read_expert(1, expert), StatusCode::kInvalidArgument,
                 {std::to_string(expert), "0 to 4"});
  }
}

TEST(Checkpoint, ACopySharesTheCounter) {
  const TempFolder folder;
  TestModel model({.family = "mixtral"}, 1);
  model.write(folder.path());
  const Checkpoint checkpoint = *Checkpoint::open(folder.path());
  const Checkpoint copy = checkpoint;
  ASSERT_TRUE(copy.read_expert(0, 1).has_value());
  EXPECT_EQ(checkpoint.bytes_read(), model.expert_bytes());
  EXPECT_EQ(checkpoint.dir(), folder.path());
}

// C214.
TEST(CheckpointFiles, EveryMissingShardIsListed) {
  const TempFolder folder;
  TestModel({.family = "qwen3_moe", .num_shards = 4}, 1).write(folder.path());
  std::filesystem::remove(folder / "model-00002-of-00004.safetensors");
  std::filesystem::remove(folder / "model-00004-of-00004.safetensors");
  const auto checkpoint = Checkpoint::open(folder.path());
  expect_error(checkpoint, StatusCode::kNotFound,
               {"2 of 4", "model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors"});
  EXPECT_EQ(checkpoint.error().message().find("model-00001"), std::string::npos);
}

// Names up to a limit are listed, the others counted: a message must not outgrow the index.
TEST(CheckpointFiles, VeryManyMissingShardsAreCounted) {
  const TempFolder folder;
  TestModel model({.family = "qwen3_moe", .num_shards = 2}, 1);
  for (int shard = 1; shard <= 2000; ++shard) {
    model.weight_map[fmt::format("tensor.{}", shard)] =
        fmt::format("model-{:05}.safetensors", shard);
  }
  model.write(folder.path());
  const auto checkpoint = Checkpoint::open(folder.path());
  expect_error(checkpoint, StatusCode::kNotFound,
               {"2000 of 2000", "model-00001.saf", "model-00400.saf"});
  const std::string& message = checkpoint.error().message();
  EXPECT_LT(message.size(), 17'000u);
  EXPECT_NE(message.find(" more"), std::string::npos) << message.substr(message.size() - 300);
}

// A name that no file of Linux can have.
TEST(CheckpointFiles, AnOverlongShardNameIsRefused) {
  const TempFolder folder;
  TestModel model({.family = "qwen3_moe", .num_shards = 2}, 1);
  model.weight_map["tensor"] = std::string(255, 'n');
  model.write(folder.path());
  expect_error(Checkpoint::open(folder.path()), StatusCode::kNotFound, {"(255 bytes)"});
  model.weight_map["tensor"] = std::string(256, 'n');
  model.write(folder.path());
  expect_error(Checkpoint::open(folder.path()), StatusCode::kCorruptData,
               {"\"tensor\"", "(256 bytes)", "no file name"});
}

// C216: a file that the index does not name is not even opened.
TEST(CheckpointFiles, OnlyIndexedFilesAreUsed) {
  const TempFolder folder;
  const TestModel model({.family = "olmoe", .num_shards = 2}, 1);
  model.write(folder.path());
  for (const char* extra : {"model.safetensors", "model-00003-of-00002.safetensors"}) {
    std::filesystem::copy_file(folder / "model-00001-of-00002.safetensors", folder / extra);
  }
  folder.write("consolidated.safetensors", "not a safetensors file");
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message();
  for (const auto& [place, blobs] : model.experts) {
    expect_same(*checkpoint->read_expert(place.first, place.second), blobs);
  }
}

TEST(CheckpointFiles, AnIndexThatNamesAbsentTensorsIsStale) {
  const TempFolder folder;
  TestModel model({.family = "olmoe", .num_shards = 2}, 1);
  for (const auto& [name, blob] : model.tensors) {
    model.weight_map[name] = "model-00001-of-00002.safetensors";
  }
  model.write(folder.path());
  expect_error(Checkpoint::open(folder.path()), StatusCode::kCorruptData,
               {"stale", "model-00001-of-00002.safetensors", "layers.0"});
}

// C216 (renamed files) and C229: the index says one thing, the files that are there hold
// everything.
TEST(CheckpointFiles, AStaleIndexCanBeRebuilt) {
  const TempFolder folder;
  TestModel model({.family = "deepseek_v2", .num_shards = 2}, 1);
  int next = 0;
  for (const auto& [name, blob] : model.tensors) {
    model.weight_map[name] = fmt::format("model-{:05}-of-00030.safetensors", next++ % 30 + 1);
  }
  model.write(folder.path());
  expect_error(Checkpoint::open(folder.path()), StatusCode::kNotFound,
               {"30 of 30", "model-00030-of-00030", "stale", "rebuild_index"});
  const auto checkpoint = Checkpoint::open(folder.path(), {.rebuild_index = true});
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message();
  for (const auto& [place, blobs] : model.experts) {
    expect_same(*checkpoint->read_expert(place.first, place.second), blobs);
  }
  std::filesystem::copy_file(folder / "model-00001-of-00002.safetensors",
                             folder / "model-x.safetensors");
  expect_error(Checkpoint::open(folder.path(), {.rebuild_index = true}), StatusCode::kCorruptData,
               {"both", "model-00001-of-00002", "model-x"});
}

TEST(CheckpointFiles, ShardsStayInTheFolder) {
  for (const std::string shard :
       {"../model.safetensors", "/etc/passwd", "a/b", "..", "", "sub/../x"}) {
    const TempFolder folder;
    TestModel model({.family = "olmoe", .num_shards = 2}, 1);
    model.weight_map["model.norm.weight"] = shard;
    model.write(folder.path());
    expect_error(Checkpoint::open(folder.path()), StatusCode::kCorruptData,
                 {"model.norm.weight", shard});
  }
}

TEST(CheckpointFiles, OddIndexesAreTypedErrors) {
  for (const std::string text :
       {"", "[]", "{}", "5", R"({"weight_map":[]})", R"({"weight_map":{"a":1}})",
        R"({"weight_map":{"a":"x","a":"y"}})", R"({"weight_map":{"a":"x"})"}) {
    const TempFolder folder;
    TestModel({.family = "olmoe"}, 1).write(folder.path());
    folder.write("model.safetensors.index.json", text);
    expect_error(Checkpoint::open(folder.path()), StatusCode::kCorruptData, {"index.json"});
  }
}

TEST(CheckpointFiles, EmptyFoldersAreTypedErrors) {
  const TempFolder folder;
  expect_error(Checkpoint::open(folder.path()), StatusCode::kNotFound, {"config.json"});
  folder.write("config.json", test::minimal_config("olmoe").dump());
  expect_error(Checkpoint::open(folder.path()), StatusCode::kNotFound,
               {"model.safetensors", "model.safetensors.index.json"});
  expect_error(Checkpoint::open(folder.path(), {.rebuild_index = true}), StatusCode::kNotFound,
               {"model*.safetensors"});
  expect_error(Checkpoint::open(folder / "absent", {.rebuild_index = true}), StatusCode::kNotFound,
               {"absent"});
}

// What Checkpoint::open, then read_shared and read_expert of layer 1, say about an edited model.
Status first_error(const TestModel& model) {
  const TempFolder folder;
  model.write(folder.path());
  const auto checkpoint = Checkpoint::open(folder.path());
  if (!checkpoint) return checkpoint.error();
  if (const auto shared = checkpoint->read_shared(1); !shared) return shared.error();
  for (int64_t e = 0; e < model.layout().num_experts; ++e) {
    if (const auto expert = checkpoint->read_expert(1, e); !expert) return expert.error();
  }
  return {};
}

TEST(CheckpointTensors, EveryParameterIsFilledOrAnError) {
  for (const char* family : kFamilyNames) {
    for (const bool fused : {false, true}) {
      const TestModel whole({.family = family, .fused = fused}, 1);
      EXPECT_TRUE(first_error(whole).ok());
      for (const auto& [name, blob] : whole.tensors) {
        if (!name.starts_with(whole.block(1))) continue;
        TestModel less = whole;
        less.tensors.erase(name);
        expect_error(first_error(less), StatusCode::kNotFound, {name});
      }
    }
  }
}

TEST(CheckpointTensors, EveryWrongShapeOrTypeIsAnError) {
  for (const char* family : {"deepseek_v3", "mixtral", "qwen2_moe", "gpt_oss"}) {
    for (const bool fused : {false, true}) {
      const TestModel whole({.family = family, .fused = fused}, 1);
      for (const auto& [name, blob] : whole.tensors) {
        if (!name.starts_with(whole.block(1))) continue;
        TestModel flat = whole;
        flat.tensors[name].shape.insert(flat.tensors[name].shape.begin(), 1);
        expect_error(first_error(flat), StatusCode::kInvalidArgument, {name, "shape [1, "});
        TestModel half = whole;
        half.tensors[name].dtype = DType::kF16;
        if (blob.dtype == DType::kF32) half.tensors[name].bytes.resize(blob.bytes.size() / 2);
        expect_error(first_error(half), StatusCode::kUnsupported, {name, "F16"});
        TestModel integer = whole;
        integer.tensors[name].dtype = blob.dtype == DType::kF32 ? DType::kI32 : DType::kI16;
        expect_error(first_error(integer), StatusCode::kInvalidArgument, {name, "BF16 or F32"});
      }
    }
  }
}

TEST(CheckpointTensors, TransposedMatricesAreRefusedUnlessSquare) {
  TestModel model({.family = "olmoe"}, 1);
  std::string name = model.block(1) + "experts.2.down_proj.weight";
  std::swap(model.tensors[name].shape[0], model.tensors[name].shape[1]);
  expect_error(first_error(model), StatusCode::kInvalidArgument, {name, "[4, 6]", "[6, 4]"});
}

// gpt_oss: the published (H, 2F) and its transpose cannot be confused unless H is 2F.
TEST(CheckpointTensors, InterleavedMatricesAreRefusedTransposed) {
  TestModel model({.family = "gpt_oss"}, 1);
  const std::string name = model.block(1) + "experts.gate_up_proj";
  std::swap(model.tensors[name].shape[1], model.tensors[name].shape[2]);
  expect_error(first_error(model), StatusCode::kInvalidArgument, {name, "[5, 8, 6]", "[5, 6, 8]"});
}

TEST(CheckpointTensors, InterleavedMatricesHaveOneTypeBiasesTheirOwn) {
  TestModel model({.family = "gpt_oss"}, 1);
  const std::string down = model.block(1) + "experts.down_proj";
  const std::string bias = model.block(1) + "experts.down_proj_bias";
  const auto widen = [&](const std::string& name) {
    model.tensors[name].dtype = DType::kF32;
    model.tensors[name].bytes.resize(2 * model.tensors[name].bytes.size());
  };
  widen(bias);
  EXPECT_TRUE(first_error(model).ok());
  widen(down);
  expect_error(first_error(model), StatusCode::kInvalidArgument, {down, "F32", "BF16"});
}

TEST(CheckpointTensors, MatricesOfOneExpertHaveOneType) {
  TestModel model({.family = "olmoe"}, 1);
  const std::string name = model.block(1) + "experts.2.up_proj.weight";
  model.tensors[name].dtype = DType::kF32;
  model.tensors[name].bytes.resize(2 * model.tensors[name].bytes.size());
  expect_error(first_error(model), StatusCode::kInvalidArgument, {name, "F32", "BF16"});
}

TEST(CheckpointTensors, ABiasInBf16IsWidened) {
  TestModel model({.family = "deepseek_v3"}, 1);
  test::Blob& bias = model.tensors[model.block(1) + "gate.e_score_correction_bias"];
  bias = {DType::kBF16, {5}, {}};
  for (const int high : {0x3F, 0xC0, 0x00, 0x40, 0xBF}) {
    bias.bytes.insert(bias.bytes.end(), {std::byte{0x80}, static_cast<std::byte>(high)});
  }
  const TempFolder folder;
  model.write(folder.path());
  const auto shared = Checkpoint::open(folder.path())->read_shared(1);
  ASSERT_TRUE(shared.has_value()) << shared.error().message();
  EXPECT_EQ(describe(shared->selection_bias.view()), "F32 [5]");
  const float* values = shared->selection_bias.view().as<float>();
  EXPECT_EQ(std::vector(values, values + 5),
            (std::vector<float>{1.0f, -4.0f, 0x1p-126f, 4.0f, -1.0f}));
}

TEST(CheckpointTensors, BothLayoutsAtOnceAreRefused) {
  for (const char* family : kFamilyNames) {
    if (family == std::string("gpt_oss")) continue;  // has one layout
    TestModel model({.family = family}, 1);
    const TestModel fused({.family = family, .fused = true}, 1);
    for (const char* name : {"experts.gate_up_proj", "experts.down_proj"}) {
      model.tensors[fused.block(1) + name] = fused.tensors.at(fused.block(1) + name);
    }
    expect_error(first_error(model), StatusCode::kInvalidArgument, {"two layouts", "layers.1"});
  }
}

TEST(CheckpointTensors, TwoPrefixesAtOnceAreRefused) {
  TestModel model({.family = "olmoe"}, 1);
  model.tensors["layers.1.mlp.gate.weight"] = model.gates.at(1);
  expect_error(first_error(model), StatusCode::kInvalidArgument,
               {"\"model.layers.", "\"layers.1.mlp.gate.weight\""});
}

// Nothing of an MoE block is passed over.
TEST(CheckpointTensors, UnknownTensorsOfABlockAreReported) {
  for (const char* family : kFamilyNames) {
    for (const char* name :
         {"gate.bias", "router.bias", "router.bias.bias", "experts.down_proj_bias_bias",
          "experts.5.gate_proj.weight", "experts.5.w1.weight",
          "experts.0.gate_proj.weight_scale_inv", "experts.00.up_proj.weight",
          "experts.-1.up_proj.weight", "experts.x", "experts.1", "experts.1.",
          "experts.99999999999999999999.up_proj.weight", "experts.0.up_proj.bias",
          "shared_expert_gate.weight", "experts.gate_up_proj_bias", "gate_proj.weight",
          "shared_experts.gate_proj.bias"}) {
      TestModel model({.family = family}, 1);
      const std::string full = model.block(1) + name;
      if (model.tensors.contains(full)) continue;  // the family has it
      model.tensors[full] = model.gates.at(1);
      expect_error(first_error(model), StatusCode::kInvalidArgument, {full});
    }
  }
  TestModel v2({.family = "deepseek_v2"}, 1);
  v2.tensors[v2.block(1) + "gate.e_score_correction_bias"] = v2.gates.at(1);
  expect_error(first_error(v2), StatusCode::kInvalidArgument,
               {"e_score_correction_bias", "deepseek_v2"});
  TestModel none({.family = "deepseek_v3"}, 1);
  none.config["n_shared_experts"] = 0;
  expect_error(first_error(none), StatusCode::kInvalidArgument, {"shared_experts.", "deepseek_v3"});
}

TEST(CheckpointTensors, DenseByConfigButWithExpertsIsAContradiction) {
  TestModel model({.family = "deepseek_v3"}, 1);
  model.config["first_k_dense_replace"] = 2;
  expect_error(first_error(model), StatusCode::kInvalidArgument,
               {"layer 1", "dense", "layers.1.mlp."});
  TestModel sparse({.family = "qwen3_moe"}, 1);
  sparse.config["num_experts"] = 0;
  expect_error(first_error(sparse), StatusCode::kInvalidArgument, {"layer 0", "dense"});
}

// A layer beyond num_hidden_layers (multi-token prediction) is none of the model's layers.
TEST(CheckpointTensors, LayersBeyondTheConfigAreLeftAlone) {
  TestModel model({.family = "deepseek_v3"}, 1);
  model.tensors["model.layers.3.mlp.experts.0.odd"] = model.gates.at(1);
  EXPECT_TRUE(first_error(model).ok());
}

TEST(CheckpointTensors, APartialCheckpointServesTheLayersItHas) {
  TestModel model({.family = "qwen3_moe"}, 1);
  std::erase_if(model.tensors,
                [](const auto& item) { return item.first.find("layers.1") == std::string::npos; });
  EXPECT_TRUE(first_error(model).ok());
  const TempFolder folder;
  model.write(folder.path());
  expect_error(Checkpoint::open(folder.path())->read_expert(0, 0), StatusCode::kNotFound,
               {"layer 0", "model.layers.0.mlp.experts.0.gate_proj.weight",
                "model.layers.0.mlp.experts.gate_up_proj"});
}

TEST(CheckpointTensors, LyingWidthsDoNotOverflow) {
  for (const bool fused : {false, true}) {
    TestModel odd({.family = "gpt_oss"}, 1);
    odd.config["intermediate_size"] = int64_t{1} << 31;
    EXPECT_FALSE(first_error(odd).ok());
    TestModel model({.family = "olmoe", .fused = fused}, 1);
    model.config["intermediate_size"] = int64_t{1} << 31;
    EXPECT_FALSE(first_error(model).ok());
    model.config["hidden_size"] = int64_t{1} << 31;
    EXPECT_FALSE(first_error(model).ok());
    model.config["num_experts"] = int64_t{1} << 31;
    EXPECT_FALSE(first_error(model).ok());
  }
}

}  // namespace
}  // namespace argosy
