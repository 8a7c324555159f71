// The whole layer: prefill and decode on one rank against its floor, and two ranks against one.
//
// Floors: docs/perf/layer.md. Test: tests/bench/bench_test.cc.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "argosy/bfloat16.h"
#include "tools/bench/bench_case.h"
#include "tools/bench/floor.h"
#include "tools/bench/layer_work.h"

namespace argosy::tools::bench {
namespace {

class FloorBench : public Bench {
 public:
  static Result<std::unique_ptr<Bench>> make(const BenchContext& context, const LayerShape& shape) {
    // From 64 tokens on nearly every expert has some: the weights fill no cache anyway.
    const int64_t num_routings = shape.num_tokens <= 64 ? 8 : 1;
    auto bench = std::make_unique<FloorBench>();
    ARGOSY_ASSIGN_OR_RETURN(bench->floor_, make_floor(context));
    ARGOSY_ASSIGN_OR_RETURN(
        bench->work_, LayerWork::create(context, shape, 1, context.num_threads, num_routings));
    return std::unique_ptr<Bench>(std::move(bench));
  }

  Result<Sample> sample() override {
    Sample sample;
    ARGOSY_ASSIGN_OR_RETURN(sample.limit_seconds,
                            floor_->seconds(work_->operations(), work_->next_weight_bytes()));
    ARGOSY_ASSIGN_OR_RETURN(const LayerWork::Call call, work_->run());
    sample.seconds = call.seconds;
    return sample;
  }

 private:
  static Result<std::unique_ptr<Floor>> make_floor(const BenchContext& context) {
    ARGOSY_ASSIGN_OR_RETURN(Floor floor,
                            Floor::create(context, context.num_threads, Floor::Of::kBoth));
    return std::make_unique<Floor>(std::move(floor));
  }

  std::unique_ptr<Floor> floor_;
  std::unique_ptr<LayerWork> work_;
};

// Two ranks of one thread against one rank of two.
class RanksBench : public Bench {
 public:
  static Result<std::unique_ptr<Bench>> make(const BenchContext& context, const LayerShape& shape) {
    auto bench = std::make_unique<RanksBench>();
    ARGOSY_ASSIGN_OR_RETURN(bench->one_, LayerWork::create(context, shape, 1, 2, 1));
    ARGOSY_ASSIGN_OR_RETURN(bench->two_, LayerWork::create(context, shape, 2, 1, 1));
    return std::unique_ptr<Bench>(std::move(bench));
  }

  Result<Sample> sample() override {
    ARGOSY_ASSIGN_OR_RETURN(const LayerWork::Call one, one_->run());
    ARGOSY_ASSIGN_OR_RETURN(const LayerWork::Call two, two_->run());
    return Sample{two.seconds, one.seconds};
  }

 private:
  std::unique_ptr<LayerWork> one_, two_;
};

// The layer on quantised weights against the same layer on bf16 ones, in turn.
class FormatBench : public Bench {
 public:
  static Result<std::unique_ptr<Bench>> make(const BenchContext& context, const LayerShape& shape,
                                             double times) {
    const int64_t num_routings = shape.num_tokens <= 64 ? 8 : 1;
    LayerShape wide = shape;
    wide.format = BlockFormat::kUnset;
    auto bench = std::make_unique<FormatBench>();
    bench->times_ = times;
    ARGOSY_ASSIGN_OR_RETURN(bench->bf16_,
                            LayerWork::create(context, wide, 1, context.num_threads, num_routings));
    ARGOSY_ASSIGN_OR_RETURN(
        bench->work_, LayerWork::create(context, shape, 1, context.num_threads, num_routings));
    ARGOSY_RETURN_IF_ERROR(bench->compare(num_routings));
    return std::unique_ptr<Bench>(std::move(bench));
  }

  nlohmann::ordered_json more() const override {
    return {{"error_max", error_max_}, {"error_rms", error_rms_}};
  }

  Result<Sample> sample() override {
    ARGOSY_ASSIGN_OR_RETURN(const LayerWork::Call bf16, bf16_->run());
    ARGOSY_ASSIGN_OR_RETURN(const LayerWork::Call call, work_->run());
    return Sample{call.seconds, bf16.seconds / times_};
  }

 private:
  // Of all routings: the largest difference to the output on bf16 weights over the largest output, and the same of rms.
  Status compare(int64_t num_routings) {
    double most = 0, peak = 0, difference = 0, size = 0;
    for (int64_t routing = 0; routing < num_routings; ++routing) {
      ARGOSY_RETURN_IF_ERROR(bf16_->run().error());
      ARGOSY_RETURN_IF_ERROR(work_->run().error());
      const ConstTensorView want = bf16_->output(), got = work_->output();
      for (int64_t i = 0; i < want.num_elements(); ++i) {
        const auto w = static_cast<double>(want.as<BFloat16>()[i].to_float());
        const double d = static_cast<double>(got.as<BFloat16>()[i].to_float()) - w;
        most = std::max(most, std::abs(d));
        peak = std::max(peak, std::abs(w));
        difference += d * d;
        size += w * w;
      }
    }
    error_max_ = most / peak;
    error_rms_ = std::sqrt(difference / size);
    bf16_->start_over();
    work_->start_over();
    return {};
  }

  double times_ = 1;
  double error_max_ = 0, error_rms_ = 0;
  std::unique_ptr<LayerWork> bf16_, work_;
};

// `times` as fast as bf16 weights is the limit.
BenchCase format_case(const char* name, LayerShape shape, BlockFormat format, double times,
                      int num_threads) {
  shape.format = format;
  return {name,
          {{"T", shape.num_tokens},
           {"E", shape.num_experts},
           {"K", shape.top_k},
           {"H", shape.hidden},
           {"F", shape.intermediate},
           {"threads", num_threads}},
          "time on bf16 weights, over 1.6 (decode, fp8), 2.5 (decode, mxfp4) or 0.8 (prefill)",
          Goals::same(1.0),
          [=](const BenchContext& context) { return FormatBench::make(context, shape, times); }};
}

BenchCase floor_case(const char* name, const LayerShape& shape, const Goals& goals,
                     int num_threads) {
  return {name,
          {{"T", shape.num_tokens},
           {"E", shape.num_experts},
           {"K", shape.top_k},
           {"H", shape.hidden},
           {"F", shape.intermediate},
           {"threads", num_threads}},
          "greater of operations / bf16 peak and weight bytes / DRAM read rate",
          goals,
          [=](const BenchContext& context) { return FloorBench::make(context, shape); }};
}

}  // namespace

std::vector<BenchCase> layer_cases(const BenchSizes& sizes) {
  LayerShape shape{0, 32, 4, 2048, 1024};
  if (sizes.quick) shape = {0, 8, 2, 64, 48};
  const auto with_tokens = [&](int64_t num_tokens) {
    LayerShape with = shape;
    with.num_tokens = sizes.quick ? std::min<int64_t>(num_tokens, 9) : num_tokens;
    return with;
  };
  std::vector<BenchCase> cases = {
      floor_case("layer_prefill", with_tokens(512), {0.30, 0.88, 0.70}, sizes.num_threads),
      floor_case("layer_prefill", with_tokens(2048), {0.30, 0.90, 0.70}, sizes.num_threads),
      floor_case("layer_decode", with_tokens(1), Goals::same(0.95), sizes.num_threads),
      floor_case("layer_decode", with_tokens(8), Goals::same(0.95), sizes.num_threads),
      floor_case("layer_decode", with_tokens(64), Goals::same(0.80), sizes.num_threads),
  };
  const auto add = [&](const char* name, int64_t num_tokens, BlockFormat format, double times) {
    cases.push_back(format_case(name, with_tokens(num_tokens), format, times, sizes.num_threads));
  };
  for (const int64_t num_tokens : {1, 8}) {
    add("layer_decode_fp8", num_tokens, BlockFormat::kE4M3Block128, 1.6);
    add("layer_decode_mxfp4", num_tokens, BlockFormat::kMxfp4, 2.5);
  }
  add("layer_prefill_fp8", 2048, BlockFormat::kE4M3Block128, 0.8);
  add("layer_prefill_mxfp4", 2048, BlockFormat::kMxfp4, 0.8);
  const LayerShape shared = with_tokens(2048);
  cases.push_back({"layer_ranks",
                   {{"T", shared.num_tokens},
                    {"E", shared.num_experts},
                    {"K", shared.top_k},
                    {"H", shared.hidden},
                    {"F", shared.intermediate},
                    {"R", 2},
                    {"threads", 1}},
                   "the same layer with R=1, 2 threads",
                   Goals::same(1 / 1.15),
                   [=](const BenchContext& context) { return RanksBench::make(context, shared); }});
  return cases;
}

}  // namespace argosy::tools::bench
