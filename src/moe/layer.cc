// The MoE layer, forward, in throughput mode: route -> counts -> plan -> (dispatch -> experts -> combine) per receive
// round. Shared experts run on the home rank between the two halves of the count exchange.
// Everything that can be wrong with a call is found before its counts are sent, so that all ranks
// get the same error. Buffers only grow. Latency mode: latency_path.cc. Test: tests/moe/.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <string>

#include "argosy/gemm_backward.h"
#include "base/error.h"
#include "moe/backward.h"
#include "moe/crossover.h"
#include "moe/layer_checks.h"
#include "moe/layer_state.h"
#include "numeric/elementary.h"
#include "platform/float_env.h"
#include "transport/join.h"

namespace argosy {
namespace {

using base::invalid;

}  // namespace

MoeLayer::State::State(Group& the_group, const RouterSpec& spec, MoeWeights the_weights,
                       BlockFormat format)
    : group(the_group), router(spec), weights(std::move(the_weights)) {
  quantised.format = format;
}
MoeLayer::State::~State() = default;

MoeLayer::MoeLayer(std::unique_ptr<State> state) : state_(std::move(state)) {}
MoeLayer::~MoeLayer() = default;

const Routing& MoeLayer::routing() const { return state_->routing; }
const Routing& MoeLayer::assigned() const {
  return state_->is_dropped ? state_->assigned : state_->routing;
}
const DispatchPlan& MoeLayer::plan() const { return state_->dispatch_plan; }
int64_t MoeLayer::latency_tokens() const { return state_->latency_tokens; }
const ExchangeStats* MoeLayer::throughput_stats() const {
  return state_->exchange == nullptr ? nullptr : &state_->exchange->stats();
}
const ExchangeStats* MoeLayer::latency_stats() const {
  return state_->latency == nullptr ? nullptr : &state_->latency->stats();
}

Result<std::unique_ptr<MoeLayer>> MoeLayer::create(Group& group, const RouterSpec& router,
                                                   MoeWeights weights, const MoeOptions& options) {
  const Placement placement{router.num_experts, group.num_ranks(), 0};
  const Result<LayerShape> checked =
      check_weights(router, weights, options.hidden_dtype, placement, group.rank());
  const auto number = static_cast<uint16_t>(1 + transport::GroupAccess::count_made(group) % 0xFFFF);
  Status local = checked.error();
  if (local.ok()) local = check_training(weights, options);
  if (local.ok() && options.weights_inside) local = check_weights_inside(weights, options);
  if (local.ok() && options.capacity.has_value()) local = check_capacity(options);
  if (local.ok() && options.exchange != nullptr) {
    local = check_exchange(group, exchange_options(router, *checked, options), *options.exchange);
  }
  if (local.ok() && options.latency != nullptr) {
    local = check_exchange(group, latency_options(router, *checked, options), *options.latency);
  }
  GateProduct gate;
  if (local.ok()) {
    Result<GateProduct> made = GateProduct::create(weights.gate.view(), weights.gate_bias.view());
    local = made.error();
    if (local.ok()) gate = std::move(*made);
  }
  // Also a rank that cannot go on takes part, so that the others learn it at once and by name.
  const Status agreed =
      group.agree(local.ok() ? layer_settings(router, weights, *checked, options)
                             : std::vector<Setting>{{"layer.check", local.to_string()}});
  ARGOSY_RETURN_IF_ERROR(local);
  ARGOSY_RETURN_IF_ERROR(agreed);
  auto state = std::make_unique<State>(group, router, std::move(weights), options.training_format);
  state->number = number;
  state->call_words = {fmt::format("forward of layer {}", number),
                       fmt::format("forward_train of layer {}", number)};
  state->shape = *checked;
  state->dtype = options.hidden_dtype;
  state->gate = std::move(gate);
  state->mode = options.mode;
  state->chunk = options.chunk;
  state->weights_inside = options.weights_inside;
  if (options.mode != MoeMode::kLatency) {
    state->exchange = options.exchange;
    if (state->exchange == nullptr) {
      ARGOSY_ASSIGN_OR_RETURN(state->exchange,
                              Exchange::create(group, exchange_options(router, *checked, options)));
    }
  }
  if (options.mode != MoeMode::kThroughput) {
    state->latency = options.latency;
    if (state->latency == nullptr) {
      ARGOSY_ASSIGN_OR_RETURN(
          state->latency,
          LatencyExchange::create(group, latency_options(router, *checked, options)));
    }
  }
  if (options.capacity.has_value()) {
    ARGOSY_ASSIGN_OR_RETURN(
        state->capacity,
        CapacityDrop::create(group, *options.capacity, router.num_experts, router.top_k));
  }
  ARGOSY_RETURN_IF_ERROR(state->quantised.take(state->gemm(), state->weights));
  if (options.training) {
    static std::atomic<uint64_t> num_layers{0};
    // Relaxed: only different numbers are wanted.
    state->id = 1 + num_layers.fetch_add(1, std::memory_order_relaxed);
    state->backward = std::make_unique<BackwardBuffers>();
    ARGOSY_ASSIGN_OR_RETURN(state->row_gather, RowGather::create(group));
  }
  if (options.mode == MoeMode::kAuto) {
    ARGOSY_ASSIGN_OR_RETURN(state->latency_tokens,
                            find_crossover(group, *state->exchange, *state->latency));
  }
  return std::unique_ptr<MoeLayer>(new MoeLayer(std::move(state)));
}

Status MoeLayer::State::check_call(const ConstTensorView& hidden, const TensorView& output) const {
  ARGOSY_RETURN_IF_ERROR(weights_status);
  const int64_t num_tokens = hidden.num_dims == 2 ? hidden.dim(0) : 0;
  ARGOSY_RETURN_IF_ERROR(check_rows("hidden", hidden, dtype, num_tokens, shape.hidden, false));
  ARGOSY_RETURN_IF_ERROR(check_rows("output", output, dtype, num_tokens, shape.hidden, true));
  const int64_t row_bytes = shape.hidden * size_of(dtype);
  // A hidden row stride may be negative or 0; the output's is positive.
  const auto [first, last] =
      std::minmax({hidden.row(0), hidden.row(std::max<int64_t>(num_tokens, 1) - 1)});
  if (num_tokens > 0 && first < output.row(num_tokens - 1) + row_bytes &&
      output.data < last + row_bytes) {
    return invalid("output overlaps hidden ({} and {})", describe(output), describe(hidden));
  }
  return {};
}

Status MoeLayer::State::run_router(const ConstTensorView& hidden, const uint8_t* mask) {
  const int64_t num_tokens = hidden.dim(0);
  const int64_t num_experts = router.num_experts;
  const std::array<int64_t, 2> dims{num_tokens, num_experts};
  ARGOSY_ASSIGN_OR_RETURN(const int64_t bytes, checked_num_bytes(dims, sizeof(float)));
  ARGOSY_RETURN_IF_ERROR(logits.reserve(bytes));
  const TensorView all(logits.data(), DType::kF32, dims);
  ARGOSY_RETURN_IF_ERROR(gate.run(gemm(), hidden, mask, all));
  return route(router, {all, weights.selection_bias.view(), mask}, &group.pool(),
               capacity == nullptr ? &routing : &assigned);
}

Status MoeLayer::State::drop_choices(const Status& local) {
  is_dropped = true;
  return capacity->run(local, assigned, &routing, &assigned_per_expert);
}

Status MoeLayer::State::take_routing(const ConstTensorView& hidden, const ConstTensorView& topk_idx,
                                     const ConstTensorView& topk_weights) {
  const int64_t num_tokens = hidden.dim(0);
  const auto fits = [&](const ConstTensorView& view, DType want) {
    return view.dtype == want && view.num_dims == 2 && view.dim(0) == num_tokens &&
           view.dim(1) == router.top_k && view.is_dense();
  };
  const bool has_data =
      num_tokens == 0 || (topk_idx.data != nullptr && topk_weights.data != nullptr);
  if (!fits(topk_idx, DType::kI32) || !fits(topk_weights, DType::kF32) || !has_data) {
    return invalid(
        "topk_idx is {} and topk_weights {}{}, the layer takes dense I32 and F32 [{}, {}]",
        describe(topk_idx), describe(topk_weights), has_data ? "" : " without data", num_tokens,
        router.top_k);
  }
  ARGOSY_RETURN_IF_ERROR(count_topk(topk_idx, router.num_experts, &routing.counts));
  routing.num_tokens = num_tokens;
  routing.num_experts = router.num_experts;
  routing.top_k = router.top_k;
  const int64_t ids = num_tokens * router.top_k;
  routing.topk_idx.assign(topk_idx.as<int32_t>(), topk_idx.as<int32_t>() + ids);
  routing.topk_weights.values.assign(topk_weights.as<float>(), topk_weights.as<float>() + ids);
  routing.num_valid_tokens = num_tokens;
  routing.num_nonfinite_rows = 0;
  is_dropped = false;
  return {};
}

// The shared experts' rows and, where there is a gate, sigmoid of its product, for the home rank's
// tokens.
Status MoeLayer::State::run_shared(const ConstTensorView& hidden, const uint8_t* mask,
                                   CombineInput* input) {
  if (shape.shared_intermediate == 0) return {};
  const int64_t num_tokens = hidden.dim(0);
  const int64_t element = size_of(dtype);
  ARGOSY_RETURN_IF_ERROR(shared_inner.reserve(num_tokens * shape.shared_intermediate * element));
  ARGOSY_RETURN_IF_ERROR(shared_rows.reserve(num_tokens * shape.hidden * element));
  ARGOSY_RETURN_IF_ERROR(shared_scale.reserve(num_tokens * static_cast<int64_t>(sizeof(float))));
  const TensorView inner_view(shared_inner.data(), dtype, {num_tokens, shape.shared_intermediate});
  const TensorView rows(shared_rows.data(), dtype, {num_tokens, shape.hidden});
  const TensorView scale(shared_scale.data(), DType::kF32, {num_tokens, 1});
  ARGOSY_RETURN_IF_ERROR(
      for_each_run(num_tokens, mask, [&](int64_t first, int64_t count) -> Status {
        const std::array<int64_t, 1> offsets{0};
        const std::array<int64_t, 1> sizes{count};
        ARGOSY_RETURN_IF_ERROR(grouped_gemm(gemm(), {hidden.rows(first, count), offsets, sizes},
                                            weights.shared_gate_up, inner_view.rows(first, count)));
        ARGOSY_RETURN_IF_ERROR(grouped_gemm(gemm(), {inner_view.rows(first, count), offsets, sizes},
                                            weights.shared_down, rows.rows(first, count)));
        if (!shape.shared_gate) return {};
        ARGOSY_RETURN_IF_ERROR(gate_logits(hidden.rows(first, count), weights.shared_gate.view(),
                                           {}, &group.pool(), scale.rows(first, count)));
        const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
        float* values = scale.as<float>();
        for (int64_t token = first; token < first + count; ++token) {
          values[token] = numeric::sigmoid_f32(values[token]);
        }
        return {};
      }));
  input->shared = rows;
  input->shared_scale = shape.shared_gate ? scale.as<float>() : nullptr;
  return {};
}

// rows -> h with the rows' weights inside the activation; gate and up in fp32 on the way.
Status MoeLayer::State::run_inside(const RaggedRows& x, const TensorView& gates,
                                   const TensorView& ups, const TensorView& h) {
  ARGOSY_RETURN_IF_ERROR(experts().preactivation(gemm(), x, gates, ups, TensorView()));
  const std::span<const float> row_weights(received.numbers, static_cast<size_t>(h.dim(0)));
  return activation_forward(gemm(), {gates, ups, x.offsets, x.sizes, row_weights}, h);
}

// rows -> h -> results, for the groups of the round.
Status MoeLayer::State::run_experts(const ConstTensorView& rows) {
  const int64_t end = end_of_groups(&received);
  if (end == 0) return {};
  ARGOSY_RETURN_IF_ERROR(inner.reserve(end * shape.intermediate * size_of(dtype)));
  const TensorView inner_view(inner.data(), dtype, {end, shape.intermediate});
  if (exchange->payload().is_quantised()) {
    row_addresses.resize(static_cast<size_t>(end));
    for (int64_t row = 0; row < end; ++row) row_addresses[static_cast<size_t>(row)] = rows.row(row);
    const ScatteredRows encoded{exchange->payload(), row_addresses, received.group_offsets,
                                received.group_sizes};
    ARGOSY_RETURN_IF_ERROR(grouped_gemm(gemm(), encoded, weights.gate_up, inner_view));
  } else if (weights_inside) {
    const int64_t bytes = end * shape.intermediate * size_of(DType::kF32);
    ARGOSY_RETURN_IF_ERROR(pre_gate.reserve(bytes));
    ARGOSY_RETURN_IF_ERROR(pre_up.reserve(bytes));
    const auto view = [&](AlignedBuffer& buffer) {
      return TensorView(buffer.data(), DType::kF32, {end, shape.intermediate});
    };
    ARGOSY_RETURN_IF_ERROR(
        run_inside({rows.rows(0, end), received.group_offsets, received.group_sizes},
                   view(pre_gate), view(pre_up), inner_view));
  } else {
    ARGOSY_RETURN_IF_ERROR(experts().gate_up(
        gemm(), {rows.rows(0, end), received.group_offsets, received.group_sizes}, inner_view));
  }
  return experts().down(gemm(), {inner_view, received.group_offsets, received.group_sizes},
                        exchange->results().rows(0, end));
}

Status MoeLayer::State::run_rounds(const ConstTensorView& hidden, const CombineInput& input,
                                   const TensorView& output) {
  for (int64_t round = 0; round < dispatch_plan.num_rounds; ++round) {
    ARGOSY_RETURN_IF_ERROR(
        exchange->issue_dispatch(dispatch_plan, round, hidden,
                                 weights_inside ? routing.topk_weights.values.data() : nullptr));
    ARGOSY_RETURN_IF_ERROR(exchange->wait_dispatch(dispatch_plan, round, &received));
    timeline.lap(MoeStage::kDispatch, round);
    ARGOSY_RETURN_IF_ERROR(tape != nullptr ? run_experts_kept(received.rows, round)
                                           : run_experts(received.rows));
    timeline.lap(MoeStage::kExperts, round);
    ARGOSY_RETURN_IF_ERROR(exchange->issue_combine(dispatch_plan, round));
    ARGOSY_RETURN_IF_ERROR(exchange->wait_combine(dispatch_plan, round, input, output));
    timeline.lap(MoeStage::kCombine, round);
  }
  return {};
}

Status MoeLayer::State::run(const Status& local, const ConstTensorView& hidden, const uint8_t* mask,
                            const TensorView& output, MoeReport* report) {
  if (latency != nullptr) {
    bool declined = false;
    Status status = run_latency(local, hidden, mask, output, report, &declined);
    if (!status.ok() || !declined) return status;
    if (exchange == nullptr) {
      return base::error(StatusCode::kDisagree,
                         "another rank took throughput mode, in a call of layer {}", number);
    }
    timeline.start();  // what latency mode took is forgotten: a flag each way
  }
  timeline.lap(MoeStage::kRoute);
  ARGOSY_RETURN_IF_ERROR(
      exchange->issue_counts(local, routing, call_words[tape != nullptr ? 1 : 0]));
  timeline.lap(MoeStage::kCounts);
  CombineInput input;
  Status step = local;
  if (step.ok()) step = run_shared(hidden, mask, &input);
  timeline.lap(MoeStage::kShared);
  ARGOSY_RETURN_IF_ERROR(exchange->wait_counts(&counts));
  if (step.ok()) step = exchange->plan(routing, counts, &dispatch_plan);
  if (step.ok() && tape != nullptr) ARGOSY_RETURN_IF_ERROR(agree_on_tape(mask));
  timeline.lap(MoeStage::kCounts);
  if (step.ok()) {
    routing.topk_weights.applied = weights_inside;
    if (weights_inside) ones.assign(routing.topk_weights.values.size(), 1.0f);
    input.topk_weights =
        ConstTensorView(weights_inside ? ones.data() : routing.topk_weights.values.data(),
                        DType::kF32, {routing.num_tokens, routing.top_k});
    input.mask = mask;
    step = run_rounds(hidden, input, output);
  }
  if (!step.ok()) {
    // kCapacity is the same on every rank and nothing has moved. Any other failure past the counts
    // is this rank's alone: the others must not wait for its rows.
    if (step.code() != StatusCode::kCapacity) group.abort(step);
    return step;
  }
  if (report != nullptr) fill_report(report);
  return {};
}

void MoeLayer::State::fill_report(MoeReport* report) const {
  const auto num_experts = static_cast<size_t>(router.num_experts);
  report->rows_per_expert.assign(num_experts, 0);
  for (size_t at = 0; at < counts.counts.size(); ++at) {
    report->rows_per_expert[at % num_experts] += counts.counts[at];
  }
  report->rows_per_rank.assign(dispatch_plan.receive_rows.begin(),
                               dispatch_plan.receive_rows.end());
  report->num_rounds = dispatch_plan.num_rounds;
  report->mode = MoeMode::kThroughput;
  report->row_bytes = shape.hidden * size_of(dtype);
  report->dispatch_row_bytes = exchange->payload().num_bytes;
  report->dispatch_bytes = dispatch_plan.rows_leaving_dedup * report->dispatch_row_bytes;
  report->combine_bytes = dispatch_plan.rows_leaving * report->row_bytes;
  report->saved_by_dedup_bytes =
      dispatch_plan.rows_leaving * report->dispatch_row_bytes - report->dispatch_bytes;
  report->num_nonfinite_rows = routing.num_nonfinite_rows;
  report->assigned_per_expert.clear();
  report->num_dropped = 0;
  if (is_dropped) {
    report->assigned_per_expert = assigned_per_expert;
    report->num_dropped =
        std::accumulate(assigned_per_expert.begin(), assigned_per_expert.end(), int64_t{0}) -
        std::accumulate(counts.counts.begin(), counts.counts.end(), int64_t{0});
  }
  timeline.write(report);
  count_traffic(dispatch_plan, routing.num_valid_tokens, report);
}

Status MoeLayer::forward(const ConstTensorView& hidden, const uint8_t* mask,
                         const TensorView& output, MoeReport* report) {
  state_->timeline.start();
  Status local = state_->check_call(hidden, output);
  if (local.ok()) local = state_->run_router(hidden, mask);
  if (state_->capacity != nullptr) ARGOSY_RETURN_IF_ERROR(state_->drop_choices(local));
  return state_->run(local, hidden, mask, output, report);
}

Status MoeLayer::forward_routed(const ConstTensorView& hidden, const ConstTensorView& topk_idx,
                                const ConstTensorView& topk_weights, const TensorView& output,
                                MoeReport* report) {
  state_->timeline.start();
  Status local = state_->check_call(hidden, output);
  if (local.ok()) local = state_->take_routing(hidden, topk_idx, topk_weights);
  return state_->run(local, hidden, nullptr, output, report);
}

const char* name_of(MoeMode mode) {
  constexpr std::array<const char*, 3> kNames{"throughput", "latency", "auto"};
  return kNames[static_cast<size_t>(mode)];
}

Result<MoeMode> parse_moe_mode(std::string_view name) {
  for (const MoeMode mode : {MoeMode::kThroughput, MoeMode::kLatency, MoeMode::kAuto}) {
    if (name == name_of(mode)) return mode;
  }
  return base::error(StatusCode::kNotFound, "no mode '{}'; there are throughput, latency, auto",
                     name);
}

double balancedness(std::span<const int64_t> loads) {
  if (loads.empty()) return 1.0;
  const int64_t most = *std::max_element(loads.begin(), loads.end());
  if (most == 0) return 1.0;
  double sum = 0;
  for (const int64_t load : loads) sum += static_cast<double>(load);
  return sum / static_cast<double>(loads.size()) / static_cast<double>(most);
}

}  // namespace argosy
