// Router traces: their rules, the recorder, and files by name. Test: tests/io/router_trace_test.cc.
#include "argosy/router_trace.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <tuple>

#include "base/error.h"
#include "io/file.h"
#include "io/partial_file.h"
#include "io/router_trace_format.h"

namespace argosy {
namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

Status check_records(const RouterTrace& trace, int64_t num_rows) {
  int64_t next = 0;
  std::vector<std::tuple<int64_t, int64_t, int64_t>> places;
  for (const TraceRecord& record : trace.records) {
    const auto index = &record - trace.records.data();
    if (record.step < 0 || record.layer < 0 || record.rank < 0) {
      return base::invalid("router trace: record {} is step {}, layer {}, rank {}", index,
                           record.step, record.layer, record.rank);
    }
    if (record.first_token != next || record.num_tokens < 0 ||
        record.num_tokens > num_rows - next) {
      return base::invalid(
          "router trace: record {} is {} rows from {} on, expected to begin at {} of {}", index,
          record.num_tokens, record.first_token, next, num_rows);
    }
    next += record.num_tokens;
    places.emplace_back(record.step, record.layer, record.rank);
  }
  if (next != num_rows) {
    return base::invalid("router trace: records have {} rows, topk_idx has {}", next, num_rows);
  }
  std::sort(places.begin(), places.end());
  const auto twice = std::adjacent_find(places.begin(), places.end());
  if (twice == places.end()) return {};
  return base::invalid("router trace: step {}, layer {}, rank {} stands twice", std::get<0>(*twice),
                       std::get<1>(*twice), std::get<2>(*twice));
}

Status check_rows(const RouterTrace& trace, int64_t num_rows) {
  const int64_t end = trace.num_experts > 0 ? trace.num_experts : kMaxId;
  const auto top_k = static_cast<size_t>(trace.top_k);
  std::vector<int32_t> row(top_k);
  for (int64_t at = 0; at < num_rows; ++at) {
    const int32_t* const ids = trace.topk_idx.data() + static_cast<size_t>(at) * top_k;
    row.assign(ids, ids + top_k);
    std::sort(row.begin(), row.end());
    if (row.front() < -1 || row.back() >= end) {
      return base::invalid("router trace: row {} holds expert {}, expected -1 to {}", at,
                           row.front() < -1 ? row.front() : row.back(), end - 1);
    }
    const auto first = std::upper_bound(row.begin(), row.end(), -1);
    const auto twice = std::adjacent_find(first, row.end());
    if (twice != row.end()) {
      return base::invalid("router trace: row {} holds expert {} twice", at, *twice);
    }
  }
  const auto odd = std::find_if(trace.topk_weights.begin(), trace.topk_weights.end(),
                                [](float weight) { return !std::isfinite(weight); });
  if (odd == trace.topk_weights.end()) return {};
  return base::invalid("router trace: the weight at row {}, position {} is {}",
                       (odd - trace.topk_weights.begin()) / trace.top_k,
                       (odd - trace.topk_weights.begin()) % trace.top_k, *odd);
}

}  // namespace

Status validate(const RouterTrace& trace) {
  if (trace.num_experts < 0 || trace.num_experts > kMaxId) {
    return base::invalid("router trace: num_experts is {}, expected 0 to {}", trace.num_experts,
                         kMaxId);
  }
  const auto size = static_cast<int64_t>(trace.topk_idx.size());
  if (trace.top_k < 0 || trace.top_k > kMaxId || (trace.top_k == 0 && size > 0)) {
    return base::invalid("router trace: top_k is {}, expected 1 to {}", trace.top_k, kMaxId);
  }
  const int64_t num_rows = trace.top_k == 0 ? 0 : size / trace.top_k;
  if (num_rows * trace.top_k != size) {
    return base::invalid("router trace: topk_idx has {} ids, no multiple of top_k {}", size,
                         trace.top_k);
  }
  if (!trace.topk_weights.empty() && trace.topk_weights.size() != trace.topk_idx.size()) {
    return base::invalid("router trace: {} weights for {} ids", trace.topk_weights.size(), size);
  }
  ARGOSY_RETURN_IF_ERROR(check_records(trace, num_rows));
  return check_rows(trace, num_rows);
}

Status append_routing(int64_t step, int64_t layer, int64_t rank, const Routing& routing,
                      RouterTrace* trace) {
  if (step < 0 || layer < 0 || rank < 0) {
    return base::invalid("router trace: cannot record step {}, layer {}, rank {}", step, layer,
                         rank);
  }
  const bool is_first = trace->records.empty();
  const bool fits =
      is_first || (trace->num_experts == routing.num_experts && trace->top_k == routing.top_k);
  const auto size = static_cast<size_t>(routing.num_tokens * routing.top_k);
  if (!fits || routing.topk_idx.size() != size || routing.topk_weights.values.size() != size) {
    return base::invalid(
        "router trace: a routing of {} tokens, {} experts, top-{} with {} ids and {} weights does "
        "not go with a trace of {} experts, top-{}",
        routing.num_tokens, routing.num_experts, routing.top_k, routing.topk_idx.size(),
        routing.topk_weights.values.size(), is_first ? routing.num_experts : trace->num_experts,
        is_first ? routing.top_k : trace->top_k);
  }
  trace->num_experts = routing.num_experts;
  trace->top_k = routing.top_k;
  const int64_t first =
      is_first ? 0 : trace->records.back().first_token + trace->records.back().num_tokens;
  trace->records.push_back({step, layer, rank, first, routing.num_tokens});
  trace->topk_idx.insert(trace->topk_idx.end(), routing.topk_idx.begin(), routing.topk_idx.end());
  trace->topk_weights.insert(trace->topk_weights.end(), routing.topk_weights.values.begin(),
                             routing.topk_weights.values.end());
  return {};
}

Result<std::string> to_bytes(const RouterTrace& trace, std::string_view path) {
  if (path.ends_with(".npz")) return to_npz(trace);
  if (path.ends_with(".jsonl")) return to_jsonl(trace);
  return base::invalid("a router trace is a .npz or a .jsonl file, not '{}'", path);
}

Status write_router_trace(const std::string& path, const RouterTrace& trace) {
  ARGOSY_ASSIGN_OR_RETURN(const std::string bytes, to_bytes(trace, path));
  io::PartialFile file(path);
  ARGOSY_RETURN_IF_ERROR(file.create());
  ARGOSY_RETURN_IF_ERROR(file.write(std::as_bytes(std::span(bytes))));
  return file.rename_to_target();
}

Result<RouterTrace> parse_router_trace(std::string_view bytes, const TraceLimits& limits) {
  const bool is_zip = bytes.starts_with("PK");
  ARGOSY_ASSIGN_OR_RETURN(RouterTrace trace, is_zip ? io::parse_trace_npz(bytes, limits)
                                                    : io::parse_trace_jsonl(bytes));
  ARGOSY_RETURN_IF_ERROR(validate(trace));
  return trace;
}

Result<RouterTrace> read_router_trace(const std::string& path, const TraceLimits& limits) {
  ARGOSY_ASSIGN_OR_RETURN(const std::string bytes, io::read_text(path, limits.max_file_bytes));
  Result<RouterTrace> trace = parse_router_trace(bytes, limits);
  if (trace) return trace;
  return Status(trace.error().code(), fmt::format("{}: {}", path, trace.error().message()));
}

}  // namespace argosy
