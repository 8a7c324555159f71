// The fp64 yardstick, written from the contract and not from the layer's code: a mistake would have
// to be made twice, in two shapes, to go unseen. Clarity over speed. Test:
// tests/moe/reference_test.cc.
#include "argosy/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "argosy/bfloat16.h"
#include "base/check.h"
#include "platform/float_env.h"

namespace argosy {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double sigmoid(double z) {
  return z >= 0 ? 1 / (1 + std::exp(-z)) : std::exp(z) / (1 + std::exp(z));
}

double softplus(double z) { return std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))); }

// log(softplus(z)); far below 0 softplus(z) is e^z.
double log_softplus(double z) { return z < -40 ? z : std::log(softplus(z)); }

double round_to(double value, SelectionPrecision precision) {
  return precision == SelectionPrecision::kFp32 ? static_cast<double>(static_cast<float>(value))
                                                : value;
}

// log(e^v / sum of all e^v). The peak is taken off first: beside 1e8 the logarithm of a sum is lost.
std::vector<double> log_softmax(std::span<const double> values) {
  const double peak = *std::max_element(values.begin(), values.end());
  double sum = 0;
  for (const double value : values) sum += std::exp(value - peak);
  std::vector<double> result;
  for (const double value : values) result.push_back((value - peak) - std::log(sum));
  return result;
}

// Logarithm of every unbiased score. For kSoftmaxTopK, whose weights are a softmax over the chosen
// only, the logit itself serves: normalising it over the chosen gives the weight.
std::vector<double> log_scores(ScoreFunction function, std::span<const double> logits) {
  std::vector<double> result(logits.begin(), logits.end());
  switch (function) {
    case ScoreFunction::kSoftmax:
      return log_softmax(logits);
    case ScoreFunction::kSigmoid:
      for (double& value : result) value = -softplus(-value);
      break;
    case ScoreFunction::kSqrtSoftplus:
      for (double& value : result) value = 0.5 * log_softplus(value);
      break;
    case ScoreFunction::kSoftmaxTopK:
    case ScoreFunction::kUnset:
      break;
  }
  return result;
}

// A selection score and the largest term that went into it: rounding errors scale with that term.
struct Candidate {
  double value = 0;
  double magnitude = 0;
};

// Indices of the best `count` candidates, best first, equal ones by rising index.
std::vector<size_t> best_of(const std::vector<Candidate>& candidates, size_t count) {
  std::vector<size_t> order(candidates.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return candidates[a].value > candidates[b].value; });
  order.resize(count);
  return order;
}

// Relative distance between the worst of `chosen` and the best candidate outside it; refused ones
// (value -inf) do not count.
double gap_of(const std::vector<Candidate>& candidates, const std::vector<size_t>& chosen) {
  constexpr double kSmallestNormalFp32 = 0x1p-126;
  const Candidate& last = candidates[chosen.back()];
  double gap = kInfinity;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& other = candidates[i];
    if (other.value == -kInfinity || std::find(chosen.begin(), chosen.end(), i) != chosen.end()) {
      continue;
    }
    const double scale = std::max({last.magnitude, other.magnitude, kSmallestNormalFp32});
    gap = std::min(gap, (last.value - other.value) / scale);
  }
  return gap;
}

Candidate score_of_group(const RouterSpec& spec, std::span<const Candidate> members,
                         SelectionPrecision precision) {
  std::vector<Candidate> sorted(members.begin(), members.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
  size_t count = 1;
  if (spec.group_score == GroupScore::kSumOfBestTwo) count = 2;
  if (spec.group_score == GroupScore::kSumOfBestKPerGroup) {
    count = static_cast<size_t>(spec.top_k / spec.keep_groups);
  }
  Candidate result;
  for (size_t i = 0; i < std::min(count, sorted.size()); ++i) {
    result.value = round_to(result.value + sorted[i].value, precision);
    result.magnitude = std::max(result.magnitude, sorted[i].magnitude);
  }
  result.magnitude = std::max(result.magnitude, std::abs(result.value));
  return result;
}

// Sets the candidates of refused groups to -inf; returns the gap at the group limit.
double limit_groups(const RouterSpec& spec, SelectionPrecision precision,
                    std::vector<Candidate>* candidates) {
  if (spec.keep_groups >= spec.num_groups) return kInfinity;
  const size_t group_size = candidates->size() / static_cast<size_t>(spec.num_groups);
  std::vector<Candidate> groups;
  for (size_t begin = 0; begin < candidates->size(); begin += group_size) {
    groups.push_back(score_of_group(
        spec, std::span<const Candidate>(*candidates).subspan(begin, group_size), precision));
  }
  const std::vector<size_t> kept = best_of(groups, static_cast<size_t>(spec.keep_groups));
  for (size_t group = 0; group < groups.size(); ++group) {
    if (std::find(kept.begin(), kept.end(), group) != kept.end()) continue;
    for (size_t i = 0; i < group_size; ++i)
      (*candidates)[group * group_size + i].value = -kInfinity;
  }
  return gap_of(groups, kept);
}

// Contract 1.2 and 1.7: unbiased scores of the chosen, divided by their sum if so specified, times
// the factor. In the log domain, so that underflowed scores keep their proportions.
std::vector<double> weights_of(const RouterSpec& spec, const std::vector<double>& log_score,
                               const std::vector<int32_t>& experts) {
  std::vector<double> chosen;
  for (const int32_t expert : experts) chosen.push_back(log_score[static_cast<size_t>(expert)]);
  const Choice choice = spec.top_k == 1 ? spec.normalise_single : spec.normalise;
  const bool over_chosen = spec.score_function == ScoreFunction::kSoftmaxTopK;
  if (over_chosen || (choice == Choice::kYes && spec.weight_norm == WeightNorm::kExact)) {
    chosen = log_softmax(chosen);
  }
  std::vector<double> weights;
  double sum = 0;
  for (const double value : chosen) {
    weights.push_back(std::exp(value));
    sum += weights.back();
  }
  const bool divide = choice == Choice::kYes && spec.weight_norm == WeightNorm::kReference;
  for (double& weight : weights) {
    if (divide) weight /= sum + 1e-20;
    weight *= static_cast<double>(spec.routed_scaling_factor);
  }
  return weights;
}

double element_of(const Tensor& tensor, int64_t index) {
  const ConstTensorView view = tensor.view();
  if (view.dtype == DType::kBF16) return static_cast<double>(view.as<BFloat16>()[index].to_float());
  return static_cast<double>(view.as<float>()[index]);
}

// A code times its scale, exact in fp64. Row-major index.
double element_of(const QuantisedTensor& tensor, int64_t index) {
  const ConstQuantisedView view = tensor.view();
  const BlockFormatInfo info = info_of(view.format);
  const int64_t row = index / view.cols, column = index % view.cols;
  const bool is_packed = info.element == ElementFormat::kE2M1;
  const auto byte = static_cast<uint8_t>(view.codes.row(row)[is_packed ? column / 2 : column]);
  const auto code = static_cast<uint8_t>(is_packed && column % 2 == 1 ? byte >> 4 : byte);
  const std::byte* scales = view.scales.row(row / info.block_rows);
  const int64_t block = column / info.block_cols;
  const double scale = info.scale_dtype == DType::kF32
                           ? static_cast<double>(reinterpret_cast<const float*>(scales)[block])
                           : static_cast<double>(decode_e8m0(static_cast<uint8_t>(scales[block])));
  return static_cast<double>(decode_element(info.element, code)) * scale;
}

int64_t num_rows_of(const Tensor& matrix) { return matrix.view().dim(0); }
int64_t num_rows_of(const QuantisedTensor& matrix) { return matrix.view().rows; }

// matrix [N, K] . x [K].
template <typename Matrix>
std::vector<double> multiply(const Matrix& matrix, std::span<const double> x) {
  const int64_t rows = num_rows_of(matrix);
  const auto columns = static_cast<int64_t>(x.size());
  std::vector<double> result(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t column = 0; column < columns; ++column) {
      sum += element_of(matrix, row * columns + column) * x[static_cast<size_t>(column)];
    }
    result[static_cast<size_t>(row)] = sum;
  }
  return result;
}

// matrix [N, K] . x [K] + bias [N], where there is one.
template <typename Matrix>
std::vector<double> multiply_add(const Matrix& matrix, const Tensor& bias,
                                 std::span<const double> x) {
  std::vector<double> result = multiply(matrix, x);
  for (size_t i = 0; i < result.size() && !bias.empty(); ++i) {
    result[i] += element_of(bias, static_cast<int64_t>(i));
  }
  return result;
}

double activate(const Activation& activation, double gate, double up) {
  switch (activation.kind) {
    case ActivationKind::kSwiGlu:
      return gate * sigmoid(gate) * up;
    case ActivationKind::kClampedSwiGlu: {
      const double limit = activation.limit;
      const double g = std::min(gate, limit);
      return (std::clamp(up, -limit, limit) + 1) * g * sigmoid(activation.alpha * g);
    }
    case ActivationKind::kGeGlu:
      return 0.5 * gate * std::erfc(-gate * std::numbers::sqrt2 / 2) * up;
    case ActivationKind::kGeGluTanh: {
      const double slope = std::sqrt(2 * std::numbers::inv_pi);
      return gate * sigmoid(2 * slope * (gate + 0.044715 * gate * gate * gate)) * up;
    }
    case ActivationKind::kRelu2Glu: {
      const double positive = std::max(gate, 0.0);
      return positive * positive * up;
    }
  }
  return std::numeric_limits<double>::quiet_NaN();
}

// `matrices` has gate, up and down: the expert itself, or its quantised ones.
template <typename Matrices>
std::vector<double> run_expert(const Matrices& matrices, const ExpertTensors& expert,
                               const Activation& activation, double weight,
                               std::span<const double> hidden) {
  std::vector<double> inner = multiply_add(matrices.gate, expert.gate_bias, hidden);
  const std::vector<double> up = multiply_add(matrices.up, expert.up_bias, hidden);
  for (size_t i = 0; i < inner.size(); ++i) {
    inner[i] = weight * activate(activation, inner[i], up[i]);
  }
  return multiply_add(matrices.down, expert.down_bias, inner);
}

// `weight` inside the activation.
std::vector<double> run_expert(const ExpertTensors& expert, const Activation& activation,
                               double weight, std::span<const double> hidden) {
  if (expert.quantised.has_value()) {
    return run_expert(*expert.quantised, expert, activation, weight, hidden);
  }
  return run_expert(expert, expert, activation, weight, hidden);
}

}  // namespace

ReferenceRouting reference_route(const RouterSpec& spec, std::span<const double> logits,
                                 std::span<const double> selection_bias,
                                 SelectionPrecision precision) {
  ARGOSY_CHECK(static_cast<int64_t>(logits.size()) == spec.num_experts, "{} logits for {} experts",
               logits.size(), spec.num_experts);
  ARGOSY_CHECK(selection_bias.empty() || selection_bias.size() == logits.size(),
               "selection bias of {} for {} experts", selection_bias.size(), logits.size());
  const platform::ScopedFloatEnv float_env(platform::Denormals::kKeep);
  std::vector<double> row(logits.begin(), logits.end());
  const bool finite =
      std::all_of(row.begin(), row.end(), [](double z) { return std::isfinite(z); });
  if (!finite) std::fill(row.begin(), row.end(), 0.0);

  const std::vector<double> log_score = log_scores(spec.score_function, row);
  std::vector<Candidate> candidates(row.size());
  for (size_t e = 0; e < row.size(); ++e) {
    const bool by_logit = spec.score_function == ScoreFunction::kSoftmaxTopK;
    const double score = round_to(by_logit ? row[e] : std::exp(log_score[e]), precision);
    const double bias = selection_bias.empty() ? 0.0 : selection_bias[e];
    const double sum = round_to(score + bias, precision);
    candidates[e] = {sum, std::max({std::abs(score), std::abs(bias), std::abs(sum)})};
  }
  ReferenceRouting routing;
  routing.selection_gap = limit_groups(spec, precision, &candidates);
  const std::vector<size_t> chosen = best_of(candidates, static_cast<size_t>(spec.top_k));
  routing.selection_gap = std::min(routing.selection_gap, gap_of(candidates, chosen));
  for (const size_t expert : chosen) routing.experts.push_back(static_cast<int32_t>(expert));
  routing.weights = weights_of(spec, log_score, routing.experts);
  return routing;
}

struct ReferenceLayer::State {
  ModelConfig config;
  SharedTensors shared;
  std::vector<double> selection_bias;  // [E] or empty
  std::vector<ExpertTensors> experts;  // [E]
};

ReferenceLayer::ReferenceLayer(std::unique_ptr<State> state) : state_(std::move(state)) {}
ReferenceLayer::~ReferenceLayer() = default;
ReferenceLayer::ReferenceLayer(ReferenceLayer&&) noexcept = default;

Result<ReferenceLayer> ReferenceLayer::open(const std::string& dir, int64_t layer,
                                            const CheckpointOptions& options) {
  ARGOSY_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(dir, options));
  auto state = std::make_unique<State>();
  state->config = checkpoint.config();
  ARGOSY_ASSIGN_OR_RETURN(state->shared, checkpoint.read_shared(layer));
  if (!state->shared.selection_bias.empty()) {
    for (int64_t e = 0; e < state->config.router.num_experts; ++e) {
      state->selection_bias.push_back(element_of(state->shared.selection_bias, e));
    }
  }
  for (int64_t e = 0; e < state->config.router.num_experts; ++e) {
    ARGOSY_ASSIGN_OR_RETURN(ExpertTensors expert, checkpoint.read_expert(layer, e));
    state->experts.push_back(std::move(expert));
  }
  return ReferenceLayer(std::move(state));
}

ReferenceToken ReferenceLayer::run(std::span<const double> hidden, std::span<const int32_t> experts,
                                   std::span<const double> routed, bool weights_inside) const {
  const State& layer = *state_;
  ARGOSY_CHECK(static_cast<int64_t>(hidden.size()) == layer.config.hidden,
               "hidden has {} values, the layer has {}", hidden.size(), layer.config.hidden);
  const platform::ScopedFloatEnv float_env(platform::Denormals::kKeep);
  const std::vector<double> logits =
      multiply_add(layer.shared.gate, layer.shared.gate_bias, hidden);
  ReferenceRouting routing =
      reference_route(layer.config.router, logits, layer.selection_bias, SelectionPrecision::kFp64);
  ReferenceToken token;
  token.selection_gap = routing.selection_gap;
  token.experts = std::move(routing.experts);
  token.weights = std::move(routing.weights);
  if (!experts.empty()) {
    token.experts.assign(experts.begin(), experts.end());
    token.weights = weights_of(
        layer.config.router, log_scores(layer.config.router.score_function, logits), token.experts);
  }

  token.output.assign(hidden.size(), 0.0);
  if (layer.shared.shared.has_value()) {
    token.output = run_expert(*layer.shared.shared, layer.config.activation, 1.0, hidden);
    if (!layer.shared.shared_gate.empty()) {
      const double scale = sigmoid(multiply(layer.shared.shared_gate, hidden)[0]);
      for (double& value : token.output) value *= scale;
    }
  }
  const std::span<const double> travelled = routed.empty() ? hidden : routed;
  for (size_t k = 0; k < token.experts.size(); ++k) {
    const double inside = weights_inside ? token.weights[k] : 1.0;
    const double outside = weights_inside ? 1.0 : token.weights[k];
    const std::vector<double> row = run_expert(layer.experts[static_cast<size_t>(token.experts[k])],
                                               layer.config.activation, inside, travelled);
    for (size_t i = 0; i < row.size(); ++i) token.output[i] += outside * row[i];
  }
  return token;
}

}  // namespace argosy
