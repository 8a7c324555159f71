// In a steady state a forward call allocates nothing, on any rank, in any number of rounds.
#include <gtest/gtest.h>

#include <atomic>

#include "argosy/moe.h"
#include "support/alloc_counter.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

int64_t allocations_of_steady_calls(int64_t budget_rows, int threads, bool gpt_oss = false) {
  const testing::NaiveLayer layer =
      gpt_oss
          ? testing::random_gpt_oss_layer(2, DType::kBF16, DotOrder::kVdpbf16, 8, 2, 32, 16)
          : testing::random_layer(2, DType::kBF16, DotOrder::kVdpbf16, 8, 2, 32, 16, true, true);
  std::atomic<int64_t> total{0};
  testing::run_group(
      3,
      [&](Group& group) {
        std::mt19937_64 random(static_cast<uint64_t>(group.rank()));
        const Tensor hidden =
            testing::to_tensor(testing::random_matrix(random, 20, 32, 1.0f, true), DType::kBF16);
        Tensor output = std::move(Tensor::zeros(DType::kBF16, {20, 32})).value();
        MoeOptions options;
        options.hidden_dtype = DType::kBF16;
        options.receive_budget_bytes = budget_rows * 32 * 2;
        Result<MoeWeights> weights = testing::weights_for_rank(layer, group.rank(), 3);
        Result<std::unique_ptr<MoeLayer>> moe =
            MoeLayer::create(group, layer.router, std::move(*weights), options);
        ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
        MoeReport report;
        const auto call = [&](int64_t tokens) {
          return (*moe)
              ->forward(hidden.view().rows(0, tokens), nullptr, output.view().rows(0, tokens),
                        &report)
              .ok();
        };
        for (int i = 0; i < 3; ++i) ASSERT_TRUE(call(20));
        ASSERT_TRUE(group.barrier().ok());
        const int64_t before = testing::num_allocations();
        bool all = true;
        for (int i = 0; i < 50; ++i) all = call(i % 3 == 0 ? 13 : 20) && all;
        // Counted before the barrier, so that what other ranks do after theirs is not seen by all.
        total += testing::num_allocations() - before;
        ASSERT_TRUE(all);
        ASSERT_TRUE(group.barrier().ok());
      },
      [threads](GroupOptions& options) { options.threads_per_rank = threads; });
  return total;
}

TEST(Allocation, SteadyStateAllocatesNothing) {
  if (!testing::is_counting_allocations()) GTEST_SKIP() << "the sanitizer owns the heap";
  EXPECT_EQ(allocations_of_steady_calls(1000, 1), 0);
  EXPECT_EQ(allocations_of_steady_calls(1000, 2), 0);
  EXPECT_EQ(allocations_of_steady_calls(6, 1), 0);
  EXPECT_EQ(allocations_of_steady_calls(1000, 2, /*gpt_oss=*/true), 0);
}

}  // namespace
}  // namespace argosy
