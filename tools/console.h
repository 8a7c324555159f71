// What the tool tells the shell: exit codes, error lines on stderr, text and JSON on stdout.
//
// Invariant: stdout holds results only; every other word goes to stderr. Test:
// tests/cli/output_test.cc.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "argosy/status.h"

namespace argosy::tools {

enum ExitCode : int {
  kExitOk = 0,           // done, all checks held
  kExitCheckFailed = 1,  // done, but a check failed
  kExitBadInput = 2,     // bad usage or input
  kExitRankLost = 3,     // a rank was lost or a deadline passed
};

ExitCode exit_code_of(const Status& status);

// "argosy: <message>" on stderr.
void print_error(std::string_view message);
// The same, and the exit code that belongs to it.
ExitCode fail(const Status& status);

// Errors: kIo with the system's reason when stdout is closed or full.
Status write_stdout(std::string_view text);

// Errors: kInvalidArgument unless a file can be put there: its folder exists and no folder or
// device has its name. Called before long work, so that a typing error costs nothing.
Status check_target(std::string_view option, const std::string& path);

// Indented. Bytes that are no UTF-8 (file names may hold them) are replaced.
std::string json_text(const nlohmann::ordered_json& json);

}  // namespace argosy::tools
