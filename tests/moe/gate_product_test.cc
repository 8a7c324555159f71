// The packed gate product against its naive twin gate_logits(), bit for bit.
#include "moe/gate_product.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "argosy/bfloat16.h"
#include "argosy/router.h"

namespace argosy {
namespace {

// Ordinary values, with zeros, denormals, huge ones, Inf and NaN now and then.
Tensor draw(std::mt19937_64& random, DType dtype, std::vector<int64_t> dims, bool is_wild) {
  Tensor tensor = Tensor::zeros(dtype, dims).value();
  const int64_t size = tensor.view().num_elements();
  for (int64_t i = 0; i < size; ++i) {
    float value = std::ldexp(static_cast<float>(random() % 2001) / 1000.0f - 1.0f, 1);
    if (is_wild && random() % 64 == 0) {
      value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    }
    if (dtype == DType::kBF16) {
      tensor.view().as<BFloat16>()[i] = BFloat16::from_float(value);
    } else {
      tensor.view().as<float>()[i] = value;
    }
  }
  return tensor;
}

struct Case {
  DType hidden, gate, bias;  // bias kUnset: none
  int64_t num_tokens, num_experts, width;
  bool has_mask, is_wild;
};

void expect_equal(const Case& one, std::mt19937_64& random, ThreadPool& pool) {
  const Tensor hidden = draw(random, one.hidden, {one.num_tokens, one.width}, one.is_wild);
  const Tensor gate = draw(random, one.gate, {one.num_experts, one.width}, one.is_wild);
  Tensor bias;
  if (one.bias != DType::kUnset) bias = draw(random, one.bias, {one.num_experts}, one.is_wild);
  std::vector<uint8_t> mask(static_cast<size_t>(one.num_tokens), 1);
  for (uint8_t& valid : mask) valid = one.has_mask && random() % 3 == 0 ? 0 : 1;
  std::vector<float> want(static_cast<size_t>(one.num_tokens * one.num_experts), -1.0f);
  std::vector<float> have(want.size(), -2.0f);
  const TensorView want_view(want.data(), DType::kF32, {one.num_tokens, one.num_experts});
  const TensorView have_view(have.data(), DType::kF32, {one.num_tokens, one.num_experts});
  ASSERT_TRUE(gate_logits(hidden.view(), gate.view(), bias.view(), nullptr, want_view).ok());
  Result<GateProduct> product = GateProduct::create(gate.view(), bias.view());
  ASSERT_TRUE(product.has_value()) << product.error().to_string();
  for (const Level level : cpu_info().value()->levels) {
    if (!resolve_level(level).has_value()) continue;
    const GemmOptions options{level, DotOrder::kVdpbf16, &pool};
    const Status status =
        product->run(options, hidden.view(), one.has_mask ? mask.data() : nullptr, have_view);
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (size_t i = 0; i < want.size(); ++i) {
      if (mask[i / static_cast<size_t>(one.num_experts)] == 0) continue;
      ASSERT_EQ(std::bit_cast<uint32_t>(have[i]), std::bit_cast<uint32_t>(want[i]))
          << name_of(level) << " logit " << i << ": " << have[i] << ", want " << want[i];
    }
  }
}

TEST(GateProduct, EqualsTheNaiveTwin) {
  const uint64_t seed = 17;
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const std::unique_ptr<ThreadPool> pool = ThreadPool::create(2).value();
  for (const DType hidden : {DType::kBF16, DType::kF32}) {
    for (const DType gate : {DType::kBF16, DType::kF32}) {
      for (const DType bias : {DType::kUnset, DType::kBF16, DType::kF32}) {
        for (const auto& [tokens, experts, width] : {std::array<int64_t, 3>{0, 8, 16},
                                                     {1, 8, 64},
                                                     {3, 5, 33},
                                                     {97, 33, 70},
                                                     {200, 16, 129}}) {
          for (const bool has_mask : {false, true}) {
            for (const bool is_wild : {false, true}) {
              SCOPED_TRACE(::testing::Message()
                           << name_of(hidden) << " x " << name_of(gate) << " + " << name_of(bias)
                           << " " << tokens << " " << experts << " " << width);
              ASSERT_NO_FATAL_FAILURE(expect_equal(
                  {hidden, gate, bias, tokens, experts, width, has_mask, is_wild}, random, *pool));
            }
          }
        }
      }
    }
  }
}

// What lies in a masked row is never looked at.
TEST(GateProduct, MaskedRowsAreNotRead) {
  const std::unique_ptr<ThreadPool> pool = ThreadPool::create(1).value();
  std::mt19937_64 random(3);
  const Tensor gate = draw(random, DType::kF32, {4, 8}, false);
  GateProduct product = GateProduct::create(gate.view(), {}).value();
  const std::vector<uint8_t> mask{1, 0, 1};
  std::vector<float> first, second;
  for (std::vector<float>* out : {&first, &second}) {
    Tensor hidden = Tensor::zeros(DType::kF32, {3, 8}).value();
    hidden.view().as<float>()[8] = out == &first ? 1.0f : NAN;
    out->assign(12, 0.0f);
    const TensorView logits(out->data(), DType::kF32, {3, 4});
    ASSERT_TRUE(
        product
            .run({Level::kGeneric, DotOrder::kAmx, pool.get()}, hidden.view(), mask.data(), logits)
            .ok());
  }
  for (size_t i = 0; i < 12; ++i) {
    if (i / 4 != 1) {
      EXPECT_EQ(first[i], second[i]) << i;
    }
  }
}

}  // namespace
}  // namespace argosy
