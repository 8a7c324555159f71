// Quantising and dequantising alone, beyond the caches, against memcpy of as many bytes.
//
// Floors: docs/perf/quantise.md. Test: tests/bench/bench_test.cc.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "argosy/bfloat16.h"
#include "argosy/pinning.h"
#include "argosy/quantise.h"
#include "argosy/thread_pool.h"
#include "tools/bench/bench_case.h"
#include "tools/bench/random_data.h"

namespace argosy::tools::bench {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct QuantiseCase {
  BlockFormat format = BlockFormat::kUnset;
  DType dtype = DType::kUnset;  // of the values
  bool back = false;            // dequantise
  int64_t rows = 0;
  int64_t cols = 0;
};

Result<Tensor> random_values(const QuantiseCase& one) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor narrow, normal_tensor({one.rows, one.cols}, 1.0, 1));
  if (one.dtype == DType::kBF16) return narrow;
  ARGOSY_ASSIGN_OR_RETURN(Tensor wide, Tensor::zeros(DType::kF32, {one.rows, one.cols}));
  const auto* const from = narrow.view().as<BFloat16>();
  auto* const to = wide.view().as<float>();
  // Not a bf16: all bits of the mantissa.
  for (int64_t i = 0; i < one.rows * one.cols; ++i) to[i] = from[i].to_float() * 1.0000119f;
  return wide;
}

class QuantiseBench : public Bench {
 public:
  static Result<std::unique_ptr<Bench>> make(const BenchContext& context, const QuantiseCase& one) {
    std::unique_ptr<QuantiseBench> bench(new QuantiseBench(one));
    ARGOSY_ASSIGN_OR_RETURN(bench->pool_, ThreadPool::create(1));
    pin_threads(*bench->pool_, 0);
    bench->quantise_.level = context.level;
    bench->dequantise_.level = context.level;
    ARGOSY_ASSIGN_OR_RETURN(bench->values_, random_values(one));
    ARGOSY_ASSIGN_OR_RETURN(const QuantisedLayout layout,
                            quantised_layout(one.format, one.rows, one.cols));
    ARGOSY_ASSIGN_OR_RETURN(bench->quantised_, QuantisedTensor::create(layout));
    ARGOSY_RETURN_IF_ERROR(bench->make_copies(layout));
    ARGOSY_RETURN_IF_ERROR(bench->check());
    return std::unique_ptr<Bench>(std::move(bench));
  }

  Result<Sample> sample() override {
    Sample sample;
    double begin = now_seconds();
    std::memcpy(to_.view().data, from_.view().data, static_cast<size_t>(from_.num_bytes()));
    sample.limit_seconds = now_seconds() - begin;
    begin = now_seconds();
    ARGOSY_RETURN_IF_ERROR(one_.back ? decode() : encode());
    sample.seconds = now_seconds() - begin;
    return sample;
  }

 private:
  explicit QuantiseBench(const QuantiseCase& one) : one_(one) {}

  // Half of what the work reads and writes: a copy reads it and writes it.
  Status make_copies(const QuantisedLayout& layout) {
    const int64_t bytes = values_.num_bytes() + layout.code_bytes() + layout.scale_bytes();
    ARGOSY_ASSIGN_OR_RETURN(from_, normal_tensor({bytes / 4}, 1.0, 2));
    ARGOSY_ASSIGN_OR_RETURN(to_, Tensor::zeros(DType::kBF16, {bytes / 4}));
    return {};
  }

  Status encode() { return quantise(quantise_, std::as_const(values_).view(), quantised_.view()); }
  Status decode() {
    return dequantise(dequantise_, std::as_const(quantised_).view(), values_.view());
  }

  double value(int64_t i) const {
    return static_cast<double>(one_.dtype == DType::kBF16
                                   ? values_.view().as<BFloat16>()[i].to_float()
                                   : values_.view().as<float>()[i]);
  }

  // There and back: half a step of e4m3, or of its denormals where the largest of a row is near 4.
  Status check() {
    std::vector<double> before;
    const int64_t size = one_.rows * one_.cols;
    const int64_t step = std::max<int64_t>(1, size / 100'003);
    for (int64_t i = 0; i < size; i += step) before.push_back(value(i));
    ARGOSY_RETURN_IF_ERROR(encode());
    ARGOSY_RETURN_IF_ERROR(decode());
    for (int64_t i = 0; i < size; i += step) {
      const double want = before[static_cast<size_t>(i / step)], got = value(i);
      // The floor rule of MXFP8 clips up to an eighth off the largest.
      const double bound = std::abs(want) * (std::abs(want) > 1 ? 0.126 : 0.0626) + 1e-4;
      if (std::abs(got - want) > bound) {
        return Status(StatusCode::kInternal, "wrong result: element " + std::to_string(i) + " is " +
                                                 std::to_string(got) + " there and back, was " +
                                                 std::to_string(want));
      }
    }
    return {};
  }

  const QuantiseCase one_;
  std::unique_ptr<ThreadPool> pool_;  // pins this thread, runs nothing
  QuantiseOptions quantise_;
  DequantiseOptions dequantise_;
  Tensor values_;
  QuantisedTensor quantised_;
  Tensor from_, to_;
};

}  // namespace

std::vector<BenchCase> quantise_cases(const BenchSizes& sizes) {
  std::vector<BenchCase> cases;
  for (const bool back : {false, true}) {
    for (const BlockFormat format : {BlockFormat::kE4M3Row128, BlockFormat::kMxfp8}) {
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        QuantiseCase one{format, dtype, back, 8192, 7168};
        if (sizes.quick) one.rows = 16, one.cols = 416;
        cases.push_back(
            {std::string(back ? "dequantise_" : "quantise_") + std::string(name_of(format)),
             {{"rows", one.rows}, {"cols", one.cols}, {"bits", size_of(dtype) * 8}, {"threads", 1}},
             "memcpy of half the bytes that are read and written",
             Goals::same(1 / 1.25),
             [one](const BenchContext& context) { return QuantiseBench::make(context, one); }});
      }
    }
  }
  return cases;
}

}  // namespace argosy::tools::bench
