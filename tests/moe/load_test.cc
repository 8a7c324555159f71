// A rank reads what every rank holds and its own experts, nothing else; sums over ranks are exact.
#include <gtest/gtest.h>

#include "argosy/bfloat16.h"
#include "argosy/moe.h"

namespace argosy {
namespace {

const char* const kModel = ARGOSY_TESTDATA "/models/deepseek_v3_tiny";

TEST(LoadMoeWeights, ReadsOnlyOwnExperts) {
  // H 64, F 32, E 16, bf16: gate 16 x 64, three matrices of 64 x 32 per expert and for the shared
  // one, an fp32 bias of 16.
  const int64_t expert_bytes = 3 * 64 * 32 * 2;
  const int64_t common_bytes = 16 * 64 * 2 + 16 * 4 + expert_bytes;
  for (const int num_ranks : {1, 3, 4, 16, 20}) {
    int64_t experts = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      Result<Checkpoint> checkpoint = Checkpoint::open(kModel);
      ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().to_string();
      const Result<MoeWeights> weights = load_moe_weights(*checkpoint, 1, rank, num_ranks);
      ASSERT_TRUE(weights.has_value()) << weights.error().to_string();
      const int64_t local = Placement{16, num_ranks, 0}.num_local(rank);
      EXPECT_EQ(weights->gate_up.num_groups(), local);
      EXPECT_EQ(weights->down.n(), 64);
      EXPECT_EQ(checkpoint->bytes_read(), common_bytes + local * expert_bytes)
          << rank << " of " << num_ranks;
      experts += local;
    }
    EXPECT_EQ(experts, 16);
  }
}

// gpt_oss: biases come along, activation too; a rank without experts agrees on both.
TEST(LoadMoeWeights, BiasesAndActivationOfGptOss) {
  // H 64, F 64, E 8, bf16: router 8 x 65; per expert three matrices of 64 x 64 and biases of 3 x 64.
  const int64_t expert_bytes = (3 * 64 * 64 + 3 * 64) * 2;
  for (const int num_ranks : {1, 3, 9}) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      Result<Checkpoint> checkpoint = Checkpoint::open(ARGOSY_TESTDATA "/models/gpt_oss_tiny");
      ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().to_string();
      const Result<MoeWeights> weights = load_moe_weights(*checkpoint, 1, rank, num_ranks);
      ASSERT_TRUE(weights.has_value()) << weights.error().to_string();
      EXPECT_EQ(to_string(weights->activation), "clamped_swiglu limit 2 alpha 1.702");
      EXPECT_EQ(weights->gate_bias.view().dim(0), 8);
      EXPECT_TRUE(weights->gate_up.has_bias());
      EXPECT_TRUE(weights->down.has_bias());
      const int64_t local = Placement{8, num_ranks, 0}.num_local(rank);
      EXPECT_EQ(checkpoint->bytes_read(), 8 * 65 * 2 + local * expert_bytes);
      if (local == 0) continue;
      const ExpertTensors expert =
          std::move(checkpoint->read_expert(1, weights->first_expert)).value();
      const auto value = [](const Tensor& bias, int64_t i) {
        return bias.view().as<BFloat16>()[i].to_float();
      };
      EXPECT_EQ(weights->gate_up.bias_of_panel(0, 1)[3], value(expert.gate_bias, 19));
      EXPECT_EQ(weights->gate_up.bias_of_panel(0, 1)[19], value(expert.up_bias, 19));
      EXPECT_EQ(weights->down.bias_of_panel(0, 1)[19], value(expert.down_bias, 51));
      EXPECT_NE(value(expert.down_bias, 51), 0.0f);
    }
  }
}

TEST(LoadMoeWeights, NamesWhatIsWrong) {
  Result<Checkpoint> checkpoint = Checkpoint::open(kModel);
  ASSERT_TRUE(checkpoint.has_value());
  const Result<MoeWeights> dense = load_moe_weights(*checkpoint, 0, 0, 1);
  ASSERT_FALSE(dense.has_value());
  EXPECT_NE(dense.error().message().find("1, 2"), std::string::npos) << dense.error().message();
  EXPECT_FALSE(load_moe_weights(*checkpoint, 99, 0, 1).has_value());
  EXPECT_FALSE(load_moe_weights(*checkpoint, -1, 0, 1).has_value());
  const Result<MoeWeights> rank = load_moe_weights(*checkpoint, 1, 4, 4);
  ASSERT_FALSE(rank.has_value());
  EXPECT_NE(rank.error().message().find("rank 4"), std::string::npos);
}

TEST(Balancedness, IsMeanOverMax) {
  EXPECT_EQ(balancedness(std::vector<int64_t>{}), 1.0);
  EXPECT_EQ(balancedness(std::vector<int64_t>{0, 0}), 1.0);
  EXPECT_EQ(balancedness(std::vector<int64_t>{3, 3, 3}), 1.0);
  EXPECT_EQ(balancedness(std::vector<int64_t>{4, 0}), 0.5);
}

}  // namespace
}  // namespace argosy
