// The real checkpoints in testdata/ load, and say what their makers say of them.
//
// Also the proof that the random models of the other tests have the names that real ones have.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "argosy/checkpoint.h"

namespace argosy {
namespace {

const std::string kModels = ARGOSY_TESTDATA "/models/";

struct RealModel {
  std::string folder, family;
  int64_t num_experts, top_k, hidden, width, shared_width;
  std::vector<int64_t> layers;  // those in testdata
  std::vector<int64_t> moe_layers;
  BlockFormat format = BlockFormat::kUnset;  // of its experts
};

int64_t bytes_of(const QuantisedTensor& matrix) {
  const ConstQuantisedView view = matrix.view();
  return view.codes.num_elements() * size_of(view.codes.dtype) +
         view.scales.num_elements() * size_of(view.scales.dtype);
}

int64_t bytes_of(const ExpertTensors& expert) {
  int64_t bytes = expert.gate.num_bytes() + expert.up.num_bytes() + expert.down.num_bytes() +
                  expert.gate_bias.num_bytes() + expert.up_bias.num_bytes() +
                  expert.down_bias.num_bytes();
  if (!expert.quantised.has_value()) return bytes;
  return bytes + bytes_of(expert.quantised->gate) + bytes_of(expert.quantised->up) +
         bytes_of(expert.quantised->down);
}

TEST(TestData, EveryModelLoads) {
  for (const RealModel& want :
       {RealModel{"deepseek_v3_tiny", "deepseek_v3", 16, 4, 64, 32, 32, {1, 2}, {1, 2}},
        RealModel{"deepseek_v2_tiny", "deepseek_v2", 32, 6, 64, 32, 64, {1, 2}, {1, 2}},
        RealModel{"mixtral_tiny", "mixtral", 8, 2, 64, 112, 0, {0, 1}, {0, 1}},
        RealModel{"qwen3_moe_tiny", "qwen3_moe", 64, 8, 128, 48, 0, {1}, {0, 1, 2}},
        RealModel{"olmoe_tiny", "olmoe", 16, 4, 64, 48, 0, {0, 1}, {0, 1}},
        RealModel{"qwen2_moe_tiny", "qwen2_moe", 12, 4, 64, 40, 96, {0, 1}, {0, 1}},
        RealModel{"gpt_oss_tiny", "gpt_oss", 8, 4, 64, 64, 0, {0, 1}, {0, 1}},
        RealModel{"deepseek_v3_tiny_fp8",
                  "deepseek_v3",
                  16,
                  4,
                  64,
                  32,
                  32,
                  {1, 2},
                  {1, 2},
                  BlockFormat::kE4M3Block128},
        RealModel{"deepseek_v3_wide_fp8",
                  "deepseek_v3",
                  8,
                  2,
                  320,
                  192,
                  192,
                  {0},
                  {0},
                  BlockFormat::kE4M3Block128},
        RealModel{"gpt_oss_tiny_mxfp4",
                  "gpt_oss",
                  8,
                  4,
                  64,
                  64,
                  0,
                  {0, 1},
                  {0, 1},
                  BlockFormat::kMxfp4}}) {
    SCOPED_TRACE(want.folder);
    const auto checkpoint = Checkpoint::open(kModels + want.folder);
    ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message();
    const ModelConfig& config = checkpoint->config();
    EXPECT_EQ(config.family, want.family);
    EXPECT_EQ(config.router.num_experts, want.num_experts);
    EXPECT_EQ(config.router.top_k, want.top_k);
    EXPECT_EQ(config.hidden, want.hidden);
    EXPECT_EQ(config.intermediate, want.width);
    EXPECT_EQ(config.shared_intermediate, want.shared_width);
    EXPECT_EQ(config.moe_layers(), want.moe_layers);
    int64_t bytes = 0;
    for (const int64_t layer : want.layers) {
      const auto shared = checkpoint->read_shared(layer);
      ASSERT_TRUE(shared.has_value()) << shared.error().message();
      EXPECT_EQ(shared->shared.has_value(), want.shared_width > 0);
      EXPECT_EQ(shared->selection_bias.empty(), want.family != "deepseek_v3");
      for (int64_t e = 0; e < want.num_experts; ++e) {
        const auto expert = checkpoint->read_expert(layer, e);
        ASSERT_TRUE(expert.has_value()) << expert.error().message();
        ASSERT_EQ(expert->quantised.has_value(), want.format != BlockFormat::kUnset);
        if (expert->quantised) {
          EXPECT_EQ(expert->quantised->up.view().format, want.format);
        }
        bytes += bytes_of(*expert);
      }
      EXPECT_EQ(shared->shared_gate.empty(), want.family != "qwen2_moe");
      EXPECT_EQ(shared->gate_bias.empty(), want.family != "gpt_oss");
      bytes += shared->gate.num_bytes() + shared->shared_gate.num_bytes() +
               shared->gate_bias.num_bytes() +
               (shared->selection_bias.empty() ? 0 : 4 * want.num_experts) +
               (shared->shared ? bytes_of(*shared->shared) : 0);
    }
    // Nothing in the file was left unread: the tensors of the MoE blocks are all there is.
    EXPECT_EQ(checkpoint->bytes_read(), bytes);
    const auto file = *SafetensorsFile::open(kModels + want.folder + "/model.safetensors");
    int64_t total = 0;
    for (const TensorInfo& info : file->tensors()) total += info.end - info.begin;
    EXPECT_EQ(bytes, total);
  }
}

QuantisedTensor make_quantised(BlockFormat format, int64_t rows, int64_t cols) {
  return QuantisedTensor::create(*quantised_layout(format, rows, cols)).value();
}

void expect_quantised_from(const Tensor& values, const QuantisedTensor& stored) {
  const ConstQuantisedView want = stored.view();
  auto made = make_quantised(want.format, want.rows, want.cols);
  ASSERT_TRUE(quantise({}, values.view(), made.view()).ok());
  const auto same = [](const ConstTensorView& a, const ConstTensorView& b) {
    return std::equal(a.data, a.data + a.num_elements() * size_of(a.dtype), b.data);
  };
  EXPECT_TRUE(same(made.view().codes, want.codes));
  EXPECT_TRUE(same(made.view().scales, want.scales));
}

// What other software made of the trained models is what quantise() makes of them, byte for byte: rules,
// orientation and interleaving at once.
TEST(TestData, QuantisedModelsAreThoseThatQuantiseMakes) {
  for (const auto& [quantised, source, shared] :
       {std::tuple("deepseek_v3_tiny_fp8", "deepseek_v3_tiny", true),
        std::tuple("gpt_oss_tiny_mxfp4", "gpt_oss_tiny", false)}) {
    SCOPED_TRACE(quantised);
    const auto stored = *Checkpoint::open(kModels + quantised);
    const auto whole = *Checkpoint::open(kModels + source);
    for (const int64_t layer : whole.config().moe_layers()) {
      for (int64_t e = 0; e < whole.config().router.num_experts; ++e) {
        const auto have = stored.read_expert(layer, e);
        const auto values = whole.read_expert(layer, e);
        ASSERT_TRUE(have.has_value() && values.has_value());
        expect_quantised_from(values->gate, have->quantised->gate);
        expect_quantised_from(values->up, have->quantised->up);
        expect_quantised_from(values->down, have->quantised->down);
      }
      if (!shared) continue;
      expect_quantised_from(whole.read_shared(layer)->shared->down,
                            stored.read_shared(layer)->shared->quantised->down);
    }
  }
}

TEST(TestData, CapturesAreWhole) {
  for (const char* run : {"f32", "bf16"}) {
    const std::string prefix =
        kModels + "deepseek_v3_tiny/captures.safetensors:" + run + ".layers.2.";
    for (const char* name :
         {"moe_input", "router_logits", "topk_idx", "topk_weights", "moe_output"}) {
      const auto tensor = read_tensor_argument(prefix + name);
      ASSERT_TRUE(tensor.has_value()) << tensor.error().message();
      EXPECT_EQ(tensor->view().dim(0), 512);
    }
  }
}

TEST(TestData, SeedExampleAndGoldenBitsLoad) {
  const auto tokens =
      read_tensor_argument(ARGOSY_TESTDATA "/seed_example/seed_example.safetensors:tokens");
  ASSERT_TRUE(tokens.has_value()) << tokens.error().message();
  EXPECT_EQ(describe(tokens->view()), "F32 [4096, 512]");
  EXPECT_TRUE(SafetensorsFile::open(ARGOSY_TESTDATA "/golden/dot_orders.safetensors").has_value());
}

}  // namespace
}  // namespace argosy
