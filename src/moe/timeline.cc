// See timeline.h. Test: tests/moe/timeline_test.cc.
#include "moe/timeline.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>

#include "platform/clock.h"

namespace argosy {
namespace {

struct StageEntry {
  const char* name;
  double StageTimes::*seconds;
};

// By MoeStage.
constexpr std::array<StageEntry, kNumMoeStages> kStages = {{{"route", &StageTimes::route},
                                                            {"counts", &StageTimes::counts},
                                                            {"dispatch", &StageTimes::dispatch},
                                                            {"experts", &StageTimes::experts},
                                                            {"combine", &StageTimes::combine},
                                                            {"shared", &StageTimes::shared}}};

const StageEntry& entry(MoeStage stage) { return kStages[static_cast<size_t>(stage)]; }

// Every stage outside of the rounds laps once, counts twice.
constexpr int64_t kSpansOutsideRounds = 4;
constexpr int64_t kSpansPerRound = 3;
constexpr int64_t kMaxSpans = kSpansOutsideRounds + kSpansPerRound * MoeReport::kMaxTimedRounds;

// The span of a stage of a round; null where the round is not kept.
StageSpan* span_of(MoeReport* report, MoeStage stage, int64_t round) {
  const int64_t at = kSpansOutsideRounds + kSpansPerRound * round +
                     (static_cast<int64_t>(stage) - static_cast<int64_t>(MoeStage::kDispatch));
  const bool kept = round < MoeReport::kMaxTimedRounds;
  return kept ? &report->spans[static_cast<size_t>(at)] : nullptr;
}

void count_computed(const DispatchPlan& plan, MoeReport* report) {
  for (size_t group = 0; group < plan.group_sizes.size(); ++group) {
    int64_t slot = plan.group_offsets[group];
    const int64_t end = slot + plan.group_sizes[group];
    while (slot < end) {
      const int64_t round = slot / plan.round_rows;
      const int64_t next = std::min(end, (round + 1) * plan.round_rows);
      if (StageSpan* const span = span_of(report, MoeStage::kExperts, round); span != nullptr) {
        span->rows += next - slot;
      }
      slot = next;
    }
  }
}

// Calls each(dest, round, is_first) for every row sent; `is_first` once per token, destination and
// round. `round_of` gives the round of assignment `at`.
template <typename RoundOf, typename Each>
void for_each_sent_row(const DispatchPlan& plan, const RoundOf& round_of, const Each& each) {
  const std::span<const int32_t> dest_rank(plan.dest_rank);
  const auto top_k = static_cast<size_t>(plan.top_k);
  for (size_t row = 0; row < dest_rank.size(); row += top_k) {
    for (size_t at = row; at < row + top_k; ++at) {
      const int dest = dest_rank[at];
      if (dest < 0) continue;
      const int64_t round = round_of(at);
      bool sent = false;
      for (size_t before = row; before < at && !sent; ++before) {
        sent = dest_rank[before] == dest && round_of(before) == round;
      }
      each(static_cast<size_t>(dest), round, !sent);
    }
  }
}

// A span of one round: the rows to every rank, and the bytes of those that leave.
void fill_from(const std::vector<int64_t>& rows, int own_rank, int64_t row_bytes, StageSpan* span) {
  span->rows = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  span->bytes = (span->rows - rows[static_cast<size_t>(own_rank)]) * row_bytes;
}

void count_sent(const DispatchPlan& plan, MoeReport* report) {
  std::vector<int64_t>& rows = report->sent_rows;
  std::vector<int64_t>& rows_dedup = report->sent_rows_dedup;
  rows.assign(static_cast<size_t>(plan.num_ranks), 0);
  rows_dedup.assign(static_cast<size_t>(plan.num_ranks), 0);
  if (plan.num_rounds == 1) {  // most calls: no divisions, and spans filled once
    for_each_sent_row(
        plan, [](size_t) { return int64_t{0}; },
        [rows = rows.data(), rows_dedup = rows_dedup.data()](size_t dest, int64_t, bool is_first) {
          ++rows[dest];
          rows_dedup[dest] += is_first ? 1 : 0;
        });
    fill_from(rows, plan.rank, report->row_bytes, span_of(report, MoeStage::kCombine, 0));
    fill_from(rows_dedup, plan.rank, report->dispatch_row_bytes,
              span_of(report, MoeStage::kDispatch, 0));
    return;
  }
  const auto add = [&](MoeStage stage, int64_t round, size_t dest) {
    StageSpan* const span = span_of(report, stage, round);
    if (span == nullptr) return;
    ++span->rows;
    if (dest == static_cast<size_t>(plan.rank)) return;
    span->bytes += stage == MoeStage::kDispatch ? report->dispatch_row_bytes : report->row_bytes;
  };
  for_each_sent_row(
      plan, [&](size_t at) { return plan.dest_slot[at] / plan.round_rows; },
      [&](size_t dest, int64_t round, bool is_first) {
        ++rows[dest];
        add(MoeStage::kCombine, round, dest);
        if (!is_first) return;
        ++rows_dedup[dest];
        add(MoeStage::kDispatch, round, dest);
      });
}

}  // namespace

const char* name_of(MoeStage stage) { return entry(stage).name; }

double seconds_of(const StageTimes& times, MoeStage stage) { return times.*entry(stage).seconds; }

Timeline::Timeline() { spans_.reserve(static_cast<size_t>(kMaxSpans)); }

void Timeline::start() {
  seconds_ = StageTimes();
  spans_.clear();
  dropped_spans_ = 0;
  begin_ = platform::now_seconds();
  mark_ = begin_;
}

void Timeline::lap(MoeStage stage, int64_t round) {
  const double now = platform::now_seconds();
  seconds_.*entry(stage).seconds += now - mark_;
  if (round < MoeReport::kMaxTimedRounds) {
    spans_.push_back({stage, static_cast<int32_t>(round), mark_, now, 0, 0});
  } else {
    ++dropped_spans_;
  }
  mark_ = now;
}

void Timeline::write(MoeReport* report) const {
  report->seconds = seconds_;
  report->seconds.total = mark_ - begin_;
  // At once for the most there can be: the number of rounds may change from call to call.
  report->spans.reserve(static_cast<size_t>(kMaxSpans));
  report->spans.assign(spans_.begin(), spans_.end());
  report->dropped_spans = dropped_spans_;
}

void count_part(const Placement& placement, const Routing& routing, int64_t received,
                PartTraffic* traffic) {
  traffic->slots.assign(static_cast<size_t>(placement.num_ranks), 0);
  traffic->rows.assign(static_cast<size_t>(placement.num_ranks), 0);
  traffic->received = received;
  std::vector<int64_t> last_token(static_cast<size_t>(placement.num_ranks), -1);
  for (int64_t id = 0; id < routing.num_tokens * routing.top_k; ++id) {
    const int32_t expert = routing.topk_idx[static_cast<size_t>(id)];
    if (expert < 0) continue;
    const auto dest = static_cast<size_t>(placement.owner(expert));
    ++traffic->rows[dest];
    if (last_token[dest] == id / routing.top_k) continue;
    last_token[dest] = id / routing.top_k;
    ++traffic->slots[dest];
  }
}

void count_part_traffic(const std::vector<PartTraffic>& parts, int64_t num_valid_tokens, int rank,
                        MoeReport* report) {
  report->sent_rows.assign(report->rows_per_rank.size(), 0);
  report->sent_rows_dedup.assign(report->rows_per_rank.size(), 0);
  for (const PartTraffic& part : parts) {
    for (size_t dest = 0; dest < part.rows.size(); ++dest) {
      report->sent_rows[dest] += part.rows[dest];
      report->sent_rows_dedup[dest] += part.slots[dest];
    }
  }
  const auto leaving = [&](const std::vector<int64_t>& rows) {
    return std::accumulate(rows.begin(), rows.end(), int64_t{0}) - rows[static_cast<size_t>(rank)];
  };
  report->dispatch_bytes = leaving(report->sent_rows_dedup) * report->dispatch_row_bytes;
  report->combine_bytes = leaving(report->sent_rows) * report->row_bytes;
  report->saved_by_dedup_bytes =
      leaving(report->sent_rows) * report->dispatch_row_bytes - report->dispatch_bytes;
  int64_t last_issued = -1;
  for (StageSpan& span : report->spans) {
    const bool by_token = span.stage == MoeStage::kRoute || span.stage == MoeStage::kShared;
    if (by_token) span.rows = num_valid_tokens;
    if (span.round < 0 || span.round >= static_cast<int64_t>(parts.size())) continue;
    const PartTraffic& part = parts[static_cast<size_t>(span.round)];
    if (span.stage == MoeStage::kExperts) span.rows = part.received;
    if (span.stage == MoeStage::kCombine) fill_from(part.rows, rank, report->row_bytes, &span);
    // Sending and waiting are two spans: the rows belong to the first.
    if (span.stage != MoeStage::kDispatch || span.round == last_issued) continue;
    last_issued = span.round;
    fill_from(part.slots, rank, report->dispatch_row_bytes, &span);
  }
}

void count_traffic(const DispatchPlan& plan, int64_t num_valid_tokens, MoeReport* report) {
  for (StageSpan& span : report->spans) {
    const bool by_token = span.stage == MoeStage::kRoute || span.stage == MoeStage::kShared;
    if (by_token) span.rows = num_valid_tokens;
  }
  count_computed(plan, report);
  count_sent(plan, report);
}

}  // namespace argosy
