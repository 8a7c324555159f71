// numpy writes its header with repr(): one flat dict with the keys descr, fortran_order and shape.
// Exactly that is parsed, nothing is evaluated. Test: tests/io/npz_test.cc.
#include "io/npy.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/error.h"
#include "io/json.h"

namespace argosy::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kAlignment = 64;

struct Descr {
  std::string_view text;
  DType dtype;
};
constexpr Descr kDescrs[] = {
    {"<f8", DType::kF64}, {"<f4", DType::kF32}, {"<i8", DType::kI64},  {"<i4", DType::kI32},
    {"<i2", DType::kI16}, {"|i1", DType::kI8},  {"<u8", DType::kU64},  {"<u4", DType::kU32},
    {"<u2", DType::kU16}, {"|u1", DType::kU8},  {"|b1", DType::kBool},
};

// A reader of the header's text. After a failure every further read fails.
class Literal {
 public:
  explicit Literal(std::string_view text) : rest_(text) {}

  bool take(char wanted) {
    skip();
    if (rest_.empty() || rest_.front() != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }
  bool text(std::string_view* out) {
    skip();
    if (rest_.empty() || (rest_.front() != '\'' && rest_.front() != '"')) return false;
    const size_t end = rest_.find(rest_.front(), 1);
    if (end == std::string_view::npos) return false;
    *out = rest_.substr(1, end - 1);
    rest_.remove_prefix(end + 1);
    return true;
  }
  bool boolean(bool* out) {
    skip();
    for (const std::string_view word : {"True", "False"}) {
      if (!rest_.starts_with(word)) continue;
      *out = word == "True";
      rest_.remove_prefix(word.size());
      return true;
    }
    return false;
  }
  bool shape(std::vector<int64_t>* out) {
    if (!take('(')) return false;
    while (!take(')')) {
      int64_t size = 0;
      skip();
      const auto [end, problem] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), size);
      if (problem != std::errc() || size < 0) return false;
      rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
      take('L');  // Python 2 wrote long integers so
      out->push_back(size);
      if (!take(',') && !(skip(), rest_.starts_with(')'))) return false;
    }
    return true;
  }
  bool at_end() {
    skip();
    return rest_.empty();
  }

 private:
  void skip() {
    while (!rest_.empty() && (rest_.front() == ' ' || rest_.front() == '\n')) {
      rest_.remove_prefix(1);
    }
  }

  std::string_view rest_;
};

struct Header {
  std::string_view descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

bool parse_header(std::string_view text, Header* header) {
  Literal literal(text);
  if (!literal.take('{')) return false;
  int seen = 0;
  while (!literal.take('}')) {
    std::string_view key;
    if (!literal.text(&key) || !literal.take(':')) return false;
    const int bit = key == "descr" ? 1 : key == "fortran_order" ? 2 : key == "shape" ? 4 : 0;
    const bool is_read = bit == 1   ? literal.text(&header->descr)
                         : bit == 2 ? literal.boolean(&header->fortran_order)
                         : bit == 4 ? literal.shape(&header->shape)
                                    : false;
    if (!is_read || (seen & bit) != 0) return false;
    seen |= bit;
    literal.take(',');
  }
  return seen == 7 && literal.at_end();
}

Status corrupt(std::string_view name, std::string_view what) {
  return base::error(StatusCode::kCorruptData, "npz: array {} {}", in_quotes(ascii(name)), what);
}

// Splits off the header; what stays is the data.
Result<std::string_view> take_header(std::string_view name, std::string_view* bytes) {
  constexpr size_t kFixed = 8;  // magic and version
  if (!bytes->starts_with(kMagic) || bytes->size() < kFixed + 2) {
    return corrupt(name, "is no npy array");
  }
  const int version = static_cast<unsigned char>((*bytes)[6]);
  if (version < 1 || version > 3) {
    return base::error(StatusCode::kUnsupported, "npz: array {} is npy version {}, 1 to 3 are read",
                       in_quotes(ascii(name)), version);
  }
  const size_t length_bytes = version == 1 ? 2 : 4;
  if (bytes->size() < kFixed + length_bytes) return corrupt(name, "is cut short");
  uint32_t length = 0;
  std::memcpy(&length, bytes->data() + kFixed, length_bytes);
  if (length > bytes->size() - kFixed - length_bytes) return corrupt(name, "is cut short");
  const std::string_view header = bytes->substr(kFixed + length_bytes, length);
  bytes->remove_prefix(kFixed + length_bytes + length);
  return header;
}

}  // namespace

int64_t NpyArray::num_elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

Result<NpyArray> parse_npy(std::string_view name, std::string_view bytes) {
  std::string_view data = bytes;
  ARGOSY_ASSIGN_OR_RETURN(const std::string_view text, take_header(name, &data));
  Header header;
  if (!parse_header(text, &header)) return corrupt(name, "has a header that is not numpy's");
  const auto known = std::find_if(std::begin(kDescrs), std::end(kDescrs),
                                  [&](const Descr& one) { return one.text == header.descr; });
  if (known == std::end(kDescrs)) {
    return base::error(StatusCode::kUnsupported,
                       "npz: array {} has dtype {}; little-endian integers, fp32 and fp64 are read",
                       in_quotes(ascii(name)), in_quotes(ascii(header.descr)));
  }
  if (header.fortran_order && header.shape.size() > 1) {
    return base::error(StatusCode::kUnsupported, "npz: array {} is in Fortran order",
                       in_quotes(ascii(name)));
  }
  const Result<int64_t> wanted = checked_num_bytes(header.shape, size_of(known->dtype));
  if (!wanted || *wanted != static_cast<int64_t>(data.size())) {
    return corrupt(name, fmt::format("is {} [{}] but holds {} bytes", name_of(known->dtype),
                                     fmt::join(header.shape, ", "), data.size()));
  }
  return NpyArray{std::string(name), known->dtype, std::move(header.shape), std::string(data)};
}

Result<std::string> npy_header(const NpySource& array) {
  const auto known = std::find_if(std::begin(kDescrs), std::end(kDescrs),
                                  [&](const Descr& one) { return one.dtype == array.dtype; });
  if (known == std::end(kDescrs)) {
    return base::error(StatusCode::kUnsupported, "npz: numpy has no dtype {} (array {})",
                       name_of(array.dtype), array.name);
  }
  std::string header =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", known->text,
                  fmt::join(array.shape, ", "), array.shape.size() == 1 ? "," : "");
  constexpr size_t kBefore = 10;  // magic, version, length
  header.append((kAlignment - (kBefore + header.size() + 1) % kAlignment) % kAlignment, ' ');
  header += '\n';
  std::string out(kMagic);
  out += {'\x01', '\x00'};
  const auto length = static_cast<uint16_t>(header.size());
  out.append(reinterpret_cast<const char*>(&length), sizeof length);
  return out + header;
}

std::string ascii(std::string_view text) {
  std::string out(text);
  std::replace_if(
      out.begin(), out.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; }, '?');
  return out;
}

}  // namespace argosy::io
