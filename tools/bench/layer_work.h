// A MoE layer with random weights on a crew of ranks, routed from outside. Test:
// tests/bench/bench_test.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "argosy/moe.h"
#include "argosy/status.h"
#include "argosy/tensor.h"
#include "tools/bench/random_data.h"
#include "tools/bench/rank_crew.h"

namespace argosy::tools::bench {

struct LayerShape {
  int64_t num_tokens = 0;  // T, over all ranks
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  BlockFormat format = BlockFormat::kUnset;  // of the experts' weights; kUnset: bf16
};

// Weights of expert `expert`, the same for any number of ranks: gate and up [F, H], down [H, F].
struct ExpertValues {
  Tensor gate, up, down;
};
Result<ExpertValues> expert_values(const LayerShape& shape, int64_t expert);

// Packed weights of experts [first, first + count), and a random gate [E, H].
Result<MoeWeights> layer_weights(const LayerShape& shape, int64_t first, int64_t count);

class LayerWork {
 public:
  // `num_routings` of them, taken in turn: what a call finds in a cache must not be its own
  // experts. Checks the last token of the first call against fp64. Errors: those of RankCrew,
  // MoeLayer; kInternal for a wrong result.
  static Result<std::unique_ptr<LayerWork>> create(const BenchContext& context,
                                                   const LayerShape& shape, int num_ranks,
                                                   int threads_per_rank, int64_t num_routings);

  struct Call {
    double seconds = 0;       // of the slowest rank
    double weight_bytes = 0;  // of the experts with tokens
  };
  Result<Call> run();
  // weight_bytes of the call that run() makes next.
  double next_weight_bytes() const;

  double operations() const;
  // [T, H] bf16 of the last call.
  ConstTensorView output() const { return output_.view(); }
  // Makes the first routing the next one again.
  void start_over() { next_ = 0; }

 private:
  struct Rank {
    std::unique_ptr<MoeLayer> layer;
    int64_t first_token = 0, num_tokens = 0;
  };

  explicit LayerWork(const LayerShape& shape) : shape_(shape) {}
  Status make_rank(Group& group);
  Status forward(Group& group, const RandomRouting& routing);
  Status check();

  LayerShape shape_;
  Tensor hidden_, output_;  // [T, H]
  std::vector<RandomRouting> routings_;
  size_t next_ = 0;
  // Layers go before the groups they were made in.
  std::unique_ptr<RankCrew> crew_;
  std::vector<Rank> ranks_;
};

}  // namespace argosy::tools::bench
