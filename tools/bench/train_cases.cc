// A training step of the layer, forward and backward with all gradients, against the peak of its products; in MXFP8, against
// the same step in bf16.
//
// Floor: docs/perf/train.md. Test: tests/bench/bench_test.cc.
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "argosy/moe.h"
#include "tools/bench/bench_case.h"
#include "tools/bench/floor.h"
#include "tools/bench/layer_work.h"
#include "tools/bench/random_data.h"
#include "tools/bench/rank_crew.h"

namespace argosy::tools::bench {
namespace {

class TrainBench : public Bench {
 public:
  static Result<std::unique_ptr<Bench>> make(const BenchContext& context, const LayerShape& shape,
                                             BlockFormat format) {
    std::unique_ptr<TrainBench> bench(new TrainBench(shape, format));
    ARGOSY_ASSIGN_OR_RETURN(Floor floor,
                            Floor::create(context, context.num_threads, Floor::Of::kPeak));
    bench->floor_ = std::make_unique<Floor>(std::move(floor));
    ARGOSY_ASSIGN_OR_RETURN(bench->crew_, RankCrew::create(context, 1, context.num_threads));
    ARGOSY_RETURN_IF_ERROR(
        bench->crew_->run([&](Group& group) { return bench->prepare(group); }).error());
    ARGOSY_RETURN_IF_ERROR(
        bench->crew_->run([&](Group&) { return bench->step(bench->layer_.get()); }).error());
    ARGOSY_RETURN_IF_ERROR(bench->check());
    return std::unique_ptr<Bench>(std::move(bench));
  }

  Result<Sample> sample() override {
    Sample sample;
    if (bf16_layer_ == nullptr) {
      ARGOSY_ASSIGN_OR_RETURN(sample.limit_seconds, floor_->seconds(operations(), 0));
    } else {
      ARGOSY_ASSIGN_OR_RETURN(sample.limit_seconds,
                              crew_->run([this](Group&) { return step(bf16_layer_.get()); }));
    }
    ARGOSY_ASSIGN_OR_RETURN(sample.seconds,
                            crew_->run([this](Group&) { return step(layer_.get()); }));
    return sample;
  }

 private:
  TrainBench(const LayerShape& shape, BlockFormat format) : shape_(shape), format_(format) {}

  // Three products of every expert row forward, and twice as many backward.
  double operations() const {
    return 18.0 * static_cast<double>(shape_.num_tokens * shape_.top_k) *
           static_cast<double>(shape_.hidden * shape_.intermediate);
  }

  Status prepare(Group& group) {
    const int64_t e = shape_.num_experts, h = shape_.hidden, f = shape_.intermediate;
    ARGOSY_ASSIGN_OR_RETURN(layer_, make_layer(group, format_));
    if (format_ != BlockFormat::kUnset) {
      ARGOSY_ASSIGN_OR_RETURN(bf16_layer_, make_layer(group, BlockFormat::kUnset));
    }
    ARGOSY_ASSIGN_OR_RETURN(hidden_, normal_tensor({shape_.num_tokens, h}, 1.0, 1));
    ARGOSY_ASSIGN_OR_RETURN(d_output_, normal_tensor({shape_.num_tokens, h}, 1.0, 2));
    ARGOSY_ASSIGN_OR_RETURN(output_, Tensor::zeros(DType::kBF16, {shape_.num_tokens, h}));
    ARGOSY_ASSIGN_OR_RETURN(d_hidden_, Tensor::zeros(DType::kBF16, {shape_.num_tokens, h}));
    const auto gradient = [&](std::initializer_list<int64_t> dims) -> Result<TensorView> {
      ARGOSY_ASSIGN_OR_RETURN(Tensor made, Tensor::zeros(DType::kF32, dims));
      kept_.push_back(std::move(made));
      return kept_.back().view();
    };
    gradients_.d_hidden = d_hidden_.view();
    ARGOSY_ASSIGN_OR_RETURN(gradients_.d_gate, gradient({e, h}));
    ARGOSY_ASSIGN_OR_RETURN(gradients_.d_expert_gate, gradient({e, f, h}));
    ARGOSY_ASSIGN_OR_RETURN(gradients_.d_expert_up, gradient({e, f, h}));
    ARGOSY_ASSIGN_OR_RETURN(gradients_.d_expert_down, gradient({e, h, f}));
    ARGOSY_ASSIGN_OR_RETURN(gradients_.d_topk_weights, gradient({shape_.num_tokens, shape_.top_k}));
    return {};
  }

  Result<std::unique_ptr<MoeLayer>> make_layer(Group& group, BlockFormat format) const {
    const int64_t e = shape_.num_experts;
    ARGOSY_ASSIGN_OR_RETURN(MoeWeights weights, layer_weights(shape_, 0, e));
    ARGOSY_ASSIGN_OR_RETURN(const RouterSpec router, router_preset("mixtral", e, shape_.top_k));
    MoeOptions options;
    options.hidden_dtype = DType::kBF16;
    options.training = true;
    options.training_format = format;
    return MoeLayer::create(group, router, std::move(weights), options);
  }

  Status step(MoeLayer* layer) {
    ARGOSY_RETURN_IF_ERROR(layer->forward_train(std::as_const(hidden_).view(), nullptr,
                                                output_.view(), &tape_, nullptr));
    return layer->backward(tape_, std::as_const(hidden_).view(), std::as_const(d_output_).view(),
                           {}, gradients_);
  }

  // The gradient of a routed weight is d_output . expert row: of the last token's first expert, in fp64.
  Status check() const {
    const int64_t h = shape_.hidden, f = shape_.intermediate;
    const int64_t token = shape_.num_tokens - 1;
    const auto at = static_cast<size_t>(token * shape_.top_k);
    const int32_t expert = tape_.routing().topk_idx[at];
    ARGOSY_ASSIGN_OR_RETURN(const ExpertValues values, expert_values(shape_, expert));
    const auto* const x = hidden_.view().as<BFloat16>() + token * h;
    const auto* const d_out = d_output_.view().as<BFloat16>() + token * h;
    std::vector<BFloat16> inner;
    for (int64_t i = 0; i < f; ++i) {
      const double gate = exact_dot(x, values.gate.view().as<BFloat16>() + i * h, h);
      const double up = exact_dot(x, values.up.view().as<BFloat16>() + i * h, h);
      inner.push_back(BFloat16::from_float(static_cast<float>(gate / (1 + std::exp(-gate)) * up)));
    }
    double want = 0, size = 0;
    for (int64_t i = 0; i < h; ++i) {
      const double row = exact_dot(inner.data(), values.down.view().as<BFloat16>() + i * f, f);
      const auto d = static_cast<double>(d_out[i].to_float());
      want += d * row;
      size += d * d * row * row;
    }
    const auto got =
        static_cast<double>(gradients_.d_topk_weights.as<float>()[static_cast<int64_t>(at)]);
    const double allowed = format_ == BlockFormat::kUnset ? 0.02 : 0.2;
    if (std::abs(got - want) <= allowed * (std::sqrt(size) + std::abs(want))) return {};
    return Status(StatusCode::kInternal, "the gradient of a routed weight is " +
                                             std::to_string(got) + ", expected " +
                                             std::to_string(want));
  }

  const LayerShape shape_;
  const BlockFormat format_;
  std::unique_ptr<Floor> floor_;
  Tensor hidden_, d_output_, output_, d_hidden_;
  std::vector<Tensor> kept_;
  MoeGradients gradients_;
  MoeTape tape_;
  // The layer goes before the group it was made in.
  std::unique_ptr<RankCrew> crew_;
  std::unique_ptr<MoeLayer> layer_, bf16_layer_;
};

}  // namespace

std::vector<BenchCase> train_cases(const BenchSizes& sizes) {
  std::vector<LayerShape> shapes = {{2048, 32, 4, 2048, 1024}, {2048, 64, 8, 1024, 512}};
  if (sizes.quick) shapes = {{40, 8, 2, 64, 48}};
  std::vector<BenchCase> cases;
  const struct {
    const char* name;
    BlockFormat format;
    const char* limit;
    Goals goals;
  } kinds[] = {{"layer_train",
                BlockFormat::kUnset,
                "operations of forward and backward / bf16 peak",
                {0.30, 0.75, 0.60}},
               {"layer_train_mxfp8", BlockFormat::kMxfp8, "the same step in bf16", {}}};
  for (const auto& kind : kinds) {
    for (const LayerShape& shape : shapes) {
      BenchCase made;
      made.name = kind.name;
      made.params = {{"T", shape.num_tokens},   {"E", shape.num_experts},
                     {"K", shape.top_k},        {"H", shape.hidden},
                     {"F", shape.intermediate}, {"threads", sizes.num_threads}};
      made.limit = kind.limit;
      made.goals = kind.goals;
      made.make = [shape, format = kind.format](const BenchContext& context) {
        return TrainBench::make(context, shape, format);
      };
      cases.push_back(std::move(made));
    }
  }
  return cases;
}

}  // namespace argosy::tools::bench
