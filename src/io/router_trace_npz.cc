// A router trace as arrays: step, layer, rank, num_tokens [records], num_experts [], topk_idx
// [rows, K] and, when recorded, topk_weights [rows, K]. Test: tests/io/router_trace_test.cc.
#include <fmt/ranges.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.h"
#include "io/npz.h"
#include "io/router_trace_format.h"

namespace argosy {
namespace {

using io::NpyArray;
using io::NpzReader;

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();
constexpr int kDenseDims = 4;

std::string shape_of(const NpyArray& array) {
  return fmt::format("{} [{}]", name_of(array.dtype), fmt::join(array.shape, ", "));
}

template <typename T>
T element(const NpyArray& array, size_t at) {
  T value;
  std::memcpy(&value, array.data.data() + at * sizeof value, sizeof value);
  return value;
}

// Any integer type, widened; what int64 has not becomes its largest value, which nothing here allows.
bool integer_at(const NpyArray& array, size_t at, int64_t* value) {
  switch (array.dtype) {
    case DType::kI64:
      *value = element<int64_t>(array, at);
      return true;
    case DType::kI32:
      *value = element<int32_t>(array, at);
      return true;
    case DType::kI16:
      *value = element<int16_t>(array, at);
      return true;
    case DType::kI8:
      *value = element<int8_t>(array, at);
      return true;
    case DType::kU64: {
      const auto wide = element<uint64_t>(array, at);
      *value = std::in_range<int64_t>(wide) ? static_cast<int64_t>(wide)
                                            : std::numeric_limits<int64_t>::max();
      return true;
    }
    case DType::kU32:
      *value = element<uint32_t>(array, at);
      return true;
    case DType::kU16:
      *value = element<uint16_t>(array, at);
      return true;
    case DType::kU8:
      *value = element<uint8_t>(array, at);
      return true;
    default:
      return false;
  }
}

template <typename Integer>
Result<std::vector<Integer>> integers_of(const NpyArray& array, int64_t lowest, int64_t highest) {
  std::vector<Integer> values(static_cast<size_t>(array.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    int64_t value = 0;
    if (!integer_at(array, i, &value)) {
      return base::error(StatusCode::kCorruptData, "npz: array {} is {}, expected integers",
                         array.name, shape_of(array));
    }
    if (value < lowest || value > highest) {
      return base::error(StatusCode::kCorruptData,
                         "npz: array {} holds {} at {}, expected {} to {}", array.name, value, i,
                         lowest, highest);
    }
    values[i] = static_cast<Integer>(value);
  }
  return values;
}

Result<std::vector<float>> weights_of(const NpyArray& array) {
  std::vector<float> values(static_cast<size_t>(array.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    if (array.dtype == DType::kF32) {
      values[i] = element<float>(array, i);
      continue;
    }
    if (array.dtype != DType::kF64) {
      return base::error(StatusCode::kCorruptData, "npz: array {} is {}, expected F32 or F64",
                         array.name, shape_of(array));
    }
    const auto value = element<double>(array, i);
    if (!(std::abs(value) <= double{std::numeric_limits<float>::max()})) {
      return base::error(StatusCode::kCorruptData,
                         "npz: array {} holds {} at {}, expected a number that fits fp32",
                         array.name, value, i);
    }
    values[i] = static_cast<float>(value);
  }
  return values;
}

// Adds topk_idx and, if there, topk_weights of the same shape; sets top_k.
Result<std::vector<int64_t>> add_rows(const NpzReader& npz, const TraceLimits& limits,
                                      RouterTrace* trace) {
  ARGOSY_ASSIGN_OR_RETURN(const NpyArray ids, npz.read("topk_idx", limits.max_array_bytes));
  if (ids.shape.size() != 2 && ids.shape.size() != kDenseDims) {
    return base::error(StatusCode::kCorruptData,
                       "npz: array topk_idx is {}, expected [rows, top_k] or [steps, layers, "
                       "tokens, top_k]",
                       shape_of(ids));
  }
  ARGOSY_ASSIGN_OR_RETURN(trace->topk_idx, integers_of<int32_t>(ids, -1, kMaxId));
  trace->top_k = ids.shape.back();
  if (!npz.has("topk_weights")) return ids.shape;
  ARGOSY_ASSIGN_OR_RETURN(const NpyArray weights, npz.read("topk_weights", limits.max_array_bytes));
  if (weights.shape != ids.shape) {
    return base::error(StatusCode::kCorruptData, "npz: topk_weights is {} but topk_idx is {}",
                       shape_of(weights), shape_of(ids));
  }
  ARGOSY_ASSIGN_OR_RETURN(trace->topk_weights, weights_of(weights));
  return ids.shape;
}

// One record per step and layer. Without elements a shape could claim any number of them.
Status add_dense_records(const std::vector<int64_t>& shape, RouterTrace* trace) {
  if (trace->topk_idx.empty()) {
    return base::error(StatusCode::kCorruptData, "npz: array topk_idx is [{}], without elements",
                       fmt::join(shape, ", "));
  }
  int64_t first = 0;
  for (int64_t step = 0; step < shape[0]; ++step) {
    for (int64_t layer = 0; layer < shape[1]; ++layer) {
      trace->records.push_back({step, layer, 0, first, shape[2]});
      first += shape[2];
    }
  }
  return {};
}

Status add_records(const NpzReader& npz, const TraceLimits& limits, RouterTrace* trace) {
  constexpr const char* kNames[] = {"step", "layer", "rank", "num_tokens"};
  std::vector<int64_t> columns[std::size(kNames)];
  for (size_t i = 0; i < std::size(kNames); ++i) {
    ARGOSY_ASSIGN_OR_RETURN(const NpyArray array, npz.read(kNames[i], limits.max_array_bytes));
    if (array.shape.size() != 1) {
      return base::error(StatusCode::kCorruptData, "npz: array {} is {}, expected [records]",
                         kNames[i], shape_of(array));
    }
    ARGOSY_ASSIGN_OR_RETURN(columns[i],
                            integers_of<int64_t>(array, 0, std::numeric_limits<int64_t>::max()));
    if (columns[i].size() != columns[0].size()) {
      return base::error(StatusCode::kCorruptData, "npz: array {} has {} records but step has {}",
                         kNames[i], columns[i].size(), columns[0].size());
    }
  }
  int64_t first = 0;
  for (size_t i = 0; i < columns[0].size(); ++i) {
    trace->records.push_back({columns[0][i], columns[1][i], columns[2][i], first, columns[3][i]});
    if (__builtin_add_overflow(first, columns[3][i], &first)) {
      return base::error(StatusCode::kCorruptData, "npz: num_tokens sums beyond 64 bits at {}", i);
    }
  }
  return {};
}

template <typename T>
io::NpySource source(const char* name, DType dtype, std::vector<int64_t> shape,
                     const std::vector<T>& values) {
  return {name, dtype, std::move(shape), std::as_bytes(std::span(values))};
}

}  // namespace

Result<RouterTrace> io::parse_trace_npz(std::string_view bytes, const TraceLimits& limits) {
  ARGOSY_ASSIGN_OR_RETURN(const NpzReader npz, NpzReader::open(bytes));
  RouterTrace trace;
  ARGOSY_ASSIGN_OR_RETURN(const std::vector<int64_t> shape, add_rows(npz, limits, &trace));
  if (npz.has("num_experts")) {
    ARGOSY_ASSIGN_OR_RETURN(const NpyArray array, npz.read("num_experts", limits.max_array_bytes));
    ARGOSY_ASSIGN_OR_RETURN(const std::vector<int64_t> value,
                            integers_of<int64_t>(array, 0, kMaxId));
    if (value.size() != 1) {
      return base::error(StatusCode::kCorruptData, "npz: array num_experts is {}, expected one",
                         shape_of(array));
    }
    trace.num_experts = value[0];
  }
  const Status added = shape.size() == kDenseDims ? add_dense_records(shape, &trace)
                                                  : add_records(npz, limits, &trace);
  ARGOSY_RETURN_IF_ERROR(added);
  return trace;
}

Result<std::string> to_npz(const RouterTrace& trace) {
  ARGOSY_RETURN_IF_ERROR(validate(trace));
  std::vector<int64_t> step, layer, rank, num_tokens;
  for (const TraceRecord& record : trace.records) {
    step.push_back(record.step);
    layer.push_back(record.layer);
    rank.push_back(record.rank);
    num_tokens.push_back(record.num_tokens);
  }
  const auto num_records = static_cast<int64_t>(trace.records.size());
  const int64_t num_rows =
      trace.top_k == 0 ? 0 : static_cast<int64_t>(trace.topk_idx.size()) / trace.top_k;
  const std::vector<int64_t> num_experts = {trace.num_experts};
  std::vector<io::NpySource> arrays = {
      source("step", DType::kI64, {num_records}, step),
      source("layer", DType::kI64, {num_records}, layer),
      source("rank", DType::kI64, {num_records}, rank),
      source("num_tokens", DType::kI64, {num_records}, num_tokens),
      source("num_experts", DType::kI64, {}, num_experts),
      source("topk_idx", DType::kI32, {num_rows, trace.top_k}, trace.topk_idx)};
  if (!trace.topk_weights.empty()) {
    arrays.push_back(
        source("topk_weights", DType::kF32, {num_rows, trace.top_k}, trace.topk_weights));
  }
  return io::make_npz(arrays);
}

}  // namespace argosy
