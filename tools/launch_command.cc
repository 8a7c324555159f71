// argosy launch: any command as the ranks of one job. Test: tests/cli/launch_test.cc.
#include "argosy/launch.h"

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands.h"
#include "tools/console.h"
#include "tools/option_checks.h"

namespace argosy::tools {
namespace {

struct LaunchArguments {
  int num_ranks = 1;
  std::optional<double> timeout_seconds;
  double grace_seconds = 5;
  bool has_no_label = false;
  std::vector<std::string> command;
};

std::chrono::milliseconds from_seconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1e3));
}

int run(const LaunchArguments& arguments) {
  LaunchOptions options;
  options.num_ranks = arguments.num_ranks;
  options.command = arguments.command;
  options.label_output = !arguments.has_no_label;
  if (arguments.timeout_seconds.has_value()) {
    options.timeout = from_seconds(*arguments.timeout_seconds);
  }
  options.grace = from_seconds(arguments.grace_seconds);
  options.notice = [](const std::string& line) { print_error(line); };
  const Result<LaunchResult> result = launch(options);
  return result.has_value() ? result->exit_code : fail(result.error());
}

}  // namespace

void add_launch_command(CLI::App& app, int* exit_code) {
  CLI::App* const command =
      app.add_subcommand("launch", "Start a command as R ranks on this host and watch over them");
  const auto arguments = std::make_shared<LaunchArguments>();
  command->add_option("-n,--ranks", arguments->num_ranks, "Ranks, 1 to 64 (default: 1)")
      ->type_name("R")
      ->check(whole_number(1, kMaxLaunchedRanks));
  command
      ->add_option("--timeout", arguments->timeout_seconds,
                   "Seconds the whole run may take; then SIGTERM, SIGKILL, exit code 3 (default: "
                   "no limit)")
      ->type_name("SECONDS")
      ->check(number(0.001, 1e7));
  command
      ->add_option("--grace", arguments->grace_seconds,
                   "Seconds the other ranks may take to end after one failed (default: 5)")
      ->type_name("SECONDS")
      ->check(number(0, 1e7));
  command->add_flag("--no-label", arguments->has_no_label,
                    "Let ranks write to this terminal themselves, without [rank N] before lines");
  command->add_option("command", arguments->command, "Program and its arguments, after --")
      ->required()
      ->type_name("CMD ...");
  command->footer(
      "Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ARGOSY_RANK,\n"
      "ARGOSY_WORLD_SIZE and ARGOSY_JOB. Rank 0 reads stdin. The exit code is that of the rank "
      "that\n"
      "failed first; 3 when it was killed or the timeout passed.\n\n"
      "Example:\n"
      "  argosy launch -n 4 --timeout 60 -- argosy run --model DIR --layer 1 --input FILE:TENSOR");
  command->callback([arguments, exit_code] { *exit_code = run(*arguments); });
}

}  // namespace argosy::tools
