// A status as bytes for an all-gather, with one number beside it: how a rank's own error becomes every rank's. Test:
// tests/exchange/counts_test.cc, tests/moe/gradient_sync_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "argosy/status.h"

namespace argosy::transport {

struct StatusMessage {
  int32_t code = 0;  // StatusCode
  int32_t text_bytes = 0;
  int64_t value = 0;
  char text[240] = {};  // the status message, or words of an ok one; cut to fit
};
static_assert(sizeof(StatusMessage) == 256);

// `words`: what an ok status carries instead of a message.
StatusMessage to_message(const Status& status, int64_t value, std::string_view words = {});

// Ok, or the status that `bytes` begin with, which come from a peer; `what` and its number go before the text
// ("rank 3: ...").
Status status_of(std::span<const std::byte> bytes, std::string_view what, int number);
// Number and words of a message; the words lie in `bytes`. Precondition: status_of() took the same bytes.
int64_t value_of(std::span<const std::byte> bytes);
std::string_view words_of(std::span<const std::byte> bytes);

}  // namespace argosy::transport
