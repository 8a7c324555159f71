// One loop over the text; the open containers are one bit each, so nesting costs no stack. A text
// without escapes is handed out as a view, one with escapes is decoded into a buffer of its length.
// Test: tests/io/json_reader_test.cc, which holds it against nlohmann's parser.
#include "io/json_reader.h"

#include <algorithm>
#include <bitset>
#include <charconv>
#include <optional>
#include <string>

#include "base/error.h"

namespace argosy::io {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Bytes of the UTF-8 letter at the front of `text`, 0 when it is none.
size_t letter_bytes(std::string_view text) {
  const auto byte = [&](size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const auto follows = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4 || !follows(1)) return 0;
  if (first < 0xE0) return 2;
  if (!follows(2)) return 0;
  // Not the long way of writing a shorter letter, no half of a UTF-16 pair, none past U+10FFFF.
  if (first == 0xE0 && byte(1) < 0xA0) return 0;
  if (first == 0xED && byte(1) > 0x9F) return 0;
  if (first < 0xF0) return 3;
  if (!follows(3)) return 0;
  if (first == 0xF0 && byte(1) < 0x90) return 0;
  if (first == 0xF4 && byte(1) > 0x8F) return 0;
  return 4;
}

void append_utf8(uint32_t letter, std::string* out) {
  const auto byte = [&](uint32_t bits) { out->push_back(static_cast<char>(bits)); };
  if (letter < 0x80) return byte(letter);
  if (letter < 0x800) {
    byte(0xC0 | letter >> 6);
  } else if (letter < 0x10000) {
    byte(0xE0 | letter >> 12);
    byte(0x80 | (letter >> 6 & 0x3F));
  } else {
    byte(0xF0 | letter >> 18);
    byte(0x80 | (letter >> 12 & 0x3F));
    byte(0x80 | (letter >> 6 & 0x3F));
  }
  byte(0x80 | (letter & 0x3F));
}

// The letter of a one-letter escape, '\0' when there is no such escape.
char plain_escape(char c) {
  switch (c) {
    case '"':
    case '\\':
    case '/':
      return c;
    case 'b':
      return '\b';
    case 'f':
      return '\f';
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    default:
      return '\0';
  }
}

// The number that all of `text` is, where T holds it.
template <typename T, typename... Base>
std::optional<T> parse(std::string_view text, Base... base) {
  T value{};
  const char* last = text.data() + text.size();
  const auto [end, failure] = std::from_chars(text.data(), last, value, base...);
  if (failure != std::errc() || end != last) return std::nullopt;
  return value;
}

// The code unit of the four digits at `at`.
std::optional<uint32_t> parse_unit(std::string_view text, size_t at) {
  const std::string_view digits = text.substr(at, 4);
  return digits.size() == 4 ? parse<uint32_t>(digits, 16) : std::nullopt;
}

bool is_first_half(uint32_t unit) { return unit >= 0xD800 && unit <= 0xDBFF; }
bool is_second_half(uint32_t unit) { return unit >= 0xDC00 && unit <= 0xDFFF; }

class Reader {
 public:
  Reader(std::string_view text, std::string_view subject, JsonHandler& handler)
      : text_(text), subject_(subject), handler_(handler) {}

  Status read() {
    if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;
    do {
      ARGOSY_RETURN_IF_ERROR(start_value());
      ARGOSY_RETURN_IF_ERROR(finish_value());
    } while (depth_ > 0);
    return at_ == text_.size() ? Status() : no_json();
  }

 private:
  Status no_json() const {
    return base::error(StatusCode::kCorruptData, "{} no JSON at byte {}", subject_, at_ + 1);
  }
  // '\0' at the end, and for a NUL, which fits nowhere outside a text either.
  char next() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool take(char c) {
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  // Up to the first scalar or empty container: what is opened on the way stays open.
  Status start_value() {
    for (;;) {
      skip_space();
      const bool is_object = next() == '{';
      if (!is_object && next() != '[') return scalar();
      ARGOSY_RETURN_IF_ERROR(open(is_object));
      skip_space();
      if (next() == (is_object ? '}' : ']')) return {};  // finish_value closes it
      if (is_object) ARGOSY_RETURN_IF_ERROR(member_key());
    }
  }

  // Closes what ends here; stands before the next value of the innermost open container, or at the
  // end.
  Status finish_value() {
    skip_space();
    while (depth_ > 0) {
      const bool is_object = is_object_[depth_ - 1];
      if (take(is_object ? '}' : ']')) {
        --depth_;
        ARGOSY_RETURN_IF_ERROR(is_object ? handler_.end_object() : handler_.end_array());
        skip_space();
        continue;
      }
      if (!take(',')) return no_json();
      skip_space();
      return is_object ? member_key() : Status();
    }
    return {};
  }

  Status open(bool is_object) {
    ++at_;
    if (depth_ == kMaxJsonDepth) {
      return base::error(StatusCode::kCorruptData, "{} nested deeper than {}", subject_,
                         kMaxJsonDepth);
    }
    is_object_[depth_++] = is_object;
    return is_object ? handler_.start_object() : handler_.start_array();
  }

  Status member_key() {
    std::string_view word;
    ARGOSY_RETURN_IF_ERROR(text_value(&word));
    ARGOSY_RETURN_IF_ERROR(handler_.key(word));
    skip_space();
    return take(':') ? Status() : no_json();
  }

  Status scalar() {
    switch (next()) {
      case '"': {
        std::string_view value;
        ARGOSY_RETURN_IF_ERROR(text_value(&value));
        return handler_.string(value);
      }
      case 'n':
        ARGOSY_RETURN_IF_ERROR(literal("null"));
        return handler_.null();
      case 't':
        ARGOSY_RETURN_IF_ERROR(literal("true"));
        return handler_.boolean(true);
      case 'f':
        ARGOSY_RETURN_IF_ERROR(literal("false"));
        return handler_.boolean(false);
      default:
        return number();
    }
  }

  Status literal(std::string_view word) {
    for (const char c : word) {
      if (!take(c)) return no_json();
    }
    return {};
  }

  Status digits() {
    if (!is_digit(next())) return no_json();
    while (is_digit(next())) ++at_;
    return {};
  }

  Status number() {
    const size_t begin = at_;
    const bool is_negative = take('-');
    if (!take('0')) ARGOSY_RETURN_IF_ERROR(digits());
    bool is_integer = true;
    if (take('.')) {
      is_integer = false;
      ARGOSY_RETURN_IF_ERROR(digits());
    }
    if (take('e') || take('E')) {
      is_integer = false;
      if (!take('+')) take('-');
      ARGOSY_RETURN_IF_ERROR(digits());
    }
    const std::string_view text = text_.substr(begin, at_ - begin);
    if (is_integer && is_negative) {
      if (const auto value = parse<int64_t>(text)) return handler_.number_negative(*value);
    } else if (is_integer) {
      if (const auto value = parse<uint64_t>(text)) return handler_.number_unsigned(*value);
    }
    const auto value = parse<double>(text);
    return value ? handler_.number_float(*value, text) : no_json();
  }

  // A text between quotes; `value` holds until the next one.
  Status text_value(std::string_view* value) {
    if (!take('"')) return no_json();
    const size_t begin = at_;
    bool has_escape = false;
    while (next() != '"') {
      if (next() == '\\') {
        has_escape = true;
        ARGOSY_RETURN_IF_ERROR(check_escape());
        continue;
      }
      const size_t bytes = letter_bytes(text_.substr(at_));
      const bool is_control = static_cast<unsigned char>(next()) < 0x20;
      if (bytes == 0 || is_control) return no_json();
      at_ += bytes;
    }
    *value = text_.substr(begin, at_ - begin);
    ++at_;
    if (has_escape) *value = decode(*value);
    return {};
  }

  Status check_escape() {
    ++at_;
    if (take('u')) {
      const std::optional<uint32_t> unit = parse_unit(text_, at_);
      if (!unit || is_second_half(*unit)) return no_json();
      at_ += 4;
      if (!is_first_half(*unit)) return {};
      if (!take('\\') || !take('u')) return no_json();
      const std::optional<uint32_t> second = parse_unit(text_, at_);
      if (!second || !is_second_half(*second)) return no_json();
      at_ += 4;
      return {};
    }
    if (plain_escape(next()) == '\0') return no_json();
    ++at_;
    return {};
  }

  // `raw` has passed check_escape wherever there is an escape.
  std::string_view decode(std::string_view raw) {
    decoded_.clear();
    decoded_.reserve(raw.size());
    for (size_t at = 0; at < raw.size();) {
      const size_t escape = std::min(raw.find('\\', at), raw.size());
      decoded_.append(raw.substr(at, escape - at));
      if (escape == raw.size()) break;
      at = escape + 2;
      if (raw[escape + 1] != 'u') {
        decoded_.push_back(plain_escape(raw[escape + 1]));
        continue;
      }
      uint32_t letter = *parse_unit(raw, at);
      at += 4;
      if (is_first_half(letter)) {
        letter = 0x10000 + ((letter - 0xD800) << 10) + (*parse_unit(raw, at + 2) - 0xDC00);
        at += 6;
      }
      append_utf8(letter, &decoded_);
    }
    return decoded_;
  }

  const std::string_view text_;
  const std::string_view subject_;
  JsonHandler& handler_;
  size_t at_ = 0;
  size_t depth_ = 0;
  std::bitset<kMaxJsonDepth> is_object_;  // by depth, of the open containers
  std::string decoded_;
};

}  // namespace

Status read_json(std::string_view text, std::string_view subject, JsonHandler& handler) {
  return Reader(text, subject, handler).read();
}

}  // namespace argosy::io
