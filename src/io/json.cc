// The tree is built from events, so it never holds what is refused. Test: tests/io/json_test.cc.
#include "io/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "io/json_reader.h"

namespace argosy::io {
namespace {

using Json = nlohmann::json;

class TreeBuilder : public JsonHandler {
 public:
  TreeBuilder(std::string_view what, size_t max_values) : what_(what), max_values_(max_values) {}

  Json take_tree() { return std::move(root_); }

  Status null() override { return add(nullptr); }
  Status boolean(bool value) override { return add(value); }
  Status number_unsigned(uint64_t value) override { return add(value); }
  Status number_negative(int64_t value) override { return add(value); }
  Status number_float(double value, std::string_view) override { return add(value); }
  Status string(std::string_view value) override { return add(value); }
  Status start_object() override { return enter(Json::object()); }
  Status start_array() override { return enter(Json::array()); }
  Status end_object() override { return leave(); }
  Status end_array() override { return leave(); }

  Status key(std::string_view word) override {
    auto& members = open_.back()->get_ref<Json::object_t&>();
    const auto [member, is_new] = members.emplace(word, nullptr);
    member_ = &member->second;
    if (is_new) return {};
    return base::error(StatusCode::kCorruptData, "{}: key {} stands twice in one object", what_,
                       in_quotes(word));
  }

 private:
  Status add(Json value) {
    if (++num_values_ > max_values_) {
      return base::error(StatusCode::kCorruptData, "{}: more than {} values", what_, max_values_);
    }
    if (open_.empty()) {
      last_ = &root_;
    } else if (open_.back()->is_array()) {
      last_ = &open_.back()->get_ref<Json::array_t&>().emplace_back();
    } else {
      last_ = member_;
    }
    *last_ = std::move(value);
    return {};
  }
  Status enter(Json container) {
    ARGOSY_RETURN_IF_ERROR(add(std::move(container)));
    open_.push_back(last_);
    return {};
  }
  Status leave() {
    open_.pop_back();
    return {};
  }

  const std::string_view what_;
  const size_t max_values_;
  Json root_;
  size_t num_values_ = 0;
  std::vector<Json*> open_;  // innermost last; an array grows only while it is the innermost
  Json* member_ = nullptr;   // of the innermost object, for the value that follows its key
  Json* last_ = nullptr;     // the value added last
};

}  // namespace

Result<Json> parse_json(std::string_view text, std::string_view what, size_t max_values) {
  TreeBuilder builder(what, max_values);
  ARGOSY_RETURN_IF_ERROR(read_json(text, fmt::format("{}:", what), builder));
  return builder.take_tree();
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
