// See random_data.h. Test: tests/bench/data_test.cc.
#include "tools/bench/random_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

namespace argosy::tools::bench {
namespace {

// splitmix64: any seed is a good one.
uint64_t next_bits(uint64_t* state) {
  uint64_t bits = *state += 0x9E3779B97F4A7C15u;
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
  return bits ^ bits >> 31;
}

constexpr size_t kTableBits = 12;
using NormalTable = std::array<double, size_t{1} << kTableBits>;

const NormalTable& standard_normals() {
  static const NormalTable table = [] {
    std::mt19937_64 rng(20260817);
    std::normal_distribution<double> normal;
    NormalTable values{};
    for (double& value : values) value = normal(rng);
    return values;
  }();
  return table;
}

}  // namespace

void fill_normal(const TensorView& tensor, double deviation, uint64_t seed) {
  std::array<BFloat16, size_t{1} << kTableBits> table;
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = BFloat16::from_float(static_cast<float>(standard_normals()[i] * deviation));
  }
  constexpr int kPerWord = 64 / static_cast<int>(kTableBits);
  auto* const values = tensor.as<BFloat16>();
  const int64_t count = tensor.num_elements();
  uint64_t state = seed;
  for (int64_t i = 0; i < count; i += kPerWord) {
    uint64_t bits = next_bits(&state);
    for (int64_t j = i; j < std::min(count, i + kPerWord); ++j) {
      values[j] = table[bits & (table.size() - 1)];
      bits >>= kTableBits;
    }
  }
}

Result<Tensor> normal_tensor(std::initializer_list<int64_t> dims, double deviation, uint64_t seed) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor tensor, Tensor::zeros(DType::kBF16, dims));
  fill_normal(tensor.view(), deviation, seed);
  return tensor;
}

Result<RandomRouting> random_routing(int64_t num_tokens, int64_t num_experts, int64_t top_k,
                                     uint64_t seed) {
  RandomRouting routing;
  ARGOSY_ASSIGN_OR_RETURN(routing.topk_idx, Tensor::zeros(DType::kI32, {num_tokens, top_k}));
  ARGOSY_ASSIGN_OR_RETURN(routing.topk_weights, Tensor::zeros(DType::kF32, {num_tokens, top_k}));
  auto* experts = routing.topk_idx.view().as<int32_t>();
  auto* weights = routing.topk_weights.view().as<float>();
  std::vector<int32_t> order(static_cast<size_t>(num_experts));
  std::iota(order.begin(), order.end(), 0);
  uint64_t state = seed;
  for (int64_t token = 0; token < num_tokens; ++token, experts += top_k, weights += top_k) {
    float sum = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      // The first K of a shuffle.
      const uint64_t left = static_cast<uint64_t>(num_experts - k);
      const size_t pick = static_cast<size_t>(k) + next_bits(&state) % left;
      std::swap(order[static_cast<size_t>(k)], order[pick]);
      experts[k] = order[static_cast<size_t>(k)];
      weights[k] = 0.1f + static_cast<float>(next_bits(&state) >> 40) * 0x1p-24f;
      sum += weights[k];
    }
    for (int64_t k = 0; k < top_k; ++k) weights[k] /= sum;
  }
  return routing;
}

Routing to_routing(const RandomRouting& random, int64_t num_experts) {
  const ConstTensorView ids = random.topk_idx.view();
  Routing routing;
  routing.num_tokens = routing.num_valid_tokens = ids.dim(0);
  routing.num_experts = num_experts;
  routing.top_k = ids.dim(1);
  const auto* const experts = ids.as<int32_t>();
  const auto* const weights = random.topk_weights.view().as<float>();
  routing.topk_idx.assign(experts, experts + ids.num_elements());
  routing.topk_weights.values.assign(weights, weights + ids.num_elements());
  routing.topk_weights.normalised = true;
  routing.counts.assign(static_cast<size_t>(num_experts), 0);
  for (const int32_t expert : routing.topk_idx) ++routing.counts[static_cast<size_t>(expert)];
  return routing;
}

int64_t num_experts_touched(const ConstTensorView& topk_idx, int64_t num_experts) {
  std::vector<bool> touched(static_cast<size_t>(num_experts));
  const auto* const experts = topk_idx.as<int32_t>();
  for (int64_t i = 0; i < topk_idx.num_elements(); ++i) {
    touched[static_cast<size_t>(experts[i])] = true;
  }
  return std::count(touched.begin(), touched.end(), true);
}

double exact_dot(const BFloat16* x, const BFloat16* w, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    sum += static_cast<double>(x[i].to_float()) * static_cast<double>(w[i].to_float());
  }
  return sum;
}

Status check_near(double got, double want, const char* what) {
  if (std::abs(got - want) <= 0.02 * std::abs(want) + 0.02) return {};
  return Status(StatusCode::kInternal,
                fmt::format("wrong result: {} is {}, the reference in fp64 {}", what, got, want));
}

}  // namespace argosy::tools::bench
