// A router trace as lines: {"step", "layer", "rank", "num_experts", "top_k", "topk_idx",
// "topk_weights"}, one record each. A line at a time is a tree. Test:
// tests/io/router_trace_test.cc.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "base/error.h"
#include "io/json.h"
#include "io/router_trace_format.h"

namespace argosy {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();
constexpr std::string_view kKeys[] = {"step",  "layer",    "rank",        "num_experts",
                                      "top_k", "topk_idx", "topk_weights"};

template <typename... Args>
Status corrupt(int64_t line, fmt::format_string<Args...> format, Args&&... args) {
  return base::error(StatusCode::kCorruptData, "router trace line {}: {}", line,
                     fmt::format(format, std::forward<Args>(args)...));
}

std::string shown(const Json& value) {
  if (value.is_string()) return io::in_quotes(value.get_ref<const std::string&>());
  if (value.is_structured()) return value.is_object() ? "an object" : "a list";
  return value.dump();
}

std::optional<int64_t> integer_of(const Json& value, int64_t lowest, int64_t highest) {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || std::in_range<int64_t>(value.get<uint64_t>()));
  if (!fits) return std::nullopt;
  const auto number = value.get<int64_t>();
  return number >= lowest && number <= highest ? std::optional(number) : std::nullopt;
}

// Absent is `otherwise`, which is an error when it is negative.
Result<int64_t> field(const Json& root, std::string_view name, int64_t line, int64_t highest,
                      int64_t otherwise) {
  const auto at = root.find(std::string(name));
  if (at == root.end()) {
    if (otherwise >= 0) return otherwise;
    return corrupt(line, "{} is missing", name);
  }
  const std::optional<int64_t> value = integer_of(*at, 0, highest);
  if (!value) return corrupt(line, "{} is {}, expected an integer", name, shown(*at));
  return *value;
}

// A list of lists of `top_k` numbers; `add` takes one number or refuses it.
template <typename Add>
Status read_rows(const Json& rows, std::string_view name, int64_t line, int64_t* top_k,
                 const Add& add) {
  if (!rows.is_array()) return corrupt(line, "{} is {}, expected a list", name, shown(rows));
  for (const Json& row : rows) {
    if (!row.is_array() || row.empty()) {
      return corrupt(line, "{} holds {}, expected lists of ids", name, shown(row));
    }
    if (*top_k == 0) *top_k = static_cast<int64_t>(row.size());
    if (static_cast<int64_t>(row.size()) != *top_k) {
      return corrupt(line, "{} holds a row of {}, expected {}", name, row.size(), *top_k);
    }
    for (const Json& value : row) {
      if (!add(value)) return corrupt(line, "{} holds {}", name, shown(value));
    }
  }
  return {};
}

Status read_weights(const Json& root, int64_t line, RouterTrace* trace) {
  const auto at = root.find("topk_weights");
  if (at != root.end()) {
    ARGOSY_RETURN_IF_ERROR(
        read_rows(*at, "topk_weights", line, &trace->top_k, [&](const Json& value) {
          constexpr double kMax = std::numeric_limits<float>::max();
          if (!value.is_number() || std::abs(value.get<double>()) > kMax) return false;
          trace->topk_weights.push_back(static_cast<float>(value.get<double>()));
          return true;
        }));
  }
  // All lines with rows have weights or none has.
  const bool has_rows = trace->records.back().num_tokens > 0;
  const size_t num_weights = trace->topk_weights.size();
  const bool is_none = num_weights == 0 && (at == root.end() || !has_rows);
  if (is_none || num_weights == trace->topk_idx.size()) return {};
  return corrupt(line, "{} weights for {} ids up to here", num_weights, trace->topk_idx.size());
}

Status read_line(std::string_view text, int64_t line, RouterTrace* trace) {
  ARGOSY_ASSIGN_OR_RETURN(
      const Json root,
      io::parse_json(text, fmt::format("router trace line {}", line), text.size()));
  if (!root.is_object()) return corrupt(line, "no JSON object");
  for (const auto& [key, value] : root.items()) {
    if (std::find(std::begin(kKeys), std::end(kKeys), key) != std::end(kKeys)) continue;
    return corrupt(line, "unknown key {}; there are: {}", io::in_quotes(key),
                   fmt::join(kKeys, ", "));
  }
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const bool is_first = trace->records.empty();
  TraceRecord record;
  ARGOSY_ASSIGN_OR_RETURN(record.step, field(root, "step", line, kMost, -1));
  ARGOSY_ASSIGN_OR_RETURN(record.layer, field(root, "layer", line, kMost, -1));
  ARGOSY_ASSIGN_OR_RETURN(record.rank, field(root, "rank", line, kMost, 0));
  ARGOSY_ASSIGN_OR_RETURN(const int64_t num_experts,
                          field(root, "num_experts", line, kMaxId, trace->num_experts));
  ARGOSY_ASSIGN_OR_RETURN(const int64_t top_k, field(root, "top_k", line, kMaxId, trace->top_k));
  if (!is_first &&
      (num_experts != trace->num_experts || (trace->top_k != 0 && top_k != trace->top_k))) {
    return corrupt(line, "num_experts {} and top_k {}, but {} and {} before", num_experts, top_k,
                   trace->num_experts, trace->top_k);
  }
  trace->num_experts = num_experts;
  trace->top_k = top_k;
  const auto ids = root.find("topk_idx");
  if (ids == root.end()) return corrupt(line, "topk_idx is missing");
  const size_t before = trace->topk_idx.size();
  ARGOSY_RETURN_IF_ERROR(read_rows(*ids, "topk_idx", line, &trace->top_k, [&](const Json& value) {
    const std::optional<int64_t> id = integer_of(value, -1, kMaxId);
    if (id) trace->topk_idx.push_back(static_cast<int32_t>(*id));
    return id.has_value();
  }));
  record.num_tokens = static_cast<int64_t>(ids->size());
  record.first_token = trace->top_k == 0 ? 0 : static_cast<int64_t>(before) / trace->top_k;
  trace->records.push_back(record);
  return read_weights(root, line, trace);
}

void append_number(int32_t id, std::string* text) { *text += fmt::format("{}", id); }

void append_number(float weight, std::string* text) {
  // "-0" is an integer to a JSON reader, and integers have no negative zero.
  *text += weight == 0 && std::signbit(weight) ? "-0.0" : fmt::format("{}", weight);
}

// "[[1,2],[3,4]]"
template <typename T>
std::string rows_of(std::span<const T> values, int64_t top_k) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    const bool begins = i % static_cast<size_t>(top_k) == 0;
    text += i == 0 ? "[" : begins ? "],[" : ",";
    append_number(values[i], &text);
  }
  return text + (values.empty() ? "]" : "]]");
}

}  // namespace

Result<RouterTrace> io::parse_trace_jsonl(std::string_view text) {
  RouterTrace trace;
  for (int64_t line = 1; !text.empty(); ++line) {
    const size_t end = text.find('\n');
    const std::string_view one = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (one.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    ARGOSY_RETURN_IF_ERROR(read_line(one, line, &trace));
  }
  return trace;
}

Result<std::string> to_jsonl(const RouterTrace& trace) {
  ARGOSY_RETURN_IF_ERROR(validate(trace));
  std::string text;
  for (const TraceRecord& record : trace.records) {
    const auto first = static_cast<size_t>(record.first_token * trace.top_k);
    const auto count = static_cast<size_t>(record.num_tokens * trace.top_k);
    text +=
        fmt::format(R"({{"step":{},"layer":{},"rank":{},"num_experts":{},"top_k":{},"topk_idx":{})",
                    record.step, record.layer, record.rank, trace.num_experts, trace.top_k,
                    rows_of(std::span(trace.topk_idx).subspan(first, count), trace.top_k));
    if (!trace.topk_weights.empty()) {
      text +=
          fmt::format(R"(,"topk_weights":{})",
                      rows_of(std::span(trace.topk_weights).subspan(first, count), trace.top_k));
    }
    text += "}\n";
  }
  return text;
}

}  // namespace argosy
