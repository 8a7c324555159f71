// Parsing of JSON that nobody vouches for: depth and duplicate keys are checked before a tree is
// built.
//
// No exception leaves these functions. Test: tests/io/json_test.cc.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "argosy/status.h"

namespace argosy::io {

inline constexpr int kMaxJsonDepth = 64;

// The tree of `text`. Errors: kCorruptData naming `what` (usually the file) and the byte or key: no
// JSON, nested deeper than kMaxJsonDepth, or one key twice in an object.
Result<nlohmann::json> parse_json(std::string_view text, std::string_view what);

// A word of a file as it may stand in a message: shortened between letters, control characters
// replaced.
std::string printable(std::string_view word);
// The same in double quotes.
std::string in_quotes(std::string_view word);

}  // namespace argosy::io
