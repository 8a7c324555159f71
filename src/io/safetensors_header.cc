// One pass over the JSON text fills TensorInfo entries (no tree: a header of 100 MB would need ten
// times that); then shapes, ranges and their tiling of the data are checked. Anything that the
// format does not name is refused. Test: tests/io/safetensors_header_test.cc.
#include "io/safetensors_header.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "base/error.h"
#include "io/json.h"

namespace argosy::io {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxHeaderDims = 64;

// A JSON header read event by event. Levels: 1 the file, 2 a tensor or the metadata, 3 a list.
class HeaderHandler : public nlohmann::json_sax<Json> {
 public:
  std::vector<TensorInfo> tensors;
  Status problem;

  bool null() override { return fail("a null"); }
  bool boolean(bool) override { return fail("a boolean"); }
  bool binary(Json::binary_t&) override { return fail("binary data"); }
  bool number_float(double, const std::string& text) override {
    return fail(fmt::format("{}, no integer of 64 bits,", text.substr(0, 40)));
  }
  bool number_integer(int64_t value) override { return number(value, fmt::format("{}", value)); }
  bool number_unsigned(uint64_t value) override {
    return number(std::in_range<int64_t>(value) ? static_cast<int64_t>(value) : -1,
                  fmt::format("{}", value));
  }
  bool string(std::string& value) override;
  bool start_object(size_t) override;
  bool end_object() override;
  bool start_array(size_t) override;
  bool end_array() override;
  bool key(std::string& word) override;
  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    return refuse(base::error(StatusCode::kCorruptData, "header is no JSON at byte {}", position));
  }

 private:
  enum class Field { kNone, kDType, kShape, kOffsets };

  bool refuse(Status status) {
    problem = std::move(status);
    return false;
  }
  std::string place() const {
    if (depth_ == 0) return "header";
    if (in_metadata_) return "__metadata__";
    return fmt::format("tensor {}", in_quotes(tensors.empty() ? "" : tensors.back().name));
  }
  // `what` stands where the format has no such thing.
  bool fail(std::string_view what) {
    static constexpr std::string_view kFields[] = {"", "dtype: ", "shape: ", "data_offsets: "};
    return refuse(base::error(StatusCode::kCorruptData, "{}: {}{} is out of place", place(),
                              kFields[static_cast<size_t>(field_)], what));
  }
  bool number(int64_t value, const std::string& text);
  bool start_tensor_field(Field field);

  int depth_ = 0;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  std::set<std::string> metadata_keys_;
  Field field_ = Field::kNone;
  bool seen_[4] = {};  // by Field, of the current tensor
  std::vector<int64_t> offsets_;
};

bool HeaderHandler::number(int64_t value, const std::string& text) {
  if (depth_ != 3) return fail(fmt::format("the number {}", text));
  if (value < 0) return fail(fmt::format("{}, not in 0 to 2^63 - 1,", text));
  auto& list = field_ == Field::kShape ? tensors.back().shape : offsets_;
  if (list.size() == kMaxHeaderDims) {
    return fail(fmt::format("more than {} numbers", kMaxHeaderDims));
  }
  list.push_back(value);
  return true;
}

bool HeaderHandler::string(std::string& value) {
  if (in_metadata_ && depth_ == 2) return true;
  if (depth_ != 2 || field_ != Field::kDType)
    return fail(fmt::format("the text {}", in_quotes(value)));
  // What is not printable is no dtype either, so the refusal names the word as it may be shown.
  const Result<DType> dtype = parse_dtype(printable(value));
  if (!dtype) {
    return refuse(
        base::error(StatusCode::kUnsupported, "{}: {}", place(), dtype.error().message()));
  }
  tensors.back().dtype = *dtype;
  return true;
}

bool HeaderHandler::start_object(size_t) {
  if (depth_ == 2 || depth_ == 3) return fail("an object");
  ++depth_;
  if (depth_ == 2) {
    field_ = Field::kNone;
    std::fill(std::begin(seen_), std::end(seen_), false);
    offsets_.clear();
  }
  return true;
}

bool HeaderHandler::end_object() {
  if (depth_ == 2 && !in_metadata_) {
    const bool complete = seen_[1] && seen_[2] && seen_[3];
    if (!complete) {
      return refuse(base::error(StatusCode::kCorruptData,
                                "{}: dtype, shape or data_offsets missing", place()));
    }
    if (offsets_.size() != 2) {
      return refuse(base::error(StatusCode::kCorruptData,
                                "{}: data_offsets has {} entries, wanted 2", place(),
                                offsets_.size()));
    }
    tensors.back().begin = offsets_[0];
    tensors.back().end = offsets_[1];
  }
  in_metadata_ = false;
  --depth_;
  return true;
}

bool HeaderHandler::start_array(size_t) {
  const bool list = depth_ == 2 && (field_ == Field::kShape || field_ == Field::kOffsets);
  if (!list) return fail("a list");
  ++depth_;
  return true;
}

bool HeaderHandler::end_array() {
  --depth_;
  return true;
}

bool HeaderHandler::key(std::string& word) {
  if (depth_ == 1) {
    field_ = Field::kNone;
    if (word == "__metadata__") {
      in_metadata_ = true;
      return !std::exchange(seen_metadata_, true) || fail("a second __metadata__");
    }
    tensors.emplace_back().name = word;
    return true;
  }
  if (in_metadata_) {
    return metadata_keys_.insert(word).second ||
           fail(fmt::format("the key {} twice", in_quotes(word)));
  }
  if (word == "dtype") return start_tensor_field(Field::kDType);
  if (word == "shape") return start_tensor_field(Field::kShape);
  if (word == "data_offsets") return start_tensor_field(Field::kOffsets);
  field_ = Field::kNone;
  return fail(fmt::format("the unknown key {}", in_quotes(word)));
}

bool HeaderHandler::start_tensor_field(Field field) {
  field_ = field;
  return !std::exchange(seen_[static_cast<size_t>(field)], true) || fail("a second value");
}

Status check_range(const TensorInfo& tensor, int64_t data_bytes) {
  if (tensor.begin > tensor.end || tensor.end > data_bytes) {
    return base::error(StatusCode::kCorruptData,
                       "tensor {}: data_offsets [{}, {}] do not lie in the {} bytes of data",
                       in_quotes(tensor.name), tensor.begin, tensor.end, data_bytes);
  }
  const bool is_empty = std::count(tensor.shape.begin(), tensor.shape.end(), 0) > 0;
  // Also where a dimension is 0 the others must not overflow: strides are products of them.
  std::vector<int64_t> at_least_one = tensor.shape;
  for (int64_t& dim : at_least_one) dim = std::max<int64_t>(dim, 1);
  const Result<int64_t> largest = checked_num_bytes(at_least_one, size_of(tensor.dtype));
  if (!largest) {
    return base::error(StatusCode::kCorruptData,
                       "tensor {}: shape [{}] of {}-byte elements needs more than 2^63 bytes{}",
                       in_quotes(tensor.name), fmt::join(tensor.shape, ", "), size_of(tensor.dtype),
                       is_empty ? ", a 0 counted as 1" : "");
  }
  const int64_t want = is_empty ? 0 : *largest;
  if (want != tensor.end - tensor.begin) {
    return base::error(StatusCode::kCorruptData,
                       "tensor {}: {} [{}] needs {} bytes, data_offsets [{}, {}] hold {}",
                       in_quotes(tensor.name), name_of(tensor.dtype), fmt::join(tensor.shape, ", "),
                       want, tensor.begin, tensor.end, tensor.end - tensor.begin);
  }
  return {};
}

// Ranges cover the data without overlap or hole.
Status check_tiling(const std::vector<TensorInfo>& tensors, int64_t data_bytes) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(tensors[a].begin, tensors[a].end) <
           std::pair(tensors[b].begin, tensors[b].end);
  });
  int64_t covered = 0;
  const TensorInfo* last = nullptr;
  for (const size_t i : order) {
    const TensorInfo& tensor = tensors[i];
    if (tensor.begin != covered) {
      return base::error(StatusCode::kCorruptData,
                         "tensor {} begins at byte {} of the data, {} ends at {}: {}",
                         in_quotes(tensor.name), tensor.begin,
                         last == nullptr ? "the header" : "tensor " + in_quotes(last->name),
                         covered, tensor.begin < covered ? "they overlap" : "a hole");
    }
    covered = tensor.end;
    last = &tensor;
  }
  if (covered != data_bytes) {
    return base::error(
        StatusCode::kCorruptData, "{} ends at byte {} of the data, the file at {}",
        last == nullptr ? "the header" : "the last tensor, " + in_quotes(last->name) + ",", covered,
        data_bytes);
  }
  return {};
}

}  // namespace

Result<std::vector<TensorInfo>> parse_safetensors_header(std::string_view json, int64_t data_begin,
                                                         int64_t data_bytes) {
  HeaderHandler handler;
  if (!Json::sax_parse(json.begin(), json.end(), &handler)) return handler.problem;
  std::vector<TensorInfo>& tensors = handler.tensors;
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  const auto twice =
      std::adjacent_find(tensors.begin(), tensors.end(),
                         [](const TensorInfo& a, const TensorInfo& b) { return a.name == b.name; });
  if (twice != tensors.end()) {
    return base::error(StatusCode::kCorruptData, "tensor {} stands twice in the header",
                       in_quotes(twice->name));
  }
  for (const TensorInfo& tensor : tensors) {
    ARGOSY_RETURN_IF_ERROR(check_range(tensor, data_bytes));
  }
  ARGOSY_RETURN_IF_ERROR(check_tiling(tensors, data_bytes));
  for (TensorInfo& tensor : tensors) {
    tensor.begin += data_begin;
    tensor.end += data_begin;
  }
  return std::move(tensors);
}

}  // namespace argosy::io
