// Dispatch in latency mode: every token once into a slot of each rank that has an expert of it, with the list of its
// experts there; received slots are sorted by expert. Floor: docs/perf/latency.md. Test: tests/exchange/latency_test.cc.
#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <span>
#include <string>

#include "base/error.h"
#include "exchange/latency_state.h"

namespace argosy {

using base::invalid;
using State = LatencyExchange::State;

namespace {

constexpr int64_t kTokensPerTask = 4;
// Headers were written by another core: so many are on their way at once.
constexpr int64_t kHeadersAhead = 8;

// Whether a row holds an id outside [-1, num_experts) or one twice (contract 1.8); rows are short.
bool has_bad_ids(const Routing& routing) {
  const auto top_k = static_cast<size_t>(routing.top_k);
  for (size_t row = 0; row < routing.topk_idx.size(); row += top_k) {
    for (size_t at = row; at < row + top_k; ++at) {
      const int32_t id = routing.topk_idx[at];
      if (id < -1 || id >= routing.num_experts) return true;
      for (size_t before = row; id >= 0 && before < at; ++before) {
        if (routing.topk_idx[before] == id) return true;
      }
    }
  }
  return false;
}

}  // namespace

// Everything that is wrong with this rank's input, before a byte moves (contract 1.8).
Status State::check_input(const Routing& routing, const ConstTensorView& hidden) {
  if (routing.num_experts != options.num_experts || routing.top_k != options.top_k) {
    return invalid("routing has {} experts and top_k {}, the exchange {} and {}",
                   routing.num_experts, routing.top_k, options.num_experts, options.top_k);
  }
  if (routing.num_tokens < 0 || routing.num_tokens > options.max_tokens) {
    return invalid("{} tokens, max_tokens is {}", routing.num_tokens, options.max_tokens);
  }
  if (routing.topk_idx.size() != static_cast<size_t>(routing.num_tokens * routing.top_k)) {
    return invalid("routing has {} ids for {} tokens of top_k {}", routing.topk_idx.size(),
                   routing.num_tokens, routing.top_k);
  }
  if (hidden.dtype != options.dtype || hidden.num_dims != 2 ||
      hidden.dim(0) != routing.num_tokens || hidden.dim(1) != options.hidden ||
      (options.hidden > 1 && routing.num_tokens > 0 && hidden.stride(1) != 1)) {
    return invalid(
        "hidden is {}, the routing and exchange need {} [{}, {}] with unit stride in hidden",
        describe(hidden), name_of(options.dtype), routing.num_tokens, options.hidden);
  }
  if (!has_bad_ids(routing)) return {};
  // Says which.
  const ConstTensorView ids(routing.topk_idx.data(), DType::kI32,
                            {routing.num_tokens, routing.top_k});
  return count_topk(ids, options.num_experts, &own_counts);
}

Status State::make_room(const Routing& routing, Call* call) {
  const size_t ids = routing.topk_idx.size();
  if (call->dest_rank.size() >= ids && slot_of.size() >= ids) return {};
  try {
    call->dest_rank.resize(std::max(ids, call->dest_rank.size()));
    call->result_at.resize(call->dest_rank.size());
    slot_of.resize(std::max(ids, slot_of.size()));
    entry_of.resize(slot_of.size());
  } catch (const std::exception&) {  // bad_alloc or length_error
    return base::error(StatusCode::kOutOfMemory, "no memory for the slots of {} ids", ids);
  }
  return {};
}

// Which slot of which rank each (token, k) goes to, and where its result will lie.
void State::number_slots(const Routing& routing, Call* call) {
  const int64_t set = set_of(call->epoch);
  std::ranges::fill(last_token, -1);
  std::vector<int64_t>& used = call->sent_slots;
  // Entries of the token's slot at each rank are counted in entry_of of the last k that went there.
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    for (int64_t k = 0; k < routing.top_k; ++k) {
      const auto at = static_cast<size_t>(token * routing.top_k + k);
      const int32_t expert = routing.topk_idx[at];
      if (expert < 0) {
        call->dest_rank[at] = -1;
        continue;
      }
      const int32_t dest = owner[static_cast<size_t>(expert)];
      const auto peer = static_cast<size_t>(dest);
      call->dest_rank[at] = dest;
      if (last_token[peer] != token) {
        last_token[peer] = token;
        ++used[peer];
        entry_of[at] = 0;
      } else {
        size_t before = at - 1;
        while (call->dest_rank[before] != dest) --before;
        entry_of[at] = entry_of[before] + 1;
      }
      slot_of[at] = static_cast<int32_t>(used[peer] - 1);
      call->result_at[at] = layout.push ? layout.return_slot(set, token, k)
                                        : layout.result(set, rank(), slot_of[at], entry_of[at]);
    }
  }
}

// The header of the token's slot at `peer`, whose first expert there is at position `first`; its bytes.
int64_t State::write_header(const Call& call, const Routing& routing, int64_t token, size_t first,
                            std::byte* to) const {
  const auto begin = static_cast<size_t>(token * routing.top_k);
  const size_t end = begin + static_cast<size_t>(routing.top_k);
  const int32_t peer = call.dest_rank[first];
  SlotHeader header{call.epoch, tag, static_cast<int32_t>(token), 0, call.context};
  auto* const entries = reinterpret_cast<SlotEntry*>(to + sizeof(SlotHeader));
  for (size_t at = first; at < end; ++at) {
    if (call.dest_rank[at] != peer) continue;
    const int32_t local = local_id[static_cast<size_t>(routing.topk_idx[at])];
    entries[header.num_entries++] = {static_cast<uint16_t>(local),
                                     static_cast<uint16_t>(at - begin)};
  }
  std::memcpy(to, &header, sizeof(header));
  if (call.numbers == nullptr) {
    return static_cast<int64_t>(sizeof(header)) +
           header.num_entries * static_cast<int64_t>(sizeof(SlotEntry));
  }
  auto* const numbers = reinterpret_cast<float*>(to + layout.numbers_at);
  for (int32_t i = 0; i < header.num_entries; ++i) numbers[i] = call.numbers[begin + entries[i].k];
  // At a fixed place, so what unused entries hold goes with them.
  return layout.numbers_at + header.num_entries * static_cast<int64_t>(sizeof(float));
}

// Header and row to every rank that has an expert of the token. A quantised row is encoded once: in the own slot where the
// token has one, else in `slot`, which also takes the headers.
void State::push_token(const Call& call, const Routing& routing, int64_t token,
                       const quant::PayloadEncoder* encoder, std::byte* slot) {
  const auto begin = static_cast<size_t>(token * routing.top_k);
  const size_t end = begin + static_cast<size_t>(routing.top_k);
  const int64_t set = set_of(call.epoch);
  const std::byte* row = call.hidden.row(token);
  bool is_ready = encoder == nullptr;
  if (!is_ready) {
    for (size_t at = begin; at < end && !is_ready; ++at) {
      if (call.dest_rank[at] != rank()) continue;
      std::byte* const mine =
          own_slots + layout.slot(set, rank(), slot_of[at]) + layout.header_bytes;
      encoder->encode(row, mine);
      row = mine;
      is_ready = true;
    }
  }
  for (size_t first = begin; first < end; ++first) {
    if (call.dest_rank[first] < 0 || entry_of[first] != 0) continue;
    if (!is_ready) {
      encoder->encode(row, slot + layout.header_bytes);
      row = slot + layout.header_bytes;
      is_ready = true;
    }
    const int peer = call.dest_rank[first];
    const int64_t to = layout.slot(set, rank(), slot_of[first]);
    if (peer == rank()) {
      // A row that is not encoded is read where it is.
      write_header(call, routing, token, first, own_slots + to);
      continue;
    }
    const int64_t header_bytes = write_header(call, routing, token, first, slot);
    endpoint.put(peer, slots, to, slot, header_bytes);
    endpoint.put(peer, slots, to + layout.header_bytes, row, payload.num_bytes);
  }
}

void State::send_rows(const Call& call, const Routing& routing) {
  const int64_t num_tasks = (routing.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  pool.parallel_for(num_tasks, [&](int64_t task, int thread) {
    std::byte* const slot = staging.data() + thread * layout.slot_bytes;
    const int64_t end = std::min(routing.num_tokens, (task + 1) * kTokensPerTask);
    const auto push_all = [&](const quant::PayloadEncoder* encoder) {
      for (int64_t token = task * kTokensPerTask; token < end; ++token) {
        push_token(call, routing, token, encoder, slot);
      }
    };
    if (!payload.is_quantised()) return push_all(nullptr);
    const quant::PayloadEncoder encoder(payload);
    push_all(&encoder);
  });
}

void State::send_notice(const Call& call, const Status& status) {
  const Notice notice = transport::to_message(status, static_cast<int64_t>(call.epoch), call.same);
  for (int peer = 0; peer < num_ranks(); ++peer) {
    endpoint.put(peer, notices, layout.notice(set_of(call.epoch), rank()), &notice,
                 static_cast<int64_t>(sizeof(notice)));
  }
}

bool State::can_issue() const {
  const Call& call = call_of(last_epoch + 1);
  if (call.step != Step::kFree) return false;
  return call.acknowledged || is_here(LatencyLayout::kDone, call, true);
}

Result<uint64_t> State::issue_dispatch(const Status& local, const Routing& routing,
                                       const ConstTensorView& hidden, const DispatchNote& note) {
  Call& call = call_of(last_epoch + 1);
  if (call.step != Step::kFree) {
    return invalid("issue_dispatch while call {} is under way (step {}); num_in_flight is {}",
                   call.epoch, static_cast<int>(call.step), options.num_in_flight);
  }
  if (!call.acknowledged) {
    // The slots I write now held the rows of that call; everybody's `done` says they were read.
    ARGOSY_RETURN_IF_ERROR(
        wait(LatencyLayout::kDone, call, true, "slots of an earlier call to be read"));
    call.acknowledged = true;
  }
  ARGOSY_RETURN_IF_ERROR(endpoint.health());
  call.epoch = ++last_epoch;
  call.acknowledged = false;
  call.parcels.clear();
  std::ranges::fill(call.sent_slots, 0);
  ++stats.num_calls;
  Status status = local.ok() && !note.decline ? check_input(routing, hidden) : local;
  if (status.ok() && note.numbers != nullptr && !options.training) {
    status = invalid("numbers beside the rows, but the exchange was not made for training");
  }
  if (status.ok() && !note.decline) status = make_room(routing, &call);
  call.failed = !status.ok() || note.decline;
  call.num_tokens = call.failed ? 0 : routing.num_tokens;
  call.same = note.same;
  call.context = note.context;
  if (!status.ok() || !note.same.empty()) send_notice(call, status);
  uint64_t bits = 0;
  if (!status.ok()) {
    bits = LatencyFlag::kFailed;
  } else if (note.decline) {
    bits = LatencyFlag::kDeclined;
  } else {
    call.hidden = hidden;
    call.numbers = note.numbers;
    number_slots(routing, &call);
    send_rows(call, routing);
    if (note.more) bits = LatencyFlag::kMore;
  }
  if (!call.same.empty()) bits |= LatencyFlag::kWords;
  raise(LatencyLayout::kRows, call, bits, true);
  call.step = Step::kDispatchIssued;
  return call.epoch;
}

Status State::corrupt(const Call& call, int source, int64_t index, const std::string& what) {
  Status status = base::error(StatusCode::kCorruptData, "call {}, slot {} from rank {}: {}",
                              call.epoch, index, source, what);
  // Nobody sends that: the peers must not wait for this rank.
  endpoint.abort(status);
  return status;
}

Status State::mixed(const Call& call, int source, int context) {
  Status status =
      base::error(StatusCode::kDisagree,
                  "call {}: rank {} sent rows of layer {}, rank {} is in a call of layer {}",
                  call.epoch, source, context, rank(), call.context);
  endpoint.abort(status);
  return status;
}

// The slots of one source, into `arrivals`. What peers wrote is copied before it is believed.
Status State::read_slots(const Call& call, int source, int64_t count) {
  const int64_t set = set_of(call.epoch);
  const auto num_local = static_cast<int32_t>(next_place.size());
  const auto fetch = [&](int64_t index) {
    if (index < count) __builtin_prefetch(own_slots + layout.slot(set, source, index));
  };
  for (int64_t index = 0; index < kHeadersAhead; ++index) fetch(index);
  for (int64_t index = 0; index < count; ++index) {
    fetch(index + kHeadersAhead);
    const std::byte* const slot = own_slots + layout.slot(set, source, index);
    SlotHeader header;
    std::memcpy(&header, slot, sizeof(header));
    if (header.epoch != call.epoch) {
      return corrupt(call, source, index, fmt::format("it is of call {}", header.epoch));
    }
    if (header.context != call.context) return mixed(call, source, header.context);
    if (header.payload_tag != tag) {
      return corrupt(call, source, index, check_payload_tag(header.payload_tag, payload).message());
    }
    // Rows of this rank may lie in its hidden states, which end sooner.
    const int64_t num_tokens = source == rank() ? call.num_tokens : options.max_tokens;
    if (header.token < 0 || header.token >= num_tokens || header.num_entries < 1 ||
        header.num_entries > layout.max_entries) {
      return corrupt(call, source, index,
                     fmt::format("token {} with {} experts, at most {} and {}", header.token,
                                 header.num_entries, num_tokens - 1, layout.max_entries));
    }
    for (int32_t at = 0; at < header.num_entries; ++at) {
      SlotEntry entry;
      std::memcpy(&entry, slot + sizeof(header) + static_cast<size_t>(at) * sizeof(entry),
                  sizeof(entry));
      if (entry.expert >= num_local || entry.k >= options.top_k) {
        return corrupt(call, source, index,
                       fmt::format("expert {} of {} and k {} of {}", entry.expert, num_local,
                                   entry.k, options.top_k));
      }
      arrivals.push_back(
          {source, static_cast<int32_t>(index), at, header.token, entry.expert, entry.k});
    }
  }
  return {};
}

// Where the expert writes the row's result. In a window that stores do not reach, it waits in the outbox.
std::byte* State::result_address(Call* call, const Arrival& arrival) {
  const int64_t set = set_of(call->epoch);
  if (!layout.push) {
    return own_results + layout.result(set, arrival.source, arrival.index, arrival.entry);
  }
  const int64_t to = layout.return_slot(set, arrival.token, arrival.k);
  std::byte* const there = peer_results[static_cast<size_t>(arrival.source)];
  if (there != nullptr) return there + to;
  // A place of its own for every call in flight.
  const int64_t from = (set * static_cast<int64_t>(layout.size.round_rows) * layout.max_entries +
                        static_cast<int64_t>(call->parcels.size())) *
                       layout.row_stride;
  call->parcels.push_back({arrival.source, from, to});
  return outbox.data() + from;
}

// Counting sort by expert: sources and slots come in order, so the order within an expert is the contract's.
Status State::sort_arrivals(Call* call, LatencyRows* rows) {
  const size_t num_local = next_place.size();
  rows->group_sizes.assign(num_local, 0);
  rows->group_offsets.assign(num_local + 1, 0);
  for (const Arrival& arrival : arrivals) {
    ++rows->group_sizes[static_cast<size_t>(arrival.expert)];
    ++stats.tokens_received[static_cast<size_t>(arrival.expert)];
  }
  // Kept beside the offsets: reading back what was just stored is what the loop would wait for.
  int64_t end = 0;
  for (size_t expert = 0; expert < num_local; ++expert) {
    next_place[expert] = end;
    end += rows->group_sizes[expert];
    rows->group_offsets[expert + 1] = end;
  }
  rows->rows.resize(arrivals.size());
  rows->results.resize(arrivals.size());
  rows->source_rank.resize(arrivals.size());
  rows->source_token.resize(arrivals.size());
  if (options.training) {
    rows->numbers.resize(arrivals.size());
    rows->result_numbers.resize(arrivals.size());
  }
  const bool is_posted = std::ranges::find(peer_results, nullptr) != peer_results.end();
  if (layout.push && is_posted) {
    ARGOSY_RETURN_IF_ERROR(outbox.reserve(options.num_in_flight * layout.size.round_rows *
                                          layout.max_entries * layout.row_stride));
  }
  const int64_t set = set_of(call->epoch);
  for (const Arrival& arrival : arrivals) {
    const auto place = static_cast<size_t>(next_place[static_cast<size_t>(arrival.expert)]++);
    rows->rows[place] =
        arrival.source == rank() && !payload.is_quantised()
            ? call->hidden.row(arrival.token)
            : own_slots + layout.slot(set, arrival.source, arrival.index) + layout.header_bytes;
    rows->results[place] = result_address(call, arrival);
    if (options.training) {
      std::memcpy(&rows->numbers[place],
                  own_slots + layout.slot(set, arrival.source, arrival.index) + layout.numbers_at +
                      arrival.entry * int64_t{sizeof(float)},
                  sizeof(float));
      rows->result_numbers[place] =
          reinterpret_cast<float*>(rows->results[place] + layout.result_number_at);
    }
    rows->source_rank[place] = arrival.source;
    rows->source_token[place] = arrival.token;
  }
  return {};
}

// The verdict of all flags: the same on every rank, as all see the same.
Status State::read_notices(Call* call, LatencyRows* rows, bool* is_over) {
  rows->more = rows->declined = false;
  int failing = -1, num_with_words = 0;
  for (int source = num_ranks() - 1; source >= 0; --source) {
    const uint64_t word = transport::load_word(
        own(flags, layout.flag(set_of(call->epoch), LatencyLayout::kRows, source)));
    if (word >> LatencyFlag::kEpochShift != call->epoch) {
      return corrupt(*call, source, 0,
                     fmt::format("flag of call {}", word >> LatencyFlag::kEpochShift));
    }
    if ((word & LatencyFlag::kFailed) != 0) failing = source;
    if ((word & LatencyFlag::kWords) != 0) ++num_with_words;
    rows->declined |= (word & LatencyFlag::kDeclined) != 0;
    rows->more |= (word & LatencyFlag::kMore) != 0;
  }
  const bool words_differ = num_with_words > 0 && num_with_words < num_ranks();
  Status status = verdict(*call, failing, words_differ);
  *is_over = !status.ok() || rows->declined;
  if (*is_over) finish_without_rows(call);
  return status;
}

Notice State::notice_from(const Call& call, int source) const {
  Notice notice;
  std::memcpy(&notice, own(notices, layout.notice(set_of(call.epoch), source)), sizeof(notice));
  return notice.value == static_cast<int64_t>(call.epoch) ? notice : Notice();
}

// The first failing rank's error, or the first words that differ from those of rank 0, none among them.
Status State::verdict(const Call& call, int failing, bool words_differ) const {
  if (failing >= 0) {
    const Notice notice = notice_from(call, failing);
    Status status = transport::status_of(std::as_bytes(std::span(&notice, 1)), "rank", failing);
    if (!status.ok()) return status;
    return base::error(StatusCode::kCorruptData, "rank {} failed and does not say why", failing);
  }
  if (call.same.empty() && !words_differ) return {};
  const Notice first = notice_from(call, 0);
  const std::string_view wanted = transport::words_of(std::as_bytes(std::span(&first, 1)));
  for (int source = 1; source < num_ranks(); ++source) {
    const Notice notice = notice_from(call, source);
    const std::string_view words = transport::words_of(std::as_bytes(std::span(&notice, 1)));
    if (words != wanted) {
      return invalid("rank {} has \"{}\", rank 0 \"{}\"", source, words, wanted);
    }
  }
  return {};
}

Status State::wait_dispatch(uint64_t call_epoch, LatencyRows* rows) {
  ARGOSY_RETURN_IF_ERROR(check_call(call_epoch, Step::kDispatchIssued, "wait_dispatch"));
  Call& call = call_of(call_epoch);
  ARGOSY_RETURN_IF_ERROR(wait(LatencyLayout::kRows, call, true, "dispatched rows"));
  bool is_over = false;
  ARGOSY_RETURN_IF_ERROR(read_notices(&call, rows, &is_over));
  arrivals.clear();
  // The first header of every source at once: each is a miss.
  for (int source = 0; source < num_ranks(); ++source) {
    __builtin_prefetch(own_slots + layout.slot(set_of(call.epoch), source, 0));
  }
  for (int source = 0; source < num_ranks() && !is_over; ++source) {
    const uint64_t word = transport::load_word(
        own(flags, layout.flag(set_of(call.epoch), LatencyLayout::kRows, source)));
    const auto count = static_cast<int64_t>(word & LatencyFlag::kCountMask);
    if (count > options.max_tokens) {
      return corrupt(call, source, 0, fmt::format("{} slots of {}", count, options.max_tokens));
    }
    ARGOSY_RETURN_IF_ERROR(read_slots(call, source, count));
  }
  ARGOSY_RETURN_IF_ERROR(sort_arrivals(&call, rows));
  if (!is_over) call.step = Step::kDispatchDone;
  return {};
}

}  // namespace argosy
