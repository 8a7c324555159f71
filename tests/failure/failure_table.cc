// Prints the whole table of docs/failures.md: every fault at every step of every rank for 2, 3 and 4 ranks.
//
//   argosy_failure_table [MAX_RANKS [DEADLINE_MS]]    exit 1 when a survivor does not end as it must
#include <dirent.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "failure/failure_run.h"

namespace argosy::testing {
namespace {

using std::chrono::milliseconds;
using transport::sim::Fault;

// Within these, counted from the fault, a survivor must have ended.
constexpr double kKillSeconds = 0.1;
constexpr double kBeyondDeadlineSeconds = 0.1;

struct Row {
  std::string fault;
  int num_ranks = 0;
  int64_t num_steps = 0;
  int num_tries = 0;
  int num_right = 0;
  int num_in_time = 0;
  int num_left = 0;
  std::vector<double> seconds;  // of all survivors
};

int count_descriptors() {
  int count = 0;
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return -1;
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

// Names of Argosy's sockets on this host; files it never makes.
int count_sockets() {
  std::ifstream list("/proc/net/unix");
  int count = 0;
  for (std::string line; std::getline(list, line);) {
    count += line.find("@argosy.") != std::string::npos ? 1 : 0;
  }
  return count;
}

int64_t shared_memory_kib() {
  std::ifstream list("/proc/meminfo");
  for (std::string line; std::getline(list, line);) {
    if (line.starts_with("Shmem:")) return std::atoll(line.c_str() + 6);
  }
  return -1;
}

// False when the victim has no such step.
bool run_try(const FailureCase& one, double limit, Row* row) {
  const FailureOutcome outcome = run_failure(one);
  const std::string verdict = judge(one, outcome);
  if (!verdict.empty()) fmt::print(stderr, "{}\n", verdict);
  if (!outcome.has_fault) return !verdict.empty();
  ++row->num_tries;
  row->num_right += verdict.empty() ? 1 : 0;
  row->num_left += outcome.num_left;
  bool is_in_time = true;
  for (const Survivor& survivor : outcome.survivors) {
    row->seconds.push_back(survivor.seconds);
    is_in_time = is_in_time && survivor.has_ended && survivor.seconds <= limit;
  }
  row->num_in_time += is_in_time ? 1 : 0;
  return true;
}

Row run_all(Fault fault, const char* name, int num_ranks, milliseconds deadline) {
  Row row;
  row.fault = name;
  row.num_ranks = num_ranks;
  const double limit = fault == Fault::kStop ? std::chrono::duration<double>(deadline).count() +
                                                   kBeyondDeadlineSeconds
                                             : kKillSeconds;
  for (int victim = 0; victim < num_ranks; ++victim) {
    FailureCase one;
    one.fault = fault;
    one.num_ranks = num_ranks;
    one.victim = victim;
    one.deadline = deadline;
    for (one.step = 0; run_try(one, limit, &row); ++one.step) {
    }
    row.num_steps = std::max(row.num_steps, one.step);
  }
  std::sort(row.seconds.begin(), row.seconds.end());
  return row;
}

int run_table(int max_ranks, milliseconds deadline) {
  const int descriptors = count_descriptors();
  const int sockets = count_sockets();
  const int64_t memory = shared_memory_kib();
  int num_wrong = 0;
  fmt::print(
      "| one rank is | ranks | steps | tries | ended, right name | in time | median ms | longest "
      "ms | "
      "processes left |\n|---|---|---|---|---|---|---|---|---|\n");
  const std::pair<Fault, const char*> faults[] = {
      {Fault::kKill, "killed (SIGKILL)"},
      {Fault::kThrow, "left by an exception"},
      {Fault::kStop, "stopped (SIGSTOP)"},
  };
  for (const auto& [fault, name] : faults) {
    for (int num_ranks = 2; num_ranks <= max_ranks; ++num_ranks) {
      const milliseconds limit = fault == Fault::kStop ? deadline : milliseconds(20'000);
      const Row row = run_all(fault, name, num_ranks, limit);
      fmt::print("| {} | {} | {} | {} | {} | {} | {:.2f} | {:.2f} | {} |\n", row.fault,
                 row.num_ranks, row.num_steps, row.num_tries, row.num_right, row.num_in_time,
                 row.seconds[row.seconds.size() / 2] * 1e3, row.seconds.back() * 1e3, row.num_left);
      std::fflush(stdout);
      num_wrong += row.num_tries - row.num_right;
    }
  }
  fmt::print(
      "\nDeadline of the stopped ones: {} ms. In time: {} ms after the death, {} ms after the "
      "deadline.\n"
      "Left behind: {} descriptors, {} sockets; shared memory of the host changed by {} KiB.\n",
      deadline.count(), kKillSeconds * 1e3, kBeyondDeadlineSeconds * 1e3,
      count_descriptors() - descriptors, count_sockets() - sockets, shared_memory_kib() - memory);
  return num_wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace argosy::testing

int main(int argc, char** argv) {
  const int max_ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const int deadline = argc > 2 ? std::atoi(argv[2]) : 500;
  return argosy::testing::run_table(max_ranks, std::chrono::milliseconds(deadline));
}
