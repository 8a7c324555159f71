// Structure limits of untrusted JSON: depth, duplicate keys, text that is no JSON.
//
// Mutations tried: without the duplicate check and with a limit of 65 a test fails.
#include "io/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "io/temp_folder.h"

namespace argosy {
namespace {

std::string nested_lists(int depth) {
  return std::string(static_cast<size_t>(depth), '[') +
         std::string(static_cast<size_t>(depth), ']');
}

TEST(Json, ReadsAValidText) {
  const auto json = io::parse_json(R"({"a": [1, {"a": 2}], "b": null})", "text");
  ASSERT_TRUE(json.has_value());
  EXPECT_EQ((*json)["a"][1]["a"], 2);
}

TEST(Json, DepthIsLimited) {
  EXPECT_TRUE(io::parse_json(nested_lists(io::kMaxJsonDepth), "text").has_value());
  test::expect_error(io::parse_json(nested_lists(io::kMaxJsonDepth + 1), "text"),
                     StatusCode::kCorruptData, {"text", "64"});
  test::expect_error(io::parse_json(std::string(1'000'000, '['), "text"), StatusCode::kCorruptData,
                     {"64"});
}

TEST(Json, DuplicateKeysAreRefusedInOneObjectOnly) {
  EXPECT_TRUE(io::parse_json(R"({"a": {"a": 1}, "b": [{"a": 1}, {"a": 1}]})", "text").has_value());
  test::expect_error(io::parse_json(R"({"a": 1, "b": 2, "a": 1})", "text"),
                     StatusCode::kCorruptData, {"\"a\"", "twice"});
}

TEST(Json, TextThatIsNoJsonIsRefused) {
  for (const std::string_view text : {"", " ", "{", "{\"a\"}", "[1,]", "{} {}", "nul", "\"\xFF\"",
                                      "[1e999]", "[01]", "{\"a\":NaN}"}) {
    test::expect_error(io::parse_json(text, "file"), StatusCode::kCorruptData,
                       {"file: no JSON at byte"});
  }
}

TEST(Json, WordsInMessagesAreShortAndPrintable) {
  EXPECT_EQ(io::in_quotes("a\nb"), "\"a?b\"");
  EXPECT_LT(io::in_quotes(std::string(1'000'000, 'x')).size(), 300u);
  // Two bytes a letter: the cut at 200 falls into the 100th or between two.
  for (const size_t before : {0, 1}) {
    std::string word(before, 'x');
    for (int i = 0; i < 150; ++i) word += "\xc3\xa9";
    const std::string shown = io::printable(word);
    const size_t letters = shown.find("...");
    EXPECT_EQ(letters, 200u - before);
    EXPECT_EQ(shown.substr(0, letters), word.substr(0, letters));
  }
}

}  // namespace
}  // namespace argosy
