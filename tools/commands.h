// The subcommands. Each adds its options and a callback that does the work and sets *exit_code.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace argosy::tools {

void add_info_command(CLI::App& app, int* exit_code);
// `arguments` is the whole command line behind the program's name: ranks that `run` starts as
// processes get the same.
void add_run_command(CLI::App& app, const std::vector<std::string>& arguments, int* exit_code);
void add_route_command(CLI::App& app, int* exit_code);
void add_quantise_command(CLI::App& app, int* exit_code);
void add_launch_command(CLI::App& app, int* exit_code);
void add_bench_command(CLI::App& app, int* exit_code);
void add_memory_command(CLI::App& app, int* exit_code);

}  // namespace argosy::tools
