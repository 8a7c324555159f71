// Runs the built command-line tool and keeps what it said: exit code, stdout, stderr.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace argosy::testing {

struct CliResult {
  int exit_code = -1;  // -1: ended by a signal
  std::string out;
  std::string err;

  // stdout as JSON; a discarded value (is_discarded()) when it is none.
  nlohmann::json json() const { return nlohmann::json::parse(out, nullptr, false); }
};

// `environment` as "NAME=VALUE" words. A `run` that does not say --floors or --pin gets them as "off":
// tests that run side by side would share the first core, and few of them are about either.
CliResult run_cli(const std::vector<std::string>& arguments,
                  const std::vector<std::string>& environment = {});

// Path below testdata/.
std::string testdata(const std::string& path);

// A folder for this test's files, empty at the start.
std::string fresh_dir(const std::string& name);

bool exists(const std::string& path);
std::string read_text(const std::string& path);

// "run --model FAMILY --layer N --input its moe_input" in one of the captured dtypes "f32", "bf16".
std::vector<std::string> run_arguments(const std::string& model, int layer, const std::string& run,
                                       const std::vector<std::string>& more);
// FILE:PREFIX of the same captures.
std::string captures(const std::string& model, int layer, const std::string& run);

struct CapturedLayer {
  std::string model;
  int layer = 0;
  std::string run;  // f32 or bf16
};
// Every captured MoE layer under testdata/models, both dtypes.
std::vector<CapturedLayer> captured_layers();

}  // namespace argosy::testing
