// The MoE layer over a group: route, dispatch, experts, combine. Forward.
//
// Bits of the output do not depend on the number of ranks, threads, level or transport
// (contract 4.1). Arithmetic: contract 3.5. Test: tests/moe/.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/capacity.h"
#include "argosy/checkpoint.h"
#include "argosy/exchange.h"
#include "argosy/gemm.h"
#include "argosy/group.h"
#include "argosy/latency.h"
#include "argosy/moe_backward.h"
#include "argosy/plan.h"
#include "argosy/router.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy {

// What one rank holds of a layer. Experts of this rank only, in order of their ids.
struct MoeWeights {
  int64_t first_expert = 0;      // id of the first of this rank's experts
  Tensor gate;                   // [E, H] bf16 or fp32
  Tensor gate_bias;              // [E] or empty
  Tensor selection_bias;         // fp32 [E] or empty
  Activation activation;         // of routed and shared experts
  PackedWeights gate_up;         // kGateUp, L groups, F x H; this and `down` with or without bias
  PackedWeights down;            // kPlain, L groups, H x F
  PackedWeights shared_gate_up;  // one group, or none
  PackedWeights shared_down;
  Tensor shared_gate;  // [1, H] or empty
};

// Reads and packs what `rank` of `num_ranks` needs: the shared part and its own experts' bytes,
// expert by expert. Errors: those of Checkpoint.
Result<MoeWeights> load_moe_weights(const Checkpoint& checkpoint, int64_t layer, int rank,
                                    int num_ranks);

// How a call's rows travel (contract 3).
enum class MoeMode : uint8_t {
  kThroughput,  // counts first, then every row to its exact place: training and prefill
  kLatency,     // rows into fixed slots without asking: decode
  // By measured cost, the same on every rank: latency mode while every rank has at most as many tokens as it was found
  // to be faster for.
  kAuto,
};
// "throughput", "latency", "auto".
const char* name_of(MoeMode mode);
// kNotFound names the word and the known ones.
Result<MoeMode> parse_moe_mode(std::string_view name);

struct MoeOptions {
  DType hidden_dtype = DType::kUnset;  // kBF16 or kF32
  MoeMode mode = MoeMode::kThroughput;
  // Of dispatch, in every mode: what travels is quantised row by row and decoded to bf16 (contract 3.5); kBF16 rows only.
  BlockFormat payload = BlockFormat::kUnset;
  // Latency mode. M, the most tokens of one rank that a call carries; more is an error on every rank, or goes by
  // in several calls.
  int64_t max_tokens = 128;
  bool chunk = false;
  ReturnPath return_path = ReturnPath::kPull;
  int64_t receive_budget_bytes = 256ll
                                 << 20;  // receive buffer per rank; more demand runs in rounds
  int64_t max_receive_rows = -1;         // hard cap per rank and call; -1 = none
  int64_t group_alignment = 1;
  bool training = false;  // forward_train and backward
  // Routed weights inside the activation (contract 3.5): h = (weight * act(gate)) * up, and combine adds the experts' rows as
  // they are. A bias of `down` is then added unweighted. Throughput mode, weights and payload as they are.
  bool weights_inside = false;
  // Choices of the layer's own gate above an expert's capacity are dropped (contract 2.4); none: dropless. Throughput mode only.
  std::optional<CapacitySpec> capacity;
  // Training in kMxfp8 or kMxfp8Ceil: the experts' products, forward and backward, on operands quantised on their way in, from
  // bf16 weights and rows (docs/training.md); gate and shared experts as they are. kBF16 rows.
  BlockFormat training_format = BlockFormat::kUnset;
  // Buffers to use; null = own ones. Layers that run one after the other on one group may share an
  // Exchange made by them with these options and the layer's sizes.
  std::shared_ptr<Exchange> exchange;
  std::shared_ptr<LatencyExchange> latency;
};

// Time of the stages of one call on this rank, seconds.
struct StageTimes {
  double route = 0;     // gate product and routing
  double counts = 0;    // count exchange, waiting included, and the plan
  double dispatch = 0;  // sending and waiting
  double experts = 0;   // grouped GEMMs
  double combine = 0;   // waiting and weighted sum
  double shared = 0;    // shared experts
  double total = 0;
};

enum class MoeStage : int32_t { kRoute = 0, kCounts, kDispatch, kExperts, kCombine, kShared };
inline constexpr int kNumMoeStages = 6;
// "route", "counts", "dispatch", "experts", "combine", "shared".
const char* name_of(MoeStage stage);
double seconds_of(const StageTimes& times, MoeStage stage);

// One stretch of one stage. Plain data. Ranks of one host share the clock, so their spans lie on
// one axis.
struct StageSpan {
  MoeStage stage = MoeStage::kRoute;
  int32_t round = -1;  // receive round of dispatch, experts and combine; else -1
  double begin = 0;    // seconds of the monotonic clock
  double end = 0;
  // route, shared: tokens. dispatch: rows sent, a token once per destination. experts: rows
  // computed. combine: expert rows added. Rows that stay on this rank are among them. counts: 0.
  int64_t rows = 0;
  int64_t bytes = 0;  // of those rows, the ones that changed rank
};

// What one call did, on this rank.
struct MoeReport {
  // Over all ranks; in latency mode nobody counts the rows of others: those of this rank's experts, elsewhere 0.
  std::vector<int64_t> rows_per_expert;  // [E]
  std::vector<int64_t> rows_per_rank;    // [R]
  int64_t num_rounds = 0;                // of throughput mode; of latency mode the calls it took
  int64_t dispatch_bytes = 0;            // rows that leave this rank, each token once per peer
  int64_t combine_bytes = 0;             // expert rows that come home from other ranks
  int64_t saved_by_dedup_bytes = 0;      // dispatch bytes that were not sent twice
  int64_t num_nonfinite_rows = 0;
  // With MoeOptions::capacity, over all ranks: choices before the drop (what bias_update.h takes), and how many were dropped.
  std::vector<int64_t> assigned_per_expert;  // [E], else empty
  int64_t num_dropped = 0;
  MoeMode mode = MoeMode::kThroughput;  // that the call took: kThroughput or kLatency
  StageTimes seconds;
  // What this rank sends to every rank, itself included: expert rows [R], and the same with each
  // token once per destination and round, which is what moves.
  std::vector<int64_t> sent_rows;
  std::vector<int64_t> sent_rows_dedup;
  int64_t row_bytes = 0;           // of an expert row on its way home
  int64_t dispatch_row_bytes = 0;  // of a dispatched row
  // Time line in order of time, without gaps or overlaps: the spans of a stage add up to its
  // seconds. Rounds from kMaxTimedRounds on are left out and counted.
  std::vector<StageSpan> spans;
  int64_t dropped_spans = 0;

  static constexpr int64_t kMaxTimedRounds = 256;
};

// Without windows, weights, and what threads keep for products.
struct MoeMemory {
  int64_t forward_bytes = 0;
  int64_t backward_bytes = 0;
  int64_t exchange_bytes = 0;  // of an exchange that layers share: of all of them
};

class MoeLayer {
 public:
  // Collective: yes. Blocks: at most the group's step_deadline. Takes the weights. Compares router,
  // sizes, dtypes and options over the ranks. Errors: kDisagree; kInvalidArgument for weights that
  // do not fit (names shapes); kOutOfMemory.
  static Result<std::unique_ptr<MoeLayer>> create(Group& group, const RouterSpec& router,
                                                  MoeWeights weights, const MoeOptions& options);
  ~MoeLayer();

  // output = experts(hidden), plus shared experts where there are some.
  //
  // Collective: yes. Blocks: at most step_deadline per exchange step. Allocates: only when T grows.
  // in   hidden  [T, H] of hidden_dtype, unit stride in H; T may differ per rank and call, 0 too
  // in   mask    [T], 1 = valid, or null; rows of masked tokens are never read and give zero rows
  // out  output  [T, H] of hidden_dtype, unit stride in H, rows apart; must not overlap hidden
  // out  report  may be null
  // Errors, the same on every rank: kInvalidArgument, kNonFinite, kCapacity (the group stays
  // usable); kTimeout, kPeerLost, kAborted (it does not).
  Status forward(const ConstTensorView& hidden, const uint8_t* mask, const TensorView& output,
                 MoeReport* report);

  // The same with a routing from outside instead of the layer's own gate.
  // in   topk_idx      int32 [T, K], dense; -1 = nobody; contract 1.8
  // in   topk_weights  fp32 [T, K], dense; used as they are
  Status forward_routed(const ConstTensorView& hidden, const ConstTensorView& topk_idx,
                        const ConstTensorView& topk_weights, const TensorView& output,
                        MoeReport* report);

  // forward() that keeps on `tape` what backward() needs, in the mode that the call takes. The layer must be made with
  // `training`, rows as they are. Errors: those of forward; kUnsupported for quantised weights.
  Status forward_train(const ConstTensorView& hidden, const uint8_t* mask, const TensorView& output,
                       MoeTape* tape, MoeReport* report);

  // Gradients of the call that filled the tape, for d_output = the gradient of its output.
  //
  // Collective: yes; the tapes of one call, the same gradients asked for on every rank (refused). Blocks: at most step_deadline per
  // exchange step. Allocates: when T or S grow.
  // in   hidden    as given to forward_train
  // in   d_output  [T, H] of hidden_dtype, unit stride in H; rows of masked tokens are never read
  // in   d_logits  fp32 [T, E] dense, added to the gradient of the router's logits (losses), or unset
  // Errors, the same on every rank where they concern its input: kInvalidArgument (shapes, dtypes), kStalePlan for a tape of
  // another layer, group or shape, kNonFinite where that was asked for; the group stays usable. kTimeout, kPeerLost, kAborted.
  Status backward(const MoeTape& tape, const ConstTensorView& hidden,
                  const ConstTensorView& d_output, const ConstTensorView& d_logits,
                  const MoeGradients& gradients);

  // Changes weights between two calls, in place: after a step of an optimiser. `change` writes values (the tensors,
  // PackedWeights::set_group, set_bias); shapes, dtypes and formats stay.
  //
  // Collective: no, but what every rank holds must be changed alike; nothing compares it. Blocks: no. Allocates: the gate's
  // packed copy. Threads: not while a call of this layer runs.
  // Errors: those of `change`; kInvalidArgument for weights that no longer fit. Calls then fail with it on every rank, until
  // an update succeeds. A tape filled before is stale.
  Status update_weights(const std::function<Status(MoeWeights&)>& change);

  // The routing of the last call, and the plan of the last one in throughput mode.
  const Routing& routing() const;
  // The same before any drop: what losses take. Without capacity that is routing().
  const Routing& assigned() const;
  const DispatchPlan& plan() const;
  // kAuto: the most tokens of one rank for which latency mode was found to be faster; 0: none. Else 0.
  int64_t latency_tokens() const;
  // Waits and loads of the exchanges so far; null where the layer has none.
  const ExchangeStats* throughput_stats() const;
  const ExchangeStats* latency_stats() const;

  // What size_tape() needs of this layer; tokens, slots and rounds are the caller's to fill. Throughput mode.
  TapeShape tape_shape() const;
  // Bytes that the layer's buffers hold now, as size_tape() predicts them; tapes apart.
  MoeMemory memory() const;

  struct State;  // internal: src/moe/layer.cc

 private:
  explicit MoeLayer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// mean / max of the loads; 1 when nothing is loaded (contract 2.5).
double balancedness(std::span<const int64_t> loads);

// XXH3-128 over bytes, 32 hex digits, the canonical big-endian form. Over an output's bytes,
// row-major, in global token order, this is the digest that contract 4.2 names.
std::string digest_of(std::span<const std::byte> bytes);

}  // namespace argosy
