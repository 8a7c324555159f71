// One pass over the JSON text fills TensorInfo entries (no tree: a header of 100 MB would need ten
// times that), in a deque: one block for all would be larger than the text. Then shapes, ranges and
// their tiling of the data are checked. Anything that the format does not name is refused.
// Test: tests/io/safetensors_header_test.cc.
#include "io/safetensors_header.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "io/json.h"
#include "io/json_reader.h"

namespace argosy::io {
namespace {

// A JSON header read event by event. Levels: 1 the file, 2 a tensor or the metadata, 3 a list.
class HeaderHandler : public JsonHandler {
 public:
  std::deque<TensorInfo> tensors;

  Status null() override { return fail("a null"); }
  Status boolean(bool) override { return fail("a boolean"); }
  Status number_float(double, std::string_view text) override {
    return fail(fmt::format("{}, no integer of 64 bits,", text.substr(0, 40)));
  }
  Status number_negative(int64_t value) override { return number(value, fmt::format("{}", value)); }
  Status number_unsigned(uint64_t value) override {
    return number(std::in_range<int64_t>(value) ? static_cast<int64_t>(value) : -1,
                  fmt::format("{}", value));
  }
  Status string(std::string_view value) override;
  Status start_object() override;
  Status end_object() override;
  Status start_array() override;
  Status end_array() override;
  Status key(std::string_view word) override;

 private:
  enum class Field { kNone, kDType, kShape, kOffsets };

  std::string place() const {
    if (depth_ == 0) return "header";
    if (in_metadata_) return "__metadata__";
    return fmt::format("tensor {}", in_quotes(tensors.empty() ? "" : tensors.back().name));
  }
  // `what` stands where the format has no such thing.
  Status fail(std::string_view what) const {
    static constexpr std::string_view kFields[] = {"", "dtype: ", "shape: ", "data_offsets: "};
    return base::error(StatusCode::kCorruptData, "{}: {}{} is out of place", place(),
                       kFields[static_cast<size_t>(field_)], what);
  }
  Status number(int64_t value, const std::string& text);
  Status start_tensor_field(Field field);

  int depth_ = 0;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  std::set<std::string> metadata_keys_;
  Field field_ = Field::kNone;
  bool seen_[4] = {};  // by Field, of the current tensor
  std::vector<int64_t> offsets_;
};

Status HeaderHandler::number(int64_t value, const std::string& text) {
  if (depth_ != 3) return fail(fmt::format("the number {}", text));
  if (value < 0) return fail(fmt::format("{}, not in 0 to 2^63 - 1,", text));
  auto& list = field_ == Field::kShape ? tensors.back().shape : offsets_;
  if (list.size() == kMaxHeaderDims) {
    return fail(fmt::format("more than {} numbers", kMaxHeaderDims));
  }
  list.push_back(value);
  return {};
}

Status HeaderHandler::string(std::string_view value) {
  if (in_metadata_ && depth_ == 2) return {};
  if (depth_ != 2 || field_ != Field::kDType)
    return fail(fmt::format("the text {}", in_quotes(value)));
  // What is not printable is no dtype either, so the refusal names the word as it may be shown.
  const Result<DType> dtype = parse_dtype(printable(value));
  if (!dtype) {
    return base::error(StatusCode::kUnsupported, "{}: {}", place(), dtype.error().message());
  }
  tensors.back().dtype = *dtype;
  return {};
}

Status HeaderHandler::start_object() {
  if (depth_ == 2 || depth_ == 3) return fail("an object");
  ++depth_;
  if (depth_ == 2) {
    field_ = Field::kNone;
    std::fill(std::begin(seen_), std::end(seen_), false);
    offsets_.clear();
  }
  return {};
}

Status HeaderHandler::end_object() {
  if (depth_ == 2 && !in_metadata_) {
    const bool complete = seen_[1] && seen_[2] && seen_[3];
    if (!complete) {
      return base::error(StatusCode::kCorruptData, "{}: dtype, shape or data_offsets missing",
                         place());
    }
    if (offsets_.size() != 2) {
      return base::error(StatusCode::kCorruptData, "{}: data_offsets has {} entries, wanted 2",
                         place(), offsets_.size());
    }
    tensors.back().begin = offsets_[0];
    tensors.back().end = offsets_[1];
  }
  in_metadata_ = false;
  --depth_;
  return {};
}

Status HeaderHandler::start_array() {
  const bool list = depth_ == 2 && (field_ == Field::kShape || field_ == Field::kOffsets);
  if (!list) return fail("a list");
  ++depth_;
  return {};
}

Status HeaderHandler::end_array() {
  --depth_;
  return {};
}

Status HeaderHandler::key(std::string_view word) {
  if (depth_ == 1) {
    field_ = Field::kNone;
    if (word == "__metadata__") {
      in_metadata_ = true;
      return std::exchange(seen_metadata_, true) ? fail("a second __metadata__") : Status();
    }
    tensors.emplace_back().name = word;
    return {};
  }
  if (in_metadata_) {
    const bool is_new = metadata_keys_.emplace(word).second;
    return is_new ? Status() : fail(fmt::format("the key {} twice", in_quotes(word)));
  }
  if (word == "dtype") return start_tensor_field(Field::kDType);
  if (word == "shape") return start_tensor_field(Field::kShape);
  if (word == "data_offsets") return start_tensor_field(Field::kOffsets);
  field_ = Field::kNone;
  return fail(fmt::format("the unknown key {}", in_quotes(word)));
}

Status HeaderHandler::start_tensor_field(Field field) {
  field_ = field;
  const bool again = std::exchange(seen_[static_cast<size_t>(field)], true);
  return again ? fail("a second value") : Status();
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
Status check_tiling(const std::deque<TensorInfo>& tensors, int64_t data_bytes) {
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

Result<std::deque<TensorInfo>> parse_safetensors_header(std::string_view json, int64_t data_begin,
                                                        int64_t data_bytes) {
  HeaderHandler handler;
  ARGOSY_RETURN_IF_ERROR(read_json(json, "header is", handler));
  std::deque<TensorInfo>& tensors = handler.tensors;
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
