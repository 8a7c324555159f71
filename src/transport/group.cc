// Group: joining in four steps, each with the startup deadline: what this rank can do by itself, a
// seat, the comparison of settings, the shared facts (id, AMX). A rank that fails in the first step
// tells the others. Test: tests/transport/group_test.cc.
#include "argosy/group.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <utility>

#include "argosy/pinning.h"
#include "base/error.h"
#include "platform/clock.h"
#include "transport/agree.h"
#include "transport/collectives.h"
#include "transport/gather.h"
#include "transport/inproc/endpoint.h"
#include "transport/inproc/world.h"
#include "transport/join.h"
#include "transport/shm/endpoint.h"
#include "transport/sim/sim.h"

namespace argosy {

using platform::Deadline;
using transport::Agreement;
using transport::AllGather;
using transport::Endpoint;
using transport::JoinOverrides;

// Members in order of destruction, last first: windows are freed before the endpoint leaves.
struct Group::State {
  std::chrono::milliseconds step_deadline{0};
  Level level = Level::kGeneric;
  DotOrder dot_order = DotOrder::kVdpbf16;
  uint64_t id = 0;
  std::unique_ptr<ThreadPool> pool;
  std::vector<int> pinned_cpus;
  std::unique_ptr<Endpoint> endpoint;
  std::unique_ptr<Agreement> agreement;
  uint64_t num_made = 0;
};

namespace {

// A longer deadline is a slip of units, and sums of spans must not overflow.
constexpr std::chrono::milliseconds kMaxDeadline = std::chrono::hours(24 * 30);

// What a rank finds out alone.
struct LocalFacts {
  Level level = Level::kGeneric;
  bool has_amx = false;
  std::unique_ptr<ThreadPool> pool;
  transport::sim::Trouble trouble;
};

// What a rank tells all others when joining.
struct SharedFacts {
  uint64_t group_id = 0;  // rank 0's counts
  uint64_t has_amx = 0;
};

Status check_deadline(const char* name, std::chrono::milliseconds deadline) {
  if (deadline.count() >= 1 && deadline <= kMaxDeadline) return {};
  return base::invalid("{} is {} ms; it can be 1 to {}", name, deadline.count(),
                       kMaxDeadline.count());
}

bool uses_shm(const GroupOptions& options) {
  if (options.transport != TransportKind::kAuto) return options.transport == TransportKind::kShm;
  return options.inproc == nullptr && options.num_ranks != 1;
}

Result<LocalFacts> find_local_facts(const GroupOptions& options, const JoinOverrides& overrides) {
  ARGOSY_RETURN_IF_ERROR(check_deadline("startup_deadline", options.startup_deadline));
  ARGOSY_RETURN_IF_ERROR(check_deadline("step_deadline", options.step_deadline));
  constexpr int kMaxCore = 32767;
  const int first_core = options.pin_first_core.value_or(0);
  if (first_core < 0 || first_core > kMaxCore) {
    return base::invalid("pin_first_core is {}; it can be 0 to {}", first_core, kMaxCore);
  }
  LocalFacts facts;
  ARGOSY_ASSIGN_OR_RETURN(facts.trouble, transport::sim::parse(options.simulate));
  ARGOSY_RETURN_IF_ERROR(
      transport::sim::check(facts.trouble, options.num_ranks, uses_shm(options)));
  ARGOSY_ASSIGN_OR_RETURN(const CpuInfo* cpu, cpu_info());
  ARGOSY_ASSIGN_OR_RETURN(facts.level, resolve_level(options.level));
  facts.has_amx = overrides.has_amx.value_or(cpu->has(Level::kAmx));
  ARGOSY_ASSIGN_OR_RETURN(facts.pool, ThreadPool::create(options.threads_per_rank));
  return facts;
}

// Differs between groups of one process by the counter, between processes by the time. Never 0.
uint64_t new_group_id() {
  static std::atomic<uint64_t> num_groups{0};
  const auto time = std::chrono::system_clock::now().time_since_epoch().count();
  // Relaxed: only the number matters. Then the finaliser of splitmix64, which is a bijection.
  uint64_t id = static_cast<uint64_t>(time) +
                num_groups.fetch_add(1, std::memory_order_relaxed) * 0x9E3779B97F4A7C15u;
  id = (id ^ (id >> 30)) * 0xBF58476D1CE4E5B9u;
  id = (id ^ (id >> 27)) * 0x94D049BB133111EBu;
  id ^= id >> 31;
  return id != 0 ? id : 1;
}

Result<std::shared_ptr<InprocWorld>> find_world(const GroupOptions& options) {
  if (options.inproc != nullptr) return options.inproc;
  if (options.num_ranks == 1) return InprocWorld::create(1);
  return base::invalid("num_ranks is {}, but no InprocWorld is given for the ranks to meet",
                       options.num_ranks);
}

// Takes this rank's place among the others; `own` says whether it can join at all, and is told to them.
Result<std::unique_ptr<Endpoint>> attach_inproc(const GroupOptions& options, const Status& own,
                                                Deadline deadline) {
  ARGOSY_ASSIGN_OR_RETURN(std::shared_ptr<InprocWorld> world, find_world(options));
  if (!own.ok()) {
    world->state().refuse(options.rank, base::error(own.code(), "rank {} could not join: {}",
                                                    options.rank, own.message()));
    return own;
  }
  return transport::inproc::attach(std::move(world), options.rank, options.num_ranks, deadline);
}

// How many groups this process has joined as one rank of one job: a group's name needs it.
uint64_t next_generation(const std::string& job, int rank) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, uint64_t> generations;
  const std::lock_guard lock(mutex);
  return generations[{job, rank}]++;
}

Result<std::unique_ptr<Endpoint>> attach_shm(const GroupOptions& options, const Status& own,
                                             Deadline deadline) {
  if (options.job.empty() && options.num_ranks != 1) {
    return base::invalid("num_ranks is {}, but no job is given for the processes to meet under",
                         options.num_ranks);
  }
  transport::shm::Seat seat;
  seat.job = options.job.empty() ? fmt::format("alone-{}", new_group_id()) : options.job;
  seat.generation = next_generation(seat.job, options.rank);
  seat.rank = options.rank;
  seat.num_ranks = options.num_ranks;
  seat.heap_bytes = transport::shm::kDefaultHeapBytes;
  return transport::shm::attach(seat, own, deadline);
}

std::vector<Setting> shared_settings(const GroupOptions& options, const JoinOverrides& overrides) {
  return {
      {"argosy_version", overrides.version.value_or(ARGOSY_VERSION)},
      {"num_ranks", fmt::format("{}", options.num_ranks)},
      {"startup_deadline_ms", fmt::format("{}", options.startup_deadline.count())},
      {"step_deadline_ms", fmt::format("{}", options.step_deadline.count())},
      {"dot_order", std::string(name_of(options.dot_order))},
  };
}

Result<SharedFacts> share_facts(Endpoint& endpoint, bool has_amx, Deadline deadline) {
  ARGOSY_ASSIGN_OR_RETURN(auto gather, AllGather::create(endpoint, sizeof(SharedFacts), deadline));
  const SharedFacts mine{new_group_id(), has_amx ? uint64_t{1} : uint64_t{0}};
  ARGOSY_RETURN_IF_ERROR(gather->issue(std::as_bytes(std::span(&mine, 1))));
  ARGOSY_RETURN_IF_ERROR(gather->wait(deadline, "joining the group"));
  SharedFacts shared{0, 1};
  for (int rank = 0; rank < endpoint.num_ranks(); ++rank) {
    SharedFacts theirs;
    if (gather->from(rank).size() != sizeof(theirs)) {
      return base::error(StatusCode::kCorruptData, "facts of rank {} have {} bytes, want {}", rank,
                         gather->from(rank).size(), sizeof(theirs));
    }
    std::memcpy(&theirs, gather->from(rank).data(), sizeof(theirs));
    if (rank == 0) shared.group_id = theirs.group_id;
    shared.has_amx &= theirs.has_amx;
  }
  return shared;
}

DotOrder resolve(DotOrder asked, bool all_have_amx) {
  if (asked != DotOrder::kAuto) return asked;
  return all_have_amx ? DotOrder::kAmx : DotOrder::kVdpbf16;
}

}  // namespace

Result<std::unique_ptr<Group>> transport::GroupAccess::join(const GroupOptions& options,
                                                            const JoinOverrides& overrides) {
  const Deadline deadline = Deadline::after(options.startup_deadline);
  Result<LocalFacts> facts = find_local_facts(options, overrides);
  Result<std::unique_ptr<Endpoint>> endpoint =
      uses_shm(options) ? attach_shm(options, facts.error(), deadline)
                        : attach_inproc(options, facts.error(), deadline);
  ARGOSY_RETURN_IF_ERROR(facts.error());
  ARGOSY_RETURN_IF_ERROR(endpoint.error());
  auto state = std::make_unique<Group::State>();
  state->step_deadline = options.step_deadline;
  state->level = facts->level;
  state->pool = std::move(facts->pool);
  state->endpoint = options.simulate.empty()
                        ? std::move(*endpoint)
                        : transport::sim::wrap(std::move(*endpoint), facts->trouble);
  ARGOSY_ASSIGN_OR_RETURN(state->agreement, Agreement::create(*state->endpoint, deadline));
  ARGOSY_RETURN_IF_ERROR(state->agreement->agree(shared_settings(options, overrides), deadline));
  ARGOSY_ASSIGN_OR_RETURN(const SharedFacts shared,
                          share_facts(*state->endpoint, facts->has_amx, deadline));
  state->id = shared.group_id;
  state->dot_order = resolve(options.dot_order, shared.has_amx != 0);
  // Last: all that looks at the affinity mask has been made.
  if (options.pin_first_core.has_value()) {
    state->pinned_cpus = pin_threads(*state->pool, *options.pin_first_core);
  }
  return std::unique_ptr<Group>(new Group(std::move(state)));
}

uint64_t transport::GroupAccess::count_made(Group& group) { return group.state_->num_made++; }

Result<std::unique_ptr<Group>> Group::join(const GroupOptions& options) {
  return transport::GroupAccess::join(options, {});
}

Group::Group(std::unique_ptr<State> state) : state_(std::move(state)) {}

Group::~Group() = default;

int Group::rank() const { return state_->endpoint->rank(); }
int Group::num_ranks() const { return state_->endpoint->num_ranks(); }
DotOrder Group::dot_order() const { return state_->dot_order; }
Level Group::level() const { return state_->level; }
ThreadPool& Group::pool() { return *state_->pool; }
const std::vector<int>& Group::pinned_cpus() const { return state_->pinned_cpus; }
std::chrono::milliseconds Group::step_deadline() const { return state_->step_deadline; }
std::string Group::transport_name() const { return std::string(state_->endpoint->name()); }
uint64_t Group::id() const { return state_->id; }
Endpoint& Group::endpoint() { return *state_->endpoint; }

Status Group::agree(const std::vector<Setting>& settings) {
  return state_->agreement->agree(settings, Deadline::after(state_->step_deadline));
}

Status Group::barrier() {
  return state_->endpoint->barrier(Deadline::after(state_->step_deadline));
}

Status Group::gather(int root, std::span<const std::byte> mine,
                     std::vector<std::vector<std::byte>>* all) {
  return transport::gather(*state_->endpoint, root, mine, all, state_->step_deadline);
}

void Group::abort(const Status& reason) { state_->endpoint->abort(reason); }

Status Group::health() const { return state_->endpoint->health(); }

}  // namespace argosy
