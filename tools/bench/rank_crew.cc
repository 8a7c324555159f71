// See rank_crew.h. Test: tests/bench/rank_crew_test.cc.
#include "tools/bench/rank_crew.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "tools/run_ranks.h"

namespace argosy::tools::bench {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

struct RankCrew::State {
  int num_ranks = 1;

  std::mutex mutex;  // guards what follows up to the blank line
  std::condition_variable changed;
  int64_t num_bodies = 0;  // bodies handed out so far
  int num_done = 0;        // ranks through with the last one
  bool stopping = false;
  const Body* body = nullptr;

  std::atomic<int> num_ready{0};
  std::vector<double> begin, end;  // [R], a rank's own until it counts as done
  std::vector<Status> statuses;    // likewise
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::thread> threads;

  void run_body(int rank, const Body& mine) {
    const auto at = static_cast<size_t>(rank);
    // Relaxed: only the time of the start depends on it; the mutex publishes everything else.
    num_ready.fetch_add(1, std::memory_order_relaxed);
    while (num_ready.load(std::memory_order_relaxed) < num_ranks) std::this_thread::yield();
    begin[at] = now_seconds();
    statuses[at] = mine(*groups[at]);
    end[at] = now_seconds();
    if (!statuses[at].ok()) groups[at]->abort(statuses[at]);
  }

  void rank_loop(int rank) {
    int64_t num_seen = 0;
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stopping || num_bodies > num_seen; });
      if (stopping) return;
      num_seen = num_bodies;
      const Body& mine = *body;
      lock.unlock();
      run_body(rank, mine);
      lock.lock();
      ++num_done;
      changed.notify_all();
    }
  }

  // The whole life of a rank's thread: joins, binds, runs bodies.
  void rank_main(int rank, const GroupOptions& options) {
    Result<std::unique_ptr<Group>> group = Group::join(options);
    statuses[static_cast<size_t>(rank)] = group.error();
    if (group.has_value()) groups[static_cast<size_t>(rank)] = std::move(*group);
    {
      const std::lock_guard lock(mutex);
      ++num_done;
      changed.notify_all();
    }
    rank_loop(rank);
  }

  void wait_for_all() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return num_done == num_ranks; });
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
};

RankCrew::RankCrew(std::unique_ptr<State> state) : state_(std::move(state)) {}

RankCrew::~RankCrew() { state_->stop(); }

Result<std::unique_ptr<RankCrew>> RankCrew::create(const BenchContext& context, int num_ranks,
                                                   int threads_per_rank) {
  ARGOSY_ASSIGN_OR_RETURN(const std::shared_ptr<InprocWorld> world, InprocWorld::create(num_ranks));
  auto state = std::make_unique<State>();
  state->num_ranks = num_ranks;
  const auto size = static_cast<size_t>(num_ranks);
  state->begin.resize(size);
  state->end.resize(size);
  state->statuses.resize(size);
  state->groups.resize(size);
  GroupOptions options;
  options.num_ranks = num_ranks;
  options.inproc = world;
  options.dot_order = context.dot_order;
  options.level = context.level;
  options.threads_per_rank = threads_per_rank;
  // Kernels of a low level may need long for a step of the other ranks.
  options.step_deadline = std::chrono::minutes(10);
  State& made = *state;
  std::unique_ptr<RankCrew> crew(new RankCrew(std::move(state)));
  try {
    for (int rank = 0; rank < num_ranks; ++rank) {
      options.rank = rank;
      options.pin_first_core = rank * threads_per_rank;
      made.threads.emplace_back([&made, rank, options] { made.rank_main(rank, options); });
    }
  } catch (const std::system_error& error) {  // those that wait for this rank give up in time
    return Status(StatusCode::kOutOfMemory,
                  fmt::format("the system refused the thread of a rank: {}", error.what()));
  }
  made.wait_for_all();
  ARGOSY_RETURN_IF_ERROR(merge_rank_errors(made.statuses));
  return crew;
}

Result<double> RankCrew::run(const Body& body) {
  State& state = *state_;
  {
    const std::lock_guard lock(state.mutex);
    state.body = &body;
    state.num_done = 0;
    state.num_ready.store(0, std::memory_order_relaxed);  // nobody is inside a body
    ++state.num_bodies;
  }
  state.changed.notify_all();
  state.wait_for_all();
  ARGOSY_RETURN_IF_ERROR(merge_rank_errors(state.statuses));
  return *std::max_element(state.end.begin(), state.end.end()) -
         *std::min_element(state.begin.begin(), state.begin.end());
}

}  // namespace argosy::tools::bench
