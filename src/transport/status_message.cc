// See status_message.h.
#include "transport/status_message.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace argosy::transport {

StatusMessage to_message(const Status& status, int64_t value, std::string_view words) {
  const std::string_view text = status.ok() ? words : status.message();
  StatusMessage message;
  message.code = static_cast<int32_t>(status.code());
  message.text_bytes = static_cast<int32_t>(std::min(text.size(), sizeof(message.text)));
  message.value = value;
  if (!text.empty()) {
    std::memcpy(message.text, text.data(), static_cast<size_t>(message.text_bytes));
  }
  return message;
}

Status status_of(std::span<const std::byte> bytes, std::string_view what, int number) {
  StatusMessage message;
  if (bytes.size() < sizeof(message)) {
    return base::error(StatusCode::kCorruptData, "the status of {} {} has {} bytes, want {}", what,
                       number, bytes.size(), sizeof(message));
  }
  std::memcpy(&message, bytes.data(), sizeof(message));
  if (message.code == 0) return {};
  return Status(static_cast<StatusCode>(message.code),
                fmt::format("{} {}: {}", what, number, words_of(bytes)));
}

int64_t value_of(std::span<const std::byte> bytes) {
  StatusMessage message;
  std::memcpy(&message, bytes.data(), sizeof(message));
  return message.value;
}

std::string_view words_of(std::span<const std::byte> bytes) {
  StatusMessage message;
  std::memcpy(&message, bytes.data(), sizeof(message));
  const auto size = std::clamp<int32_t>(message.text_bytes, 0, sizeof(message.text));
  return {reinterpret_cast<const char*>(bytes.data()) + offsetof(StatusMessage, text),
          static_cast<size_t>(size)};
}

}  // namespace argosy::transport
