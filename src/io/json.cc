// A first pass over the text checks its structure, a second builds the tree: the checks need no
// tree, and the tree never holds what they refuse. Test: tests/io/json_test.cc.
#include "io/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "base/error.h"

namespace argosy::io {
namespace {

using Json = nlohmann::json;

// Keys of the open objects, innermost last; arrays hold an empty set, so the size is the depth.
class StructureCheck : public nlohmann::json_sax<Json> {
 public:
  std::string problem;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(Json::binary_t&) override { return true; }
  bool start_object(size_t) override { return enter(); }
  bool start_array(size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }

  bool key(std::string& word) override {
    if (open_.back().insert(word).second) return true;
    problem = fmt::format("key {} stands twice in one object", in_quotes(word));
    return false;
  }

  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    problem = fmt::format("no JSON at byte {}", position);
    return false;
  }

 private:
  bool enter() {
    open_.emplace_back();
    if (open_.size() <= kMaxJsonDepth) return true;
    problem = fmt::format("nested deeper than {}", kMaxJsonDepth);
    return false;
  }
  bool leave() {
    open_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> open_;
};

}  // namespace

Result<Json> parse_json(std::string_view text, std::string_view what) {
  StructureCheck check;
  if (!Json::sax_parse(text.begin(), text.end(), &check)) {
    return base::error(StatusCode::kCorruptData, "{}: {}", what, check.problem);
  }
  return Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
}

std::string printable(std::string_view word) {
  constexpr size_t kMaxShown = 200;
  size_t shown = std::min(word.size(), kMaxShown);
  // A letter is shown whole or not at all: half of one is no UTF-8.
  const auto inside_letter = [&] {
    return (static_cast<unsigned char>(word[shown]) & 0xC0) == 0x80;
  };
  while (shown > 0 && shown < word.size() && inside_letter()) --shown;
  std::string text(word.substr(0, shown));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
  if (word.size() > kMaxShown) text += fmt::format("... ({} bytes)", word.size());
  return text;
}

std::string in_quotes(std::string_view word) { return '"' + printable(word) + '"'; }

}  // namespace argosy::io
