// Joining a group, with what tests replace. The public door is Group::join.
//
// Test: tests/transport/group_test.cc.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "argosy/group.h"

namespace argosy::transport {

// Facts of this process and build that a test plays as if they were others.
struct JoinOverrides {
  std::optional<bool> has_amx;
  std::optional<std::string> version;
};

struct GroupAccess {
  static Result<std::unique_ptr<Group>> join(const GroupOptions& options,
                                             const JoinOverrides& overrides);
  // Counts what is made over the group, collectively: the same number on every rank.
  static uint64_t count_made(Group& group);
};

}  // namespace argosy::transport
