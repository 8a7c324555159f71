// Drawing a schedule from its seed: sizes, routings, values and the ranks' programs. Test: latency_schedule_test.cc.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "exchange/latency_schedule.h"
#include "exchange/latency_schedule_values.h"

namespace argosy::testing {

void LatencySchedule::draw_options(Layer* layer, bool share, const ScheduleRules& rules) {
  LatencyOptions& options = layer->options;
  const int64_t kind = random_.below(4);
  options.dtype = kind < 2 ? DType::kF32 : DType::kBF16;
  options.payload = kind == 3 ? BlockFormat::kMxfp8 : BlockFormat::kUnset;
  options.hidden = random_.between(1, 9);
  options.num_experts = random_.between(1, 6);
  options.top_k = random_.between(1, std::min<int64_t>(3, options.num_experts));
  options.max_tokens = random_.between(1, 3);
  options.return_path = random_.one_in(2) ? ReturnPath::kPull : ReturnPath::kPush;
  options.training = random_.one_in(2);
  // Up to five calls under way on one group.
  options.num_in_flight = rules.num_in_flight > 0 ? rules.num_in_flight
                          : share                 ? random_.between(1, 2)
                                                  : random_.between(1, 5);
  layer->num_calls = rules.num_calls > 0 ? rules.num_calls
                     : share             ? static_cast<int>(random_.between(3, 4))
                                         : static_cast<int>(random_.between(5, kMaxCalls));
}

void LatencySchedule::draw_shape(const ScheduleRules& rules) {
  num_ranks_ = rules.num_ranks > 0 ? rules.num_ranks : static_cast<int>(random_.between(2, 4));
  num_layers_ = rules.num_calls == 0 && random_.one_in(3) ? 2 : 1;
  bool direct = random_.one_in(2);
  for (int i = 0; i < num_layers_; ++i) {
    Layer& layer = layers_[static_cast<size_t>(i)];
    draw_options(&layer, num_layers_ == 2, rules);
    direct |= layer.options.return_path == ReturnPath::kPull;  // which reads the peers' windows
  }
  ScheduledWorld::Fault fault;
  switch (rules.fault) {
    case PlantedFault::kFlagWithoutEpoch:
      fault.value_mask = LatencyFlag::of_epoch(1) - 1;
      break;
    case PlantedFault::kFlagOfOldEpoch:
      fault.value_lag = LatencyFlag::of_epoch(1);
      break;
    // Windows of the first exchange, in the order in which it makes them.
    case PlantedFault::kSlotAfterFlag:
      fault.unbound_window = 1;
      break;
    case PlantedFault::kResultAfterFlag:
      fault.unbound_window = 2;
      break;
    case PlantedFault::kNoticeAfterFlag:
      fault.unbound_window = 3;
      break;
    default:
      break;
  }
  world_.reset(num_ranks_, direct, fault);
  count_shape(direct);
  for (int i = 0; i < num_layers_; ++i) {
    Layer& layer = layers_[static_cast<size_t>(i)];
    layer.payload =
        *payload_layout(layer.options.dtype, layer.options.payload, layer.options.hidden);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      auto state = LatencyExchange::State::create(world_.endpoint(rank), *pool_, layer.options, 1,
                                                  std::chrono::milliseconds(1000));
      if (!state.has_value()) return check(state.error());
      layer.states[static_cast<size_t>(rank)] = std::move(*state);
    }
    for (int call = 0; call < layer.num_calls; ++call) draw_call(i, call);
  }
}

void LatencySchedule::count_shape(bool direct) {
  in_flight_.fill(0);
  if (num_layers_ == 2) ++coverage_.two_exchanges;
  const LatencyOptions& options = layers_[0].options;
  if (options.payload != BlockFormat::kUnset) ++coverage_.quantised;
  if (options.training) ++coverage_.training;
  if (options.return_path == ReturnPath::kPull) {
    ++coverage_.pull;
  } else {
    ++(direct ? coverage_.push_by_stores : coverage_.push_by_puts);
  }
}

void LatencySchedule::draw_routing(const LatencyOptions& options, Routing* routing) {
  const int64_t size = random_.below(4);
  routing->num_tokens = size == 0   ? 0
                        : size == 1 ? options.max_tokens
                                    : random_.between(0, options.max_tokens);
  routing->num_experts = options.num_experts;
  routing->top_k = options.top_k;
  const auto count = static_cast<size_t>(routing->num_tokens * options.top_k);
  routing->topk_idx.resize(count);
  routing->topk_weights.values.resize(count);
  for (size_t at = 0; at < count; ++at) {
    const size_t first = at - at % static_cast<size_t>(options.top_k);
    int32_t expert = -1;
    if (!random_.one_in(6)) {
      const auto chosen = routing->topk_idx.begin();
      do {
        expert = static_cast<int32_t>(random_.below(options.num_experts));
      } while (std::find(chosen + static_cast<int64_t>(first), chosen + static_cast<int64_t>(at),
                         expert) != chosen + static_cast<int64_t>(at));
    }
    routing->topk_idx[at] = expert;
    routing->topk_weights.values[at] =
        expert < 0 ? 0.0f : 0.125f * static_cast<float>(random_.between(1, 15));
  }
}

void LatencySchedule::draw_hidden(int exchange, int call, int rank) {
  const Layer& layer = layers_[static_cast<size_t>(exchange)];
  const LatencyOptions& options = layer.options;
  Part& part = layers_[static_cast<size_t>(exchange)]
                   .calls[static_cast<size_t>(call)]
                   .parts[static_cast<size_t>(rank)];
  const int64_t tokens = part.routing.num_tokens;
  const int64_t row_bytes = options.hidden * size_of(options.dtype);
  part.hidden.resize(static_cast<size_t>(tokens * row_bytes));
  part.output.resize(part.hidden.size());
  part.rows.resize(static_cast<size_t>(tokens * options.hidden));
  part.numbers.clear();
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t k = 0; k < options.top_k; ++k) {
      part.numbers.push_back(number(exchange, call, rank, token, k));
    }
    std::byte* const row = part.hidden.data() + token * row_bytes;
    for (int64_t column = 0; column < options.hidden; ++column) {
      store(options.dtype, row, column,
            element(options.dtype, exchange, call, rank, token, column));
    }
    alignas(64) std::array<std::byte, 64> encoded{};
    alignas(64) std::array<std::byte, 64> decoded{};
    const std::byte* as_received = row;
    if (layer.payload.is_quantised()) {
      encode_payload(layer.payload, row, encoded.data());
      decode_payload(layer.payload, encoded.data(), decoded.data());
      as_received = decoded.data();
    }
    for (int64_t column = 0; column < options.hidden; ++column) {
      part.rows[static_cast<size_t>(token * options.hidden + column)] =
          load(options.dtype, as_received, column);
    }
  }
}

void LatencySchedule::draw_call(int exchange, int call) {
  Layer& layer = layers_[static_cast<size_t>(exchange)];
  Call& one = layer.calls[static_cast<size_t>(call)];
  one.failing = -1;
  one.declined = one.more = false;
  one.has_numbers = layer.options.training && !random_.one_in(4);
  one.differing = -1;
  const bool has_words = random_.one_in(4);
  const auto differs = has_words && random_.one_in(3) ? random_.below(num_ranks_) : -1;
  const bool one_without = random_.one_in(2);
  const auto fails = random_.one_in(12) ? random_.below(num_ranks_) : -1;
  const auto declines = random_.one_in(12) ? random_.below(num_ranks_) : -1;
  for (int rank = num_ranks_ - 1; rank >= 0; --rank) {
    Part& part = one.parts[static_cast<size_t>(rank)];
    part.fails = rank == fails || (fails >= 0 && random_.one_in(4));
    part.declines = !part.fails && rank == declines;
    part.more = random_.one_in(6);
    part.same = !has_words ? std::string() : fmt::format("call {} of {}", call, exchange);
    if (rank == differs && one_without) part.same.clear();
    if (rank == differs && !one_without) part.same += " in another way";
    part.results_written = part.has_returned = false;
    part.next = 0;
    draw_routing(layer.options, &part.routing);
    draw_hidden(exchange, call, rank);
    if (part.fails) one.failing = rank;
    one.declined |= part.declines;
    one.more |= part.more && !part.fails && !part.declines;
  }
  if (one.failing < 0 && differs >= 0) {
    one.differing = differs == 0 ? 1 : static_cast<int>(differs);
    ++coverage_.differing_calls;
  }
  if (one.failing >= 0) ++coverage_.failed_calls;
  if (one.declined) ++coverage_.declined_calls;
}

// Whether `half` may stand next in the program of `rank`, given what stands in all programs so far. `alone`: every rank
// gets this same program.
bool LatencySchedule::may_come_next(int rank, const Half& half, bool alone) const {
  const Layer& layer = layers_[half.exchange];
  const auto at_least = [&](int call, int next) {
    const Call& one = layer.calls[static_cast<size_t>(call)];
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (!(alone && peer != rank) && one.parts[static_cast<size_t>(peer)].next < next)
        return false;
    }
    return true;
  };
  const auto own = [&](int call) {
    return layer.calls[static_cast<size_t>(call)].parts[static_cast<size_t>(rank)].next;
  };
  switch (half.kind) {
    case Kind::kIssueDispatch: {
      const int earlier = half.call - static_cast<int>(layer.options.num_in_flight);
      return (half.call == 0 || own(half.call - 1) > 0) &&
             (earlier < 0 || (own(earlier) == 4 && at_least(earlier, 3)));
    }
    case Kind::kWaitDispatch:
      return at_least(half.call, 1);
    case Kind::kIssueCombine:
      return true;
    case Kind::kWaitCombine:
      return at_least(half.call, 3);
  }
  return false;
}

// Programs of ranks [first, last], drawn together: some order of all their halves in which none waits for a later one.
void LatencySchedule::draw_program_steps(int first_rank, int last_rank) {
  const bool alone = first_rank == last_rank;
  const bool early = random_.one_in(2);  // as many calls under way as there may be
  while (true) {
    candidates_.clear();
    candidate_ranks_.clear();
    bool is_issue = false;
    for (int rank = first_rank; rank <= last_rank; ++rank) {
      for (int exchange = 0; exchange < num_layers_; ++exchange) {
        const Layer& layer = layers_[static_cast<size_t>(exchange)];
        for (int call = 0; call < layer.num_calls; ++call) {
          const int next =
              layer.calls[static_cast<size_t>(call)].parts[static_cast<size_t>(rank)].next;
          const Half half{static_cast<Kind>(next), static_cast<uint8_t>(exchange),
                          static_cast<uint8_t>(call)};
          if (next == 4 || (early && is_issue && next != 0) || !may_come_next(rank, half, alone)) {
            continue;
          }
          if (early && next == 0 && !is_issue) {
            candidates_.clear();
            candidate_ranks_.clear();
            is_issue = true;
          }
          candidates_.push_back(half);
          candidate_ranks_.push_back(rank);
        }
      }
    }
    if (candidates_.empty()) return;
    const auto chosen =
        static_cast<size_t>(random_.below(static_cast<int64_t>(candidates_.size())));
    const Half& half = candidates_[chosen];
    programs_[static_cast<size_t>(candidate_ranks_[chosen])].push_back(half);
    int& next = part_of(candidate_ranks_[chosen], half).next;
    next = half.kind == Kind::kWaitDispatch && call_of(half).is_over() ? 4 : next + 1;
  }
}

void LatencySchedule::draw_programs() {
  for (std::vector<Half>& program : programs_) program.clear();
  at_.fill(0);
  if (random_.one_in(2)) {
    draw_program_steps(0, num_ranks_ - 1);
    return;
  }
  draw_program_steps(0, 0);
  for (int rank = 1; rank < num_ranks_; ++rank) programs_[static_cast<size_t>(rank)] = programs_[0];
}

void LatencySchedule::draw_pace() {
  constexpr std::array<int64_t, 4> kWeights{256, 256, 40, 0};
  constexpr std::array<int64_t, 4> kShares{8, 64, 160, 250};
  const auto draw = [&] { return kWeights[static_cast<size_t>(random_.below(4))]; };
  pace_.rank_share = kShares[static_cast<size_t>(random_.below(4))];
  for (int64_t& weight : pace_.rank) weight = draw();
  for (int64_t& weight : pace_.channel) weight = draw();
  pace_.puts = rules_.payloads_are_slow ? 0 : draw();
  if (rules_.rank_1_is_slow) pace_.rank[1] = 0;
}

}  // namespace argosy::testing
