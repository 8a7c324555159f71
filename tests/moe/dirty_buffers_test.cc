// K14, C136 (forward): between the steps results buffer and outputs hold NaN, fresh memory huge values; every
// step gives the same bits, also after larger and smaller ones.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstring>

#include "argosy/moe.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

void poison(const TensorView& view) {
  std::memset(view.data, 0xFF, static_cast<size_t>(view.num_elements() * size_of(view.dtype)));
}

void expect_same_bits_in_every_step(const testing::NaiveLayer& layer) {
  mallopt(M_PERTURB,
          0x00);  // glibc fills fresh memory with the complement: 0xFF, a NaN in bf16 and fp32
  std::mt19937_64 random(4);
  const testing::Matrix hidden = testing::random_matrix(random, 30, 24, 1.0f, true);
  const Tensor input = testing::to_tensor(hidden, DType::kBF16);
  const Tensor want =
      testing::to_tensor(testing::naive_forward(layer, hidden, nullptr), DType::kBF16);
  testing::run_group(
      3,
      [&](Group& group) {
        MoeOptions options;
        options.hidden_dtype = DType::kBF16;
        options.receive_budget_bytes = 64 * 24 * 2;
        ExchangeOptions exchange{DType::kBF16, 24, 7, 2, options.receive_budget_bytes};
        Result<std::unique_ptr<Exchange>> buffers = Exchange::create(group, exchange);
        ASSERT_TRUE(buffers.has_value()) << buffers.error().to_string();
        options.exchange = std::move(*buffers);
        Result<MoeWeights> weights = testing::weights_for_rank(layer, group.rank(), 3);
        Result<std::unique_ptr<MoeLayer>> moe =
            MoeLayer::create(group, layer.router, std::move(*weights), options);
        ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
        Tensor output = std::move(Tensor::zeros(DType::kBF16, {10, 24})).value();
        for (const int64_t tokens : {10, 10, 3, 0, 10, 7, 10}) {
          // All ranks are through with the step before: nobody reads what is poisoned.
          ASSERT_TRUE(group.barrier().ok());
          poison(options.exchange->results());
          poison(output.view());
          ASSERT_TRUE(group.barrier().ok());
          const Status status = (*moe)->forward(input.view().rows(group.rank() * 10, tokens),
                                                nullptr, output.view().rows(0, tokens), nullptr);
          ASSERT_TRUE(status.ok()) << status.to_string();
          EXPECT_EQ(std::memcmp(output.view().data, want.view().row(group.rank() * 10),
                                static_cast<size_t>(tokens * 24 * 2)),
                    0)
              << tokens;
        }
        ASSERT_TRUE(group.barrier().ok());
      },
      [](GroupOptions& options) { options.dot_order = DotOrder::kVdpbf16; });
  mallopt(M_PERTURB, 0);
}

TEST(DirtyBuffers, EveryStepGivesTheSameBits) {
  expect_same_bits_in_every_step(
      testing::random_layer(6, DType::kBF16, DotOrder::kVdpbf16, 7, 2, 24, 10, true, true));
}

// 10 columns of 16, so the padding of biases and panels takes part.
TEST(DirtyBuffers, BiasesAndTheClampedActivationToo) {
  expect_same_bits_in_every_step(
      testing::random_gpt_oss_layer(6, DType::kBF16, DotOrder::kVdpbf16, 7, 2, 24, 10));
}

}  // namespace
}  // namespace argosy
