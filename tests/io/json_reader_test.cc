// The JSON reader against its naive twin, nlohmann's parser: the same texts are accepted, with the
// same events. Two differences are meant: a NUL ends nlohmann's text early, and a number that fp64
// rounds to zero is refused here.
//
// Mutations tried, each makes a test fail: no check of overlong letters (of three or four bytes),
// of half pairs or of control characters; "01" taken as a number; decoding without the reserve.
#include "io/json_reader.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "io/allocation_watch.h"
#include "io/temp_folder.h"

namespace argosy {
namespace {

using Json = nlohmann::json;

// The events as one line of text, with every bit of every value.
class Recorder : public io::JsonHandler {
 public:
  std::string events;

  Status null() override { return add("null"); }
  Status boolean(bool value) override { return add(value ? "true" : "false"); }
  Status number_unsigned(uint64_t value) override { return add(fmt::format("u{}", value)); }
  Status number_negative(int64_t value) override { return add(fmt::format("i{}", value)); }
  Status number_float(double value, std::string_view text) override {
    return add(fmt::format("f{:a} of {}", value, text));
  }
  Status string(std::string_view value) override { return add(fmt::format("s{}", value)); }
  Status key(std::string_view word) override { return add(fmt::format("k{}", word)); }
  Status start_object() override { return add("{"); }
  Status end_object() override { return add("}"); }
  Status start_array() override { return add("["); }
  Status end_array() override { return add("]"); }

 private:
  Status add(std::string_view event) {
    events.append(event).push_back('\n');
    return {};
  }
};

class Twin : public nlohmann::json_sax<Json> {
 public:
  Recorder recorder;
  bool rounds_to_zero = false;

  bool null() override { return recorder.null().ok(); }
  bool boolean(bool value) override { return recorder.boolean(value).ok(); }
  bool number_unsigned(uint64_t value) override { return recorder.number_unsigned(value).ok(); }
  bool number_integer(int64_t value) override { return recorder.number_negative(value).ok(); }
  bool number_float(double value, const std::string& text) override {
    const size_t digits = std::min(text.find_first_of("eE"), text.size());
    rounds_to_zero |= value == 0 && text.substr(0, digits).find_first_of("123456789") != text.npos;
    return recorder.number_float(value, text).ok();
  }
  bool string(std::string& value) override { return recorder.string(value).ok(); }
  bool binary(Json::binary_t&) override { return false; }
  bool start_object(size_t) override { return recorder.start_object().ok(); }
  bool key(std::string& word) override { return recorder.key(word).ok(); }
  bool end_object() override { return recorder.end_object().ok(); }
  bool start_array(size_t) override { return recorder.start_array().ok(); }
  bool end_array() override { return recorder.end_array().ok(); }
  bool parse_error(size_t, const std::string&, const Json::exception&) override { return false; }
};

// The events, or nothing when the text is refused.
std::optional<std::string> read(std::string_view text) {
  Recorder recorder;
  const Status status = io::read_json(text, "text:", recorder);
  if (status.ok()) return recorder.events;
  EXPECT_EQ(name_of(status.code()), name_of(StatusCode::kCorruptData));
  return std::nullopt;
}

std::optional<std::string> twin_read(std::string_view text) {
  if (text.find('\0') != text.npos) return std::nullopt;
  Twin twin;
  const bool accepted = Json::sax_parse(text.begin(), text.end(), &twin);
  if (!accepted || twin.rounds_to_zero) return std::nullopt;
  return twin.recorder.events;
}

void expect_agreement(std::string_view text, int* num_accepted) {
  const auto events = read(text);
  ASSERT_EQ(events, twin_read(text)) << ::testing::PrintToString(std::string(text));
  *num_accepted += events.has_value();
}

constexpr std::string_view kTexts[] = {
    R"({"a":[1,-2,0.5,1e3,true,false,null,"t",[],{}],"b":{"c":"d"},"":""})",
    R"(["\"\\\/\b\f\n\r\t","\u00e9\u20AC","\ud83d\ude00x","\u0000"])",
    "[\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\x7f\", \"\xed\x9f\xbf\xee\x80\x80\"]",
    "\xEF\xBB\xBF { \"a\" :\t[ 1 , 2 ]\r\n} ",
    "[0,-0,18446744073709551615,18446744073709551616,-9223372036854775808,-9223372036854775809]",
    "[0.0,-0.0e0,5e-324,1.7976931348623157e308,1E+2,123456789.123456789e-5]",
    "null",
    "\"\"",
    " -1 "};

TEST(JsonReader, MutatedTextsAgreeWithTheTwin) {
  constexpr uint64_t kSeed = 20261129;
  SCOPED_TRACE(::testing::Message() << "seed " << kSeed);
  constexpr std::string_view kBytes =
      "{}[]:,\"\\/u0123456789abcdefE+-. \n\t\x01\x7f\x80\xbf\xc3\xed"
      "\xf0\xf4\xffntrls";
  std::mt19937_64 random(kSeed);
  const auto below = [&](size_t bound) { return static_cast<size_t>(random() % bound); };
  int num_accepted = 0;
  for (int run = 0; run < 100'000; ++run) {
    std::string text(kTexts[below(std::size(kTexts))]);
    for (size_t edits = below(3); edits > 0 && !text.empty(); --edits) {
      const size_t at = below(text.size());
      const std::string piece = text.substr(below(text.size()), 1 + below(12));
      switch (below(4)) {
        case 0:
          text.erase(at, 1 + below(3));
          break;
        case 1:
          text.insert(at, piece);
          break;
        case 2:
          text[at] = kBytes[below(kBytes.size())];
          break;
        default:
          text.insert(at, 1, kBytes[below(kBytes.size())]);
      }
    }
    expect_agreement(text, &num_accepted);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(num_accepted, 20'000);
  EXPECT_LT(num_accepted, 80'000);
}

TEST(JsonReader, NumbersAgreeWithTheTwin) {
  constexpr uint64_t kSeed = 7;
  SCOPED_TRACE(::testing::Message() << "seed " << kSeed);
  constexpr std::string_view kBytes = "0011239+--..eE";
  std::mt19937_64 random(kSeed);
  int num_accepted = 0;
  for (int run = 0; run < 200'000; ++run) {
    std::string text;
    for (size_t i = 1 + random() % 8; i > 0; --i) text += kBytes[random() % kBytes.size()];
    expect_agreement(text, &num_accepted);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(num_accepted, 10'000);
}

TEST(JsonReader, EveryPairOfBytesAndEveryEdgeOfFourAgreeWithTheTwin) {
  int num_accepted = 0;
  for (int first = 0; first < 256; ++first) {
    for (int second = 0; second < 256; ++second) {
      expect_agreement(fmt::format("\"{}{}\"", static_cast<char>(first), static_cast<char>(second)),
                       &num_accepted);
      if (HasFatalFailure()) return;
    }
  }
  constexpr std::string_view kFirst = "\xdf\xe0\xe1\xec\xed\xee\xef\xf0\xf1\xf3\xf4\xf5\xff";
  constexpr std::string_view kNext = "\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\"";
  for (const char a : kFirst) {
    for (const char b : kNext) {
      for (const char c : kNext) {
        for (const char d : kNext) {
          expect_agreement(fmt::format("\"{}{}{}{}\"", a, b, c, d), &num_accepted);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(num_accepted, 10'000);
}

TEST(JsonReader, EveryCodeUnitAgreesWithTheTwin) {
  int num_accepted = 0;
  for (int unit = 0; unit < 0x10000; ++unit) {
    expect_agreement(fmt::format("\"\\u{:04x}\"", unit), &num_accepted);
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(num_accepted, 0x10000 - 0x800);
  for (const int first : {0xD7FF, 0xD800, 0xD83D, 0xDBFF, 0xDC00, 0xDFFF, 0xE000}) {
    for (const int second : {0x41, 0xD7FF, 0xD800, 0xDBFF, 0xDC00, 0xDE00, 0xDFFF, 0xE000}) {
      expect_agreement(fmt::format("\"x\\u{:04X}\\u{:04X}y\"", first, second), &num_accepted);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(JsonReader, WhatDiffersFromTheTwinIsRefused) {
  for (const std::string_view text : {"1e-999", "-2e-324", "[1e-99999999999999999999]", "1e999"}) {
    EXPECT_FALSE(read(text).has_value()) << text;
  }
  EXPECT_FALSE(read(std::string_view("{}\0garbage", 10)).has_value());
  EXPECT_FALSE(read(std::string_view("{}\0", 3)).has_value());
}

TEST(JsonReader, RefusalsNameTheByte) {
  const auto expect_byte = [](std::string_view text, int byte) {
    Recorder recorder;
    test::expect_error(io::read_json(text, "file:", recorder), StatusCode::kCorruptData,
                       {fmt::format("file: no JSON at byte {}", byte)});
  };
  expect_byte("", 1);
  expect_byte("{", 2);
  expect_byte("{\"a\"}", 5);
  expect_byte("[1,]", 4);
  expect_byte("{} {}", 4);
  expect_byte("nul", 4);
  expect_byte("\"\xff\"", 2);
  expect_byte("[01]", 3);
}

TEST(JsonReader, AHandlerEndsTheReading) {
  class Stop : public Recorder {
    Status string(std::string_view value) override {
      return Status(StatusCode::kUnsupported, std::string(value));
    }
  };
  Stop stop;
  const Status status = io::read_json(R"([1,"here","there"])", "text:", stop);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(), "here");
  EXPECT_EQ(stop.events, "[\nu1\n");
}

class Ignore : public io::JsonHandler {
 public:
  Status null() override { return {}; }
  Status boolean(bool) override { return {}; }
  Status number_unsigned(uint64_t) override { return {}; }
  Status number_negative(int64_t) override { return {}; }
  Status number_float(double, std::string_view) override { return {}; }
  Status string(std::string_view) override { return {}; }
  Status key(std::string_view) override { return {}; }
  Status start_object() override { return {}; }
  Status end_object() override { return {}; }
  Status start_array() override { return {}; }
  Status end_array() override { return {}; }
};

TEST(JsonReader, OnlyEscapesCostMemoryAndNoMoreThanTheText) {
  const auto largest = [](const std::string& text) {
    Ignore ignore;
    test::reset_largest_allocation();
    EXPECT_TRUE(io::read_json(text, "text:", ignore).ok());
    return test::largest_allocation();
  };
  const std::string x(1'000'000, 'x');
  const std::string sevens(1'000'000, '7');
  EXPECT_EQ(largest('"' + x + '"'), 0u);
  EXPECT_EQ(largest("0." + sevens), 0u);
  EXPECT_EQ(largest(std::string(1'000'000, ' ') + "[]"), 0u);
  EXPECT_EQ(largest("{\"" + x + "\":[null,true]}"), 0u);
  EXPECT_LE(largest('"' + x + "\\n" + x + "xx\""), 2 * x.size() + 7);
  // A longer text after a shorter one must not double the buffer beyond the whole.
  const std::string half(600'000, 'x');
  EXPECT_LE(largest("[\"\\n" + half + "\",\"\\n" + half + "xx\"]"), 2 * half.size() + 14);
}

}  // namespace
}  // namespace argosy
