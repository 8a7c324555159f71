// argosy run --backward --recipe: the same bytes for any ranks and transports, errors against the same run in fp32 within
// bounds and above those of bf16, what is refused.
#include <gtest/gtest.h>

#include <algorithm>

#include "cli/gradient_run.h"

namespace argosy::testing {
namespace {

const Model kModels[] = {{"deepseek_v3_tiny", 1}, {"gpt_oss_tiny", 0}};

TEST(Recipe, TheFileIsTheSameForAnyRanksAndTransport) {
  const std::string path = fresh_dir("recipe") + "/grads.safetensors";
  for (const Model& model : kModels) {
    const auto file_of = [&](const Words& more) {
      Words words = {"--dtype", "bf16", "--recipe", "mxfp8", "--grads", path};
      words.insert(words.end(), more.begin(), more.end());
      EXPECT_EQ(run_with(model, grads_file(model), words)["recipe"], "mxfp8");
      return bytes_of(path);
    };
    const std::string one = file_of({});
    EXPECT_GT(one.size(), 10'000u);
    for (const Words& more :
         {Words{"--ranks", "2", "--transport", "shm"},
          Words{"--ranks", "3", "--threads-per-rank", "2", "--receive-budget", "8192"},
          Words{"--ranks", "2", "--level", "generic"}}) {
      EXPECT_TRUE(file_of(more) == one) << model.name << " " << more[1];
    }
  }
}

// Of the same bf16 inputs: as far from bf16's gradients as 3 bits of mantissa put it. On the way to any of them at most six
// operands are rounded by at most 2^-4 each: rows and weights forward, rows and weights of both gradients. Most are far nearer.
TEST(Recipe, GradientsAreNearThoseOfBf16) {
  const std::string path = fresh_dir("recipe_near") + "/grads.safetensors";
  for (const Model& model : kModels) {
    run_with(model, grads_file(model), {"--dtype", "bf16", "--grads", path});
    for (const char* recipe : {"mxfp8", "mxfp8_ceil"}) {
      const json report = run_with(model, grads_file(model),
                                   {"--dtype", "bf16", "--recipe", recipe, "--compare-grads", path,
                                    "--tolerance", "0.375", "--ranks", "2"});
      std::vector<double> errors;
      for (const json& gradient : report["gradients"]) {
        errors.push_back(gradient["max_rel_to_peak"].get<double>());
      }
      std::sort(errors.begin(), errors.end());
      ASSERT_FALSE(errors.empty());
      EXPECT_GT(errors.back(), 1e-2) << model.name << " " << recipe;
      EXPECT_LE(errors.back(), 6.0 / 16) << model.name << " " << recipe;
      EXPECT_LE(errors[errors.size() / 2], 0.1) << model.name << " " << recipe;
    }
  }
}

TEST(Recipe, Refusals) {
  const auto refusal = [](const Words& words) {
    const CliResult result = run_cli(words);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    return result.err;
  };
  EXPECT_NE(refusal(arguments(kModels[0], grads_file(kModels[0]), {"--recipe", "mxfp8"}))
                .find("training in mxfp8 with rows of F32, it takes BF16"),
            std::string::npos);
  EXPECT_NE(
      refusal(arguments(kModels[0], grads_file(kModels[0]), {"--recipe", "fp4"})).find("--recipe"),
      std::string::npos);
  EXPECT_NE(refusal(run_arguments("deepseek_v3_tiny", 1, "f32", {"--recipe", "mxfp8"}))
                .find("--backward"),
            std::string::npos);
}

}  // namespace
}  // namespace argosy::testing
