// See cli_process.h.
#include "cli/cli_process.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace argosy::testing {
namespace {

// Removed when the test program ends.
struct Folders {
  std::vector<std::string> paths;

  ~Folders() {
    std::error_code ignored;
    for (const std::string& path : paths) std::filesystem::remove_all(path, ignored);
  }
};

std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

}  // namespace

CliResult run_cli(const std::vector<std::string>& arguments,
                  const std::vector<std::string>& environment) {
  const std::string err_path = fmt::format("{}/argosy_cli_{}.err", ::testing::TempDir(), getpid());
  std::string command = "env";
  for (const std::string& word : environment) command += " " + quoted(word);
  command += " " + quoted(ARGOSY_CLI);
  for (size_t i = 0; i < arguments.size(); ++i) {
    command += " " + quoted(arguments[i]);
    if (i > 0 || arguments[i] != "run") continue;
    for (const char* const option : {"--floors", "--pin"}) {
      const bool said = std::find(arguments.begin(), arguments.end(), option) != arguments.end();
      if (!said) command += fmt::format(" {} off", option);
    }
  }
  command += " 2>" + quoted(err_path) + " </dev/null";
  CliResult result;
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return result;
  char buffer[4096];
  for (size_t got = 0; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    result.out.append(buffer, got);
  }
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  result.err = read_text(err_path);
  std::filesystem::remove(err_path);
  EXPECT_EQ(result.err.find("Sanitizer"), std::string::npos) << command << "\n" << result.err;
  return result;
}

std::string testdata(const std::string& path) { return std::string(ARGOSY_TESTDATA) + "/" + path; }

std::string fresh_dir(const std::string& name) {
  static Folders folders;
  const std::string dir = fmt::format("{}/argosy_cli_{}_{}", ::testing::TempDir(), name, getpid());
  std::filesystem::remove_all(dir);
  std::filesystem::create_directories(dir);
  folders.paths.push_back(dir);
  return dir;
}

bool exists(const std::string& path) { return std::filesystem::exists(path); }

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string captures(const std::string& model, int layer, const std::string& run) {
  return fmt::format("{}/captures.safetensors:{}.layers.{}", testdata("models/" + model), run,
                     layer);
}

std::vector<std::string> run_arguments(const std::string& model, int layer, const std::string& run,
                                       const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"run",
                                        "--model",
                                        testdata("models/" + model),
                                        "--layer",
                                        std::to_string(layer),
                                        "--input",
                                        captures(model, layer, run) + ".moe_input"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::vector<CapturedLayer> captured_layers() {
  std::vector<CapturedLayer> layers;
  for (const std::string run : {"f32", "bf16"}) {
    for (const int layer : {1, 2}) {
      layers.push_back({"deepseek_v3_tiny", layer, run});
      layers.push_back({"deepseek_v2_tiny", layer, run});
    }
    for (const int layer : {0, 1}) {
      layers.push_back({"mixtral_tiny", layer, run});
      layers.push_back({"olmoe_tiny", layer, run});
      layers.push_back({"qwen2_moe_tiny", layer, run});
      layers.push_back({"gpt_oss_tiny", layer, run});
    }
    layers.push_back({"qwen3_moe_tiny", 1, run});
  }
  return layers;
}

}  // namespace argosy::testing
