// See layer_work.h. Test: tests/bench/bench_test.cc.
#include "tools/bench/layer_work.h"

#include <cmath>
#include <utility>

#include "argosy/plan.h"
#include "argosy/router.h"

namespace argosy::tools::bench {
namespace {

double inverse_root(int64_t size) { return 1.0 / std::sqrt(static_cast<double>(size)); }

Result<QuantisedTensor> quantised(const Tensor& values, BlockFormat format) {
  const ConstTensorView view = values.view();
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                          quantised_layout(format, view.dim(0), view.dim(1)));
  ARGOSY_ASSIGN_OR_RETURN(QuantisedTensor tensor, QuantisedTensor::create(layout));
  ARGOSY_RETURN_IF_ERROR(quantise({}, view, tensor.view()));
  return tensor;
}

// There and back, rounded to bf16.
Status requantise(BlockFormat format, Tensor* values) {
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedTensor codes, quantised(*values, format));
  return dequantise({}, codes.view(), values->view());
}

Result<PackedWeights> create_packed(const LayerShape& shape, PackedWeights::Kind kind,
                                    int64_t count, int64_t n, int64_t k) {
  if (shape.format == BlockFormat::kUnset) {
    return PackedWeights::create(kind, DType::kBF16, count, n, k);
  }
  return PackedWeights::create_quantised(kind, shape.format, count, n, k);
}

Status set_expert(const LayerShape& shape, const ExpertValues& values, int64_t local,
                  MoeWeights* weights) {
  if (shape.format == BlockFormat::kUnset) {
    ARGOSY_RETURN_IF_ERROR(weights->gate_up.set_group(local, values.gate.view(), values.up.view()));
    return weights->down.set_group(local, values.down.view());
  }
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedTensor gate, quantised(values.gate, shape.format));
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedTensor up, quantised(values.up, shape.format));
  ARGOSY_ASSIGN_OR_RETURN(const QuantisedTensor down, quantised(values.down, shape.format));
  ARGOSY_RETURN_IF_ERROR(weights->gate_up.set_group(local, gate.view(), up.view()));
  return weights->down.set_group(local, down.view());
}

// Rows of one token in fp64; h is not rounded, which costs less than the tolerance.
std::vector<double> exact_token(const LayerShape& shape, const BFloat16* x,
                                const ExpertValues& expert) {
  const auto* const gate = expert.gate.view().as<BFloat16>();
  const auto* const up = expert.up.view().as<BFloat16>();
  const auto* const down = expert.down.view().as<BFloat16>();
  std::vector<double> h(static_cast<size_t>(shape.intermediate));
  for (int64_t f = 0; f < shape.intermediate; ++f) {
    const double g = exact_dot(x, gate + f * shape.hidden, shape.hidden);
    const double u = exact_dot(x, up + f * shape.hidden, shape.hidden);
    h[static_cast<size_t>(f)] = g / (1 + std::exp(-g)) * u;
  }
  std::vector<double> row(static_cast<size_t>(shape.hidden));
  for (size_t column = 0; column < row.size(); ++column) {
    for (size_t f = 0; f < h.size(); ++f) {
      row[column] += h[f] * static_cast<double>(down[column * h.size() + f].to_float());
    }
  }
  return row;
}

}  // namespace

Result<MoeWeights> layer_weights(const LayerShape& shape, int64_t first, int64_t count) {
  MoeWeights weights;
  weights.first_expert = first;
  ARGOSY_ASSIGN_OR_RETURN(weights.gate, normal_tensor({shape.num_experts, shape.hidden},
                                                      inverse_root(shape.hidden), 7));
  ARGOSY_ASSIGN_OR_RETURN(weights.gate_up, create_packed(shape, PackedWeights::Kind::kGateUp, count,
                                                         shape.intermediate, shape.hidden));
  ARGOSY_ASSIGN_OR_RETURN(weights.down, create_packed(shape, PackedWeights::Kind::kPlain, count,
                                                      shape.hidden, shape.intermediate));
  for (int64_t local = 0; local < count; ++local) {
    ARGOSY_ASSIGN_OR_RETURN(const ExpertValues values, expert_values(shape, first + local));
    ARGOSY_RETURN_IF_ERROR(set_expert(shape, values, local, &weights));
  }
  return weights;
}

Result<ExpertValues> expert_values(const LayerShape& shape, int64_t expert) {
  const auto seed = 10 + 3 * static_cast<uint64_t>(expert);
  ExpertValues values;
  ARGOSY_ASSIGN_OR_RETURN(values.gate, normal_tensor({shape.intermediate, shape.hidden},
                                                     inverse_root(shape.hidden), seed));
  ARGOSY_ASSIGN_OR_RETURN(values.up, normal_tensor({shape.intermediate, shape.hidden},
                                                   inverse_root(shape.hidden), seed + 1));
  ARGOSY_ASSIGN_OR_RETURN(values.down, normal_tensor({shape.hidden, shape.intermediate},
                                                     inverse_root(shape.intermediate), seed + 2));
  return values;
}

Result<std::unique_ptr<LayerWork>> LayerWork::create(const BenchContext& context,
                                                     const LayerShape& shape, int num_ranks,
                                                     int threads_per_rank, int64_t num_routings) {
  std::unique_ptr<LayerWork> work(new LayerWork(shape));
  ARGOSY_ASSIGN_OR_RETURN(work->hidden_, normal_tensor({shape.num_tokens, shape.hidden}, 1.0, 5));
  ARGOSY_ASSIGN_OR_RETURN(work->output_,
                          Tensor::zeros(DType::kBF16, {shape.num_tokens, shape.hidden}));
  for (int64_t i = 0; i < num_routings; ++i) {
    ARGOSY_ASSIGN_OR_RETURN(RandomRouting routing,
                            random_routing(shape.num_tokens, shape.num_experts, shape.top_k,
                                           static_cast<uint64_t>(100 + i)));
    work->routings_.push_back(std::move(routing));
  }
  work->ranks_.resize(static_cast<size_t>(num_ranks));
  ARGOSY_ASSIGN_OR_RETURN(work->crew_, RankCrew::create(context, num_ranks, threads_per_rank));
  ARGOSY_ASSIGN_OR_RETURN(
      [[maybe_unused]] const double seconds,
      work->crew_->run([&work](Group& group) { return work->make_rank(group); }));
  ARGOSY_RETURN_IF_ERROR(work->check());
  return work;
}

Status LayerWork::make_rank(Group& group) {
  Rank& rank = ranks_[static_cast<size_t>(group.rank())];
  rank.first_token = owned_begin(shape_.num_tokens, group.num_ranks(), group.rank());
  rank.num_tokens =
      owned_begin(shape_.num_tokens, group.num_ranks(), group.rank() + 1) - rank.first_token;
  const Placement placement{shape_.num_experts, group.num_ranks(), 0};
  ARGOSY_ASSIGN_OR_RETURN(MoeWeights weights, layer_weights(shape_, placement.begin(group.rank()),
                                                            placement.num_local(group.rank())));
  ARGOSY_ASSIGN_OR_RETURN(const RouterSpec router,
                          router_preset("mixtral", shape_.num_experts, shape_.top_k));
  MoeOptions options;
  options.hidden_dtype = DType::kBF16;
  ARGOSY_ASSIGN_OR_RETURN(rank.layer, MoeLayer::create(group, router, std::move(weights), options));
  return {};
}

Status LayerWork::forward(Group& group, const RandomRouting& routing) {
  const Rank& rank = ranks_[static_cast<size_t>(group.rank())];
  const auto mine = [&](const auto& view) { return view.rows(rank.first_token, rank.num_tokens); };
  return rank.layer->forward_routed(
      mine(std::as_const(hidden_).view()), mine(routing.topk_idx.view()),
      mine(routing.topk_weights.view()), mine(output_.view()), nullptr);
}

double LayerWork::next_weight_bytes() const {
  const int64_t touched = num_experts_touched(routings_[next_].topk_idx.view(), shape_.num_experts);
  return 2.0 * 3.0 * static_cast<double>(touched * shape_.hidden * shape_.intermediate);
}

Result<LayerWork::Call> LayerWork::run() {
  Call call;
  call.weight_bytes = next_weight_bytes();
  const RandomRouting& routing = routings_[next_];
  next_ = (next_ + 1) % routings_.size();
  ARGOSY_ASSIGN_OR_RETURN(call.seconds,
                          crew_->run([&](Group& group) { return forward(group, routing); }));
  return call;
}

double LayerWork::operations() const {
  return 6.0 * static_cast<double>(shape_.num_tokens * shape_.top_k) *
         static_cast<double>(shape_.hidden * shape_.intermediate);
}

Status LayerWork::check() {
  ARGOSY_ASSIGN_OR_RETURN([[maybe_unused]] const Call call, run());
  start_over();
  const int64_t token = shape_.num_tokens - 1;
  const auto* const x = std::as_const(hidden_).view().as<BFloat16>() + token * shape_.hidden;
  std::vector<double> want(static_cast<size_t>(shape_.hidden));
  for (int64_t k = 0; k < shape_.top_k; ++k) {
    const auto at = token * shape_.top_k + k;
    const int64_t expert = routings_[0].topk_idx.view().as<int32_t>()[at];
    const auto weight = static_cast<double>(routings_[0].topk_weights.view().as<float>()[at]);
    ARGOSY_ASSIGN_OR_RETURN(ExpertValues values, expert_values(shape_, expert));
    for (Tensor* matrix : {&values.gate, &values.up, &values.down}) {
      if (shape_.format == BlockFormat::kUnset) break;
      ARGOSY_RETURN_IF_ERROR(requantise(shape_.format, matrix));
    }
    const std::vector<double> row = exact_token(shape_, x, values);
    for (size_t i = 0; i < row.size(); ++i) want[i] += weight * row[i];
  }
  const auto* const got = output_.view().as<BFloat16>() + token * shape_.hidden;
  for (size_t i = 0; i < want.size(); ++i) {
    ARGOSY_RETURN_IF_ERROR(
        check_near(static_cast<double>(got[i].to_float()), want[i], "an output of the layer"));
  }
  return {};
}

}  // namespace argosy::tools::bench
