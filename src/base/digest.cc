// XXH3-128 (contract 4.2), by the xxHash library, header-only use.
// Test: tests/base/digest_test.cc holds published vectors.
#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include "argosy/moe.h"

namespace argosy {

std::string digest_of(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace argosy
