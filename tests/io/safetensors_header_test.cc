// K22, the file container: every rule of the safetensors header, and thousands of mutated headers
// held against a naive twin (a tree, 128-bit products, one counter per data byte). C208, C211,
// C212.
//
// Mutations tried, each makes a test fail: no overlap check, no hole check, no check of the last
// end, no check of duplicate names, unchecked product, metadata values of any kind.
#include "io/safetensors_header.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>

#include "io/allocation_watch.h"
#include "io/temp_folder.h"

namespace argosy {
namespace {

using Json = nlohmann::json;

auto parse(std::string_view json, int64_t data_bytes) {
  return io::parse_safetensors_header(json, 0, data_bytes);
}

// The naive twin's tree, or nothing when the text is no JSON or has a key twice.
std::optional<Json> twin_tree(const std::string& text) {
  std::vector<std::set<std::string>> keys(1);
  bool twice = false;
  const auto callback = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key)
      twice |= !keys.back().insert(value.get<std::string>()).second;
    return true;
  };
  const Json tree = Json::parse(text, callback, false);
  if (tree.is_discarded() || !tree.is_object() || twice) return std::nullopt;
  return tree;
}

bool twin_metadata(const Json& metadata) {
  if (!metadata.is_object()) return false;
  for (const auto& [key, value] : metadata.items()) {
    if (!value.is_string()) return false;
  }
  return true;
}

bool twin_tensor(const Json& tensor, std::vector<int>* covered) {
  if (!tensor.is_object() || tensor.size() != 3) return false;
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!tensor.contains(key)) return false;
  }
  if (!tensor["dtype"].is_string() || !parse_dtype(tensor["dtype"].get<std::string>()))
    return false;
  if (!tensor["shape"].is_array() || !tensor["data_offsets"].is_array()) return false;
  if (tensor["data_offsets"].size() != 2 || tensor["shape"].size() > 64) return false;
  for (const char* key : {"shape", "data_offsets"}) {
    for (const Json& number : tensor[key]) {
      if (!number.is_number_integer() ||
          (!number.is_number_unsigned() && number.get<int64_t>() != 0)) {
        return false;
      }
      if (number.get<uint64_t>() > uint64_t{INT64_MAX}) return false;
    }
  }
  unsigned __int128 bytes = size_of(*parse_dtype(tensor["dtype"].get<std::string>()));
  bool has_zero = false;
  for (const Json& dim : tensor["shape"]) {
    has_zero |= dim == 0;
    if (dim != 0) bytes *= dim.get<uint64_t>();
    if (bytes > INT64_MAX) return false;
  }
  if (has_zero) bytes = 0;
  const auto begin = tensor["data_offsets"][0].get<uint64_t>();
  const auto end = tensor["data_offsets"][1].get<uint64_t>();
  if (begin > end || end > covered->size() || end - begin != bytes) return false;
  for (uint64_t i = begin; i < end; ++i) ++(*covered)[i];
  return true;
}

bool twin_accepts(const std::string& text, size_t data_bytes) {
  const std::optional<Json> tree = twin_tree(text);
  if (!tree) return false;
  std::vector<int> covered(data_bytes, 0);
  for (const auto& [name, tensor] : tree->items()) {
    const bool good =
        name == "__metadata__" ? twin_metadata(tensor) : twin_tensor(tensor, &covered);
    if (!good) return false;
  }
  return std::all_of(covered.begin(), covered.end(), [](int count) { return count == 1; });
}

// [name, dtype, shape, begin, end]
std::string header_of(
    std::initializer_list<std::tuple<const char*, const char*, const char*, const char*>> tensors) {
  std::string text = "{";
  for (const auto& [name, dtype, shape, offsets] : tensors) {
    if (text.size() > 1) text += ",";
    text += std::string("\"") + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
            ",\"data_offsets\":" + offsets + "}";
  }
  return text + "}";
}

TEST(SafetensorsHeader, EveryDTypeLoads) {
  for (const char* name : {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64",
                           "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}) {
    const int64_t bytes = 6 * size_of(*parse_dtype(name));
    const std::string offsets = "[0," + std::to_string(bytes) + "]";
    const auto tensors = parse(header_of({{"x", name, "[2,3]", offsets.c_str()}}), bytes);
    ASSERT_TRUE(tensors.has_value()) << tensors.error().message();
    EXPECT_EQ(name_of((*tensors)[0].dtype), name);
    EXPECT_EQ((*tensors)[0].shape, (std::vector<int64_t>{2, 3}));
  }
}

TEST(SafetensorsHeader, UnknownDTypeIsATypedRefusal) {
  for (const char* name : {"F4", "F8_E4M3FNUZ", "C64", "f32", ""}) {
    test::expect_error(parse(header_of({{"odd", name, "[1]", "[0,4]"}}), 4),
                       StatusCode::kUnsupported, {"\"odd\"", name, "BF16"});
  }
}

// A file must not write to the terminal of who opens it.
TEST(SafetensorsHeader, UnknownDTypeIsShownWithoutControlCharacters) {
  test::expect_error(parse(header_of({{"odd", "\\u001b[2J", "[1]", "[0,4]"}}), 4),
                     StatusCode::kUnsupported, {"\"odd\"", "\"?[2J\"", "BF16"});
}

TEST(SafetensorsHeader, RangesAreCountedFromTheFile) {
  const auto tensors =
      io::parse_safetensors_header(header_of({{"x", "U8", "[4]", "[0,4]"}}), 100, 4);
  ASSERT_TRUE(tensors.has_value());
  EXPECT_EQ((*tensors)[0].begin, 100);
  EXPECT_EQ((*tensors)[0].end, 104);
}

TEST(SafetensorsHeader, ScalarsEmptyTensorsAndManyDimsLoad) {
  EXPECT_TRUE(parse("{}", 0).has_value());
  EXPECT_TRUE(parse("{}   ", 0).has_value());
  const auto tensors = parse(header_of({{"scalar", "F32", "[]", "[0,4]"},
                                        {"empty", "F32", "[3,0]", "[4,4]"},
                                        {"front", "F32", "[0]", "[0,0]"},
                                        {"six", "U8", "[1,1,2,1,1,2]", "[4,8]"}}),
                             8);
  ASSERT_TRUE(tensors.has_value()) << tensors.error().message();
  EXPECT_EQ((*tensors)[3].name, "six");
  EXPECT_EQ((*tensors)[3].shape.size(), 6u);
}

// C208; also where a zero hides the overflow from the byte count.
TEST(SafetensorsHeader, ProductsAreChecked) {
  for (const char* shape : {"[4294967296,4294967296]", "[4294967296,4294967296,0]",
                            "[2147483648,2147483648,2]", "[9223372036854775807]"}) {
    for (const char* offsets : {"[0,0]", "[0,4]", "[0,18446744073709551615]", "[4,0]"}) {
      EXPECT_FALSE(parse(header_of({{"x", "F32", shape, offsets}}), 4).has_value())
          << shape << offsets;
    }
    test::expect_error(parse(header_of({{"x", "F32", shape, "[0,0]"}}), 0),
                       StatusCode::kCorruptData, {"\"x\"", "2^63"});
  }
  test::expect_error(
      parse(header_of({{"x", "F32", "[0,4611686018427387904,4611686018427387904]", "[0,0]"}}), 0),
      StatusCode::kCorruptData, {"[0, 4611686018427387904, 4611686018427387904]"});
}

// C211.
TEST(SafetensorsHeader, OverlapsAndHolesAreRefusedUnsortedLoads) {
  const auto same = header_of({{"a", "F32", "[1]", "[0,4]"}, {"b", "F32", "[1]", "[0,4]"}});
  test::expect_error(parse(same, 4), StatusCode::kCorruptData, {"\"a\"", "\"b\"", "overlap"});
  const auto hole = header_of({{"a", "F32", "[1]", "[0,4]"}, {"b", "F32", "[1]", "[8,12]"}});
  test::expect_error(parse(hole, 12), StatusCode::kCorruptData, {"\"b\"", "8", "4", "hole"});
  const auto late = header_of({{"a", "F32", "[1]", "[4,8]"}});
  test::expect_error(parse(late, 8), StatusCode::kCorruptData, {"\"a\"", "hole"});
  const auto rest = header_of({{"a", "F32", "[1]", "[0,4]"}});
  test::expect_error(parse(rest, 8), StatusCode::kCorruptData, {"\"a\"", "4", "8"});
  const auto unsorted = header_of(
      {{"c", "F32", "[1]", "[8,12]"}, {"a", "F32", "[1]", "[4,8]"}, {"b", "F32", "[1]", "[0,4]"}});
  const auto tensors = parse(unsorted, 12);
  ASSERT_TRUE(tensors.has_value()) << tensors.error().message();
  EXPECT_EQ((*tensors)[0].name, "a");
  EXPECT_EQ((*tensors)[0].begin, 4);
  EXPECT_EQ((*tensors)[1].name, "b");
  EXPECT_EQ((*tensors)[1].begin, 0);
}

// C212.
TEST(SafetensorsHeader, OddOffsetsAreRefused) {
  for (const char* offsets :
       {"[-1,4]", "[8,4]", "[4]", "[0,4,8]", "[]", "[0,4.0]", "[0,\"4\"]", "4", "null", "[0,[4]]",
        "{}", "[0,5]", "[0,3]", "[0,18446744073709551616]", "[true,4]"}) {
    test::expect_error(parse(header_of({{"x", "U8", "[4]", offsets}}), 8), StatusCode::kCorruptData,
                       {"\"x\""});
  }
}

TEST(SafetensorsHeader, OddShapesAreRefused) {
  for (const char* shape :
       {"[-4]", "[4.0]", "[\"4\"]", "4", "null", "[[4]]", "{}", "[2]", "[4,2]"}) {
    test::expect_error(parse(header_of({{"x", "U8", shape, "[0,4]"}}), 4), StatusCode::kCorruptData,
                       {"\"x\""});
  }
  std::string many = "[1";
  for (int i = 0; i < 64; ++i) many += ",1";
  test::expect_error(parse(header_of({{"x", "U8", (many + "]").c_str(), "[0,1]"}}), 1),
                     StatusCode::kCorruptData, {"\"x\"", "64"});
}

TEST(SafetensorsHeader, MissingDoubleAndUnknownFieldsAreRefused) {
  const std::string_view texts[] = {
      R"({"x":{"shape":[1],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":[1]}})",
      R"({"x":{}})",
      R"({"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]}})",
      R"({"x":[1]})",
      R"({"x":5})",
      R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}})"};
  for (const std::string_view text : texts) {
    test::expect_error(parse(text, 1), StatusCode::kCorruptData, {"\"x\""});
  }
  for (const std::string_view text : {"", "[]", "5", "null", "{} x", "{"}) {
    test::expect_error(parse(text, 0), StatusCode::kCorruptData, {"header"});
  }
}

TEST(SafetensorsHeader, MetadataIsTextToText) {
  EXPECT_TRUE(parse(R"({"__metadata__":{"format":"pt","a":""}})", 0).has_value());
  EXPECT_TRUE(parse(R"({"__metadata__":{}})", 0).has_value());
  for (const std::string_view text :
       {R"({"__metadata__":{"a":1}})", R"({"__metadata__":{"a":{}}})",
        R"({"__metadata__":{"a":["b"]}})", R"({"__metadata__":"a"})", R"({"__metadata__":null})",
        R"({"__metadata__":[]})", R"({"__metadata__":{"a":"1","a":"1"}})",
        R"({"__metadata__":{},"__metadata__":{}})"}) {
    test::expect_error(parse(text, 0), StatusCode::kCorruptData, {"__metadata__"});
  }
}

TEST(AllocationWatch, SeesWhatIsAllocated) {
  test::reset_largest_allocation();
  const std::vector<char> block(123'456);
  EXPECT_EQ(test::largest_allocation(), block.size());
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  std::string operator()(std::string text) {
    const int num_edits = 1 + static_cast<int>(random_() % 3);
    for (int i = 0; i < num_edits && !text.empty(); ++i) edit(&text);
    return text;
  }

 private:
  size_t below(size_t bound) { return static_cast<size_t>(random_() % bound); }

  void edit(std::string* text) {
    const size_t at = below(text->size());
    switch (below(6)) {
      case 0:
        text->resize(at);
        break;
      case 1:
        (*text)[at] = static_cast<char>((*text)[at] ^ (1 << below(8)));
        break;
      case 2:
        text->erase(at, 1 + below(4));
        break;
      case 3:
        text->insert(at, text->substr(below(text->size()), 1 + below(30)));
        break;
      default:
        edit_number(text, at);
        break;
    }
  }
  void edit_number(std::string* text, size_t at) {
    static constexpr const char* kNumbers[] = {"0",
                                               "1",
                                               "2",
                                               "3",
                                               "4",
                                               "6",
                                               "8",
                                               "12",
                                               "16",
                                               "24",
                                               "-1",
                                               "-0",
                                               "1e1",
                                               "4.0",
                                               "4294967296",
                                               "9223372036854775807",
                                               "9223372036854775808",
                                               "18446744073709551615",
                                               "99999999999999999999"};
    const size_t begin = text->find_first_of("0123456789", at);
    if (begin == std::string::npos) return;
    const size_t end = std::min(text->find_first_not_of("0123456789", begin), text->size());
    text->replace(begin, end - begin, kNumbers[below(std::size(kNumbers))]);
  }

  std::mt19937_64 random_;
};

TEST(SafetensorsHeader, MutatedHeadersAgreeWithTheTwin) {
  const std::string base = header_of({{"layers.0.w", "F32", "[2,3]", "[0,24]"},
                                      {"layers.1.w", "BF16", "[4]", "[24,32]"},
                                      {"e", "U8", "[2,0]", "[32,32]"},
                                      {"s", "I64", "[]", "[32,40]"},
                                      {"__metadata", "BOOL", "[8]", "[40,48]"}});
  const std::string with_metadata = R"({"__metadata__":{"format":"pt"},)" + base.substr(1);
  constexpr uint64_t kSeed = 20260101;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Mutator mutate(kSeed);
  int num_accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::string text = mutate(i % 2 == 0 ? base : with_metadata);
    test::reset_largest_allocation();
    const auto tensors = parse(text, 48);
    EXPECT_LE(test::largest_allocation(), text.size() + 4096) << text;
    ASSERT_EQ(tensors.has_value(), twin_accepts(text, 48))
        << text << "\n"
        << (tensors ? "accepted" : tensors.error().message());
    num_accepted += tensors.has_value();
    if (tensors) continue;
    ASSERT_TRUE(tensors.error().code() == StatusCode::kCorruptData ||
                tensors.error().code() == StatusCode::kUnsupported);
  }
  EXPECT_GT(num_accepted, 200);  // the mutations are mild enough to reach what lies behind the JSON
}

TEST(SafetensorsHeader, HostileSizesAllocateLittle) {
  for (const std::string& text :
       {std::string(1'000'000, '['), "{\"a\":{\"shape\":[" + std::string(1'000'000, '1'),
        "{\"a\":{\"shape\":[1" + std::string(1'000'000, ',')}) {
    test::reset_largest_allocation();
    EXPECT_FALSE(parse(text, 8).has_value());
    EXPECT_LE(test::largest_allocation(), 8192u);
  }
}

}  // namespace
}  // namespace argosy
