// One seed = one schedule of a LatencyExchange or two over a ScheduledWorld: sizes, routings, programs of the ranks, and
// the order in which messages come and ranks go on.
//
// Every row, size and sum is checked against values that name exchange, call, rank, token and column. What nobody may
// read any more is overwritten at once. A schedule ends well, or with the text of the first failure: a wrong byte, an
// error, or a hang. Programs are drawn so that no wait of one rank can need a later step of its own: a hang is a fault.
// Test: latency_schedule_test.cc.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "argosy/thread_pool.h"
#include "exchange/latency_state.h"
#include "exchange/scheduled_world.h"

namespace argosy::testing {

// What a reader that is wrong would do; found by the schedules.
enum class PlantedFault {
  kNone,
  kFlagWithoutEpoch,  // the word of a flag carries only its lower bits
  kFlagOfOldEpoch,    // a flag says the epoch before
  kEpochNotCompared,  // any flag that was ever raised is taken for the one that is waited for
  kSlotAfterFlag,     // the puts of rows may come after their flag
  kResultAfterFlag,   // those of results
  kNoticeAfterFlag,   // those of notices
  kReuseWithoutDone,  // slots are written again before their readers have finished
  kSumWithoutDone,    // results are read before they are written
};

// What is not drawn: of a schedule for a named case. 0 and false: drawn.
struct ScheduleRules {
  int num_ranks = 0;
  int64_t num_in_flight = 0;
  int num_calls = 0;
  bool rank_1_is_slow = false;     // it goes on only when nothing else can happen
  bool payloads_are_slow = false;  // no put comes before something waits for nothing but puts
  PlantedFault fault = PlantedFault::kNone;
};

// What all schedules together have met.
struct ScheduleCoverage {
  int most_in_flight = 0;  // calls of one rank
  int64_t failed_calls = 0, declined_calls = 0;
  // Schedules with an exchange of this kind.
  int64_t pull = 0, push_by_stores = 0, push_by_puts = 0, quantised = 0, two_exchanges = 0;
  int64_t training = 0, differing_calls = 0;
};

class LatencySchedule {
 public:
  LatencySchedule();

  // "" when all went well; else what failed, and the last steps. Same seed and rules, same schedule.
  std::string run(uint64_t seed, const ScheduleRules& rules);

  const ScheduleCoverage& coverage() const { return coverage_; }

 private:
  static constexpr int kMaxRanks = ScheduledWorld::kMaxRanks;
  static constexpr int kMaxExchanges = 2;
  static constexpr int kMaxCalls = 8;

  enum class Kind : uint8_t { kIssueDispatch, kWaitDispatch, kIssueCombine, kWaitCombine };
  struct Half {
    Kind kind;
    uint8_t exchange;
    uint8_t call;
  };
  // One rank's part of a call.
  struct Part {
    Routing routing;
    bool fails = false, declines = false, more = false;
    std::vector<std::byte> hidden;  // [T, H] of the exchange's dtype
    std::vector<float> rows;        // [T, H] as receivers get them
    std::vector<float> numbers;     // [T, K] beside them
    std::string same;               // what all ranks must share
    std::vector<std::byte> output;  // [T, H]
    LatencyRows received;
    uint64_t number = 0;  // of the call
    ReturnedRows returned;
    bool has_returned = false;  // `returned` may still be read
    bool results_written = false;
    int next = 0;  // while programs are drawn: the half that comes next, 4 = over
  };
  struct Call {
    std::array<Part, kMaxRanks> parts;
    int failing = -1;  // first rank that fails
    bool declined = false, more = false;
    bool has_numbers = false;  // beside its rows; beside results always, for training
    int differing = -1;        // first rank whose words differ from those of rank 0
    bool is_over() const {
      return failing >= 0 || differing >= 0 || declined;
    }  // with wait_dispatch
  };
  struct Layer {
    LatencyOptions options;
    PayloadLayout payload;
    int num_calls = 0;
    std::array<std::unique_ptr<LatencyExchange::State>, kMaxRanks> states;
    std::array<Call, kMaxCalls> calls;
  };
  // How likely each thing is to be picked; 0 = only when nothing else is possible.
  struct Pace {
    int64_t rank_share = 128;  // of 256 picks
    std::array<int64_t, kMaxRanks> rank{};
    std::array<int64_t, kMaxRanks * kMaxRanks> channel{};
    int64_t puts = 256;
  };
  struct Step {
    bool is_half = false;
    int rank = 0;
    Half half{};
    ScheduledWorld::Message message;
  };

  void draw_shape(const ScheduleRules& rules);
  void draw_options(Layer* layer, bool share, const ScheduleRules& rules);
  void draw_call(int exchange, int call);
  void draw_routing(const LatencyOptions& options, Routing* routing);
  void draw_hidden(int exchange, int call, int rank);
  void draw_programs();
  bool may_come_next(int rank, const Half& half, bool alone) const;
  void draw_program_steps(int first_rank, int last_rank);
  void draw_pace();
  void count_shape(bool direct);

  bool pick_and_do();
  bool try_random();
  bool try_any(bool held_too);
  bool deliver(size_t which);
  bool step_rank(int rank);
  bool is_ready(int rank);
  void plant(int rank, const Half& half);
  int64_t weight_of(const ScheduledWorld::Message& message) const;

  // False when it would wait, and nothing has changed.
  bool do_half(int rank, const Half& half);
  bool issue_dispatch(int rank, const Half& half);
  bool wait_dispatch(int rank, const Half& half);
  bool issue_combine(int rank, const Half& half);
  bool wait_combine(int rank, const Half& half);
  void check_rows(int rank, const Half& half);
  void write_results(int rank, const Half& half);
  void check_sums(int rank, const Half& half);
  void check_returned(int rank, const Half& half);
  void end_returned(int rank, const Half& half);
  void poison_slots(int rank, const Half& half);
  void poison_results(int rank, const Half& half);

  Layer& layer_of(const Half& half) { return layers_[half.exchange]; }
  Call& call_of(const Half& half) { return layers_[half.exchange].calls[half.call]; }
  Part& part_of(int rank, const Half& half) {
    return call_of(half).parts[static_cast<size_t>(rank)];
  }
  LatencyExchange::State& state_of(int rank, const Half& half) {
    return *layers_[half.exchange].states[static_cast<size_t>(rank)];
  }
  void fail(std::string text);
  void check(const Status& status);
  std::string last_steps() const;

  std::unique_ptr<ThreadPool> pool_;
  ScheduledWorld world_;
  SmallRandom random_{0};
  ScheduleRules rules_;
  int num_ranks_ = 0, num_layers_ = 0;
  std::array<Layer, kMaxExchanges> layers_;
  std::array<std::vector<Half>, kMaxRanks> programs_;
  std::array<size_t, kMaxRanks> at_{};  // next half of each rank
  std::array<int, kMaxRanks> in_flight_{};
  ScheduleCoverage coverage_;
  Pace pace_;
  std::vector<Half> candidates_;  // scratch
  std::vector<int> candidate_ranks_;
  std::array<Step, 48> steps_;  // the last ones, in a ring
  size_t num_steps_ = 0;
  std::string failure_;
};

}  // namespace argosy::testing
