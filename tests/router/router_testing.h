// What the router's tests share: building a spec, routing plain vectors, comparing results.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "argosy/router.h"

namespace argosy::test {

inline RouterSpec spec_of(std::string_view preset, int64_t num_experts, int64_t top_k) {
  auto spec = router_preset(preset, num_experts, top_k);
  EXPECT_TRUE(spec.has_value()) << spec.error().to_string();
  return *spec;
}

struct Batch {
  RouterSpec spec;
  std::vector<float> logits;  // [T, E]
  std::vector<float> bias;    // [E] or empty
  std::vector<uint8_t> mask;  // [T] or empty

  int64_t num_tokens() const { return static_cast<int64_t>(logits.size()) / spec.num_experts; }
  std::span<const float> row(int64_t token) const {
    const auto experts = static_cast<size_t>(spec.num_experts);
    return {logits.data() + static_cast<size_t>(token) * experts, experts};
  }
};

inline Status route_batch(const Batch& batch, ThreadPool* pool, Routing* routing) {
  RouterInput input;
  input.logits = ConstTensorView(batch.logits.data(), DType::kF32,
                                 {batch.num_tokens(), batch.spec.num_experts});
  if (!batch.bias.empty()) {
    input.selection_bias =
        ConstTensorView(batch.bias.data(), DType::kF32, {static_cast<int64_t>(batch.bias.size())});
  }
  input.mask = batch.mask.empty() ? nullptr : batch.mask.data();
  return route(batch.spec, input, pool, routing);
}

inline Routing route_ok(const Batch& batch, ThreadPool* pool = nullptr) {
  Routing routing;
  const Status status = route_batch(batch, pool, &routing);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return routing;
}

inline std::vector<int32_t> ids_of(const Routing& routing, int64_t token) {
  const auto first = routing.topk_idx.begin() + token * routing.top_k;
  return {first, first + routing.top_k};
}

inline std::vector<float> weights_of(const Routing& routing, int64_t token) {
  const auto first = routing.topk_weights.values.begin() + token * routing.top_k;
  return {first, first + routing.top_k};
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

inline std::vector<float> normal_logits(std::mt19937_64& random, size_t count, float spread) {
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

inline std::unique_ptr<ThreadPool> make_pool(int num_threads) {
  auto pool = ThreadPool::create(num_threads);
  EXPECT_TRUE(pool.has_value());
  return std::move(*pool);
}

// logit(p): the logit whose sigmoid is p.
inline float logit_of(double p) { return static_cast<float>(std::log(p / (1.0 - p))); }

}  // namespace argosy::test
