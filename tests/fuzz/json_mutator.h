// Edits JSON as a tree, so that most mutants pass the parser and reach the checks behind it.
//
// Used by the mutators of all targets that read JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "fuzz/fuzz_target.h"

namespace argosy::testing {

using Tree = nlohmann::ordered_json;

// One to four edits: numbers to boundaries, other types, deep nesting, members removed, renamed,
// copied, swapped; words come from `words`. `text` that is no JSON, and one in 16, goes to `bytes`.
std::string mutate_json(std::string_view text, std::span<const std::string_view> words,
                        Random& random, ByteMutator bytes);

// The text of `tree`, whatever its strings hold.
std::string dump(const Tree& tree);

// `text` with one member of one of its objects standing twice.
std::string with_duplicate_key(const std::string& text, const Tree& tree, Random& random);

}  // namespace argosy::testing
