// The flag protocol of latency mode as a model of its own, explored to the last state: ranks, sets of slots and results
// that hold the epoch of what was written last, flags, and messages under way in any order the transport allows.
//
// In every state: a reader of epoch e sees epoch e, in slots (when they are sorted, and until its results are written), in
// notices and in results; a flag only grows; somebody can go on until all calls are over. The same search finds the
// planted faults. The protocol: src/exchange/latency_state.h. The code itself: latency_schedule_test.cc.
#include <fmt/format.h>
#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "support/rank_threads.h"

namespace argosy {
namespace {

constexpr int kMaxRanks = 3;
constexpr int kMaxSets = 2;
constexpr int kMaxCalls = 6;
constexpr int kMaxMessages = 14;  // of one rank to one peer, under way at once
constexpr bool kSlow = testing::kUnderSanitizer;
constexpr uint8_t kBeingWritten = 15;  // a result; 0 is a place that holds nothing of use

enum class Fault {
  kNone,
  kEpochNotCompared,   // any flag that was ever raised is taken for the one that is waited for
  kPutAfterFlag,       // a flag may overtake puts
  kReuseWithoutDone,   // slots are written again before their readers have finished
  kDoneBeforeReading,  // `done` is raised as soon as the rows are here
  kSumWithoutDone,     // results are read before they are written
  kDoneToSendersOnly,  // no `done` for a rank that sent no rows
};
enum class Order { kSequential, kOverlapped, kAny };  // of the halves of the calls on each rank

struct Model {
  int num_ranks = 2;
  int num_sets = 1;  // num_in_flight
  int num_calls = 4;
  Order order = Order::kAny;
  bool push = false;       // results travel home by puts; else they are read where they are
  bool queue_self = true;  // messages of a rank to itself wait too
  // A flag comes as soon as it may. Nothing is lost: it only lets others go on, and what it may be moved before neither
  // writes its word nor takes a step that it forbids.
  bool flags_at_once = false;
  bool two_pieces = false;  // header and row of a slot come apart
  int failing_call = -1;    // on rank 0, with a notice
  int declined_call = -1;   // on the last rank
  Fault fault = Fault::kNone;
};

enum Kind : uint8_t { kHeader, kRow, kResult, kNotice, kRowsFlag, kDoneFlag };
constexpr std::array<const char*, 6> kKindNames{"header", "row",       "result",
                                                "notice", "rows flag", "done flag"};
constexpr std::array<const char*, 4> kHalfNames{"issue_dispatch", "wait_dispatch", "issue_combine",
                                                "wait_combine"};

// Plain bytes without gaps: a state is its hash.
struct State {
  struct Rank {
    uint8_t next[kMaxCalls];                // half of each call that comes next; 4 = over
    uint8_t slots[2][kMaxSets][kMaxRanks];  // epochs: headers and rows, by source
    uint8_t notices[kMaxSets][kMaxRanks];
    uint8_t results[kMaxSets][kMaxRanks];   // pull: by home; push: by owner
    uint8_t flags[2][kMaxSets][kMaxRanks];  // rows, done
  };
  struct Channel {
    uint8_t count;
    uint8_t messages[kMaxMessages];  // kind << 4 | epoch
  };
  Rank ranks[kMaxRanks];
  Channel channels[kMaxRanks][kMaxRanks];  // by source and dest
};
static_assert(sizeof(State) == kMaxRanks * (kMaxCalls + 36) + 9 * (kMaxMessages + 1));

// 128 bits of each state that was seen: 10^8 states share one by chance once in 10^22 searches.
class SeenStates {
 public:
  SeenStates() : table_(size_t{1} << 16) {}
  bool insert(const State& state) {
    const XXH128_hash_t hash = XXH3_128bits(&state, sizeof(state));
    if (2 * (count_ + 1) > table_.size()) grow();
    return place({hash.low64 | 1, hash.high64});
  }
  size_t count() const { return count_; }

 private:
  using Entry = std::array<uint64_t, 2>;  // first = 0: free
  bool place(const Entry& entry) {
    size_t at = entry[1] & (table_.size() - 1);
    while (table_[at][0] != 0) {
      if (table_[at] == entry) return false;
      at = (at + 1) & (table_.size() - 1);
    }
    table_[at] = entry;
    ++count_;
    return true;
  }
  void grow() {
    std::vector<Entry> old(table_.size() * 2);
    old.swap(table_);
    count_ = 0;
    for (const Entry& entry : old) {
      if (entry[0] != 0) place(entry);
    }
  }
  std::vector<Entry> table_;
  size_t count_ = 0;
};

// One thing that can happen: a message comes, or a rank does its next half of a call.
struct Move {
  bool is_message;
  uint8_t rank;   // or source
  uint8_t which;  // call, or dest
  uint8_t index;  // of the message
};

class Explorer {
 public:
  explicit Explorer(const Model& model) : model_(model) { write_program(); }

  // "" when every reachable state is right; else what is wrong, and the way there.
  std::string explore(size_t max_states);
  size_t num_states() const { return seen_.count(); }
  size_t num_moves() const { return num_moves_; }

 private:
  struct Frame {
    State state;
    std::vector<Move> moves;
    size_t next = 0;
  };
  struct Half {
    int call, half;
  };

  // Which calls bring rows from whom to whom; calls without rows between two ranks occur in any place.
  static bool has_rows(int call, int source, int dest) {
    return (call + 2 * source + dest) % 4 != 3;
  }
  bool is_over(int call) const {
    return call == model_.failing_call || call == model_.declined_call;
  }
  int set_of(int epoch) const { return epoch % model_.num_sets; }

  void write_program();
  void find_moves(const State& state, std::vector<Move>* moves) const;
  bool find_flag(const State& state, std::vector<Move>* moves) const;
  bool is_next(const State::Rank& rank, int call) const;
  bool is_ready(const State& state, int rank, int call) const;
  bool flags_are_up(const State& state, int rank, int kind, int epoch, int call_of_rows) const;
  void apply(State* state, const Move& move);
  void do_half(State* state, int rank, int call);
  void issue_dispatch(State* state, int rank, int call);
  void wait_dispatch(State* state, int rank, int call);
  void issue_combine(State* state, int rank, int call);
  void wait_combine(State* state, int rank, int call);
  void check_slots(const State& state, int rank, int call);
  void raise(State* state, int rank, Kind kind, int call);
  void send(State* state, int source, int dest, Kind kind, int epoch);
  void arrive(State* state, int source, int dest, int kind, int epoch);
  void see(int got, int epoch, const char* what, int rank, int peer);
  std::string describe(const Move& move, const State& state) const;
  static void sort_neighbours(State::Channel* channel);
  static bool is_put(int message) { return message >> 4 < kRowsFlag; }

  const Model model_;
  std::vector<Half> program_;  // of every rank, unless the order is any
  SeenStates seen_;
  size_t num_moves_ = 0;
  std::string failure_;
};

void Explorer::write_program() {
  if (model_.order == Order::kAny) return;
  const int sets = model_.order == Order::kOverlapped ? model_.num_sets : 1;
  for (int call = 0; call < std::min(sets, model_.num_calls); ++call) program_.push_back({call, 0});
  for (int call = 0; call < model_.num_calls; ++call) {
    for (int half = 1; half < 4; ++half) program_.push_back({call, half});
    if (call + sets < model_.num_calls) program_.push_back({call + sets, 0});
  }
}

bool Explorer::is_next(const State::Rank& rank, int call) const {
  if (model_.order == Order::kAny) {
    return rank.next[call] != 0 || call == 0 || rank.next[call - 1] > 0;
  }
  for (const Half& half : program_) {
    if (rank.next[half.call] <= half.half) return half.call == call;
  }
  return false;
}

// kind 0: everybody's rows. kind 1: everybody's `done`, or of those that this rank sent rows to.
bool Explorer::flags_are_up(const State& state, int rank, int kind, int epoch,
                            int call_of_rows) const {
  for (int peer = 0; peer < model_.num_ranks; ++peer) {
    if (call_of_rows >= 0 && !has_rows(call_of_rows, rank, peer)) continue;
    const int flag = state.ranks[rank].flags[kind][set_of(epoch)][peer];
    if (model_.fault == Fault::kEpochNotCompared ? flag == 0 : flag < epoch) return false;
  }
  return true;
}

bool Explorer::is_ready(const State& state, int rank, int call) const {
  const State::Rank& own = state.ranks[rank];
  const int epoch = call + 1;
  switch (own.next[call]) {
    case 0: {
      const int earlier = call - model_.num_sets;
      return earlier < 0 ||
             (own.next[earlier] == 4 && (model_.fault == Fault::kReuseWithoutDone ||
                                         flags_are_up(state, rank, 1, earlier + 1, -1)));
    }
    case 1:
      return flags_are_up(state, rank, 0, epoch, -1);
    case 2:
      return true;
    case 3:
      return model_.fault == Fault::kSumWithoutDone || flags_are_up(state, rank, 1, epoch, call);
    default:
      return false;
  }
}

void Explorer::find_moves(const State& state, std::vector<Move>* moves) const {
  moves->clear();
  if (model_.flags_at_once && find_flag(state, moves)) return;
  for (int rank = 0; rank < model_.num_ranks; ++rank) {
    for (int call = 0; call < model_.num_calls; ++call) {
      if (state.ranks[rank].next[call] < 4 && is_next(state.ranks[rank], call) &&
          is_ready(state, rank, call)) {
        moves->push_back({false, static_cast<uint8_t>(rank), static_cast<uint8_t>(call), 0});
      }
    }
    for (int dest = 0; dest < model_.num_ranks; ++dest) {
      const State::Channel& channel = state.channels[rank][dest];
      bool puts_before = false;
      for (int i = 0; i < channel.count; ++i) {
        const int message = channel.messages[i];
        puts_before |= is_put(message);
        if (is_put(message) || !puts_before || model_.fault == Fault::kPutAfterFlag) {
          moves->push_back({true, static_cast<uint8_t>(rank), static_cast<uint8_t>(dest),
                            static_cast<uint8_t>(i)});
        }
      }
    }
  }
}

// The first flag that may come, alone.
bool Explorer::find_flag(const State& state, std::vector<Move>* moves) const {
  for (int rank = 0; rank < model_.num_ranks; ++rank) {
    for (int dest = 0; dest < model_.num_ranks; ++dest) {
      const State::Channel& channel = state.channels[rank][dest];
      const bool may_overtake = model_.fault == Fault::kPutAfterFlag;
      for (int i = 0; i < channel.count; ++i) {
        if (is_put(channel.messages[i]) && !may_overtake) break;
        if (is_put(channel.messages[i])) continue;
        moves->push_back({true, static_cast<uint8_t>(rank), static_cast<uint8_t>(dest),
                          static_cast<uint8_t>(i)});
        return true;
      }
    }
  }
  return false;
}

void Explorer::see(int got, int epoch, const char* what, int rank, int peer) {
  if (got == epoch || !failure_.empty()) return;
  failure_ = fmt::format("rank {} in epoch {} reads the {} of rank {} of epoch {}", rank, epoch,
                         what, peer, got);
}

void Explorer::arrive(State* state, int source, int dest, int kind, int epoch) {
  State::Rank& rank = state->ranks[dest];
  const int set = set_of(epoch);
  const auto tag = static_cast<uint8_t>(epoch);
  switch (kind) {
    case kHeader:
    case kRow:
      rank.slots[kind][set][source] = tag;
      break;
    case kResult:
      rank.results[set][source] = tag;
      break;
    case kNotice:
      rank.notices[set][source] = tag;
      break;
    default: {
      uint8_t& flag = rank.flags[kind - kRowsFlag][set][source];
      if (flag >= tag && failure_.empty()) {
        failure_ = fmt::format("{} of rank {} at rank {} goes from {} to {}", kKindNames[kind],
                               source, dest, flag, tag);
      }
      flag = tag;
    }
  }
}

void Explorer::send(State* state, int source, int dest, Kind kind, int epoch) {
  if (source == dest && !model_.queue_self) return arrive(state, source, dest, kind, epoch);
  State::Channel& channel = state->channels[source][dest];
  if (channel.count == kMaxMessages) {
    failure_ = fmt::format("more than {} messages under way", kMaxMessages);
    return;
  }
  channel.messages[channel.count++] = static_cast<uint8_t>(kind << 4 | epoch);
  sort_neighbours(&channel);
}

// Messages of one sort that stand side by side have no order: sorted, such states are one.
void Explorer::sort_neighbours(State::Channel* channel) {
  uint8_t* const messages = channel->messages;
  for (int last = 1; last < channel->count; ++last) {
    for (int at = last; at > 0 && is_put(messages[at - 1]) == is_put(messages[at]) &&
                        messages[at - 1] > messages[at];
         --at) {
      std::swap(messages[at - 1], messages[at]);
    }
  }
}

void Explorer::raise(State* state, int rank, Kind kind, int call) {
  for (int peer = 0; peer < model_.num_ranks; ++peer) {
    const bool is_left_out = model_.fault == Fault::kDoneToSendersOnly && kind == kDoneFlag &&
                             !has_rows(call, peer, rank);
    if (!is_left_out) send(state, rank, peer, kind, call + 1);
  }
}

void Explorer::issue_dispatch(State* state, int rank, int call) {
  const bool fails = call == model_.failing_call && rank == 0;
  const bool declines = call == model_.declined_call && rank == model_.num_ranks - 1;
  for (int dest = 0; dest < model_.num_ranks; ++dest) {
    if (fails) {
      send(state, rank, dest, kNotice, call + 1);
    } else if (!declines && has_rows(call, rank, dest)) {
      send(state, rank, dest, kHeader, call + 1);
      if (model_.two_pieces) send(state, rank, dest, kRow, call + 1);
    }
  }
  raise(state, rank, kRowsFlag, call);
}

void Explorer::check_slots(const State& state, int rank, int call) {
  const int epoch = call + 1;
  const State::Rank& own = state.ranks[rank];
  for (int source = 0; source < model_.num_ranks; ++source) {
    if (!has_rows(call, source, rank)) continue;
    see(own.slots[kHeader][set_of(epoch)][source], epoch, "header", rank, source);
    if (model_.two_pieces) see(own.slots[kRow][set_of(epoch)][source], epoch, "row", rank, source);
  }
}

void Explorer::wait_dispatch(State* state, int rank, int call) {
  const int epoch = call + 1;
  const int set = set_of(epoch);
  State::Rank& own = state->ranks[rank];
  for (int peer = 0; peer < model_.num_ranks && model_.fault != Fault::kEpochNotCompared; ++peer) {
    see(own.flags[0][set][peer], epoch, "flag", rank, peer);
  }
  if (is_over(call)) {
    if (call == model_.failing_call) see(own.notices[set][0], epoch, "notice", rank, 0);
    own.notices[set][0] = 0;
    std::memset(own.slots[kHeader][set], 0, kMaxRanks);
    std::memset(own.slots[kRow][set], 0, kMaxRanks);
    own.next[call] = 4;
    raise(state, rank, kDoneFlag, call);
    return;
  }
  check_slots(*state, rank, call);
  own.next[call] = 2;
  // The experts may write from now on.
  if (!model_.push) std::memset(own.results[set], kBeingWritten, kMaxRanks);
  if (model_.fault == Fault::kDoneBeforeReading) raise(state, rank, kDoneFlag, call);
}

void Explorer::issue_combine(State* state, int rank, int call) {
  const int epoch = call + 1;
  const int set = set_of(epoch);
  State::Rank& own = state->ranks[rank];
  check_slots(*state, rank, call);
  for (int home = 0; home < model_.num_ranks; ++home) {
    if (!model_.push) own.results[set][home] = static_cast<uint8_t>(epoch);
    if (!has_rows(call, home, rank)) continue;
    if (model_.push) send(state, rank, home, kResult, epoch);
  }
  // Read and done with: what lies there is worth nothing, and states that differ in it only are one.
  std::memset(own.slots[kHeader][set], 0, kMaxRanks);
  std::memset(own.slots[kRow][set], 0, kMaxRanks);
  own.next[call] = 3;
  if (model_.fault == Fault::kDoneBeforeReading) return;
  raise(state, rank, kDoneFlag, call);
}

void Explorer::wait_combine(State* state, int rank, int call) {
  const int epoch = call + 1;
  const int set = set_of(epoch);
  for (int owner = 0; owner < model_.num_ranks; ++owner) {
    if (!has_rows(call, rank, owner)) continue;
    uint8_t& result = model_.push ? state->ranks[rank].results[set][owner]
                                  : state->ranks[owner].results[set][rank];
    see(result, epoch, "result", rank, owner);
    result = 0;
  }
  state->ranks[rank].next[call] = 4;
}

void Explorer::do_half(State* state, int rank, int call) {
  uint8_t& next = state->ranks[rank].next[call];
  switch (next) {
    case 0:
      next = 1;
      return issue_dispatch(state, rank, call);
    case 1:
      return wait_dispatch(state, rank, call);
    case 2:
      return issue_combine(state, rank, call);
    default:
      return wait_combine(state, rank, call);
  }
}

void Explorer::apply(State* state, const Move& move) {
  if (!move.is_message) return do_half(state, move.rank, move.which);
  State::Channel& channel = state->channels[move.rank][move.which];
  const int message = channel.messages[move.index];
  std::copy(channel.messages + move.index + 1, channel.messages + channel.count,
            channel.messages + move.index);
  channel.messages[--channel.count] = 0;
  sort_neighbours(&channel);
  arrive(state, move.rank, move.which, message >> 4, message & 15);
}

std::string Explorer::describe(const Move& move, const State& state) const {
  if (!move.is_message) {
    return fmt::format("rank {}: {} of epoch {}", move.rank,
                       kHalfNames[state.ranks[move.rank].next[move.which]], move.which + 1);
  }
  const int message = state.channels[move.rank][move.which].messages[move.index];
  return fmt::format("{} to {}: {} of epoch {}", move.rank, move.which, kKindNames[message >> 4],
                     message & 15);
}

std::string Explorer::explore(size_t max_states) {
  std::vector<Frame> path(1);
  size_t depth = 1;
  std::memset(&path[0].state, 0, sizeof(State));
  seen_.insert(path[0].state);
  find_moves(path[0].state, &path[0].moves);
  while (depth > 0 && failure_.empty()) {
    if (path.size() == depth) path.emplace_back();
    Frame& frame = path[depth - 1];
    Frame& after = path[depth];
    if (frame.next == frame.moves.size()) {
      --depth;
      continue;
    }
    after.state = frame.state;
    apply(&after.state, frame.moves[frame.next++]);
    ++num_moves_;
    if (!failure_.empty() || !seen_.insert(after.state)) continue;
    if (seen_.count() > max_states) return fmt::format("more than {} states", max_states);
    find_moves(after.state, &after.moves);
    after.next = 0;
    ++depth;
    if (!after.moves.empty()) continue;
    for (int rank = 0; rank < model_.num_ranks; ++rank) {
      for (int call = 0; call < model_.num_calls && failure_.empty(); ++call) {
        const int next = after.state.ranks[rank].next[call];
        if (next == 4) continue;
        failure_ =
            fmt::format("hang: rank {} waits in {} of epoch {}", rank, kHalfNames[next], call + 1);
        --depth;  // the way there is shown up to the last move
      }
      if (!failure_.empty()) break;
    }
  }
  if (failure_.empty()) return failure_;
  std::string text = failure_ + "\n";
  for (size_t i = 0; i < depth; ++i) {
    text += "  " + describe(path[i].moves[path[i].next - 1], path[i].state) + "\n";
  }
  return text;
}

constexpr size_t kMaxStates = 20'000'000;

void expect_right(const Model& model) {
  Explorer explorer(model);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(explorer.explore(kMaxStates), "");
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  constexpr std::array<const char*, 3> kOrderNames{"one by one", "overlapped", "any order"};
  fmt::print("{} ranks, {} calls, {} in flight, {}, {}{}: {} states, {} moves, {:.2f} s\n",
             model.num_ranks, model.num_calls, model.num_sets,
             kOrderNames[static_cast<size_t>(model.order)], model.push ? "push" : "pull",
             model.failing_call >= 0 || model.declined_call >= 0 ? ", calls without rows" : "",
             explorer.num_states(), explorer.num_moves(), seconds.count());
}

// Sanitizers leave out what is slow: there a rank's messages to itself come at once, as they do on every back end.
TEST(LatencyModel, TwoRanks) {
  for (const int num_sets : {1, 2}) {
    for (const Order order : {Order::kSequential, Order::kOverlapped, Order::kAny}) {
      if (num_sets == 1 && order != Order::kAny) continue;  // there is only one order
      for (const bool push : {false, true}) {
        Model model{.num_sets = num_sets, .num_calls = 5, .order = order, .push = push};
        model.queue_self = !kSlow || order != Order::kAny;
        expect_right(model);
        model.failing_call = 1;
        model.declined_call = 3;
        expect_right(model);
      }
    }
  }
}

// Header and row of a slot apart.
TEST(LatencyModel, TwoRanksRowsInPieces) {
  for (const int num_sets : {1, 2}) {
    expect_right({.num_sets = num_sets,
                  .num_calls = 5,
                  .queue_self = false,
                  .two_pieces = true,
                  .failing_call = 2});
  }
}

TEST(LatencyModel, ThreeRanks) {
  for (const bool push : {false, true}) {
    Model model{.num_ranks = 3, .num_calls = 4, .push = push, .queue_self = !kSlow};
    expect_right(model);
    model.queue_self = false;
    model.flags_at_once = true;
    model.num_sets = 2;
    for (const Order order : {Order::kSequential, Order::kOverlapped, Order::kAny}) {
      model.order = order;
      model.num_calls = order == Order::kAny && (push || kSlow) ? 3 : 4;
      expect_right(model);
      model.failing_call = 0;
      model.declined_call = 2;
      expect_right(model);
      model.failing_call = model.declined_call = -1;
    }
  }
}

struct Planted {
  Fault fault;
  const char* name;
  const char* text;
};
class LatencyModelFaults : public ::testing::TestWithParam<Planted> {};

TEST_P(LatencyModelFaults, AreFound) {
  for (const auto& [num_sets, at_once] : {std::pair{1, false}, {1, true}, {2, false}, {2, true}}) {
    Explorer explorer({.num_sets = num_sets,
                       .num_calls = 5,
                       .flags_at_once = at_once,
                       .fault = GetParam().fault});
    const std::string failure = explorer.explore(kMaxStates);
    EXPECT_NE(failure.find(GetParam().text), std::string::npos) << failure;
    fmt::print("{} in flight, {} states: {}", num_sets, explorer.num_states(),
               failure.substr(0, failure.find('\n') + 1));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Planted, LatencyModelFaults,
    ::testing::Values(Planted{Fault::kEpochNotCompared, "EpochNotCompared", "in epoch "},
                      Planted{Fault::kPutAfterFlag, "PutAfterFlag", "in epoch "},
                      Planted{Fault::kReuseWithoutDone, "ReuseWithoutDone", "epoch"},
                      Planted{Fault::kDoneBeforeReading, "DoneBeforeReading", "in epoch "},
                      Planted{Fault::kSumWithoutDone, "SumWithoutDone", "reads the result"},
                      Planted{Fault::kDoneToSendersOnly, "DoneToSendersOnly", "hang: "}),
    [](const auto& planted) { return std::string(planted.param.name); });

}  // namespace
}  // namespace argosy
