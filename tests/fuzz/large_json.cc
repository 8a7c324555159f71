// See large_json.h.
#include "fuzz/large_json.h"

namespace argosy::testing {

std::string repeated(std::string_view text, std::string_view between) {
  std::string all(text);
  while (all.size() < kLargeBytes) all.append(between).append(text);
  return all;
}

std::string one_letter(size_t number) {
  // Four bytes of UTF-8 from U+10000 on.
  const size_t letter = 0x10000 + number;
  const auto byte = [](size_t bits) { return static_cast<char>(bits); };
  return {byte(0xF0 | letter >> 18), byte(0x80 | (letter >> 12 & 0x3F)),
          byte(0x80 | (letter >> 6 & 0x3F)), byte(0x80 | (letter & 0x3F))};
}

std::string one_letter_members(size_t count, std::string_view value) {
  std::string all = "{";
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) all += ',';
    all.append("\"").append(one_letter(i)).append("\":").append(value);
  }
  return all + "}";
}

std::map<std::string, std::string> large_json() {
  const std::string half_deep_lists = [] {
    std::string all;
    for (int i = 0; i < 31; ++i) all.append("[" + repeated("1", ",").substr(0, 33333) + ",");
    return all + "1" + std::string(31, ']');
  }();
  return {
      {"text", '"' + repeated("x") + '"'},
      {"text_of_escapes", '"' + repeated("\\u00e9") + '"'},
      {"text_with_one_escape", '"' + repeated("x") + "\\n\""},
      {"text_with_an_escape_inside", '"' + repeated("x") + "\\n" + repeated("x") + "xx\""},
      {"growing_texts_of_escapes",
       [] {
         std::string all = "[";
         for (size_t bytes = 16; bytes < kLargeBytes; bytes = bytes * 5 / 4) {
           all.append("\"\\n").append(bytes, 'x').append("\",");
         }
         return all + "1]";
       }()},
      {"text_without_end", '"' + repeated("x")},
      {"number", repeated("7")},
      {"fraction", "0." + repeated("7")},
      {"exponent", "1e" + repeated("7")},
      {"ones", '[' + repeated("1", ",") + ']'},
      {"literals", '[' + repeated("null", ",") + ']'},
      {"texts", '[' + repeated("\"\"", ",") + ']'},
      {"empty_lists", '[' + repeated("[]", ",") + ']'},
      {"empty_objects", '[' + repeated("{}", ",") + ']'},
      {"small_objects", '[' + repeated(R"({"a":1})", ",") + ']'},
      {"nested_lists", repeated("[")},
      {"nested_objects", repeated("{\"a\":")},
      {"wide_at_every_depth", half_deep_lists},
      {"one_letter_keys", one_letter_members(100'000, "1")},
      {"one_letter_keys_nested", "{\"a\":" + one_letter_members(100'000, "[]") + "}"},
      {"one_key_again_and_again", '{' + repeated("\"a\":1", ",") + '}'},
      {"giant_key", "{\"" + repeated("x") + "\":1}"},
      {"giant_key_twice", "{\"" + repeated("x") + "\":1,\"" + repeated("x") + "\":1}"},
      {"white_space", repeated(" \n") + "{}" + repeated("\t\r")},
      {"zeros", std::string(kLargeBytes, '\0')},
  };
}

}  // namespace argosy::testing
