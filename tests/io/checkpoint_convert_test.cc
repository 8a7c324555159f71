// Whole checkpoints quantised: every family in every format loads again, its experts are what quantise() makes of
// the source's, everything else is copied; the folders it refuses, and that it leaves nothing behind.
#include "argosy/checkpoint_convert.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "argosy/checkpoint.h"
#include "io/model_writer.h"
#include "io/temp_folder.h"

namespace argosy {
namespace {

using test::expect_error;
using test::ModelLayout;
using test::TempFolder;
using test::TestModel;

constexpr BlockFormat kFormats[] = {BlockFormat::kE4M3Block128, BlockFormat::kE4M3Row128,
                                    BlockFormat::kMxfp8, BlockFormat::kMxfp8Ceil,
                                    BlockFormat::kMxfp4};

bool same(const ConstTensorView& a, const ConstTensorView& b) {
  return a.num_elements() == b.num_elements() &&
         std::equal(a.data, a.data + a.num_elements() * size_of(a.dtype), b.data);
}

QuantisedTensor make_quantised(BlockFormat format, int64_t rows, int64_t cols) {
  return QuantisedTensor::create(*quantised_layout(format, rows, cols)).value();
}

void expect_quantised_from(const Tensor& values, BlockFormat format,
                           const QuantisedTensor& stored) {
  auto made = make_quantised(format, values.view().dim(0), values.view().dim(1));
  ASSERT_TRUE(quantise({}, values.view(), made.view()).ok());
  EXPECT_TRUE(same(made.view().codes, stored.view().codes));
  EXPECT_TRUE(same(made.view().scales, stored.view().scales));
}

void expect_quantised_from(const ExpertTensors& source, BlockFormat format,
                           const ExpertTensors& made) {
  ASSERT_TRUE(made.quantised.has_value());
  expect_quantised_from(source.gate, format, made.quantised->gate);
  expect_quantised_from(source.up, format, made.quantised->up);
  expect_quantised_from(source.down, format, made.quantised->down);
  EXPECT_EQ(source.up_bias.empty(), made.up_bias.empty());
  if (!source.up_bias.empty()) {
    EXPECT_TRUE(same(source.up_bias.view(), made.up_bias.view()));
  }
}

void expect_converted(const ModelLayout& layout, BlockFormat format, uint64_t seed) {
  SCOPED_TRACE(
      fmt::format("{} fused {} {} seed {}", layout.family, layout.fused, name_of(format), seed));
  const TempFolder folder;
  const std::string target = folder / "quantised";
  std::filesystem::create_directory(folder / "source");
  const TestModel model(layout, seed);
  model.write(folder / "source");
  folder.write("source/tokenizer.json", "{}");
  int64_t called = 0;
  ConvertOptions options{.format = format};
  options.on_matrix = [&](std::string_view, const ConstTensorView&, const ConstQuantisedView&) {
    ++called;
    return Status();
  };
  const auto report = quantise_checkpoint(folder / "source", target, options);
  ASSERT_TRUE(report.has_value()) << report.error().message();
  EXPECT_EQ(report->num_matrices, called);
  EXPECT_LT(report->bytes_after, report->bytes_before);
  EXPECT_EQ(test::read_bytes(target + "/tokenizer.json"), "{}");
  const auto source = *Checkpoint::open(folder / "source");
  const auto made = Checkpoint::open(target);
  ASSERT_TRUE(made.has_value()) << made.error().message();
  for (const auto& [place, blobs] : model.experts) {
    const auto expert = made->read_expert(place.first, place.second);
    ASSERT_TRUE(expert.has_value()) << expert.error().message();
    expect_quantised_from(*source.read_expert(place.first, place.second), format, *expert);
  }
  for (const int64_t layer : source.config().moe_layers()) {
    const auto shared = made->read_shared(layer);
    ASSERT_TRUE(shared.has_value()) << shared.error().message();
    if (shared->shared)
      expect_quantised_from(*source.read_shared(layer)->shared, format, *shared->shared);
    EXPECT_TRUE(same(source.read_shared(layer)->gate.view(), shared->gate.view()));
  }
  const std::string dense = layout.prefix + "embed_tokens.weight";
  int64_t found = 0;
  for (const auto& file : std::filesystem::directory_iterator(target)) {
    if (file.path().extension() != ".safetensors") continue;
    const auto opened = *SafetensorsFile::open(file.path().string());
    if (opened->find(dense) == nullptr) continue;
    ++found;
    EXPECT_TRUE(std::ranges::equal(opened->read(dense)->bytes(), model.tensors.at(dense).bytes));
  }
  EXPECT_EQ(found, 1);
  expect_error(quantise_checkpoint(target, folder / "again", options), StatusCode::kInvalidArgument,
               {"quantised already"});
}

TEST(CheckpointConvert, EveryFamilyInEveryFormat) {
  uint64_t seed = 40;
  for (const char* family :
       {"deepseek_v3", "deepseek_v2", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"}) {
    for (const BlockFormat format : kFormats) {
      const bool fused = seed % 2 == 0 && family != std::string("gpt_oss");
      expect_converted({.family = family,
                        .fused = fused,
                        .num_shards = 2,
                        .num_experts = 3,
                        .hidden = 70,
                        .width = 33,
                        .num_layers = 2},
                       format, seed++);
    }
  }
  // Whole groups: gpt_oss's own layout.
  expect_converted(
      {.family = "gpt_oss", .num_experts = 3, .hidden = 64, .width = 96, .num_layers = 2},
      BlockFormat::kMxfp4, seed);
}

TEST(CheckpointConvert, WholeGroupsOfGptOssHaveThePublishedNames) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "source");
  TestModel({.family = "gpt_oss", .num_experts = 2, .hidden = 64, .width = 32, .num_layers = 1}, 1)
      .write(folder / "source");
  ASSERT_TRUE(quantise_checkpoint(folder / "source", folder / "q", {.format = BlockFormat::kMxfp4})
                  .has_value());
  const auto shard = *SafetensorsFile::open(folder / "q/model-00001-of-00002.safetensors");
  const auto* const blocks = shard->find("model.layers.0.mlp.experts.gate_up_proj_blocks");
  ASSERT_NE(blocks, nullptr);
  EXPECT_EQ(blocks->shape, (std::vector<int64_t>{2, 64, 2, 16}));
  EXPECT_EQ(shard->find("model.layers.0.mlp.experts.down_proj_scales")->shape,
            (std::vector<int64_t>{2, 64, 1}));
}

TEST(CheckpointConvert, LayersThatAreNotThereStayAway) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "source");
  TestModel model({.family = "qwen3_moe"}, 1);
  std::erase_if(model.tensors,
                [](const auto& item) { return item.first.find("layers.1") == std::string::npos; });
  model.write(folder / "source");
  ASSERT_TRUE(quantise_checkpoint(folder / "source", folder / "q", {.format = BlockFormat::kMxfp8})
                  .has_value());
  const auto made = *Checkpoint::open(folder / "q");
  EXPECT_TRUE(made.read_expert(1, 4)->quantised.has_value());
  expect_error(made.read_expert(0, 0), StatusCode::kNotFound, {"layer 0"});
}

TEST(CheckpointConvert, RefusalsAndFailuresLeaveNothing) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "source");
  TestModel model({.family = "olmoe"}, 1);
  model.write(folder / "source");
  const std::string target = folder / "target";
  for (const BlockFormat format :
       {BlockFormat::kUnset, BlockFormat::kNvfp4, BlockFormat::kE4M3Row128E8M0}) {
    expect_error(quantise_checkpoint(folder / "source", target, {.format = format}),
                 StatusCode::kInvalidArgument, {"format"});
  }
  expect_error(
      quantise_checkpoint(folder / "source", folder / "source", {.format = BlockFormat::kMxfp8}),
      StatusCode::kInvalidArgument, {"source", "not empty"});
  expect_error(
      quantise_checkpoint(folder / "source", folder / "a/b", {.format = BlockFormat::kMxfp8}),
      StatusCode::kIo, {"a/b"});
  int64_t left = 20;  // fails in the second layer
  ConvertOptions options{.format = BlockFormat::kMxfp8};
  options.on_matrix = [&](std::string_view, const ConstTensorView&, const ConstQuantisedView&) {
    return --left > 0 ? Status() : Status(StatusCode::kNonFinite, "enough");
  };
  expect_error(quantise_checkpoint(folder / "source", target, options), StatusCode::kNonFinite,
               {"layers.1.mlp.experts.1.up_proj", "enough"});
  EXPECT_FALSE(std::filesystem::exists(target));
  std::filesystem::create_directory(target);
  left = 20;
  EXPECT_FALSE(quantise_checkpoint(folder / "source", target, options).has_value());
  EXPECT_TRUE(std::filesystem::is_empty(target));
  TestModel dense({.family = "qwen3_moe"}, 1);
  dense.config["num_experts"] = 0;
  std::erase_if(dense.tensors,
                [](const auto& item) { return item.first.find("mlp") != std::string::npos; });
  std::filesystem::create_directory(folder / "dense");
  dense.write(folder / "dense");
  expect_error(quantise_checkpoint(folder / "dense", target, {.format = BlockFormat::kMxfp8}),
               StatusCode::kInvalidArgument, {"no layer of experts"});
}

}  // namespace
}  // namespace argosy
