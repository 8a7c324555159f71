// Processes of this host: descriptors, starting a child that dies with its parent, finding what is
// left of it. Test: tests/platform/launch_test.cc.
#pragma once

#include <signal.h>

#include <optional>
#include <string>
#include <vector>

#include "argosy/status.h"
#include "platform/descriptor.h"

namespace argosy::platform {

struct Pipe {
  Descriptor read_end;
  Descriptor write_end;
};

// Closed on exec, and never one of the numbers 0 to 2. Errors: kOutOfMemory names the limit.
Result<Pipe> make_pipe();
// /dev/null for reading, likewise.
Result<Descriptor> open_null();

// Puts /dev/null in the place of those of the descriptors 0 to 2 that are closed, for its scope: what is opened
// meanwhile cannot be taken for standard output.
class StandardDescriptors {
 public:
  StandardDescriptors();

 private:
  Descriptor fillers_[3];
};

int parent_process_id();
// 128 random bits as 32 hex digits.
std::string random_hex_128();

struct SpawnOptions {
  std::vector<std::string> command;      // not empty; command[0] is looked up in PATH
  std::vector<std::string> environment;  // "NAME=value", all of it
  // Descriptors for 0, 1 and 2; -1 inherits.
  int standard[3] = {-1, -1, -1};
  sigset_t signal_mask;  // of the new program
};

// Starts a child that gets SIGKILL when the calling thread ends. Returns its process id once the
// program runs. Errors: kNotFound or kIo when it cannot be executed; kOutOfMemory when the system
// refuses the process, naming the limit.
Result<int> spawn(const SpawnOptions& options);

struct ChildEnd {
  int exit_code = 0;
  int signal = 0;
};
// How a child ended, which it then is no more; nullopt while it runs.
std::optional<ChildEnd> collect_child(int process_id);

// A child that SIGSTOP or its like has stopped.
bool is_stopped_child(int process_id);

// Children of this process, ended ones too, in no order.
std::vector<int> child_processes();
// Numbers in /proc: every process that is visible.
std::vector<int> all_processes();

// The calling process ends, or stops until somebody sends SIGCONT, at this very call.
[[noreturn]] void kill_self();
void stop_self();

// "9 (SIGKILL)".
std::string describe_signal(int signal);

}  // namespace argosy::platform
