// K23 for quantised experts: FP8, MXFP8 and MXFP4 checkpoints of every family, read back byte for byte, with
// blocks that are partial at the edges (320 x 192); what is wrong with scales, by its name.
//
// The model here is written with the layouts spelled out once more; values are decoded by a loop over elements.
// Mutations tried, each makes a test fail: gate and up exchanged in the packed layout, the expert's scale offset
// dropped, two scale tensors of one matrix accepted.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>

#include "argosy/checkpoint.h"
#include "io/model_writer.h"
#include "io/temp_folder.h"

namespace argosy {
namespace {

using test::Blob;
using test::expect_error;
using test::ModelLayout;
using test::TempFolder;
using test::TestModel;
using Shape = std::vector<int64_t>;

struct Layout {
  const char* method;
  BlockFormat format;
  Shape block;
  DType codes, scales;
  const char* suffix;
};
const Layout kLayouts[] = {
    {"fp8", BlockFormat::kE4M3Block128, {128, 128}, DType::kE4M3, DType::kF32, "weight_scale_inv"},
    {"fp8", BlockFormat::kE4M3Row128, {1, 128}, DType::kE4M3, DType::kF32, "weight_scale_inv"},
    {"mxfp8", BlockFormat::kMxfp8, {1, 32}, DType::kE4M3, DType::kU8, "weight_scale_inv"},
    {"mxfp8", BlockFormat::kMxfp8, {1, 32}, DType::kE4M3, DType::kE8M0, "weight_scale"},
    {"mxfp4", BlockFormat::kMxfp4, {1, 32}, DType::kU8, DType::kU8, "weight_scale"}};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Matrix {
  int64_t rows = 0, cols = 0;
  Blob codes, scales;
};

// A bf16 model whose experts, shared ones too, are then replaced by random codes and scales.
class QuantisedModel {
 public:
  QuantisedModel(ModelLayout base, Layout layout, uint64_t seed)
      : model(base, seed), layout_(std::move(layout)), state_(seed) {
    model.config["quantization_config"] = {{"quant_method", layout_.method},
                                           {"weight_block_size", layout_.block},
                                           {"modules_to_not_convert", {"self_attn", "lm_head"}}};
    const bool mixtral = base.family == "mixtral";
    const int64_t width = base.width, hidden = base.hidden;
    for (const auto& [place, blobs] : model.experts) {
      const std::string prefix =
          fmt::format("{}experts.{}.", model.block(place.first), place.second);
      for (const char* fused : {"gate_up_proj", "down_proj"}) {
        model.tensors.erase(model.block(place.first) + "experts." + fused);
      }
      experts[place] = {add(prefix + (mixtral ? "w1" : "gate_proj"), width, hidden),
                        add(prefix + (mixtral ? "w3" : "up_proj"), width, hidden),
                        add(prefix + (mixtral ? "w2" : "down_proj"), hidden, width)};
    }
    const std::string module = base.family == "qwen2_moe" ? "shared_expert." : "shared_experts.";
    for (const auto& [layer, blobs] : model.shared) {
      const std::string prefix = model.block(layer) + module;
      shared[layer] = {add(prefix + "gate_proj", 2 * width, hidden),
                       add(prefix + "up_proj", 2 * width, hidden),
                       add(prefix + "down_proj", hidden, 2 * width)};
    }
  }

  int64_t expert_bytes() const {
    int64_t bytes = 0;
    for (const Matrix& matrix : experts.begin()->second) {
      bytes += static_cast<int64_t>(matrix.codes.bytes.size() + matrix.scales.bytes.size());
    }
    return bytes + (model.layout().family == "gpt_oss"
                        ? 2 * (2 * model.layout().width + model.layout().hidden)
                        : 0);
  }

  Matrix random_matrix(int64_t rows, int64_t cols) {
    const int64_t code_cols = layout_.codes == DType::kU8 ? ceil_div(cols, 2) : cols;
    Matrix matrix{
        rows,
        cols,
        {layout_.codes, {rows, code_cols}, {}},
        {layout_.scales, {ceil_div(rows, layout_.block[0]), ceil_div(cols, layout_.block[1])}, {}}};
    for (int64_t i = 0; i < rows * code_cols; ++i) matrix.codes.bytes.push_back(next());
    for (int64_t i = 0; i < matrix.scales.shape[0] * matrix.scales.shape[1]; ++i) {
      if (layout_.scales == DType::kF32) {
        const float scale = static_cast<float>(1 + std::to_integer<int>(next())) * 0x1p-9f;
        const auto* bytes = reinterpret_cast<const std::byte*>(&scale);
        matrix.scales.bytes.insert(matrix.scales.bytes.end(), bytes, bytes + 4);
      } else {
        matrix.scales.bytes.push_back(
            std::byte{static_cast<uint8_t>(100 + std::to_integer<int>(next()) % 50)});
      }
    }
    return matrix;
  }

  TestModel model;
  std::map<std::pair<int64_t, int64_t>, std::array<Matrix, 3>> experts;
  std::map<int64_t, std::array<Matrix, 3>> shared;

 private:
  Matrix add(const std::string& name, int64_t rows, int64_t cols) {
    Matrix matrix = random_matrix(rows, cols);
    model.tensors[name + ".weight"] = matrix.codes;
    model.tensors[fmt::format("{}.{}", name, layout_.suffix)] = matrix.scales;
    return matrix;
  }
  std::byte next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::byte>(state_ >> 56);
  }

  Layout layout_;
  uint64_t state_;
};

void expect_bytes(const ConstTensorView& view, const Blob& blob) {
  ASSERT_EQ(view.num_elements() * size_of(view.dtype), static_cast<int64_t>(blob.bytes.size()));
  EXPECT_EQ(std::memcmp(view.data, blob.bytes.data(), blob.bytes.size()), 0);
}

void expect_same(const ExpertTensors& expert, const std::array<Matrix, 3>& want,
                 BlockFormat format) {
  ASSERT_TRUE(expert.quantised.has_value());
  EXPECT_TRUE(expert.gate.empty() && expert.up.empty() && expert.down.empty());
  const QuantisedTensor* got[3] = {&expert.quantised->gate, &expert.quantised->up,
                                   &expert.quantised->down};
  for (size_t i = 0; i < 3; ++i) {
    const ConstQuantisedView view = got[i]->view();
    EXPECT_EQ(view.format, format);
    EXPECT_EQ(view.rows, want[i].rows);
    EXPECT_EQ(view.cols, want[i].cols);
    EXPECT_EQ(view.codes.dtype, info_of(format).code_dtype);
    EXPECT_EQ(view.scales.dtype, info_of(format).scale_dtype);
    expect_bytes(view.codes, want[i].codes);
    expect_bytes(view.scales, want[i].scales);
  }
}

// The value of one element, from the definition.
float value_at(const Matrix& matrix, const Layout& layout, int64_t row, int64_t col) {
  const auto at =
      static_cast<size_t>((row / layout.block[0]) * matrix.scales.shape[1] + col / layout.block[1]);
  float scale = 0;
  if (layout.scales == DType::kF32) {
    std::memcpy(&scale, matrix.scales.bytes.data() + 4 * at, 4);
  } else {
    scale = decode_e8m0(std::to_integer<uint8_t>(matrix.scales.bytes[at]));
  }
  if (layout.codes == DType::kE4M3) {
    const auto code = matrix.codes.bytes[static_cast<size_t>(row * matrix.cols + col)];
    return decode_element(ElementFormat::kE4M3, std::to_integer<uint8_t>(code)) * scale;
  }
  const auto pair = std::to_integer<uint8_t>(
      matrix.codes.bytes[static_cast<size_t>(row * ceil_div(matrix.cols, 2) + col / 2)]);
  const auto code = static_cast<uint8_t>(col % 2 == 0 ? pair & 15 : pair >> 4);
  return decode_element(ElementFormat::kE2M1, code) * scale;
}

void expect_values(const Tensor& tensor, const Matrix& matrix, const Layout& layout) {
  ASSERT_EQ(describe(tensor.view()), fmt::format("F32 [{}, {}]", matrix.rows, matrix.cols));
  const float* values = tensor.view().as<float>();
  int64_t differing = 0;
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t col = 0; col < matrix.cols; ++col) {
      const float want = value_at(matrix, layout, row, col);
      const float got = values[row * matrix.cols + col];
      differing += std::isnan(want) ? !std::isnan(got) : got != want;
    }
  }
  EXPECT_EQ(differing, 0);
}

TEST(QuantisedCheckpoint, EveryExpertOfEveryFamilyComesBack) {
  uint64_t seed = 7;
  for (const char* family :
       {"deepseek_v3", "deepseek_v2", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"}) {
    for (const Layout& layout : kLayouts) {
      SCOPED_TRACE(testing::Message() << family << " " << name_of(layout.format) << " "
                                      << layout.suffix << " seed " << seed);
      // One above a block, and an odd number: rows of e2m1 end in half a byte.
      const QuantisedModel written({.family = family,
                                    .num_shards = 2,
                                    .num_experts = 3,
                                    .hidden = 129,
                                    .width = 33,
                                    .num_layers = 2},
                                   layout, seed++);
      const TempFolder folder;
      written.model.write(folder.path());
      const auto checkpoint = Checkpoint::open(folder.path());
      ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message();
      for (const auto& [place, want] : written.experts) {
        const int64_t before = checkpoint->bytes_read();
        const auto expert = checkpoint->read_expert(place.first, place.second);
        ASSERT_TRUE(expert.has_value()) << expert.error().message();
        expect_same(*expert, want, layout.format);
        EXPECT_EQ(expert->gate_bias.empty(), family != std::string("gpt_oss"));
        // The two biases of gate and up lie in one row.
        EXPECT_EQ(checkpoint->bytes_read() - before, written.expert_bytes());
      }
      for (const auto& [layer, want] : written.shared) {
        const auto shared = checkpoint->read_shared(layer);
        ASSERT_TRUE(shared.has_value()) << shared.error().message();
        ASSERT_TRUE(shared->shared.has_value());
        expect_same(*shared->shared, want, layout.format);
        EXPECT_EQ(describe(shared->gate.view()), "BF16 [3, 129]");
      }
    }
  }
}

// Contract 5: partial blocks at both edges, 320 = 2 * 128 + 64 and 192 = 128 + 64, value by value.
TEST(QuantisedCheckpoint, DequantisedOnLoadByTheDefinition) {
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(name_of(layout.format));
    const QuantisedModel written(
        {.family = "deepseek_v3", .num_experts = 2, .hidden = 320, .width = 192, .num_layers = 2},
        layout, 11);
    const TempFolder folder;
    written.model.write(folder.path());
    const auto wide = Checkpoint::open(folder.path(), {.dequantise_to = DType::kF32});
    ASSERT_TRUE(wide.has_value()) << wide.error().message();
    const auto narrow = *Checkpoint::open(folder.path(), {.dequantise_to = DType::kBF16});
    for (const auto& [place, want] : written.experts) {
      const auto expert = wide->read_expert(place.first, place.second);
      ASSERT_TRUE(expert.has_value()) << expert.error().message();
      EXPECT_FALSE(expert->quantised.has_value());
      expect_values(expert->gate, want[0], layout);
      expect_values(expert->up, want[1], layout);
      expect_values(expert->down, want[2], layout);
      EXPECT_EQ(describe(narrow.read_expert(place.first, place.second)->down.view()),
                "BF16 [320, 192]");
    }
    expect_values(wide->read_shared(1)->shared->up, written.shared.at(1)[1], layout);
  }
  expect_error(Checkpoint::open("absent", {.dequantise_to = DType::kE4M3}),
               StatusCode::kInvalidArgument, {"dequantise_to", "F8_E4M3"});
}

// gpt_oss as published: rows 2f and 2f + 1 of one tensor are gate f and up f, groups of 32 along the inputs.
class PackedModel {
 public:
  PackedModel()
      : source({.family = "gpt_oss", .num_experts = 3, .hidden = 64, .width = 96, .num_layers = 1},
               kLayouts[4], 3) {
    model = source.model;
    std::erase_if(model.tensors, [](const auto& item) {
      return item.first.find("experts.") != std::string::npos &&
             item.first.find("bias") == std::string::npos;
    });
    Blob gate_up{DType::kU8, {3, 192, 2, 16}, {}}, gate_up_scales{DType::kU8, {3, 192, 2}, {}};
    Blob down{DType::kU8, {3, 64, 3, 16}, {}}, down_scales{DType::kU8, {3, 64, 3}, {}};
    const auto append = [](const Blob& from, int64_t row, Blob* to) {
      const auto bytes = from.bytes.begin() + row * from.shape[1];
      to->bytes.insert(to->bytes.end(), bytes, bytes + from.shape[1]);
    };
    for (int64_t e = 0; e < 3; ++e) {
      const auto& [gate, up, of_down] = source.experts.at({0, e});
      for (int64_t f = 0; f < 96; ++f) {
        append(gate.codes, f, &gate_up);
        append(up.codes, f, &gate_up);
        append(gate.scales, f, &gate_up_scales);
        append(up.scales, f, &gate_up_scales);
      }
      for (int64_t h = 0; h < 64; ++h) {
        append(of_down.codes, h, &down);
        append(of_down.scales, h, &down_scales);
      }
    }
    const std::string prefix = model.block(0) + "experts.";
    model.tensors[prefix + "gate_up_proj_blocks"] = gate_up;
    model.tensors[prefix + "gate_up_proj_scales"] = gate_up_scales;
    model.tensors[prefix + "down_proj_blocks"] = down;
    model.tensors[prefix + "down_proj_scales"] = down_scales;
  }

  QuantisedModel source;
  TestModel model{{.family = "gpt_oss"}, 1};
};

// What open, then read_shared and read_expert of the last layer, say.
Status first_error(const TestModel& model, const CheckpointOptions& options = {}) {
  const TempFolder folder;
  model.write(folder.path());
  const auto checkpoint = Checkpoint::open(folder.path(), options);
  if (!checkpoint) return checkpoint.error();
  const int64_t layer = model.layout().num_layers - 1;
  if (const auto shared = checkpoint->read_shared(layer); !shared) return shared.error();
  for (int64_t e = 0; e < model.layout().num_experts; ++e) {
    if (const auto expert = checkpoint->read_expert(layer, e); !expert) return expert.error();
  }
  return {};
}

TEST(QuantisedCheckpoint, PackedExpertsComeBackByRows) {
  const PackedModel packed;
  const TempFolder folder;
  packed.model.write(folder.path());
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message();
  for (int64_t e = 2; e >= 0; --e) {
    const int64_t before = checkpoint->bytes_read();
    const auto expert = checkpoint->read_expert(0, e);
    ASSERT_TRUE(expert.has_value()) << expert.error().message();
    expect_same(*expert, packed.source.experts.at({0, e}), BlockFormat::kMxfp4);
    const auto& bias = packed.source.model.experts.at({0, e}).up_bias;
    EXPECT_EQ(std::memcmp(expert->up_bias.bytes().data(), bias.bytes.data(), bias.bytes.size()), 0);
    EXPECT_EQ(checkpoint->bytes_read() - before, packed.source.expert_bytes());
  }
}

TEST(QuantisedCheckpoint, PackedTensorsOfAnotherShapeOrTypeAreRefused) {
  const PackedModel whole;
  EXPECT_TRUE(first_error(whole.model).ok());
  for (const char* name :
       {"gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"}) {
    const std::string full = whole.model.block(0) + "experts." + name;
    TestModel less = whole.model;
    less.tensors.erase(full);
    expect_error(first_error(less), StatusCode::kNotFound, {full});
    TestModel other = whole.model;
    other.tensors[full].dtype = DType::kI8;
    expect_error(first_error(other), StatusCode::kInvalidArgument, {full, "I8", "U8"});
    TestModel flat = whole.model;
    Shape& shape = flat.tensors[full].shape;
    std::swap(shape[1], shape[2]);
    expect_error(first_error(flat), StatusCode::kInvalidArgument, {full, "shape [3, "});
  }
  TestModel narrow = whole.model;
  narrow.config["hidden_size"] = 48;
  narrow.tensors[narrow.router(0) + ".weight"].shape = {3, 48};
  narrow.tensors[narrow.router(0) + ".weight"].bytes.resize(3 * 48 * 2);
  expect_error(first_error(narrow), StatusCode::kInvalidArgument,
               {"gate_up_proj", "48", "multiple of 32"});
  TestModel mxfp8 = whole.model;
  mxfp8.config["quantization_config"]["quant_method"] = "mxfp8";
  expect_error(first_error(mxfp8), StatusCode::kInvalidArgument, {"_blocks"});
}

TEST(QuantisedCheckpoint, ScalesThatAreWrongAreNamed) {
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(name_of(layout.format));
    const QuantisedModel whole(
        {.family = "deepseek_v3", .num_experts = 2, .hidden = 129, .width = 33, .num_layers = 2},
        layout, 5);
    EXPECT_TRUE(first_error(whole.model).ok());
    for (const char* matrix : {"experts.1.down_proj", "shared_experts.up_proj"}) {
      const std::string codes = fmt::format("{}{}.weight", whole.model.block(1), matrix);
      const std::string scales =
          fmt::format("{}{}.{}", whole.model.block(1), matrix, layout.suffix);
      TestModel missing = whole.model;
      missing.tensors.erase(scales);
      expect_error(first_error(missing), StatusCode::kNotFound, {codes, "weight_scale_inv"});
      TestModel no_codes = whole.model;
      no_codes.tensors.erase(codes);
      expect_error(first_error(no_codes), StatusCode::kNotFound, {codes});
      TestModel turned = whole.model;
      Shape& shape = turned.tensors[scales].shape;
      const std::string seen = fmt::format("[{}, {}]", shape[1], shape[0]);
      if (shape[0] != shape[1]) {
        std::swap(shape[0], shape[1]);
        expect_error(first_error(turned), StatusCode::kInvalidArgument, {scales, seen});
      }
      TestModel flat = whole.model;
      flat.tensors[scales].shape = {shape[0] * shape[1]};
      expect_error(first_error(flat), StatusCode::kInvalidArgument, {scales, "has shape ["});
      TestModel typed = whole.model;
      typed.tensors[scales].dtype = layout.scales == DType::kF32 ? DType::kI32 : DType::kI8;
      expect_error(first_error(typed), StatusCode::kInvalidArgument,
                   {scales, layout.scales == DType::kF32 ? "F32" : "F8_E8M0 or U8"});
      TestModel code_type = whole.model;
      code_type.tensors[codes].dtype = DType::kE5M2;
      expect_error(first_error(code_type), StatusCode::kInvalidArgument, {codes, "F8_E5M2"});
      TestModel twice = whole.model;
      const bool first = layout.suffix == std::string("weight_scale_inv");
      const std::string other = codes + (first ? "_scale" : "_scale_inv");
      twice.tensors[other] = twice.tensors[scales];
      expect_error(first_error(twice), StatusCode::kInvalidArgument,
                   {codes + "_scale", "two scale"});
    }
  }
}

TEST(QuantisedCheckpoint, ScalesOutsideTheFormatsRuleAreNamed) {
  const auto with_scale = [](const Layout& layout, float value) {
    QuantisedModel model(
        {.family = "olmoe", .num_experts = 2, .hidden = 40, .width = 33, .num_layers = 1}, layout,
        5);
    const std::string name = model.model.block(0) + "experts.1.up_proj.weight_scale_inv";
    std::memcpy(model.model.tensors[name].bytes.data(), &value, 4);
    return model.model;
  };
  const Layout& fp8 = kLayouts[0];
  for (const float bad : {-1.0f, std::numeric_limits<float>::infinity()}) {
    expect_error(first_error(with_scale(fp8, bad)), StatusCode::kCorruptData,
                 {"experts.1.up_proj.weight_scale_inv"});
  }
  EXPECT_TRUE(first_error(with_scale(fp8, 0.0f)).ok());
  const TestModel nan = with_scale(fp8, std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(first_error(nan).ok());
  expect_error(first_error(nan, {.on_nan_scale = OnNonFinite::kError}), StatusCode::kNonFinite,
               {"experts.1.up_proj.weight_scale_inv"});
  // e8m0: only 255 is NaN, and 254 is an ordinary scale.
  for (const Layout* layout : {&kLayouts[2], &kLayouts[4]}) {
    for (const int code : {0, 254, 255}) {
      QuantisedModel model(
          {.family = "olmoe", .num_experts = 2, .hidden = 40, .width = 33, .num_layers = 1},
          *layout, 5);
      const std::string name =
          fmt::format("{}experts.1.up_proj.{}", model.model.block(0), layout->suffix);
      model.model.tensors[name].bytes[3] = static_cast<std::byte>(code);
      EXPECT_TRUE(first_error(model.model).ok()) << code;
      const Status strict = first_error(model.model, {.on_nan_scale = OnNonFinite::kError});
      if (code != 255) {
        EXPECT_TRUE(strict.ok()) << code;
      } else {
        expect_error(strict, StatusCode::kNonFinite, {name, "row 1", "block 1"});
      }
    }
  }
}

TEST(QuantisedCheckpoint, ModulesNotConvertedStayAsTheyWere) {
  const ModelLayout base{
      .family = "deepseek_v3", .num_experts = 2, .hidden = 129, .width = 33, .num_layers = 3};
  const QuantisedModel whole(base, kLayouts[0], 9);
  const TestModel plain(base, 9);
  // Layer 1 as in the source, layer 2 quantised.
  TestModel mixed = whole.model;
  std::erase_if(mixed.tensors, [](const auto& item) {
    return item.first.find("layers.1.mlp.") != std::string::npos &&
           item.first.find("scale") != std::string::npos;
  });
  for (const auto& [name, blob] : plain.tensors) {
    if (name.find("layers.1.mlp.") != std::string::npos) mixed.tensors[name] = blob;
  }
  mixed.config["quantization_config"]["modules_to_not_convert"] = {"model.layers.1"};
  const TempFolder folder;
  mixed.write(folder.path());
  const auto checkpoint = *Checkpoint::open(folder.path());
  const auto expert = checkpoint.read_expert(1, 1);
  ASSERT_TRUE(expert.has_value()) << expert.error().message();
  EXPECT_EQ(describe(expert->gate.view()), "BF16 [33, 129]");
  EXPECT_FALSE(expert->quantised.has_value());
  EXPECT_TRUE(checkpoint.read_expert(2, 1)->quantised.has_value());
  EXPECT_FALSE(checkpoint.read_shared(1)->shared->quantised.has_value());

  // Config and tensors that contradict each other, in both directions.
  TestModel all = mixed;
  all.config["quantization_config"].erase("modules_to_not_convert");
  const TempFolder other;
  all.write(other.path());
  expect_error(Checkpoint::open(other.path())->read_expert(1, 1), StatusCode::kInvalidArgument,
               {"layers.1.mlp.experts.1.gate_proj.weight", "BF16", "F8_E4M3"});
  TestModel none = whole.model;
  none.config["quantization_config"]["modules_to_not_convert"] = {"mlp"};
  expect_error(first_error(none), StatusCode::kInvalidArgument,
               {"weight_scale_inv", "modules_to_not_convert"});
  TestModel some = whole.model;
  some.config["quantization_config"]["modules_to_not_convert"] = {"experts.0.up_proj"};
  expect_error(first_error(some), StatusCode::kUnsupported,
               {"experts.0.gate_proj\" is quantised", "experts.0.up_proj\" is not"});
  TestModel silent = whole.model;
  silent.config.erase("quantization_config");
  expect_error(first_error(silent), StatusCode::kInvalidArgument,
               {"weight_scale_inv", "config.json"});
}

// Fused bf16 experts stay readable beside quantised shared ones, when the config says so.
TEST(QuantisedCheckpoint, FusedExpertsAreReadWhenTheConfigExceptsThem) {
  TestModel model({.family = "gpt_oss"}, 1);
  model.config["quantization_config"] = {{"quant_method", "mxfp4"},
                                         {"modules_to_not_convert", {"mlp.experts"}}};
  EXPECT_TRUE(first_error(model).ok());
  model.config["quantization_config"].erase("modules_to_not_convert");
  expect_error(first_error(model), StatusCode::kInvalidArgument, {"fused", "quantised"});
}

TEST(QuantisedCheckpoint, LyingSizesAllocateNothing) {
  for (const char* field : {"hidden_size", "moe_intermediate_size", "n_routed_experts"}) {
    QuantisedModel odd(
        {.family = "deepseek_v3", .num_experts = 2, .hidden = 129, .width = 33, .num_layers = 2},
        kLayouts[0], 5);
    odd.model.config[field] = int64_t{1} << 31;
    EXPECT_FALSE(first_error(odd.model).ok());
    PackedModel packed;
    const bool width = field == std::string("moe_intermediate_size");
    packed.model.config[width                                      ? "intermediate_size"
                        : field == std::string("n_routed_experts") ? "num_local_experts"
                                                                   : field] = int64_t{1} << 31;
    EXPECT_FALSE(first_error(packed.model).ok());
  }
}

}  // namespace
}  // namespace argosy
