// See console.h. Test: tests/cli/output_test.cc.
#include "tools/console.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

namespace argosy::tools {

namespace fs = std::filesystem;

namespace {

// The message of kAborted carries the reason of the rank that gave up, code first. When that rank
// met bad input, so did the run, whichever rank tells.
ExitCode exit_code_of_abort(std::string_view message) {
  constexpr std::string_view kBefore = "aborted the group: ";
  const size_t begin = message.find(kBefore);
  if (begin == std::string_view::npos) return kExitRankLost;
  const std::string_view reason = message.substr(begin + kBefore.size());
  const std::string_view code = reason.substr(0, reason.find(':'));
  for (const StatusCode lost :
       {StatusCode::kTimeout, StatusCode::kPeerLost, StatusCode::kAborted, StatusCode::kOk}) {
    if (code == name_of(lost)) return kExitRankLost;
  }
  return kExitBadInput;
}

}  // namespace

ExitCode exit_code_of(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return kExitOk;
    case StatusCode::kTimeout:
    case StatusCode::kPeerLost:
      return kExitRankLost;
    case StatusCode::kAborted:
      return exit_code_of_abort(status.message());
    default:
      return kExitBadInput;
  }
}

void print_error(std::string_view message) {
  const std::string line = fmt::format("argosy: {}\n", message);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

ExitCode fail(const Status& status) {
  print_error(status.message());
  return exit_code_of(status);
}

Status write_stdout(std::string_view text) {
  const bool whole = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!whole || std::fflush(stdout) != 0) {
    const std::error_code reason(errno, std::generic_category());
    return Status(StatusCode::kIo, fmt::format("cannot write {} bytes to standard output: {}",
                                               text.size(), reason.message()));
  }
  return Status();
}

Status check_target(std::string_view option, const std::string& path) {
  std::error_code error;
  const fs::path target(path);
  if (target.filename().empty()) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{} '{}' names no file", option, path));
  }
  const fs::file_status seen = fs::status(target, error);
  if (fs::exists(seen) && !fs::is_regular_file(seen)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} '{}' exists and is no regular file", option, path));
  }
  const fs::path folder = target.has_parent_path() ? target.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, error)) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{} '{}': folder '{}' does not exist",
                                                            option, path, folder.string()));
  }
  return Status();
}

std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace argosy::tools
