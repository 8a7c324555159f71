// Fields in order, each a count and its elements. Test: tests/cli/rank_record_test.cc.
#include "tools/rank_record.h"

#include <fmt/format.h>

#include <cstring>
#include <type_traits>

namespace argosy::tools {
namespace {

class Writer {
 public:
  template <typename T>
  bool operator()(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto count = static_cast<int64_t>(values.size());
    append(std::as_bytes(std::span(&count, 1)));
    append(std::as_bytes(std::span(values)));
    return true;
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void append(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  bool operator()(std::vector<T>& values) {
    int64_t count = 0;
    if (bytes_.size() < sizeof(count)) return false;
    std::memcpy(&count, bytes_.data(), sizeof(count));
    bytes_ = bytes_.subspan(sizeof(count));
    if (count < 0 || static_cast<uint64_t>(count) > bytes_.size() / sizeof(T)) return false;
    values.resize(static_cast<size_t>(count));
    const size_t size = values.size() * sizeof(T);
    if (size > 0) std::memcpy(values.data(), bytes_.data(), size);
    bytes_ = bytes_.subspan(size);
    return true;
  }
  bool is_at_end() const { return bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
};

// Numbers that stand alone.
struct Scalars {
  int64_t weight_bytes_read = 0;
  int64_t num_rounds = 0;
  int64_t dispatch_bytes = 0;
  int64_t combine_bytes = 0;
  int64_t saved_by_dedup_bytes = 0;
  int64_t num_nonfinite_rows = 0;
  int64_t row_bytes = 0;
  int64_t dropped_spans = 0;
  int64_t mode = 0;
  int64_t dispatch_row_bytes = 0;
  int64_t latency_tokens = 0;
  WeightBytes weight_bytes;
  StageTimes seconds;
};

template <typename Field, typename Gradients>
bool each_gradient(Field& field, Gradients& g) {
  return field(g.gate) && field(g.gate_bias) && field(g.expert_gate) && field(g.expert_up) &&
         field(g.expert_down) && field(g.expert_gate_bias) && field(g.expert_up_bias) &&
         field(g.expert_down_bias) && field(g.shared_gate) && field(g.shared_up) &&
         field(g.shared_down) && field(g.shared_scale);
}

// The one list of fields, for both directions.
template <typename Field, typename Record>
bool each_field(Field& field, Record& record, std::vector<Scalars>& scalars) {
  return field(scalars) && field(record.report.rows_per_expert) &&
         field(record.report.rows_per_rank) && field(record.report.sent_rows) &&
         field(record.report.sent_rows_dedup) && field(record.report.spans) &&
         field(record.seconds) && field(record.output) && field(record.topk_idx) &&
         field(record.topk_weights) && field(record.pinned_cpus) && field(record.waits) &&
         field(record.d_hidden) && each_gradient(field, record.gradients);
}

}  // namespace

std::vector<std::byte> to_bytes(const RankRecord& record) {
  const MoeReport& report = record.report;
  std::vector<Scalars> scalars = {
      {record.weight_bytes_read, report.num_rounds, report.dispatch_bytes, report.combine_bytes,
       report.saved_by_dedup_bytes, report.num_nonfinite_rows, report.row_bytes,
       report.dropped_spans, static_cast<int64_t>(report.mode), report.dispatch_row_bytes,
       record.latency_tokens, record.weight_bytes, report.seconds}};
  Writer writer;
  each_field(writer, record, scalars);
  return writer.take();
}

Result<RankRecord> rank_record_from(std::span<const std::byte> bytes) {
  RankRecord record;
  std::vector<Scalars> scalars;
  Reader reader(bytes);
  if (!each_field(reader, record, scalars) || !reader.is_at_end() || scalars.size() != 1) {
    return Status(StatusCode::kCorruptData,
                  fmt::format("{} bytes are no record of a rank", bytes.size()));
  }
  for (const StageSpan& span : record.report.spans) {
    const auto stage = static_cast<int32_t>(span.stage);
    if (stage < 0 || stage >= kNumMoeStages) {
      return Status(StatusCode::kCorruptData,
                    fmt::format("the record of a rank has a span of stage {}", stage));
    }
  }
  const Scalars& one = scalars[0];
  record.weight_bytes_read = one.weight_bytes_read;
  record.weight_bytes = one.weight_bytes;
  record.report.num_rounds = one.num_rounds;
  record.report.dispatch_bytes = one.dispatch_bytes;
  record.report.combine_bytes = one.combine_bytes;
  record.report.saved_by_dedup_bytes = one.saved_by_dedup_bytes;
  record.report.num_nonfinite_rows = one.num_nonfinite_rows;
  record.report.row_bytes = one.row_bytes;
  record.report.dropped_spans = one.dropped_spans;
  record.report.seconds = one.seconds;
  record.report.mode = one.mode == static_cast<int64_t>(MoeMode::kLatency) ? MoeMode::kLatency
                                                                           : MoeMode::kThroughput;
  record.report.dispatch_row_bytes = one.dispatch_row_bytes;
  record.latency_tokens = one.latency_tokens;
  return record;
}

}  // namespace argosy::tools
