// argosy run --backward on trained checkpoints: every gradient against fp64 autograd of an independent implementation
// (grads.safetensors), the same bytes for any ranks and transports; bf16 against fp32 on the same inputs; refusals.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "argosy/bfloat16.h"
#include "argosy/checkpoint.h"
#include "cli/gradient_run.h"

namespace argosy::testing {
namespace {

const Model kModels[] = {{"deepseek_v2_tiny", 1}, {"deepseek_v3_tiny", 1}, {"mixtral_tiny", 0},
                         {"qwen2_moe_tiny", 0},   {"olmoe_tiny", 0},       {"gpt_oss_tiny", 0}};

TEST(Backward, EveryGradientOfEveryFamilyAgreesWithAutogradInFp64) {
  for (const Model& model : kModels) {
    const json report =
        run_with(model, grads_file(model), {"--compare-grads", grads_file(model), "--ranks", "3"});
    EXPECT_TRUE(report["passed"].get<bool>()) << model.name;
    ASSERT_GT(report["gradients"].size(), 5u);
    double worst = 0;
    for (const json& gradient : report["gradients"]) {
      worst = std::max(worst, gradient["max_rel_to_peak"].get<double>());
    }
    EXPECT_LE(worst, 1e-5) << model.name;
    EXPECT_GT(worst, 0) << model.name;
  }
}

TEST(Backward, TheFileIsTheSameForAnyRanksThreadsAndTransport) {
  const std::string dir = fresh_dir("backward");
  for (const Model& model : {kModels[1], kModels[3], kModels[5]}) {
    for (const std::string dtype : {"fp32", "bf16"}) {
      const std::string path = dir + "/grads.safetensors";
      const auto file_of = [&](const Words& more) {
        Words words = {"--dtype", dtype, "--grads", path};
        words.insert(words.end(), more.begin(), more.end());
        run_with(model, grads_file(model), words);
        return bytes_of(path);
      };
      const std::string one = file_of({});
      EXPECT_GT(one.size(), 10'000u);
      for (const Words& more :
           {Words{"--ranks", "2", "--transport", "shm"}, Words{"--ranks", "3", "--repeat", "2"},
            Words{"--ranks", "4", "--threads-per-rank", "2"}, Words{"--ranks", "8"},
            Words{"--ranks", "2", "--receive-budget", "8192"},
            Words{"--ranks", "3", "--level", "generic"}, Words{"--mode", "latency"},
            Words{"--ranks", "3", "--mode", "latency", "--transport", "shm", "--repeat", "2"},
            Words{"--ranks", "4", "--mode", "latency", "--max-tokens", "7", "--chunk"},
            Words{"--ranks", "2", "--mode", "auto"}}) {
        EXPECT_TRUE(file_of(more) == one)
            << model.name << " " << dtype << fmt::format(" {}", fmt::join(more, " "));
      }
    }
  }
}

// bf16 differs from fp32 on the same numbers by rounding alone: rows, h and gradients of rows have 8 bits. Routing is
// the same, as the gate product is fp32 in both.
TEST(Backward, Bf16IsWithinItsRoundingOfFp32OnTheSameInputs) {
  const std::string dir = fresh_dir("backward_bf16");
  for (const Model& model : kModels) {
    const std::string inputs = dir + "/inputs.safetensors";
    std::vector<Tensor> kept;
    std::vector<NamedTensor> tensors;
    for (const std::string name : {"hidden_in", "grad_output"}) {
      Result<Tensor> tensor = read_tensor_argument(grads_file(model) + ":" + name);
      ASSERT_TRUE(tensor.has_value()) << tensor.error().message();
      const TensorView view = tensor->view();
      for (int64_t i = 0; i < view.num_elements(); ++i) {
        view.as<float>()[i] = BFloat16::from_float(view.as<float>()[i]).to_float();
      }
      kept.push_back(std::move(*tensor));
      tensors.push_back({name, {}});
    }
    for (size_t i = 0; i < kept.size(); ++i) tensors[i].tensor = std::as_const(kept[i]).view();
    ASSERT_TRUE(write_safetensors(inputs, tensors).ok());
    const std::string exact = dir + "/exact.safetensors";
    run_with(model, inputs, {"--grads", exact});
    const json report = run_with(
        model, inputs,
        {"--dtype", "bf16", "--compare-grads", exact, "--tolerance", "2e-2", "--ranks", "2"});
    double worst = 0;
    for (const json& gradient : report["gradients"]) {
      worst = std::max(worst, gradient["max_rel_to_peak"].get<double>());
    }
    EXPECT_GT(worst, 1e-4) << model.name;
    EXPECT_LE(worst, 2e-2) << model.name;
  }
}

// What cannot be compared is named, never read as something else.
TEST(Backward, RefusesAFileThatItCannotCompareWith) {
  const std::string dir = fresh_dir("backward_compare");
  const Model& model = kModels[1];
  const auto compared_with = [&](DType dtype, uint8_t byte) {
    Result<Tensor> hidden = read_tensor_argument(grads_file(model) + ":hidden_in");
    const ConstTensorView like = std::as_const(*hidden).view();
    Tensor tensor = std::move(*Tensor::zeros(dtype, {like.dim(0), like.dim(1)}));
    std::fill_n(tensor.view().data, tensor.bytes().size(), std::byte{byte});
    const std::string path = dir + "/other.safetensors";
    EXPECT_TRUE(write_safetensors(path, {{{"d.hidden", std::as_const(tensor).view()}}}).ok());
    const CliResult result =
        run_cli(arguments(model, grads_file(model), {"--compare-grads", path}));
    EXPECT_EQ(result.exit_code, 2) << result.out;
    return result.err;
  };
  for (const DType dtype : {DType::kI8, DType::kI32, DType::kF64, DType::kF16, DType::kBool}) {
    EXPECT_NE(compared_with(dtype, 0).find("expected F32 or BF16"), std::string::npos);
  }
  EXPECT_NE(compared_with(DType::kF32, 0xFF).find("d.hidden holds -nan at [0, 0]"),
            std::string::npos);
  // Before the run, which would be lost.
  const CliResult missing = run_cli(arguments(
      model, grads_file(model),
      {"--compare-grads", dir + "/none.safetensors", "--grads", dir + "/kept.safetensors"}));
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_NE(missing.err.find("--compare-grads: "), std::string::npos) << missing.err;
}

TEST(Backward, Refusals) {
  const Model& model = kModels[1];
  const auto refusal = [&](const Words& words) {
    const CliResult result = run_cli(words);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    return result.err;
  };
  const Words plain = run_arguments("deepseek_v3_tiny", 1, "f32", {"--backward"});
  EXPECT_NE(refusal(plain).find("--grad-output"), std::string::npos);
  EXPECT_NE(refusal(arguments(model, grads_file(model),
                              {"--mode", "latency", "--dtype", "bf16", "--payload", "mxfp8"}))
                .find("training with a quantised payload is not there yet"),
            std::string::npos);
  EXPECT_NE(refusal(arguments(model, grads_file(model), {"--max-tokens", "8"}))
                .find("--max-tokens is of latency mode"),
            std::string::npos);
  Words shape = run_arguments("deepseek_v3_tiny", 1, "f32", {"--backward"});
  shape.insert(shape.end(),
               {"--grad-output", grads_file(model) + ":d.model.layers.1.mlp.gate.weight"});
  EXPECT_NE(refusal(shape).find("--grad-output"), std::string::npos);
  EXPECT_NE(refusal(arguments(model, grads_file(model),
                              {"--compare-grads", testdata("models/olmoe_tiny/grads.safetensors")}))
                .find("d.model.layers.1"),
            std::string::npos);
}

}  // namespace
}  // namespace argosy::testing
