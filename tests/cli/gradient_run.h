// `argosy run --backward` of a layer of a trained checkpoint, for tests.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cli/cli_process.h"

namespace argosy::testing {

using Words = std::vector<std::string>;
using nlohmann::json;

struct Model {
  std::string name;
  int layer;
};
inline std::string model_dir(const Model& model) { return testdata("models/" + model.name); }
inline std::string grads_file(const Model& model) {
  return model_dir(model) + "/grads.safetensors";
}

inline Words arguments(const Model& model, const std::string& inputs, const Words& more) {
  Words words = {"run",
                 "--model",
                 model_dir(model),
                 "--layer",
                 fmt::format("{}", model.layer),
                 "--input",
                 inputs + ":hidden_in",
                 "--backward",
                 "--grad-output",
                 inputs + ":grad_output",
                 "--check",
                 "none",
                 "--floors",
                 "off"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

inline json run_with(const Model& model, const std::string& inputs, Words more) {
  more.insert(more.end(), {"--json", "-"});
  const CliResult result = run_cli(arguments(model, inputs, more));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  json report = result.json();
  EXPECT_FALSE(report.is_discarded()) << result.out;
  return report;
}

inline std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace argosy::testing
