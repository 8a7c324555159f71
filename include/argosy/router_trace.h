// Router traces: which experts the tokens of each step, layer and rank went to. A plain value that
// is recorded, written, read and replayed without logits or weights.
//
// Two formats, told apart by their first bytes (docs/routing.md has every array and key):
//   .npz    numpy.load reads it; written stored, read stored or deflated (numpy.savez_compressed)
//   .jsonl  one record a line, to read by eye
// Files are never trusted: the memory taken is bounded by the file's size and TraceLimits, what is
// accepted obeys the rules of RouterTrace. Test: tests/io/router_trace_test.cc.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/router.h"
#include "argosy/status.h"

namespace argosy {

// The tokens of one step, layer and rank: rows [first_token, first_token + num_tokens) of the trace.
struct TraceRecord {
  int64_t step = 0;
  int64_t layer = 0;
  int64_t rank = 0;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
};

// Records tile the rows in order. No (step, layer, rank) stands twice.
struct RouterTrace {
  int64_t num_experts = 0;  // 0: the file does not say; ids then are at most int32
  int64_t top_k = 0;        // 0 only without rows
  std::vector<TraceRecord> records;
  std::vector<int32_t> topk_idx;    // [rows, K], -1 = nobody, no expert twice in a row
  std::vector<float> topk_weights;  // [rows, K], finite, or empty: not recorded
};

// Adds one record: the recorder. Errors: kInvalidArgument for a routing of other sizes than the
// trace's, or for a negative index; *trace is then unchanged.
Status append_routing(int64_t step, int64_t layer, int64_t rank, const Routing& routing,
                      RouterTrace* trace);

// Ok, or kInvalidArgument naming the record or row that breaks a rule of RouterTrace.
Status validate(const RouterTrace& trace);

// The bytes of a file. Errors: those of validate(); kUnsupported for an array of 4 GiB or more.
Result<std::string> to_npz(const RouterTrace& trace);
Result<std::string> to_jsonl(const RouterTrace& trace);
// Either, by the end of the name, .npz or .jsonl; kInvalidArgument for another.
Result<std::string> to_bytes(const RouterTrace& trace, std::string_view path);

// Writes to_bytes(), beside the target and then renamed over it. Errors: also kIo.
Status write_router_trace(const std::string& path, const RouterTrace& trace);

struct TraceLimits {
  int64_t max_file_bytes = int64_t{4} << 30;
  int64_t max_array_bytes = int64_t{4} << 30;  // of one array of an npz, inflated
};

// Reads either format. An npz that holds topk_idx [steps, layers, tokens, K] and no record arrays
// is read as one record per step and layer, of rank 0. Errors: kCorruptData naming array or line;
// kUnsupported for what numpy can store and this cannot read (other dtypes, big endian, Fortran
// order, other compression); kInvalidArgument for a trace that breaks a rule.
Result<RouterTrace> parse_router_trace(std::string_view bytes, const TraceLimits& limits = {});
// Also kNotFound, kIo.
Result<RouterTrace> read_router_trace(const std::string& path, const TraceLimits& limits = {});

// What one layer of a trace loads, over all its records. The replay.
struct TraceLayerLoad {
  int64_t layer = 0;
  int64_t num_steps = 0;
  int64_t num_tokens = 0;
  std::vector<int64_t> counts;      // [E] rows per expert over all steps
  std::vector<int64_t> rank_loads;  // [R] rows per rank that owns the experts
  // Mean over the steps with a row of (largest load / mean load) in that step; 1 without such.
  double expert_peak = 1;
  double rank_peak = 1;
};

// Loads by rising layer, experts owned in contiguous parts by `num_ranks` ranks. `num_experts` 0:
// the trace's, or one past its largest id. Errors: kInvalidArgument for ids outside, for a number of
// experts that contradicts the trace, for num_ranks below 1; kUnsupported for more than 2^16 experts
// or 2^22 loads (layers x experts and ranks).
Result<std::vector<TraceLayerLoad>> replay_router_trace(const RouterTrace& trace,
                                                        int64_t num_experts, int num_ranks);

}  // namespace argosy
