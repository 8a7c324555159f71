// Structure limits of untrusted JSON: depth, values, duplicate keys, text that is no JSON.
//
// Mutations tried: without the duplicate check and with a limit of 65 a test fails.
#include "io/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "io/allocation_watch.h"
#include "io/json_reader.h"
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

TEST(Json, ValuesAreLimited) {
  const auto ones = [](size_t count) {
    std::string text = "[1";
    for (size_t i = 1; i < count; ++i) text += ",1";
    return text + "]";
  };
  // The list is a value itself.
  const auto most = io::parse_json(ones(io::kMaxJsonValues - 1), "text");
  ASSERT_TRUE(most.has_value()) << most.error().message();
  EXPECT_EQ(most->size(), io::kMaxJsonValues - 1);
  test::expect_error(io::parse_json(ones(io::kMaxJsonValues), "text"), StatusCode::kCorruptData,
                     {"text", "16384"});
  EXPECT_TRUE(io::parse_json(ones(3), "text", 4).has_value());
  test::expect_error(io::parse_json(ones(4), "text", 4), StatusCode::kCorruptData, {"than 4 "});
  const std::string large = ones(1'000'000);
  test::reset_largest_allocation();
  EXPECT_FALSE(io::parse_json(large, "text").has_value());
  EXPECT_LE(test::largest_allocation(), io::kMaxJsonTreeBytes);
}

TEST(Json, KeepsEveryKindOfValue) {
  const std::string text =
      R"({"a":[1,-2,0.5,true,false,null,"t\u00e9",[],{}],"b":{"c":{"d":[[1],[2,3]]}}})";
  EXPECT_EQ(io::parse_json(text, "text").value(), nlohmann::json::parse(text));
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
