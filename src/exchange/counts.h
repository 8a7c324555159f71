// The message of the count exchange: each rank's status word with its text, its token count, its
// counts.
#pragma once

#include <cstdint>

namespace argosy {

// Bytes one rank sends for `num_experts` experts.
int64_t counts_message_bytes(int64_t num_experts);

}  // namespace argosy
