// Window memory of one process: a handle is an address. Test: tests/transport/endpoint_test.cc.
#include "transport/inproc/endpoint.h"

#include <map>
#include <utility>

#include "transport/inproc/world.h"
#include "transport/shared/endpoint.h"

namespace argosy::transport::inproc {
namespace {

class ProcessMemory final : public shared::WindowMemory {
 public:
  explicit ProcessMemory(std::shared_ptr<InprocWorld> world) : world_(std::move(world)) {}

  // Peers may still read this rank's last results.
  ~ProcessMemory() override {
    InprocWorld::State& state = world_->state();
    const std::lock_guard lock(state.mutex);
    for (auto& [handle, memory] : owned_) state.left_behind.push_back(std::move(memory));
  }

  Result<uint64_t> create(int64_t bytes) override {
    ARGOSY_ASSIGN_OR_RETURN(platform::MappedMemory memory, platform::MappedMemory::map(bytes));
    const auto handle = reinterpret_cast<uint64_t>(memory.data());
    owned_.emplace(handle, std::move(memory));
    return handle;
  }
  std::byte* address(int, uint64_t handle) override { return reinterpret_cast<std::byte*>(handle); }
  void release(uint64_t handle, int64_t) override { owned_.erase(handle); }

 private:
  std::shared_ptr<InprocWorld> world_;
  std::map<uint64_t, platform::MappedMemory> owned_;
};

}  // namespace

Result<std::unique_ptr<Endpoint>> attach(std::shared_ptr<InprocWorld> world, int rank,
                                         int num_ranks, platform::Deadline deadline) {
  ARGOSY_RETURN_IF_ERROR(world->state().take_seat(rank, num_ranks));
  shared::Attachment attachment;
  attachment.name = "inproc";
  attachment.rank = rank;
  attachment.ranks = world->state().ranks;
  attachment.memory = std::make_unique<ProcessMemory>(world);
  attachment.keep_alive = std::move(world);
  return shared::attach(std::move(attachment), deadline);
}

}  // namespace argosy::transport::inproc
