// See run_ranks.h. Test: tests/cli/run_test.cc, tests/cli/table_test.cc.
#include "tools/run_ranks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <latch>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "argosy/checkpoint.h"
#include "argosy/exchange.h"
#include "argosy/group.h"
#include "argosy/plan.h"

namespace argosy::tools {
namespace {

// Runs body(rank) on one thread per rank and joins them. All or none start: a rank that came alone
// would wait its whole deadline for the others.
template <typename Body>
Status on_every_rank(int num_ranks, const Body& body) {
  std::latch gate(1);
  bool go = true;  // written before the gate opens, read after
  std::vector<std::thread> threads;
  std::string refusal;
  for (int rank = 0; rank < num_ranks && go; ++rank) {
    try {
      threads.emplace_back([&, rank] {
        gate.wait();
        if (go) body(rank);
      });
    } catch (const std::system_error& error) {
      go = false;
      refusal = fmt::format("the system refused the thread of rank {} of {}: {}", rank, num_ranks,
                            error.what());
    }
  }
  gate.count_down();
  for (std::thread& thread : threads) thread.join();
  return go ? Status() : Status(StatusCode::kOutOfMemory, refusal);
}

struct LoadedWeights {
  MoeWeights weights;
  int64_t bytes_read = 0;
};

// Of one matrix as a checkpoint has it, scales included.
int64_t matrix_bytes(const PackedWeights& packed) {
  const int64_t elements = packed.n() * packed.k();
  if (elements == 0) return 0;
  const Result<QuantisedLayout> layout = quantised_layout(packed.format(), packed.n(), packed.k());
  return layout.has_value() ? layout->code_bytes() + layout->scale_bytes()
                            : elements * size_of(packed.dtype());
}

WeightBytes weight_bytes_of(const MoeWeights& weights) {
  const auto matrices = [](const PackedWeights& gate_up, const PackedWeights& down) {
    return 2 * matrix_bytes(gate_up) + matrix_bytes(down);
  };
  return {weights.gate.num_bytes(), matrices(weights.gate_up, weights.down),
          matrices(weights.shared_gate_up, weights.shared_down) + weights.shared_gate.num_bytes()};
}

Result<LoadedWeights> load(const RunRanksOptions& options, int rank) {
  ARGOSY_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          Checkpoint::open(options.model_dir, options.checkpoint));
  ARGOSY_ASSIGN_OR_RETURN(MoeWeights weights,
                          load_moe_weights(checkpoint, options.layer, rank, options.num_ranks));
  return LoadedWeights{std::move(weights), checkpoint.bytes_read()};
}

bool pins(const RunRanksOptions& options) {
  if (options.pin != Pin::kAuto) return options.pin == Pin::kOn;
  const Result<const CpuInfo*> cpu = cpu_info();  // joining reports its error
  return cpu.has_value() &&
         int64_t{options.num_ranks} * options.threads_per_rank <= (*cpu)->num_cores;
}

GroupOptions group_options(const RunRanksOptions& options, const RankSeat& seat) {
  GroupOptions group;
  group.rank = seat.rank;
  group.num_ranks = options.num_ranks;
  group.transport = seat.transport;
  group.job = seat.job;
  group.inproc = seat.inproc;
  group.dot_order = options.dot_order;
  group.level = options.level;
  group.threads_per_rank = options.threads_per_rank;
  if (pins(options)) group.pin_first_core = seat.rank * options.threads_per_rank;
  group.simulate = options.simulate;
  if (options.deadline.has_value()) {
    group.startup_deadline = *options.deadline;
    group.step_deadline = *options.deadline;
  }
  return group;
}

// What the rank with most tokens has, unless the caller says.
int64_t max_tokens_of(const RunRanksOptions& options, const RankInput& input) {
  const int64_t most = (input.hidden.dim(0) + options.num_ranks - 1) / options.num_ranks;
  return options.max_tokens.value_or(std::max<int64_t>(1, most));
}

// Not by every rank in a race when ranks are threads.
Status check_sizes(const RunRanksOptions& options, const RankInput& input) {
  const ModelConfig& config = *input.config;
  ExchangeOptions exchange{input.hidden.dtype, config.hidden, config.router.num_experts,
                           config.router.top_k};
  exchange.receive_budget_bytes =
      options.receive_budget_bytes.value_or(exchange.receive_budget_bytes);
  exchange.payload = options.payload;
  exchange.numbers = options.weights_inside;
  exchange.training = options.backward;
  ARGOSY_RETURN_IF_ERROR(size_exchange(exchange, options.num_ranks).error());
  if (options.mode == MoeMode::kThroughput) return {};
  LatencyOptions latency{input.hidden.dtype, config.hidden, config.router.num_experts,
                         config.router.top_k};
  latency.max_tokens = max_tokens_of(options, input);
  latency.payload = options.payload;
  latency.training = options.backward;
  return size_exchange(latency, options.num_ranks).error();
}

// Of one kind of exchange, added to those of the other.
void add_waits(const ExchangeStats* stats, std::vector<PeerWait>* waits) {
  if (stats == nullptr) return;
  for (size_t peer = 0; peer < stats->waits.size(); ++peer) {
    const WaitHistogram& wait = stats->waits[peer];
    if (wait.num_waits == 0) continue;
    waits->push_back({static_cast<int64_t>(peer), wait.num_waits, wait.total_ns,
                      wait.quantile_ns(0.5), wait.quantile_ns(0.99), wait.max_ns});
  }
}

// Gradients of the layer for this rank's share, into the record.
Status run_backward(MoeLayer& layer, const MoeTape& tape, const RankInput& input,
                    const ConstTensorView& hidden, int64_t first, const Group& group,
                    RankRecord* record) {
  const ModelConfig& config = *input.config;
  const int64_t num_experts = config.router.num_experts, h = config.hidden;
  const int64_t f = config.intermediate, fs = config.shared_intermediate;
  const int64_t num_local = Placement{num_experts, group.num_ranks(), 0}.num_local(group.rank());
  const bool is_root = group.rank() == 0;
  RankGradients& g = record->gradients;
  MoeGradients gradients;
  const auto view = [](std::vector<float>& values, std::initializer_list<int64_t> dims) {
    TensorView made(nullptr, DType::kF32, dims);
    values.assign(static_cast<size_t>(made.num_elements()), 0.0f);
    made.data = reinterpret_cast<std::byte*>(values.data());
    return made;
  };
  record->d_hidden.resize(static_cast<size_t>(hidden.dim(0) * h * size_of(hidden.dtype)));
  gradients.d_hidden = TensorView(record->d_hidden.data(), hidden.dtype, {hidden.dim(0), h});
  gradients.d_gate = view(g.gate, {num_experts, h});
  if (config.gate_bias) gradients.d_gate_bias = view(g.gate_bias, {num_experts});
  gradients.d_expert_gate = view(g.expert_gate, {num_local, f, h});
  gradients.d_expert_up = view(g.expert_up, {num_local, f, h});
  gradients.d_expert_down = view(g.expert_down, {num_local, h, f});
  if (config.expert_bias) {
    gradients.d_expert_gate_bias = view(g.expert_gate_bias, {num_local, f});
    gradients.d_expert_up_bias = view(g.expert_up_bias, {num_local, f});
    gradients.d_expert_down_bias = view(g.expert_down_bias, {num_local, h});
  }
  if (fs > 0) {
    gradients.d_shared_gate = view(g.shared_gate, {fs, h});
    gradients.d_shared_up = view(g.shared_up, {fs, h});
    gradients.d_shared_down = view(g.shared_down, {h, fs});
    if (config.shared_gate) gradients.d_shared_scale = view(g.shared_scale, {1, h});
  }
  ARGOSY_RETURN_IF_ERROR(
      layer.backward(tape, hidden, input.d_output.rows(first, hidden.dim(0)), {}, gradients));
  if (is_root) return {};
  // The same on every rank: sent once.
  for (std::vector<float>* const same :
       {&g.gate, &g.gate_bias, &g.shared_gate, &g.shared_up, &g.shared_down, &g.shared_scale}) {
    same->clear();
  }
  return {};
}

Result<RankRecord> run_layer(const RunRanksOptions& options, const RankInput& input,
                             LoadedWeights loaded, Group& group, Progress& progress) {
  const int64_t num_tokens = input.hidden.dim(0);
  const int64_t first = owned_begin(num_tokens, options.num_ranks, group.rank());
  const int64_t count = owned_begin(num_tokens, options.num_ranks, group.rank() + 1) - first;
  MoeOptions moe;
  moe.hidden_dtype = input.hidden.dtype;
  if (options.receive_budget_bytes.has_value()) {
    moe.receive_budget_bytes = *options.receive_budget_bytes;
  }
  moe.mode = options.mode;
  moe.payload = options.payload;
  moe.max_tokens = max_tokens_of(options, input);
  moe.chunk = options.chunk;
  moe.weights_inside = options.weights_inside;
  moe.training = options.backward;
  moe.training_format = options.training_format;
  const WeightBytes weight_bytes = weight_bytes_of(loaded.weights);
  ARGOSY_ASSIGN_OR_RETURN(
      const std::unique_ptr<MoeLayer> layer,
      MoeLayer::create(group, input.config->router, std::move(loaded.weights), moe));
  ARGOSY_ASSIGN_OR_RETURN(Tensor output,
                          Tensor::zeros(input.hidden.dtype, {count, input.config->hidden}));
  RankRecord record;
  record.weight_bytes_read = loaded.bytes_read;
  record.weight_bytes = weight_bytes;
  record.pinned_cpus.assign(group.pinned_cpus().begin(), group.pinned_cpus().end());
  record.seconds.resize(static_cast<size_t>(options.repeat));  // all memory before the first run
  const ConstTensorView hidden = input.hidden.rows(first, count);
  MoeTape tape;
  for (int64_t i = 0; i < options.repeat; ++i) {
    ARGOSY_RETURN_IF_ERROR(
        options.backward
            ? layer->forward_train(hidden, nullptr, output.view(), &tape, &record.report)
            : layer->forward(hidden, nullptr, output.view(), &record.report));
    if (options.backward) {
      ARGOSY_RETURN_IF_ERROR(run_backward(*layer, tape, input, hidden, first, group, &record));
    }
    record.seconds[static_cast<size_t>(i)] = record.report.seconds;
    if (group.rank() == 0) progress.step();
  }
  record.latency_tokens = layer->latency_tokens();
  add_waits(layer->throughput_stats(), &record.waits);
  add_waits(layer->latency_stats(), &record.waits);
  const std::span<const std::byte> bytes = std::as_const(output).bytes();
  record.output.assign(bytes.begin(), bytes.end());
  const Routing& routing = layer->routing();
  record.topk_idx.assign(routing.topk_idx.begin(), routing.topk_idx.end());
  record.topk_weights.assign(routing.topk_weights.values.begin(),
                             routing.topk_weights.values.end());
  return record;
}

constexpr double StageTimes::*kStages[] = {
    &StageTimes::route,   &StageTimes::counts, &StageTimes::dispatch, &StageTimes::experts,
    &StageTimes::combine, &StageTimes::shared, &StageTimes::total};

// Copies a rank's rows to their place in the whole tensor.
Status place_rows(std::span<const std::byte> rows, int64_t first_row, int64_t num_rows, int rank,
                  Tensor* whole) {
  const std::span<std::byte> all(whole->view().data, static_cast<size_t>(whole->num_bytes()));
  const int64_t total = whole->view().dim(0);
  const size_t row_bytes = total == 0 ? 0 : all.size() / static_cast<size_t>(total);
  if (rows.size() != static_cast<size_t>(num_rows) * row_bytes) {
    return Status(StatusCode::kCorruptData,
                  fmt::format("rank {} sent {} bytes for {} rows of {} bytes", rank, rows.size(),
                              num_rows, row_bytes));
  }
  std::copy(rows.begin(), rows.end(),
            all.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(first_row) * row_bytes));
  return Status();
}

void add_to(const std::vector<int64_t>& more, std::vector<int64_t>* sums) {
  for (size_t i = 0; i < std::min(more.size(), sums->size()); ++i) (*sums)[i] += more[i];
}

// Experts of all ranks one after the other; what all hold from rank 0.
void add_gradients(const RankGradients& one, int rank, RankGradients* all) {
  if (rank == 0) {
    *all = one;
    return;
  }
  const auto append = [](const std::vector<float>& more, std::vector<float>* to) {
    to->insert(to->end(), more.begin(), more.end());
  };
  append(one.expert_gate, &all->expert_gate);
  append(one.expert_up, &all->expert_up);
  append(one.expert_down, &all->expert_down);
  append(one.expert_gate_bias, &all->expert_gate_bias);
  append(one.expert_up_bias, &all->expert_up_bias);
  append(one.expert_down_bias, &all->expert_down_bias);
}

Status add_record(const RunRanksOptions& options, RankRecord record, int rank,
                  RanksResult* result) {
  const int64_t num_tokens = result->output.view().dim(0);
  const int64_t first = owned_begin(num_tokens, options.num_ranks, rank);
  const int64_t count = owned_begin(num_tokens, options.num_ranks, rank + 1) - first;
  ARGOSY_RETURN_IF_ERROR(place_rows(record.output, first, count, rank, &result->output));
  ARGOSY_RETURN_IF_ERROR(
      place_rows(std::as_bytes(std::span(record.topk_idx)), first, count, rank, &result->topk_idx));
  ARGOSY_RETURN_IF_ERROR(place_rows(std::as_bytes(std::span(record.topk_weights)), first, count,
                                    rank, &result->topk_weights));
  const auto num_ranks = static_cast<size_t>(options.num_ranks);
  if (record.report.sent_rows.size() != num_ranks ||
      record.report.sent_rows_dedup.size() != num_ranks) {
    return Status(StatusCode::kCorruptData,
                  fmt::format("rank {} sent traffic to {} and {} ranks, the group has {}", rank,
                              record.report.sent_rows.size(), record.report.sent_rows_dedup.size(),
                              num_ranks));
  }
  result->weight_bytes_read.push_back(record.weight_bytes_read);
  result->weight_bytes = record.weight_bytes;
  result->pinned_cpus.push_back(std::move(record.pinned_cpus));
  const size_t num_repeats = std::min(record.seconds.size(), result->slowest_rank_seconds.size());
  for (size_t i = 0; i < num_repeats; ++i) {
    for (double StageTimes::*const stage : kStages) {
      double& slowest = result->slowest_rank_seconds[i].*stage;
      slowest = std::max(slowest, record.seconds[i].*stage);
    }
  }
  // In latency mode every rank counts its own rows; in throughput mode all count all.
  if (rank == 0) {
    result->rows_per_expert.assign(record.report.rows_per_expert.size(), 0);
    result->rows_per_rank.assign(record.report.rows_per_rank.size(), 0);
    result->latency_tokens = record.latency_tokens;
  }
  if (rank == 0 || record.report.mode == MoeMode::kLatency) {
    add_to(record.report.rows_per_expert, &result->rows_per_expert);
    add_to(record.report.rows_per_rank, &result->rows_per_rank);
  }
  if (options.backward) {
    ARGOSY_RETURN_IF_ERROR(place_rows(record.d_hidden, first, count, rank, &result->d_hidden));
    add_gradients(record.gradients, rank, &result->gradients);
  }
  result->waits.push_back(std::move(record.waits));
  result->reports.push_back(std::move(record.report));
  return Status();
}

Result<RanksResult> assemble(const RunRanksOptions& options, const RankInput& input, Group& group,
                             const std::vector<std::vector<std::byte>>& records) {
  const int64_t num_tokens = input.hidden.dim(0);
  const int64_t top_k = input.config->router.top_k;
  RanksResult result;
  ARGOSY_ASSIGN_OR_RETURN(result.output,
                          Tensor::zeros(input.hidden.dtype, {num_tokens, input.config->hidden}));
  ARGOSY_ASSIGN_OR_RETURN(result.topk_idx, Tensor::zeros(DType::kI32, {num_tokens, top_k}));
  ARGOSY_ASSIGN_OR_RETURN(result.topk_weights, Tensor::zeros(DType::kF32, {num_tokens, top_k}));
  if (options.backward) {
    ARGOSY_ASSIGN_OR_RETURN(result.d_hidden,
                            Tensor::zeros(input.hidden.dtype, {num_tokens, input.config->hidden}));
  }
  result.dot_order = group.dot_order();
  result.level = group.level();
  result.transport = group.transport_name();
  result.slowest_rank_seconds.resize(static_cast<size_t>(options.repeat));
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    ARGOSY_ASSIGN_OR_RETURN(RankRecord record,
                            rank_record_from(records[static_cast<size_t>(rank)]));
    ARGOSY_RETURN_IF_ERROR(add_record(options, std::move(record), rank, &result));
  }
  return result;
}

Status run_in_group(const RunRanksOptions& options, const RankInput& input, LoadedWeights loaded,
                    Group& group, Progress& progress, std::optional<RanksResult>* result) {
  ARGOSY_RETURN_IF_ERROR(group.agree({{"repeat", fmt::format("{}", options.repeat)}}));
  ARGOSY_ASSIGN_OR_RETURN(const RankRecord record,
                          run_layer(options, input, std::move(loaded), group, progress));
  std::vector<std::vector<std::byte>> records;
  const bool is_root = group.rank() == 0;
  ARGOSY_RETURN_IF_ERROR(group.gather(0, to_bytes(record), is_root ? &records : nullptr));
  if (!is_root) return Status();
  ARGOSY_ASSIGN_OR_RETURN(*result, assemble(options, input, group, records));
  return Status();
}

// How near an error is to its cause; lower comes first.
int distance_from_cause(StatusCode code) {
  switch (code) {
    case StatusCode::kAborted:
      return 3;
    case StatusCode::kTimeout:
      return 2;
    case StatusCode::kPeerLost:
      return 1;
    default:
      return 0;
  }
}

struct SharedMessage {
  Status status;
  std::vector<int> ranks;
};

std::string said_by(const SharedMessage& group) {
  return fmt::format("rank{} {}", group.ranks.size() > 1 ? "s" : "", fmt::join(group.ranks, ", "));
}

}  // namespace

Status merge_rank_errors(std::span<const Status> statuses) {
  std::vector<SharedMessage> groups;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    const Status& status = statuses[rank];
    if (status.ok()) continue;
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const SharedMessage& group) {
      return group.status.to_string() == status.to_string();
    });
    if (same == groups.end()) {
      groups.push_back({status, {static_cast<int>(rank)}});
    } else {
      same->ranks.push_back(static_cast<int>(rank));
    }
  }
  if (groups.empty()) return Status();
  // A rank that was aborted by one that is listed anyway has nothing to add.
  const auto is_echo = [&](const SharedMessage& group) {
    return group.status.code() == StatusCode::kAborted &&
           std::any_of(groups.begin(), groups.end(), [&](const SharedMessage& other) {
             return other.status.code() != StatusCode::kAborted &&
                    group.status.message().find(other.status.message()) != std::string::npos;
           });
  };
  std::vector<SharedMessage> own;
  std::copy_if(groups.begin(), groups.end(), std::back_inserter(own),
               [&](const SharedMessage& group) { return !is_echo(group); });
  groups = std::move(own);
  std::stable_sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
    return distance_from_cause(a.status.code()) < distance_from_cause(b.status.code());
  });
  const SharedMessage& root = groups.front();
  if (root.ranks.size() == statuses.size()) return root.status;
  std::string message = fmt::format("{}: {}", said_by(root), root.status.message());
  constexpr size_t kMostGroups = 5;
  for (size_t i = 1; i < std::min(groups.size(), kMostGroups); ++i) {
    message += fmt::format("\n  then {}: {}", said_by(groups[i]), groups[i].status.message());
  }
  if (groups.size() > kMostGroups) {
    message += fmt::format("\n  and {} more messages", groups.size() - kMostGroups);
  }
  return Status(root.status.code(), message);
}

namespace {

// What a library threw on this rank (no memory, above all) ends it with a status that the others hear too.
template <typename Body>
auto without_exceptions(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, fmt::format("an exception: {}", error.what()));
  }
}

}  // namespace

RankOutcome run_rank(const RunRanksOptions& options, const RankSeat& seat,
                     const Result<RankInput>& input, Progress& progress) {
  Status mine = input.has_value() ? check_sizes(options, *input) : input.error();
  std::optional<LoadedWeights> loaded;
  if (mine.ok()) {
    Result<LoadedWeights> weights = load(options, seat.rank);
    mine = weights.error();
    if (weights.has_value()) loaded = std::move(weights).value();
  }
  RankOutcome outcome;
  Result<std::unique_ptr<Group>> group =
      without_exceptions([&] { return Group::join(group_options(options, seat)); });
  if (!group.has_value()) {
    const StatusCode code = group.error().code();
    outcome.is_known_to_others = code == StatusCode::kAborted || code == StatusCode::kDisagree;
    outcome.status = mine.ok() ? group.error() : mine;
    return outcome;
  }
  // Peers may still wait for this rank: the group must end for them as well. Call errors of the
  // layer are every rank's: one that is not there yet would see the abort instead of its own.
  bool is_alone = !mine.ok();
  if (mine.ok()) {
    mine = without_exceptions([&] {
      return run_in_group(options, *input, std::move(*loaded), **group, progress, &outcome.result);
    });
    is_alone = !mine.ok() && radius_of(mine.code()) != BlastRadius::kCall;
  }
  if (is_alone) (*group)->abort(mine);
  outcome.is_known_to_others =
      mine.code() != StatusCode::kTimeout && mine.code() != StatusCode::kPeerLost;
  outcome.status = std::move(mine);
  return outcome;
}

Result<RanksResult> run_ranks(const RunRanksOptions& options, const RankInput& input,
                              Progress& progress) {
  ARGOSY_RETURN_IF_ERROR(check_sizes(options, input));
  ARGOSY_ASSIGN_OR_RETURN(const std::shared_ptr<InprocWorld> world,
                          InprocWorld::create(options.num_ranks));
  std::vector<RankOutcome> outcomes(static_cast<size_t>(options.num_ranks));
  progress.begin("run", options.repeat);
  ARGOSY_RETURN_IF_ERROR(on_every_rank(options.num_ranks, [&](int rank) {
    const RankSeat seat{rank, TransportKind::kInproc, "", world};
    outcomes[static_cast<size_t>(rank)] = run_rank(options, seat, input, progress);
  }));
  std::vector<Status> statuses;
  for (const RankOutcome& outcome : outcomes) statuses.push_back(outcome.status);
  ARGOSY_RETURN_IF_ERROR(merge_rank_errors(statuses));
  return std::move(*outcomes[0].result);
}

}  // namespace argosy::tools
