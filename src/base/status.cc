// Codes to names and radii: the ranges of codes are the radii. Test: tests/base/status_test.cc.
#include "argosy/status.h"

#include <fmt/format.h>

namespace argosy {

BlastRadius radius_of(StatusCode code) {
  const auto number = static_cast<int32_t>(code);
  if (number == 0) return BlastRadius::kNone;
  if (number < 20) return BlastRadius::kCall;
  if (number < 40) return BlastRadius::kHandle;
  if (number < 60) return BlastRadius::kGroup;
  return BlastRadius::kProcess;
}

std::string_view name_of(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "Ok";
    case StatusCode::kInvalidArgument:
      return "InvalidArgument";
    case StatusCode::kNotFound:
      return "NotFound";
    case StatusCode::kCorruptData:
      return "CorruptData";
    case StatusCode::kNonFinite:
      return "NonFinite";
    case StatusCode::kCapacity:
      return "Capacity";
    case StatusCode::kUnsupported:
      return "Unsupported";
    case StatusCode::kIo:
      return "Io";
    case StatusCode::kStalePlan:
      return "StalePlan";
    case StatusCode::kTimeout:
      return "Timeout";
    case StatusCode::kPeerLost:
      return "PeerLost";
    case StatusCode::kAborted:
      return "Aborted";
    case StatusCode::kDisagree:
      return "Disagree";
    case StatusCode::kOutOfMemory:
      return "OutOfMemory";
    case StatusCode::kInternal:
      return "Internal";
  }
  return "Unknown";
}

std::string Status::to_string() const {
  if (ok()) return "Ok";
  return fmt::format("{}: {}", name_of(code_), message_);
}

}  // namespace argosy
