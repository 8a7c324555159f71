// The group: who the ranks are, how they reach each other, how long they wait, what they agreed on.
//
// Long-lived. Test: tests/transport/group_test.cc.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "argosy/cpu.h"
#include "argosy/status.h"
#include "argosy/thread_pool.h"

namespace argosy {

namespace transport {
class Endpoint;
struct GroupAccess;
}  // namespace transport

// Where ranks that are threads of one process meet. Make one, hand it to every rank.
class InprocWorld {
 public:
  // Errors: kInvalidArgument when num_ranks < 1 or > 1024.
  static Result<std::shared_ptr<InprocWorld>> create(int num_ranks);
  ~InprocWorld();

  struct State;
  State& state() { return *state_; }

 private:
  explicit InprocWorld(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// How ranks reach each other.
enum class TransportKind {
  kAuto,    // inproc when `inproc` is given or num_ranks is 1, else shm
  kInproc,  // ranks are threads of one process
  kShm,     // ranks are processes of one host
};

struct GroupOptions {
  int rank = 0;
  int num_ranks = 1;
  TransportKind transport = TransportKind::kAuto;
  std::shared_ptr<InprocWorld> inproc;  // may be null when num_ranks is 1
  // shm: the name ranks of one job meet under; the same on every rank, different between jobs. A process
  // that joins several groups of one job meets the same peers in the same order.
  std::string job;
  std::chrono::milliseconds startup_deadline{60'000};
  std::chrono::milliseconds step_deadline{30'000};
  DotOrder dot_order = DotOrder::kAuto;
  std::optional<Level> level;  // unset: the best this CPU and build have
  int threads_per_rank = 1;
  // Set: joining ends by binding thread t of the rank's pool, the caller being thread 0, to the CPU
  // of index pin_first_core + t of those this process may use, counted round (argosy/pinning.h).
  // Best effort, and for good: the caller stays bound when the group is gone. Each rank's own.
  std::optional<int> pin_first_core;
  // Trouble on purpose, for trying how a program bears it: "" for none, else for instance
  // "seed=7,delay_us=200,pause_us=50" (messages late and, between peers, out of order; ranks late) or
  // "kill=1@12" (rank 1 gets SIGKILL at its step 12). All words: docs/failures.md. Errors then end with
  // this text.
  std::string simulate;
};

// A setting that all ranks must share.
struct Setting {
  std::string field;
  std::string value;
};

class Group {
 public:
  // Collective: yes. Blocks: at most startup_deadline. Compares num_ranks, deadlines, dot_order and
  // the library version over all ranks, and resolves dot_order kAuto: kAmx if every rank has AMX,
  // else kVdpbf16. `level` and threads_per_rank are each rank's own. Errors, on every rank:
  // kDisagree names the field and both values with their ranks; kTimeout names the ranks that never
  // came; kInvalidArgument for a rank outside [0, num_ranks) or taken twice. Any other failure of
  // one rank (level, threads, pin_first_core) comes out on the others with its code and its rank. A world serves
  // one group, also when joining failed.
  static Result<std::unique_ptr<Group>> join(const GroupOptions& options);
  // Leaves without communicating.
  ~Group();

  int rank() const;
  int num_ranks() const;
  DotOrder dot_order() const;  // kAmx or kVdpbf16
  Level level() const;
  ThreadPool& pool();
  // CPU of every thread of the pool, -1 for one that could not be bound. Empty without
  // pin_first_core.
  const std::vector<int>& pinned_cpus() const;
  std::chrono::milliseconds step_deadline() const;
  std::string transport_name() const;
  // Equal on all ranks, different between groups: plans carry it.
  uint64_t id() const;

  // Collective: yes; same fields in the same order everywhere, 64 KiB of text at most. Blocks: at
  // most step_deadline. Compares a hash of the settings; errors, on every rank: kDisagree naming
  // the first differing field, the values and their ranks; kInvalidArgument naming the rank with
  // too much text. After either the group is still usable, although kDisagree has group radius:
  // whoever compared decides.
  Status agree(const std::vector<Setting>& settings);

  // Collective: yes. Blocks: at most step_deadline.
  Status barrier();

  // Brings every rank's bytes to `root`, as (*all)[rank] in rank order; sizes may differ, 0 is fine.
  // On other ranks `all` may be null and is left alone. A rank returns as soon as its own bytes are
  // sent; nobody waits for the root to use them.
  //
  // Collective: yes, with one root. Blocks: at most step_deadline per chunk of a few MiB.
  // Allocates: yes. Errors, the same on every rank, after which the group is still usable:
  // kInvalidArgument for a root outside [0, num_ranks) or a root with null `all`; kDisagree names
  // two roots and their ranks. kOutOfMemory, and the errors of a wait, end the group.
  Status gather(int root, std::span<const std::byte> mine,
                std::vector<std::vector<std::byte>>* all);

  // Makes every present and later wait of every rank fail with kAborted and this message.
  void abort(const Status& reason);
  // Ok until the group is poisoned.
  Status health() const;

  transport::Endpoint& endpoint();

 private:
  friend struct transport::GroupAccess;
  struct State;
  explicit Group(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace argosy
