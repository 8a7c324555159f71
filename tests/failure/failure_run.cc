// See failure_run.h.
#include "failure/failure_run.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <thread>

#include "argosy/exchange.h"
#include "argosy/group.h"
#include "platform/clock.h"
#include "support/routing_cases.h"

namespace argosy::testing {
namespace {

using platform::Clock;
using transport::sim::Fault;

constexpr int64_t kHidden = 16;
constexpr int64_t kExperts = 6;
constexpr int64_t kTopK = 2;
constexpr int64_t kTokens = 5;
constexpr int64_t kRoundRows = 8;  // several rounds a call
constexpr auto kHung = std::chrono::seconds(20);

int64_t now_ns() { return Clock::now().time_since_epoch().count(); }

// What a rank leaves for the parent, in memory both share.
struct Record {
  std::atomic<int> is_done{0};
  int code = 0;
  int64_t ended_ns = 0;
  char text[1500] = {};
};

// What the ranks' processes do; the numbers do not matter here, other tests check them.
Status run_calls(const GroupOptions& options) {
  Result<std::unique_ptr<Group>> group = Group::join(options);
  if (!group.has_value()) return group.error();
  ExchangeOptions settings;
  settings.dtype = DType::kF32;
  settings.hidden = kHidden;
  settings.num_experts = kExperts;
  settings.top_k = kTopK;
  settings.receive_budget_bytes = kRoundRows * kHidden * 4;
  Result<std::unique_ptr<Exchange>> exchange = Exchange::create(**group, settings);
  if (!exchange.has_value()) return exchange.error();
  std::mt19937_64 random(static_cast<uint64_t>(options.rank) + 1);
  for (int call = 0; call < 2; ++call) {
    const Routing routing = draw_routing(random, kTokens, kExperts, kTopK, 0.0, [&](int64_t) {
      return static_cast<int32_t>(random() % kExperts);
    });
    const std::vector<float> hidden(kTokens * kHidden, 1.0f);
    std::vector<float> output(kTokens * kHidden);
    CombineInput input;
    input.topk_weights =
        ConstTensorView(routing.topk_weights.values.data(), DType::kF32, {kTokens, kTopK});
    CountsMatrix counts;
    DispatchPlan plan;
    ReceivedRows rows;
    Status status = (*exchange)->issue_counts({}, routing);
    if (status.ok()) status = (*exchange)->wait_counts(&counts);
    if (status.ok()) status = (*exchange)->plan(routing, counts, &plan);
    for (int64_t round = 0; status.ok() && round < plan.num_rounds; ++round) {
      status = (*exchange)->issue_dispatch(
          plan, round, ConstTensorView(hidden.data(), DType::kF32, {kTokens, kHidden}));
      if (status.ok()) status = (*exchange)->wait_dispatch(plan, round, &rows);
      if (status.ok()) status = (*exchange)->issue_combine(plan, round);
      if (status.ok()) {
        status = (*exchange)->wait_combine(
            plan, round, input, TensorView(output.data(), DType::kF32, {kTokens, kHidden}));
      }
    }
    if (!status.ok()) return status;
  }
  return (*group)->barrier();
}

GroupOptions options_of(const FailureCase& one, const std::string& job, int rank) {
  GroupOptions options;
  options.rank = rank;
  options.num_ranks = one.num_ranks;
  options.transport = TransportKind::kShm;
  options.job = job;
  options.startup_deadline = one.deadline;
  options.step_deadline = one.deadline;
  if (one.fault != Fault::kNone) {
    transport::sim::Trouble trouble;
    trouble.fault = one.fault;
    trouble.rank = one.victim;
    trouble.step = one.step;
    options.simulate = to_string(trouble);
  }
  return options;
}

[[noreturn]] void be_rank(const FailureCase& one, const std::string& job, int rank,
                          Record& record) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Status status;
  try {
    status = run_calls(options_of(one, job, rank));
  } catch (const std::runtime_error& error) {
    status = Status(StatusCode::kInternal, error.what());
  }
  record.ended_ns = now_ns();
  record.code = static_cast<int>(status.code());
  std::snprintf(record.text, sizeof(record.text), "%s", status.message().c_str());
  // Release, pairs with the acquire of the parent.
  record.is_done.store(1, std::memory_order_release);
  _exit(0);
}

// The children of one try, in rank order.
struct Children {
  std::vector<pid_t> pids;
  std::vector<bool> is_gone;
  int64_t fault_ns = 0;  // when the victim died or stopped
  bool is_stopped = false;

  // A stopped victim does not end by itself.
  bool all_gone(int victim) const {
    for (size_t rank = 0; rank < pids.size(); ++rank) {
      if (!is_gone[rank] && !(is_stopped && static_cast<int>(rank) == victim)) return false;
    }
    return true;
  }
};

// Looks at what has happened to the children since the last look.
void look(const FailureCase& one, Children* children) {
  for (size_t rank = 0; rank < children->pids.size(); ++rank) {
    if (children->is_gone[rank]) continue;
    int status = 0;
    if (waitpid(children->pids[rank], &status, WNOHANG | WUNTRACED) <= 0) continue;
    const bool is_victim = static_cast<int>(rank) == one.victim;
    if (WIFSTOPPED(status)) {
      children->is_stopped = true;
    } else {
      children->is_gone[rank] = true;
    }
    if (is_victim && (WIFSTOPPED(status) || WIFSIGNALED(status))) children->fault_ns = now_ns();
  }
}

}  // namespace

std::string to_string(const FailureCase& one) {
  transport::sim::Trouble trouble;
  trouble.fault = one.fault;
  trouble.rank = one.victim;
  trouble.step = one.step;
  return fmt::format("{} ranks, {}", one.num_ranks, to_string(trouble));
}

FailureOutcome run_failure(const FailureCase& one) {
  static int num_jobs = 0;
  const std::string job = fmt::format("failure-{}-{}", getpid(), num_jobs++);
  const size_t bytes = sizeof(Record) * static_cast<size_t>(one.num_ranks);
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  Record* const records = static_cast<Record*>(memory);
  Children children;
  for (int rank = 0; rank < one.num_ranks; ++rank) {
    new (records + rank) Record();
    const pid_t pid = fork();
    if (pid == 0) be_rank(one, job, rank, records[rank]);
    children.pids.push_back(pid);
    children.is_gone.push_back(false);
  }
  const Clock::time_point end = Clock::now() + one.deadline + kHung;
  while (!children.all_gone(one.victim) && Clock::now() < end) {
    look(one, &children);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }

  FailureOutcome outcome;
  const Record& victim = records[one.victim];
  // Acquire, pairs with the release of the rank; likewise below.
  const bool has_thrown = victim.is_done.load(std::memory_order_acquire) == 1 &&
                          victim.code == static_cast<int>(StatusCode::kInternal);
  outcome.has_fault = children.fault_ns != 0 || has_thrown;
  const int64_t fault_ns = has_thrown ? victim.ended_ns : children.fault_ns;
  for (int rank = 0; rank < one.num_ranks; ++rank) {
    const auto at = static_cast<size_t>(rank);
    const Record& record = records[rank];
    if (rank != one.victim) {
      Survivor survivor;
      survivor.rank = rank;
      survivor.has_ended = record.is_done.load(std::memory_order_acquire) == 1;
      survivor.status = Status(static_cast<StatusCode>(record.code), record.text);
      survivor.seconds = static_cast<double>(record.ended_ns - fault_ns) * 1e-9;
      outcome.survivors.push_back(survivor);
      outcome.num_left += children.is_gone[at] ? 0 : 1;
    }
    if (!children.is_gone[at]) {
      kill(children.pids[at], SIGKILL);
      waitpid(children.pids[at], nullptr, 0);
    }
  }
  munmap(memory, bytes);
  return outcome;
}

namespace {

// Where the text goes on after `words`, or npos.
size_t after(const std::string& text, const std::string& words) {
  const size_t at = text.find(words);
  return at == std::string::npos ? at : at + words.size();
}

// Reads digits; false when there are none.
bool read_number(const std::string& text, size_t* at, int* number) {
  const size_t begin = *at;
  for (*number = 0; *at < text.size() && text[*at] >= '0' && text[*at] <= '9'; ++*at) {
    *number = *number * 10 + (text[*at] - '0');
  }
  return *at > begin;
}

// The rank that the text says is missing, -1 when it names none or more than one.
int named_rank(const std::string& text, bool is_stop) {
  size_t at = after(text, is_stop ? " ms for rank " : " lost rank ");
  if (at == std::string::npos && !is_stop) at = after(text, " waits for rank ");
  int rank = -1;
  if (at == std::string::npos || !read_number(text, &at, &rank)) return -1;
  if (text.compare(at, 7, " (have ") == 0) at = text.find(')', at) + 1;
  const bool goes_on = text.compare(at, 7, ", rank ") == 0 || text.compare(at, 5, " and ") == 0;
  return is_stop && goes_on ? -1 : rank;
}

}  // namespace

std::string judge(const FailureCase& one, const FailureOutcome& outcome) {
  const bool is_stop = one.fault == Fault::kStop;
  for (const Survivor& survivor : outcome.survivors) {
    const std::string text = survivor.status.to_string();
    const auto wrong = [&](const char* what) {
      return fmt::format("{}: rank {} {}: {}", to_string(one), survivor.rank, what, text);
    };
    if (!survivor.has_ended) return wrong("did not end");
    if (!outcome.has_fault) {
      if (!survivor.status.ok()) return wrong("failed without a fault");
      continue;
    }
    if (survivor.status.ok()) return wrong("saw no error");
    if (named_rank(text, is_stop) != one.victim) return wrong("does not name the victim alone");
    const StatusCode own = is_stop ? StatusCode::kTimeout : StatusCode::kPeerLost;
    if (survivor.status.code() != own && survivor.status.code() != StatusCode::kAborted) {
      return wrong("has the wrong code");
    }
  }
  return outcome.num_left == 0 ? "" : fmt::format("{} processes are left", outcome.num_left);
}

}  // namespace argosy::testing
