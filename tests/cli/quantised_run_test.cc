// argosy run on quantised checkpoints that are damaged: a scale that is missing, of another shape or dtype, outside the
// format's rule, or NaN as the caller chose.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>

#include "argosy/checkpoint.h"
#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

using Words = std::vector<std::string>;

const char* const kModel = "olmoe_tiny";  // 16 experts of 48 x 64
const char* const kScale = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv";

// A tensor as it will be written.
struct Change {
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
  bool gone = false;
};

class QuantisedRun {
 public:
  explicit QuantisedRun(const std::string& format) : dir_(fresh_dir("quantised_run_" + format)) {
    const CliResult made =
        run_cli({"quantise", "--model", testdata(std::string("models/") + kModel), "--format",
                 format, "--output", dir_ + "/whole"});
    EXPECT_EQ(made.exit_code, 0) << made.err;
  }

  // The checkpoint with one scale changed.
  CliResult run(const std::function<void(Change*)>& change, const Words& more = {}) const {
    std::filesystem::remove_all(dir_ + "/damaged");
    std::filesystem::copy(dir_ + "/whole", dir_ + "/damaged");
    for (const auto& entry : std::filesystem::directory_iterator(dir_ + "/damaged")) {
      if (entry.path().extension() == ".safetensors") rewrite(entry.path().string(), change);
    }
    Words words = {"run",
                   "--model",
                   dir_ + "/damaged",
                   "--layer",
                   "1",
                   "--input",
                   captures(kModel, 1, "bf16") + ".moe_input"};
    words.insert(words.end(), more.begin(), more.end());
    return run_cli(words);
  }

 private:
  static void rewrite(const std::string& path, const std::function<void(Change*)>& change) {
    const auto file = SafetensorsFile::open(path);
    ASSERT_TRUE(file.has_value()) << file.error().message();
    if ((*file)->find(kScale) == nullptr) return;
    std::vector<Tensor> kept;
    std::vector<NamedTensor> tensors;
    Change changed{};
    for (const TensorInfo& info : (*file)->tensors()) {
      kept.push_back((*file)->read(info.name).value());
      ConstTensorView view = std::as_const(kept.back()).view();
      if (info.name == kScale) {
        changed = {info.dtype, info.shape, {view.data, view.data + (info.end - info.begin)}};
        change(&changed);
        if (changed.gone) continue;
        view = ConstTensorView(changed.bytes.data(), changed.dtype, changed.shape);
      }
      tensors.push_back({info.name, view});
    }
    ASSERT_TRUE(write_safetensors(path, tensors).ok());
  }

  std::string dir_;
};

void expect_refused(const CliResult& result, const Words& named) {
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_EQ(result.out, "");
  for (const std::string& name : named) {
    EXPECT_NE(result.err.find(name), std::string::npos) << name << "\n" << result.err;
  }
}

TEST(QuantisedRun, DamagedScalesAreNamed) {
  for (const auto& [format, shape, types] :
       {std::tuple("e4m3_128x128", "[1, 1]", "F32"), std::tuple("mxfp8", "[48, 2]", "F8_E8M0")}) {
    SCOPED_TRACE(format);
    const QuantisedRun model(format);
    EXPECT_EQ(model.run([](Change*) {}).exit_code, 0);
    expect_refused(model.run([](Change* scale) { scale->gone = true; }),
                   {"experts.3.up_proj.weight", "weight_scale_inv"});
    expect_refused(model.run([](Change* scale) {
      scale->shape.push_back(1);
      std::swap(scale->shape[0], scale->shape[2]);
    }),
                   {kScale, shape});
    expect_refused(model.run([](Change* scale) {
      scale->shape[0] += 1;
      scale->bytes.resize(scale->bytes.size() * 2);
      scale->bytes.resize(
          static_cast<size_t>(scale->shape[0] * scale->shape[1] * size_of(scale->dtype)));
    }),
                   {kScale, shape});
    expect_refused(model.run([](Change* scale) {
      scale->dtype = scale->dtype == DType::kF32 ? DType::kI32 : DType::kI8;
    }),
                   {kScale, types});
  }
}

TEST(QuantisedRun, NanScalesAsTheCallerChose) {
  const QuantisedRun fp8("e4m3_128x128"), mxfp8("mxfp8");
  const auto store = [](float value) {
    return [value](Change* scale) { std::memcpy(scale->bytes.data(), &value, sizeof(value)); };
  };
  const auto code = [](int value) {
    return [value](Change* scale) { scale->bytes[0] = static_cast<std::byte>(value); };
  };
  for (const CliResult& result : {fp8.run(store(std::nanf("")), {"--json", "-", "--check", "none"}),
                                  mxfp8.run(code(255), {"--json", "-", "--check", "none"})}) {
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_GT(result.json()["nonfinite_output_rows"], 0);
    EXPECT_LT(result.json()["nonfinite_output_rows"], result.json()["tokens"]);
  }
  const Words strict = {"--nan-scales", "error"};
  expect_refused(fp8.run(store(std::nanf("")), strict), {kScale});
  expect_refused(mxfp8.run(code(255), strict), {kScale, "row 0", "block 0"});
  // 254 is an ordinary scale.
  EXPECT_EQ(mxfp8.run(code(254), {"--nan-scales", "error", "--check", "none"}).exit_code, 0);
  for (const float bad : {-1.0f, std::numeric_limits<float>::infinity()}) {
    expect_refused(fp8.run(store(bad)), {kScale});
  }
  expect_refused(fp8.run(store(1.0f), {"--nan-scales", "zero"}), {"--nan-scales", "zero"});
}

}  // namespace
}  // namespace argosy::testing
