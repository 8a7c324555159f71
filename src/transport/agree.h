// Compares settings over ranks: first a hash of all of them, and only when hashes differ the text,
// to name the field. Used when a group is joined and by Group::agree. Test:
// tests/transport/group_test.cc.
#pragma once

#include <memory>
#include <span>

#include "argosy/group.h"
#include "argosy/status.h"
#include "transport/collectives.h"

namespace argosy::transport {

// The most that one rank's settings may need, as text.
inline constexpr int64_t kMaxSettingsBytes = int64_t{64} * 1024;

class Agreement {
 public:
  // Collective: yes.
  static Result<std::unique_ptr<Agreement>> create(Endpoint& endpoint, platform::Deadline deadline);

  // Collective: yes. Errors, the same on every rank, after which the group is still usable:
  // kDisagree names the first field that differs, the values and their ranks; kInvalidArgument for
  // settings above kMaxSettingsBytes. Errors of the waits are those of Endpoint::wait_all.
  Status agree(std::span<const Setting> settings, platform::Deadline deadline);

 private:
  Agreement(std::unique_ptr<AllGather> hashes, std::unique_ptr<AllGather> texts)
      : hashes_(std::move(hashes)), texts_(std::move(texts)) {}
  Status name_difference(std::span<const std::byte> text, platform::Deadline deadline);

  std::unique_ptr<AllGather> hashes_;
  std::unique_ptr<AllGather> texts_;
};

}  // namespace argosy::transport
