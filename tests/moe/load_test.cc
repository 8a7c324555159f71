// A rank reads what every rank holds and its own experts, nothing else; sums over ranks are exact.
#include <gtest/gtest.h>

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
