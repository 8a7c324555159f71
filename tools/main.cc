// argosy: info, run, route, quantise, launch, bench and memory by one command line.
//
// Exit codes: 0 done and all checks held; 1 a check failed; 2 bad usage or input; 3 a rank was lost
// or a deadline passed. Test: tests/cli/.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <string>
#include <vector>

#include "tools/commands.h"
#include "tools/console.h"

namespace {

constexpr const char* kFooter =
    "Exit codes: 0 done, all checks held; 1 a check failed; 2 bad usage or input; 3 a rank was "
    "lost "
    "or a deadline passed.\n"
    "`argosy COMMAND --help` shows options and examples.";

// The first word that no option or command took, or "". CLI11 tells of a missing option first, but
// the two are often one typing error. Words of a command that takes any are left out.
std::string unknown_word(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    const std::vector<std::string> words = command->remaining();
    // "--" only says that options end there.
    const auto word = std::find_if(words.begin(), words.end(),
                                   [](const std::string& one) { return one != "--"; });
    if (word != words.end() && !command->get_allow_extras()) return *word;
  }
  return "";
}

std::string message_of(const CLI::App& app, const CLI::ParseError& error) {
  const std::string word = unknown_word(app);
  if (word.empty()) return error.what();
  return "'" + word + (word[0] == '-' ? "' is no option" : "' is out of place");
}

}  // namespace

int main(int argc, char** argv) {
  using namespace argosy::tools;  // NOLINT(google-build-using-namespace)
  // A file above the size limit is then an error of the write, not the end of the process without
  // cleaning up. A handler, unlike SIG_IGN, is not passed on to the commands that launch starts.
  std::signal(SIGXFSZ, [](int) {});
  CLI::App app{"Mixture-of-Experts layers over many ranks: route, dispatch, experts, combine.",
               "argosy"};
  app.set_version_flag("--version", std::string("argosy " ARGOSY_VERSION));
  app.footer(kFooter);
  app.require_subcommand(1);
  int exit_code = kExitOk;
  add_info_command(app, &exit_code);
  add_run_command(app, std::vector<std::string>(argv + std::min(argc, 1), argv + argc), &exit_code);
  add_route_command(app, &exit_code);
  add_quantise_command(app, &exit_code);
  add_launch_command(app, &exit_code);
  add_bench_command(app, &exit_code);
  add_memory_command(app, &exit_code);
  // CLI11 would only say that a subcommand is missing.
  if (argc > 1 && argv[1][0] != '-') {
    const std::string word = argv[1];
    const auto named = [&](const CLI::App* command) { return command->get_name() == word; };
    if (app.get_subcommands(named).empty()) {
      print_error("'" + word +
                  "' is no command; there are info, run, route, quantise, launch, bench, memory");
      return kExitBadInput;
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    print_error(message_of(app, error) + " (see --help)");
    return kExitBadInput;
  }
  return exit_code;
}
