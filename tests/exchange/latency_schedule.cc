// Running a schedule that was drawn (latency_schedule_draw.cc), and its checks. Test: latency_schedule_test.cc.
#include "exchange/latency_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "exchange/latency_schedule_values.h"

namespace argosy::testing {
namespace {

using State = LatencyExchange::State;

constexpr std::array<const char*, 4> kKindNames{"issue_dispatch", "wait_dispatch", "issue_combine",
                                                "wait_combine"};

void poison(std::byte* data, int64_t bytes) {
  if (bytes > 0) std::memset(data, 0xFF, static_cast<size_t>(bytes));
}

std::string failure_text(int exchange, int call) {
  return fmt::format("no rows for call {} of exchange {}", call, exchange);
}

}  // namespace

LatencySchedule::LatencySchedule() : pool_(std::move(*ThreadPool::create(1))) {}

std::string LatencySchedule::run(uint64_t seed, const ScheduleRules& rules) {
  random_ = SmallRandom(seed);
  rules_ = rules;
  failure_.clear();
  num_steps_ = 0;
  draw_shape(rules);
  if (!failure_.empty()) return failure_;
  draw_programs();
  draw_pace();
  while (failure_.empty() && pick_and_do()) {
    if (random_.one_in(48)) draw_pace();
    if (rules.fault == PlantedFault::kNone && !world_.broken().empty()) fail(world_.broken());
  }
  int64_t num_signals = 0;
  for (int i = 0; i < num_layers_; ++i) {
    num_signals += int64_t{2} * num_ranks_ * num_ranks_ * layers_[static_cast<size_t>(i)].num_calls;
  }
  for (int rank = 0; rank < num_ranks_ && failure_.empty(); ++rank) {
    const auto at = static_cast<size_t>(rank);
    if (at_[at] == programs_[at].size()) continue;
    const Half& half = programs_[at][at_[at]];
    fail(fmt::format("hang: rank {} waits in {} of call {} of exchange {}, {} messages under way",
                     rank, kKindNames[static_cast<size_t>(half.kind)], half.call, half.exchange,
                     world_.pending().size()));
  }
  if (failure_.empty() && !world_.pending().empty()) fail("messages that nobody can deliver");
  if (failure_.empty() && world_.num_signals() != num_signals) {
    fail(fmt::format("{} signals, expected {}", world_.num_signals(), num_signals));
  }
  return failure_;
}

int64_t LatencySchedule::weight_of(const ScheduledWorld::Message& message) const {
  const int64_t weight =
      pace_.channel[static_cast<size_t>(message.source * kMaxRanks + message.dest)];
  return message.is_signal ? weight : std::min(weight, pace_.puts);
}

bool LatencySchedule::deliver(size_t which) {
  const ScheduledWorld::Message message = world_.pending()[which];
  if (!world_.deliver(which, random_)) return false;
  steps_[num_steps_++ % steps_.size()] = {.message = message};
  return true;
}

// A half that would wait is tried too, now and then: it must find out by itself, and change nothing.
bool LatencySchedule::step_rank(int rank) {
  const auto at = static_cast<size_t>(rank);
  if (at_[at] == programs_[at].size()) return false;
  const bool ready = is_ready(rank);
  if (!ready && !random_.one_in(8)) return false;
  const Half half = programs_[at][at_[at]];
  if (!do_half(rank, half)) {
    if (ready) fail(fmt::format("rank {} waits for what is said to be here", rank));
    return false;
  }
  ++at_[at];
  steps_[num_steps_++ % steps_.size()] = {
      .is_half = true, .rank = rank, .half = half, .message = {}};
  if (!ready) fail(fmt::format("rank {} goes on, though what it needs is not here", rank));
  return true;
}

bool LatencySchedule::pick_and_do() { return try_random() || try_any(false) || try_any(true); }

bool LatencySchedule::try_random() {
  for (int attempt = 0; attempt < 12; ++attempt) {
    const size_t num_pending = world_.pending().size();
    if (num_pending == 0 || random_.below(256) < pace_.rank_share) {
      const auto rank = static_cast<int>(random_.below(num_ranks_));
      if (random_.below(256) < pace_.rank[static_cast<size_t>(rank)] && step_rank(rank))
        return true;
    } else {
      const auto which = static_cast<size_t>(random_.below(static_cast<int64_t>(num_pending)));
      if (random_.below(256) < weight_of(world_.pending()[which]) && deliver(which)) return true;
    }
  }
  return false;
}

// Whatever is possible, from a random place on.
bool LatencySchedule::try_any(bool held_too) {
  const auto num_pending = static_cast<int64_t>(world_.pending().size());
  const int64_t first = random_.below(num_pending + num_ranks_);
  for (int64_t i = 0; i < num_pending + num_ranks_; ++i) {
    const int64_t which = (first + i) % (num_pending + num_ranks_);
    if (which < num_ranks_) {
      const auto rank = static_cast<int>(which);
      if ((held_too || pace_.rank[static_cast<size_t>(rank)] > 0) && step_rank(rank)) return true;
    } else {
      const auto message = static_cast<size_t>(which - num_ranks_);
      if ((held_too || weight_of(world_.pending()[message]) > 0) && deliver(message)) return true;
    }
  }
  return false;
}

// Makes the flags look as they would to a reader with the fault.
void LatencySchedule::plant(int rank, const Half& half) {
  const bool reuse = half.kind == Kind::kIssueDispatch;
  const bool sum = half.kind == Kind::kWaitCombine;
  const bool any = rules_.fault == PlantedFault::kEpochNotCompared;
  if (!any && !(reuse && rules_.fault == PlantedFault::kReuseWithoutDone) &&
      !(sum && rules_.fault == PlantedFault::kSumWithoutDone)) {
    return;
  }
  if (half.kind == Kind::kIssueCombine) return;
  State& state = state_of(rank, half);
  const uint64_t epoch =
      reuse ? state.call_of(state.last_epoch + 1).epoch : part_of(rank, half).number;
  if (epoch == 0) return;
  const auto kind = half.kind == Kind::kWaitDispatch ? LatencyLayout::kRows : LatencyLayout::kDone;
  const uint64_t wanted = LatencyFlag::of_epoch(epoch);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    std::byte* const at =
        state.own(state.flags, state.layout.flag(state.set_of(epoch), kind, peer));
    uint64_t word = 0;
    std::memcpy(&word, at, sizeof(word));
    if (word >= wanted || (any && word == 0)) continue;
    word = wanted | (word & (LatencyFlag::of_epoch(1) - 1));
    std::memcpy(at, &word, sizeof(word));
  }
}

bool LatencySchedule::is_ready(int rank) {
  const auto at = static_cast<size_t>(rank);
  const Half& half = programs_[at][at_[at]];
  if (rules_.fault != PlantedFault::kNone) plant(rank, half);
  const State& state = state_of(rank, half);
  switch (half.kind) {
    case Kind::kIssueDispatch:
      return state.can_issue();
    case Kind::kWaitDispatch:
      return state.arrived(part_of(rank, half).number, LatencyLayout::kRows);
    case Kind::kIssueCombine:
      return true;
    case Kind::kWaitCombine:
      return state.arrived(part_of(rank, half).number, LatencyLayout::kDone);
  }
  return false;
}

bool LatencySchedule::do_half(int rank, const Half& half) {
  switch (half.kind) {
    case Kind::kIssueDispatch:
      return issue_dispatch(rank, half);
    case Kind::kWaitDispatch:
      return wait_dispatch(rank, half);
    case Kind::kIssueCombine:
      return issue_combine(rank, half);
    case Kind::kWaitCombine:
      return wait_combine(rank, half);
  }
  return false;
}

bool LatencySchedule::issue_dispatch(int rank, const Half& half) {
  Part& part = part_of(rank, half);
  const LatencyOptions& options = layer_of(half).options;
  end_returned(rank, half);
  const Status local = part.fails
                           ? Status(StatusCode::kNonFinite, failure_text(half.exchange, half.call))
                           : Status();
  const Result<uint64_t> number =
      state_of(rank, half)
          .issue_dispatch(local, part.routing,
                          ConstTensorView(part.hidden.data(), options.dtype,
                                          {part.routing.num_tokens, options.hidden}),
                          {.more = part.more,
                           .decline = part.declines,
                           .numbers = call_of(half).has_numbers ? part.numbers.data() : nullptr,
                           .same = part.same});
  if (world_.take_blocked()) return false;
  check(number.error());
  part.number = half.call + uint64_t{1};
  if (number.has_value() && *number != part.number)
    fail(fmt::format("call has number {}", *number));
  int& in_flight = in_flight_[static_cast<size_t>(rank)];
  coverage_.most_in_flight = std::max(coverage_.most_in_flight, ++in_flight);
  return true;
}

bool LatencySchedule::wait_dispatch(int rank, const Half& half) {
  const Call& call = call_of(half);
  Part& part = part_of(rank, half);
  State& state = state_of(rank, half);
  const Status status = state.wait_dispatch(part.number, &part.received);
  if (world_.take_blocked()) return false;
  const auto notices = static_cast<int64_t>(sizeof(Notice)) * num_ranks_;
  poison(state.own(state.notices, state.layout.notice(state.set_of(part.number), 0)), notices);
  if (call.failing >= 0) {
    const std::string want =
        fmt::format("rank {}: {}", call.failing, failure_text(half.exchange, half.call));
    if (status.code() != StatusCode::kNonFinite || status.message() != want) {
      fail(fmt::format("the call ends with \"{}\", expected \"{}\"", status.to_string(), want));
    }
  } else if (call.differing >= 0) {
    const std::string want =
        fmt::format("rank {} has \"{}\", rank 0 \"{}\"", call.differing,
                    call.parts[static_cast<size_t>(call.differing)].same, call.parts[0].same);
    if (status.code() != StatusCode::kInvalidArgument || status.message() != want) {
      fail(fmt::format("the call ends with \"{}\", expected \"{}\"", status.to_string(), want));
    }
  } else if (!status.ok()) {
    check(status);
  } else if (part.received.declined != call.declined || part.received.more != call.more) {
    fail(fmt::format("declined {} and more {}, expected {} and {}", part.received.declined,
                     part.received.more, call.declined, call.more));
  }
  // Every home rank has summed what these results were before.
  poison_results(rank, half);
  if (!failure_.empty()) return true;
  if (call.is_over()) {
    --in_flight_[static_cast<size_t>(rank)];
    poison_slots(rank, half);
    poison(part.hidden.data(), static_cast<int64_t>(part.hidden.size()));
    return true;
  }
  check_rows(rank, half);
  if (random_.one_in(2)) write_results(rank, half);
  return true;
}

bool LatencySchedule::issue_combine(int rank, const Half& half) {
  Part& part = part_of(rank, half);
  State& state = state_of(rank, half);
  check_rows(rank, half);  // they are still what they were
  if (!part.results_written) write_results(rank, half);
  poison_slots(rank, half);
  check(state.issue_combine(part.number));
  poison(part.hidden.data(), static_cast<int64_t>(part.hidden.size()));
  for (const State::Parcel& parcel : state.call_of(part.number).parcels) {
    poison(state.outbox.data() + parcel.from, state.layout.result_bytes);
  }
  return !world_.take_blocked();
}

bool LatencySchedule::wait_combine(int rank, const Half& half) {
  Part& part = part_of(rank, half);
  State& state = state_of(rank, half);
  const LatencyOptions& options = layer_of(half).options;
  CombineInput input;
  input.topk_weights = ConstTensorView(part.routing.topk_weights.values.data(), DType::kF32,
                                       {part.routing.num_tokens, options.top_k});
  if (options.training && part.number % 2 == 0) {
    const Status status = state.wait_returned(part.number, &part.returned);
    if (world_.take_blocked()) return false;
    --in_flight_[static_cast<size_t>(rank)];
    check(status);
    part.has_returned = true;
    check_returned(rank, half);
    return true;
  }
  poison(part.output.data(), static_cast<int64_t>(part.output.size()));
  const Status status = state.wait_combine(
      part.number, input,
      TensorView(part.output.data(), options.dtype, {part.routing.num_tokens, options.hidden}));
  if (world_.take_blocked()) return false;
  --in_flight_[static_cast<size_t>(rank)];
  check(status);
  check_sums(rank, half);
  // The next rows for these return slots come after this rank's next flags of rows.
  if (options.return_path == ReturnPath::kPush) poison_results(rank, half);
  return true;
}

// Rows in the contract's order: by expert, then rising by source and token; each of a token that asked for the expert, and
// as many as there are such tokens.
void LatencySchedule::check_rows(int rank, const Half& half) {
  const Layer& layer = layer_of(half);
  const LatencyOptions& options = layer.options;
  const Call& call = call_of(half);
  const LatencyRows& rows = part_of(rank, half).received;
  const Placement& placement = state_of(rank, half).placement;
  const auto num_local = static_cast<size_t>(placement.num_local(rank));
  if (rows.group_sizes.size() != num_local || rows.group_offsets.size() != num_local + 1) {
    return fail(fmt::format("{} groups, expected {}", rows.group_sizes.size(), num_local));
  }
  alignas(64) std::array<std::byte, 64> decoded{};
  size_t next = 0;
  for (size_t group = 0; group < num_local; ++group) {
    const auto expert = static_cast<int32_t>(placement.begin(rank) + static_cast<int64_t>(group));
    for (int source = 0; source < num_ranks_; ++source) {
      const Part& sent = call.parts[static_cast<size_t>(source)];
      for (size_t at = 0; at < sent.routing.topk_idx.size(); ++at) {
        if (sent.routing.topk_idx[at] != expert) continue;
        const int64_t token = static_cast<int64_t>(at) / options.top_k;
        if (next >= rows.rows.size() || rows.source_rank[next] != source ||
            rows.source_token[next] != token) {
          return fail(fmt::format("row {} is not token {} of rank {} for expert {}", next, token,
                                  source, expert));
        }
        if (call.has_numbers && rows.numbers[next] != sent.numbers[at]) {
          return fail(fmt::format("beside row {}, token {} of rank {}: {}, expected {}", next,
                                  token, source, rows.numbers[next], sent.numbers[at]));
        }
        const std::byte* row = rows.rows[next++];
        if (layer.payload.is_quantised()) {
          decode_payload(layer.payload, row, decoded.data());
          row = decoded.data();
        }
        for (int64_t column = 0; column < options.hidden; ++column) {
          const float want = sent.rows[static_cast<size_t>(token * options.hidden + column)];
          const float got = load(options.dtype, row, column);
          if (got != want) {
            return fail(fmt::format("row {}, token {} of rank {}, column {}: {}, expected {}",
                                    next - 1, token, source, column, got, want));
          }
        }
      }
    }
    if (rows.group_offsets[group + 1] != static_cast<int64_t>(next) ||
        rows.group_offsets[group] + rows.group_sizes[group] != static_cast<int64_t>(next)) {
      return fail(fmt::format("group {} ends at {}, expected {}", group,
                              rows.group_offsets[group + 1], next));
    }
  }
  if (next != rows.rows.size()) fail(fmt::format("{} rows, expected {}", rows.rows.size(), next));
}

void LatencySchedule::write_results(int rank, const Half& half) {
  if (!failure_.empty()) return;
  const LatencyOptions& options = layer_of(half).options;
  const Call& call = call_of(half);
  Part& part = part_of(rank, half);
  const LatencyRows& rows = part.received;
  const int64_t first = state_of(rank, half).placement.begin(rank);
  for (size_t group = 0; group < rows.group_sizes.size(); ++group) {
    for (int64_t i = rows.group_offsets[group]; i < rows.group_offsets[group + 1]; ++i) {
      const auto at = static_cast<size_t>(i);
      const Part& sent = call.parts[static_cast<size_t>(rows.source_rank[at])];
      if (options.training) {
        const auto* const ids =
            sent.routing.topk_idx.data() + rows.source_token[at] * options.top_k;
        const int64_t k =
            std::find(ids, ids + options.top_k, first + static_cast<int64_t>(group)) - ids;
        *rows.result_numbers[at] =
            result_number(half.exchange, half.call, rows.source_rank[at], rows.source_token[at], k);
      }
      for (int64_t column = 0; column < options.hidden; ++column) {
        const float value =
            sent.rows[static_cast<size_t>(rows.source_token[at] * options.hidden + column)];
        store(options.dtype, rows.results[at], column,
              expert_value(options.dtype, value, first + static_cast<int64_t>(group)));
      }
    }
  }
  part.results_written = true;
}

void LatencySchedule::check_sums(int rank, const Half& half) {
  if (!failure_.empty()) return;
  const LatencyOptions& options = layer_of(half).options;
  const Part& part = part_of(rank, half);
  const int64_t row_bytes = options.hidden * size_of(options.dtype);
  for (int64_t token = 0; token < part.routing.num_tokens; ++token) {
    for (int64_t column = 0; column < options.hidden; ++column) {
      const float value = part.rows[static_cast<size_t>(token * options.hidden + column)];
      float want = 0.0f;
      for (int64_t k = 0; k < options.top_k; ++k) {
        const auto at = static_cast<size_t>(token * options.top_k + k);
        const int32_t expert = part.routing.topk_idx[at];
        if (expert < 0) continue;
        want = std::fma(part.routing.topk_weights.values[at],
                        expert_value(options.dtype, value, expert), want);
      }
      if (options.dtype == DType::kBF16) want = BFloat16::from_float(want).to_float();
      const float got = load(options.dtype, part.output.data() + token * row_bytes, column);
      if (got != want) {
        return fail(
            fmt::format("sum of token {}, column {}: {}, expected {}", token, column, got, want));
      }
    }
  }
}

// The rows that came home, and the numbers beside them.
void LatencySchedule::check_returned(int rank, const Half& half) {
  if (!failure_.empty()) return;
  const LatencyOptions& options = layer_of(half).options;
  const Part& part = part_of(rank, half);
  for (size_t at = 0; at < part.routing.topk_idx.size(); ++at) {
    const int64_t token = static_cast<int64_t>(at) / options.top_k;
    const int64_t k = static_cast<int64_t>(at) % options.top_k;
    const int32_t expert = part.routing.topk_idx[at];
    if ((part.returned.rows[at] == nullptr) != (expert < 0)) {
      return fail(fmt::format("token {}, k {}: {} came home", token, k,
                              expert < 0 ? "a row of nobody" : "no row"));
    }
    const float beside =
        expert < 0 ? 0.0f : result_number(half.exchange, half.call, rank, token, k);
    if (part.returned.numbers[at] != beside) {
      return fail(fmt::format("beside the result of token {}, k {}: {}, expected {}", token, k,
                              part.returned.numbers[at], beside));
    }
    for (int64_t column = 0; column < options.hidden && expert >= 0; ++column) {
      const float want = expert_value(
          options.dtype, part.rows[static_cast<size_t>(token * options.hidden + column)], expert);
      const float got = load(options.dtype, part.returned.rows[at], column);
      if (got != want) {
        return fail(fmt::format("result of token {}, k {}, column {}: {}, expected {}", token, k,
                                column, got, want));
      }
    }
  }
}

// What came home is still there when the call is issued that takes its place, and nobody's any more from then on.
void LatencySchedule::end_returned(int rank, const Half& half) {
  const LatencyOptions& options = layer_of(half).options;
  if (half.call < options.num_in_flight) return;
  const Half earlier{Kind::kWaitCombine, half.exchange,
                     static_cast<uint8_t>(half.call - options.num_in_flight)};
  Part& part = part_of(rank, earlier);
  if (!part.has_returned) return;
  check_returned(rank, earlier);
  part.has_returned = false;
  if (options.return_path == ReturnPath::kPush) poison_results(rank, earlier);
}

// This rank's slots of a call: it has read them all.
void LatencySchedule::poison_slots(int rank, const Half& half) {
  State& state = state_of(rank, half);
  const LatencyLayout& layout = state.layout;
  poison(state.own(state.slots, layout.slot(state.set_of(part_of(rank, half).number), 0, 0)),
         layout.num_ranks * layout.max_tokens * layout.slot_bytes);
}

// This rank's part of the window of results: what lies there belongs to a call that is over everywhere.
void LatencySchedule::poison_results(int rank, const Half& half) {
  State& state = state_of(rank, half);
  const LatencyLayout& layout = state.layout;
  const int64_t set = state.set_of(part_of(rank, half).number);
  if (!layout.push) {
    poison(state.own(state.results, layout.result(set, 0, 0, 0)),
           layout.num_ranks * layout.max_tokens * layout.max_entries * layout.row_stride);
  } else if (half.kind == Kind::kWaitCombine) {
    poison(state.own(state.results, layout.return_slot(set, 0, 0)),
           layout.max_tokens * layout.top_k * layout.row_stride);
  }
}

void LatencySchedule::check(const Status& status) {
  if (!status.ok()) fail(status.to_string());
}

void LatencySchedule::fail(std::string text) {
  if (failure_.empty()) failure_ = text + "\n" + last_steps();
}

std::string LatencySchedule::last_steps() const {
  std::string text = fmt::format("{} ranks, {} exchanges; last of {} steps:\n", num_ranks_,
                                 num_layers_, num_steps_);
  const size_t shown = std::min(num_steps_, steps_.size());
  for (size_t i = num_steps_ - shown; i < num_steps_; ++i) {
    const Step& step = steps_[i % steps_.size()];
    const ScheduledWorld::Message& message = step.message;
    if (step.is_half) {
      text += fmt::format("  rank {}: {} of call {} of exchange {}\n", step.rank,
                          kKindNames[static_cast<size_t>(step.half.kind)], step.half.call,
                          step.half.exchange);
    } else if (message.is_signal) {
      text += fmt::format("  {} to {}: word {} of window {} = epoch {} + {:#x}\n", message.source,
                          message.dest, message.offset, message.window,
                          message.value >> LatencyFlag::kEpochShift,
                          message.value & (LatencyFlag::of_epoch(1) - 1));
    } else {
      text += fmt::format("  {} to {}: {}bytes [{}, {}) of window {}\n", message.source,
                          message.dest, message.is_torn ? "the other " : "", message.offset,
                          message.offset + message.bytes, message.window);
    }
  }
  return text;
}

}  // namespace argosy::testing
