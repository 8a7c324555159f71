// The subcommands. Each adds its options and a callback that does the work and sets *exit_code.
#pragma once

#include <CLI/CLI.hpp>

namespace argosy::tools {

void add_info_command(CLI::App& app, int* exit_code);
void add_run_command(CLI::App& app, int* exit_code);
void add_route_command(CLI::App& app, int* exit_code);

}  // namespace argosy::tools
