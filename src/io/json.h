// A tree of JSON that nobody vouches for: how deep it nests, how many values it has and that no key
// stands twice is checked while it grows.
//
// No exception leaves these functions. Test: tests/io/json_test.cc.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "argosy/status.h"

namespace argosy::io {

// Bounds the tree's arrays and the stack on which nlohmann::json frees it: at most 32 bytes a value
// in one request. A text of n bytes asks for no more than n + kMaxJsonTreeBytes at once.
inline constexpr size_t kMaxJsonValues = 1 << 14;
inline constexpr size_t kMaxJsonTreeBytes = 32 * kMaxJsonValues;

// The tree of `text`. Errors: kCorruptData naming `what` (usually the file) and the byte, key or
// limit: no JSON, nested deeper than kMaxJsonDepth, more than `max_values` values (containers
// count too), or one key twice in an object. With more values than the default, the constant above
// grows with them.
Result<nlohmann::json> parse_json(std::string_view text, std::string_view what,
                                  size_t max_values = kMaxJsonValues);

// A word of a file as it may stand in a message: shortened between letters, control characters
// replaced.
std::string printable(std::string_view word);
// The same in double quotes.
std::string in_quotes(std::string_view word);

}  // namespace argosy::io
