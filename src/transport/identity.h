// rank_identity over any environment, so that tests need not change their own. The public door is
// argosy/identity.h. Test: tests/transport/identity_test.cc.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "argosy/identity.h"

namespace argosy::transport {

// A variable's value, or nullopt when it is not set or empty.
using Environment = std::function<std::optional<std::string>(const char* name)>;

Result<RankIdentity> rank_identity_in(const Environment& environment, int parent_process_id,
                                      const IdentityOptions& options);

}  // namespace argosy::transport
