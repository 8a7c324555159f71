// The drop of a layer with a capacity: CapacityCut over a group. Test: tests/moe/capacity_layer_test.cc.
#pragma once

#include <memory>
#include <vector>

#include "argosy/capacity.h"
#include "argosy/group.h"
#include "transport/collectives.h"

namespace argosy {

class CapacityDrop {
 public:
  // Collective: yes. Precondition: validate(spec) is ok.
  static Result<std::unique_ptr<CapacityDrop>> create(Group& group, const CapacitySpec& spec,
                                                      int64_t num_experts, int64_t top_k);

  // kept = routing without what is dropped; assigned [E] = the choices of all ranks before the drop.
  //
  // Collective: yes. in  local  what this rank has found wrong: it comes out on every rank, and nothing is dropped. Errors:
  // that, with its rank; those of a wait.
  Status run(const Status& local, const Routing& routing, Routing* kept,
             std::vector<int64_t>* assigned);

  const CapacitySpec& spec() const { return spec_; }

 private:
  CapacityDrop(Group& group, const CapacitySpec& spec, int64_t num_experts, int64_t top_k)
      : group_(group), spec_(spec), num_experts_(num_experts), top_k_(top_k) {}
  Status drop(const Routing& routing, int64_t num_tokens, Routing* kept);
  Status gather_counts(const std::vector<int64_t>& mine);

  Group& group_;
  const CapacitySpec spec_;
  const int64_t num_experts_, top_k_;
  std::unique_ptr<transport::AllGather> statuses_;  // and tokens, and counts [E]
  std::unique_ptr<transport::AllGather> counts_;    // [E], or bins [E, kBins]
};

}  // namespace argosy
