// Copies of a block, through the caches or past them. Test: tests/platform/copy_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace argosy::platform {

// Copies `bytes` from source to target, which do not overlap; any alignment.
using CopyBlock = void (*)(std::byte* target, const std::byte* source, int64_t bytes);

// `past_caches`: by streaming stores, as wide as this CPU has; the thread that made the copies must call
// finish_streaming() before it tells another that they are there. Else memcpy.
CopyBlock copy_block(bool past_caches);
void finish_streaming();

}  // namespace argosy::platform
