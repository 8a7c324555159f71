// A small process that outlives its maker by milliseconds: when the maker dies without a word, it
// kills what the maker's job left behind.
//
// A rank dies with its launcher (PR_SET_PDEATHSIG), but what a rank has started itself does not;
// it is found by the job's name in its environment. Test: tests/cli/launch_test.cc.
#pragma once

#include <string>

#include "argosy/status.h"
#include "platform/process.h"

namespace argosy::platform {

class Guardian {
 public:
  // `mark` is a "NAME=value" of every process of the job and of no other. Call before the first
  // rank starts. Errors: kOutOfMemory.
  static Result<Guardian> start(const std::string& mark);
  // The maker goes on or ends in order: the guardian ends without killing.
  ~Guardian();
  Guardian(Guardian&& other) noexcept = default;

  int process_id() const { return process_id_; }

 private:
  Guardian(int process_id, Descriptor line) : process_id_(process_id), line_(std::move(line)) {}

  int process_id_;
  Descriptor line_;  // closed by the system when the maker dies
};

}  // namespace argosy::platform
