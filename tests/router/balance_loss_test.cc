// Auxiliary loss and z-loss against dual numbers and differences of the loss itself, the named
// cases of the field, and that no split of the tokens changes anything (contract 2.1, 2.2).
#include "argosy/balance_loss.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "router/router_testing.h"
#include "support/router_dual.h"

namespace argosy::test {
namespace {

using Random = std::mt19937_64;

constexpr std::string_view kPresets[] = {"softmax_pre", "softmax_post", "deepseek_v3",
                                         "sqrt_softplus"};

struct Tokens {
  Batch batch;
  Routing routing;
  std::vector<int32_t> sequence;
  int64_t num_sequences = 1;
  LossCounts counts_from = LossCounts::kRouted;

  BalanceInput input() const {
    BalanceInput input;
    input.rows.logits = ConstTensorView(batch.logits.data(), DType::kF32,
                                        {batch.num_tokens(), batch.spec.num_experts});
    input.rows.mask = batch.mask.empty() ? nullptr : batch.mask.data();
    input.routing = &routing;
    input.counts_from = counts_from;
    input.sequence = sequence.empty() ? nullptr : sequence.data();
    input.num_sequences = num_sequences;
    return input;
  }
  // The tokens at `ids`, as another rank or micro-batch holds them.
  Tokens part(const std::vector<int64_t>& ids) const {
    Tokens part = *this;
    part.batch.logits.clear();
    part.batch.mask.clear();
    part.sequence.clear();
    for (const int64_t id : ids) {
      const auto row = batch.row(id);
      part.batch.logits.insert(part.batch.logits.end(), row.begin(), row.end());
      if (!batch.mask.empty()) part.batch.mask.push_back(batch.mask[static_cast<size_t>(id)]);
      if (!sequence.empty()) part.sequence.push_back(sequence[static_cast<size_t>(id)]);
    }
    part.routing = route_ok(part.batch);
    return part;
  }
};

BalanceSums sums_ok(const Tokens& tokens, ThreadPool* pool = nullptr) {
  BalanceSums sums;
  const Status status = balance_sums(tokens.batch.spec, tokens.input(), pool, &sums);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return sums;
}

double loss_ok(const RouterSpec& spec, const AuxLossSpec& aux, const BalanceSums& sums) {
  const Result<double> loss = aux_loss(spec, aux, sums);
  EXPECT_TRUE(loss.has_value()) << loss.error().to_string();
  return loss.has_value() ? *loss : NAN;
}

std::vector<float> gradient_ok(const Tokens& tokens, const AuxLossSpec& aux,
                               const BalanceSums& totals, ThreadPool* pool = nullptr) {
  std::vector<float> d_logits(tokens.batch.logits.size(), NAN);
  const TensorView out(d_logits.data(), DType::kF32,
                       {tokens.batch.num_tokens(), tokens.batch.spec.num_experts});
  const Status status = aux_loss_backward(tokens.batch.spec, aux, tokens.input(), totals, 1.0,
                                          GradientMode::kWrite, pool, out);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return d_logits;
}

ZLossSums z_sums_ok(const Tokens& tokens, ThreadPool* pool = nullptr) {
  const Result<ZLossSums> sums = z_loss_sums(tokens.batch.spec, tokens.input().rows, pool);
  EXPECT_TRUE(sums.has_value()) << sums.error().to_string();
  return sums.has_value() ? *sums : ZLossSums{};
}

std::vector<float> z_gradient_ok(const Tokens& tokens, double coeff, int64_t num_tokens,
                                 ThreadPool* pool = nullptr) {
  std::vector<float> d_logits(tokens.batch.logits.size(), NAN);
  const TensorView out(d_logits.data(), DType::kF32,
                       {tokens.batch.num_tokens(), tokens.batch.spec.num_experts});
  const Status status = z_loss_backward(tokens.batch.spec, coeff, tokens.input().rows, num_tokens,
                                        1.0, GradientMode::kWrite, pool, out);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return d_logits;
}

Tokens draw_tokens(Random& random, std::string_view preset, int64_t num_tokens, float spread,
                   int64_t num_sequences = 1) {
  Tokens tokens;
  tokens.batch.spec = spec_of(preset, 16, 4);
  tokens.batch.logits = normal_logits(random, static_cast<size_t>(num_tokens) * 16, spread);
  if (tokens.batch.spec.selection_bias == Choice::kYes) {
    tokens.batch.bias = normal_logits(random, 16, 0.2f);
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    tokens.batch.mask.push_back(random() % 4 != 0);
    tokens.sequence.push_back(
        static_cast<int32_t>(random() % static_cast<uint64_t>(num_sequences)));
  }
  tokens.num_sequences = num_sequences;
  tokens.routing = route_ok(tokens.batch);
  return tokens;
}

// Equal logits per token `logit`, routed as `ids` say.
Tokens tokens_of(std::string_view preset, int64_t num_experts, int64_t top_k,
                 std::vector<float> logits, std::vector<int32_t> ids) {
  Tokens tokens;
  tokens.batch.spec = spec_of(preset, num_experts, top_k);
  tokens.batch.logits = std::move(logits);
  tokens.routing.num_tokens = tokens.batch.num_tokens();
  tokens.routing.num_experts = num_experts;
  tokens.routing.top_k = top_k;
  tokens.routing.topk_idx = std::move(ids);
  return tokens;
}

Dual dual_share(const RouterSpec& spec, std::span<const Dual> row, size_t expert) {
  const std::vector<Dual> scores = dual_scores(spec.score_function, row);
  return scores[expert] / sum_of(scores);
}

TEST(AuxLoss, LossAndGradientEqualDualNumbers) {
  constexpr uint64_t kSeed = 901;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (const std::string_view preset : kPresets) {
    for (const float spread : {0.5f, 3.0f, 40.0f}) {
      const Tokens tokens = draw_tokens(random, preset, 30, spread, 3);
      const RouterSpec& spec = tokens.batch.spec;
      const AuxLossSpec aux = {0.01, LossScale::kMegatron, 0};
      const BalanceSums sums = sums_ok(tokens);
      const std::vector<float> d_logits = gradient_ok(tokens, aux, sums);
      long double want_loss = 0;
      for (int64_t t = 0; t < 30; ++t) {
        const auto at = static_cast<size_t>(t);
        const auto s = static_cast<size_t>(tokens.sequence[at]);
        const auto loss = [&](std::span<const Dual> row) {
          Dual sum;
          for (size_t e = 0; e < 16; ++e) {
            sum = sum + constant(static_cast<long double>(sums.counts[s * 16 + e])) *
                            dual_share(spec, row, e);
          }
          const auto count = static_cast<long double>(sums.num_tokens[s]);
          return sum * constant(0.01L * 16 / (4 * count * count * 3));
        };
        const bool valid = tokens.batch.mask[at] != 0;
        const auto want = dual_gradient(tokens.batch.row(t), loss);
        for (size_t e = 0; e < 16; ++e) {
          const long double wanted = valid ? want[e] : 0.0L;
          ASSERT_LE(std::fabs(static_cast<long double>(d_logits[at * 16 + e]) - wanted),
                    1e-7L * std::fabs(wanted) + 1e-17L)
              << preset << " token " << t << " expert " << e;
        }
        std::vector<Dual> row;
        for (const float z : tokens.batch.row(t)) row.push_back(constant(z));
        if (valid) want_loss += loss(row).value;
      }
      EXPECT_NEAR(loss_ok(spec, aux, sums), static_cast<double>(want_loss), 1e-14) << preset;
    }
  }
}

// K05: the gradient is the difference quotient of the loss that is reported.
TEST(AuxLoss, GradientEqualsDifferencesOfTheLoss) {
  constexpr uint64_t kSeed = 902;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  constexpr float kStep = 0x1p-8f;
  for (const std::string_view preset : kPresets) {
    Tokens tokens = draw_tokens(random, preset, 6, 1.0f, 2);
    const AuxLossSpec aux = {1.0, LossScale::kHuggingFace, 0};
    const std::vector<float> d_logits = gradient_ok(tokens, aux, sums_ok(tokens));
    const std::vector<float> d_z = z_gradient_ok(tokens, 1.0, z_sums_ok(tokens).num_tokens);
    for (size_t i = 0; i < tokens.batch.logits.size(); ++i) {
      double aux_value[2];
      double z_value[2];
      const float at = tokens.batch.logits[i];
      for (const int side : {0, 1}) {
        tokens.batch.logits[i] = side == 0 ? at - kStep : at + kStep;
        aux_value[side] = loss_ok(tokens.batch.spec, aux, sums_ok(tokens));
        z_value[side] = z_loss(1.0, z_sums_ok(tokens));
      }
      const double width = static_cast<double>(at + kStep) - static_cast<double>(at - kStep);
      tokens.batch.logits[i] = at;
      ASSERT_NEAR(d_logits[i], (aux_value[1] - aux_value[0]) / width, 1e-5) << preset;
      ASSERT_NEAR(d_z[i], (z_value[1] - z_value[0]) / width, 1e-5) << preset;
    }
  }
}

TEST(AuxLoss, UniformIsOneAndAllToOneIsE) {
  for (const int64_t top_k : {1, 2}) {  // C074
    std::vector<int32_t> ids;
    for (int32_t t = 0; t < 8; ++t) {
      for (int32_t k = 0; k < top_k; ++k) ids.push_back((t + k) % 4);
    }
    for (const std::string_view preset : kPresets) {
      const Tokens tokens = tokens_of(preset, 4, top_k, std::vector<float>(32, -3.0f), ids);
      const BalanceSums sums = sums_ok(tokens);
      EXPECT_NEAR(loss_ok(tokens.batch.spec, {1.0, LossScale::kMegatron, 0}, sums), 1.0, 1e-15);
      EXPECT_NEAR(loss_ok(tokens.batch.spec, {1.0, LossScale::kHuggingFace, 0}, sums),
                  static_cast<double>(top_k), 1e-15);
      for (const float d : gradient_ok(tokens, {1.0, LossScale::kMegatron, 0}, sums)) {
        ASSERT_EQ(d, 0.0f) << preset;
      }
    }
  }
  std::vector<float> one_hot(32, -1000.0f);
  for (size_t t = 0; t < 8; ++t) one_hot[t * 4] = 1000.0f;
  Tokens all_to_one = tokens_of("switch", 4, 1, one_hot, std::vector<int32_t>(8, 0));
  EXPECT_EQ(loss_ok(all_to_one.batch.spec, {1.0, LossScale::kMegatron, 0}, sums_ok(all_to_one)),
            4.0);
}

// C027: sigmoids of 1e-25 give the loss of sigmoids of 0.5.
TEST(AuxLoss, TinyScoresAreNormalisedExactly) {
  const std::vector<int32_t> ids = {0, 1, 2, 3};
  for (const float logit : {0.0f, -57.564628f, -600.0f}) {
    const Tokens tokens = tokens_of("sigmoid", 4, 1, std::vector<float>(16, logit), ids);
    EXPECT_EQ(loss_ok(tokens.batch.spec, {1.0, LossScale::kMegatron, 0}, sums_ok(tokens)), 1.0);
  }
}

// C042: one softmax, not two.
TEST(AuxLoss, OneSoftmax) {
  std::vector<float> logits;
  for (int t = 0; t < 5; ++t) logits.insert(logits.end(), {10.0f, 0.0f, 0.0f, 0.0f});
  const Tokens tokens = tokens_of("switch", 4, 1, logits, std::vector<int32_t>(5, 0));
  EXPECT_NEAR(loss_ok(tokens.batch.spec, {1.0, LossScale::kMegatron, 0}, sums_ok(tokens)),
              4.0 / (1.0 + 3.0 * std::exp(-10.0)), 1e-12);
}

// C044, C063: counts before any drop, tokens from the mask.
TEST(AuxLoss, CountsAreOfTheRoutingBeforeDropsAndTokensOfTheMask) {
  Tokens tokens =
      tokens_of("mixtral", 4, 2, std::vector<float>(16, 0.0f), {0, 1, 0, 2, 0, 3, -1, -1});
  tokens.batch.mask = {1, 1, 1, 0};
  const BalanceSums sums = sums_ok(tokens);
  EXPECT_EQ(sums.num_tokens, std::vector<int64_t>{3});
  EXPECT_EQ(sums.counts, (std::vector<int64_t>{3, 1, 1, 1}));
  tokens.routing.topk_idx[3] = -1;  // after a drop
  BalanceSums refused;
  const Status status = balance_sums(tokens.batch.spec, tokens.input(), nullptr, &refused);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("topk_idx[1, 1] is -1, but token 1 is valid"), std::string::npos);
}

// C046, C047: sequences of valid lengths 6 and 2; the mean of two separate calls.
TEST(AuxLoss, SequencesAreNormalisedByTheirOwnLength) {
  Tokens uniform =
      tokens_of("switch", 2, 1, std::vector<float>(24, 0.0f), {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1});
  uniform.batch.mask = {1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0};
  uniform.sequence = {0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1};
  uniform.num_sequences = 2;
  EXPECT_EQ(loss_ok(uniform.batch.spec, {1.0, LossScale::kMegatron, 0}, sums_ok(uniform)), 1.0);
  Random random(903);
  for (const std::string_view preset : kPresets) {
    const Tokens both = draw_tokens(random, preset, 40, 2.0f, 2);
    const AuxLossSpec aux = {0.5, LossScale::kMegatron, 0};
    double separate = 0;
    for (const int32_t sequence : {0, 1}) {
      std::vector<int64_t> ids;
      for (int64_t t = 0; t < 40; ++t) {
        if (both.sequence[static_cast<size_t>(t)] == sequence) ids.push_back(t);
      }
      Tokens one = both.part(ids);
      one.sequence.clear();
      one.num_sequences = 1;
      separate += loss_ok(one.batch.spec, aux, sums_ok(one)) / 2;
    }
    EXPECT_NEAR(loss_ok(both.batch.spec, aux, sums_ok(both)), separate, 1e-15);
    // A third sequence without a valid token changes nothing.
    Tokens more = both;
    more.num_sequences = 3;
    EXPECT_EQ(loss_ok(more.batch.spec, aux, sums_ok(more)),
              loss_ok(both.batch.spec, aux, sums_ok(both)));
  }
}

TEST(AuxLoss, PlainCountsIgnoreBiasAndGroups) {
  Random random(904);
  Tokens tokens = draw_tokens(random, "deepseek_v3", 50, 1.0f);
  tokens.batch.spec.num_groups = 4;
  tokens.batch.spec.keep_groups = 1;
  tokens.batch.spec.group_score = GroupScore::kSumOfBestTwo;
  tokens.routing = route_ok(tokens.batch);
  const BalanceSums routed = sums_ok(tokens);
  EXPECT_EQ(routed.counts, tokens.routing.counts);
  tokens.counts_from = LossCounts::kPlainTopK;
  const BalanceSums plain = sums_ok(tokens);
  Batch unbiased = tokens.batch;
  unbiased.bias.clear();
  unbiased.spec = spec_of("sigmoid", 16, 4);
  EXPECT_EQ(plain.counts, route_ok(unbiased).counts);
  EXPECT_NE(plain.counts, routed.counts);
  EXPECT_EQ(plain.score_sums, routed.score_sums);
}

// C043: mean((log(e^3 + 1))^2), from raw logits.
TEST(ZLoss, IsTheMeanOfSquaredLogSumExp) {
  Tokens tokens = tokens_of("switch", 2, 1, {3, 0, 3, 0, 3, 0, 3, 0}, {0, 0, 0, 0});
  EXPECT_NEAR(z_loss(1.0, z_sums_ok(tokens)), 9.2939, 1e-4);
  EXPECT_NEAR(z_loss(0.5, z_sums_ok(tokens)), 0.5 * std::pow(std::log(std::exp(3.0) + 1.0), 2.0),
              1e-14);
  Tokens huge = tokens_of("switch", 2, 1, {3e38f, -3e38f}, {0});
  EXPECT_NEAR(z_loss(1.0, z_sums_ok(huge)) / 9e76, 1.0, 1e-6);
  tokens.batch.mask = {0, 0, 0, 0};
  EXPECT_EQ(z_loss(1.0, z_sums_ok(tokens)), 0.0);
}

TEST(ZLoss, GradientEqualsDualNumbers) {
  constexpr uint64_t kSeed = 905;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (const float spread : {0.1f, 3.0f, 50.0f}) {
    const Tokens tokens = draw_tokens(random, "mixtral", 20, spread);
    const int64_t count = z_sums_ok(tokens).num_tokens;
    const std::vector<float> d_logits = z_gradient_ok(tokens, 1e-3, count);
    for (int64_t t = 0; t < 20; ++t) {
      if (tokens.batch.mask[static_cast<size_t>(t)] == 0) continue;
      const auto want = dual_gradient(tokens.batch.row(t), [&](std::span<const Dual> row) {
        Dual peak = row[0];
        for (const Dual z : row) peak = z.value > peak.value ? z : peak;
        Dual sum;
        for (const Dual z : row) sum = sum + exp(z - peak);
        const Dual lse = peak + log(sum);
        return lse * lse * constant(1e-3L / static_cast<long double>(count));
      });
      for (size_t e = 0; e < 16; ++e) {
        ASSERT_NEAR(d_logits[static_cast<size_t>(t) * 16 + e], static_cast<double>(want[e]),
                    1e-7 * std::fabs(static_cast<double>(want[e])) + 1e-45);
      }
    }
  }
}

// One loss and gradient over drawn layouts: ranks with any tokens, sequences cut anywhere,
// micro-batches; the one-rank run is the oracle (K06, contract 2.2).
struct Layout {
  std::vector<std::vector<int64_t>> parts;  // token ids of each rank and micro-batch
};

Layout draw_layout(Random& random, int64_t num_tokens) {
  Layout layout;
  layout.parts.resize(1 + random() % 7);
  const bool contiguous = random() % 2 == 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const auto parts = static_cast<int64_t>(layout.parts.size());
    const int64_t part =
        contiguous ? t * parts / num_tokens : static_cast<int64_t>(random() % 7) % parts;
    layout.parts[static_cast<size_t>(part)].push_back(t);
  }
  return layout;
}

TEST(Losses, NoLayoutChangesLossGradientOrCounts) {
  constexpr uint64_t kSeed = 906;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 60; ++round) {
    const std::string_view preset = kPresets[round % 4];
    const int64_t sequences = round % 3 == 0 ? 5 : 1;
    Tokens whole =
        draw_tokens(random, preset, 1 + static_cast<int64_t>(random() % 90), 3.0f, sequences);
    whole.counts_from = round % 5 == 0 ? LossCounts::kPlainTopK : LossCounts::kRouted;
    const RouterSpec& spec = whole.batch.spec;
    const AuxLossSpec aux = {0.01, LossScale::kMegatron, sequences};
    const BalanceSums want = sums_ok(whole);
    const std::vector<float> d_want = gradient_ok(whole, aux, want);
    const ZLossSums z_want = z_sums_ok(whole);
    const std::vector<float> dz_want = z_gradient_ok(whole, 1e-3, z_want.num_tokens);

    const Layout layout = draw_layout(random, whole.batch.num_tokens());
    BalanceSums totals;
    ZLossSums z_totals;
    for (const auto& ids : layout.parts) {
      const Tokens part = whole.part(ids);
      ASSERT_TRUE(add_sums(sums_ok(part), &totals).ok());
      const ZLossSums z_part = z_sums_ok(part);
      z_totals.sum += z_part.sum;
      z_totals.num_tokens += z_part.num_tokens;
    }
    ASSERT_EQ(totals.counts, want.counts);
    ASSERT_EQ(totals.num_tokens, want.num_tokens);
    const double loss = loss_ok(spec, aux, want);
    ASSERT_NEAR(loss_ok(spec, aux, totals), loss, 1e-12 * loss);
    ASSERT_EQ(z_totals.num_tokens, z_want.num_tokens);
    ASSERT_NEAR(z_loss(1e-3, z_totals), z_loss(1e-3, z_want), 1e-12);
    double shares = 0;
    for (const auto& ids : layout.parts) {
      const Tokens part = whole.part(ids);
      BalanceSums share = totals;
      share.score_sums = sums_ok(part).score_sums;
      shares += loss_ok(spec, aux, share);
      const std::vector<float> d_part = gradient_ok(part, aux, totals);
      const std::vector<float> dz_part = z_gradient_ok(part, 1e-3, z_totals.num_tokens);
      for (size_t i = 0; i < ids.size(); ++i) {
        for (size_t e = 0; e < 16; ++e) {
          const size_t at = static_cast<size_t>(ids[i]) * 16 + e;
          ASSERT_EQ(d_part[i * 16 + e], d_want[at]);
          ASSERT_EQ(dz_part[i * 16 + e], dz_want[at]);
        }
      }
    }
    ASSERT_NEAR(shares, loss, 1e-12 * loss);
  }
}

// Whole sequences in different micro-batches: each is reduced and differentiated alone, and only
// the number of all sequences is known to all.
TEST(Losses, SequencesInMicroBatchesAddUp) {
  constexpr uint64_t kSeed = 910;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (const std::string_view preset : kPresets) {
    const Tokens whole = draw_tokens(random, preset, 70, 2.0f, 6);
    const AuxLossSpec aux = {0.3, LossScale::kMegatron, 6};
    const double want = loss_ok(whole.batch.spec, aux, sums_ok(whole));
    const std::vector<float> d_want = gradient_ok(whole, aux, sums_ok(whole));
    double sum = 0;
    for (const int32_t first : {0, 2, 3}) {
      const int32_t last = first == 0 ? 2 : (first == 2 ? 3 : 6);
      std::vector<int64_t> ids;
      for (int64_t t = 0; t < 70; ++t) {
        const int32_t sequence = whole.sequence[static_cast<size_t>(t)];
        if (sequence >= first && sequence < last) ids.push_back(t);
      }
      Tokens part = whole.part(ids);
      for (int32_t& sequence : part.sequence) sequence -= first;
      part.num_sequences = last - first;
      const BalanceSums sums = sums_ok(part);
      sum += loss_ok(part.batch.spec, aux, sums);
      const std::vector<float> d_part = gradient_ok(part, aux, sums);
      for (size_t i = 0; i < d_part.size(); ++i) {
        ASSERT_EQ(d_part[i], d_want[static_cast<size_t>(ids[i / 16]) * 16 + i % 16]);
      }
    }
    EXPECT_NEAR(sum, want, 1e-14);
  }
}

TEST(Losses, ThreadsChangeNoBit) {
  Random random(907);
  const auto pool = make_pool(4);
  Tokens tokens;
  tokens.batch.spec = spec_of("deepseek_v3", 300, 8);
  tokens.batch.logits = normal_logits(random, 300 * 1001, 2.0f);
  tokens.batch.bias = normal_logits(random, 300, 0.1f);
  tokens.routing = route_ok(tokens.batch);
  const BalanceSums a = sums_ok(tokens);
  const BalanceSums b = sums_ok(tokens, pool.get());
  EXPECT_EQ(a.counts, b.counts);
  EXPECT_EQ(a.score_sums, b.score_sums);
  EXPECT_EQ(z_sums_ok(tokens).sum, z_sums_ok(tokens, pool.get()).sum);
  const AuxLossSpec aux = {1.0, LossScale::kMegatron, 0};
  EXPECT_TRUE(same_bits(gradient_ok(tokens, aux, a), gradient_ok(tokens, aux, a, pool.get())));
  EXPECT_TRUE(
      same_bits(z_gradient_ok(tokens, 1.0, 1001), z_gradient_ok(tokens, 1.0, 1001, pool.get())));
}

// Appended padding, whatever it holds, changes no bit (K05); a replaced row is one of logits 0.
TEST(Losses, PaddingIsNeverReadAndReplacedRowsCountAsZeros) {
  Random random(908);
  for (const std::string_view preset : kPresets) {
    Tokens tokens = draw_tokens(random, preset, 33, 2.0f);
    tokens.batch.spec.on_nonfinite = OnNonfinite::kUniform;
    const AuxLossSpec aux = {1.0, LossScale::kMegatron, 0};
    const BalanceSums sums = sums_ok(tokens);
    std::vector<float> d_want = gradient_ok(tokens, aux, sums);
    Tokens padded = tokens;
    padded.batch.logits.resize(40 * 16, NAN);
    padded.batch.mask.resize(40, 0);
    padded.sequence.resize(40, -5);
    padded.routing = route_ok(padded.batch);
    const BalanceSums padded_sums = sums_ok(padded);
    EXPECT_EQ(padded_sums.counts, sums.counts);
    EXPECT_EQ(padded_sums.score_sums, sums.score_sums);
    EXPECT_EQ(z_sums_ok(padded).sum, z_sums_ok(tokens).sum);
    d_want.resize(40 * 16, 0.0f);
    EXPECT_TRUE(same_bits(gradient_ok(padded, aux, sums), d_want));

    tokens.batch.mask[4] = 1;
    Tokens zeros = tokens;
    for (size_t e = 0; e < 16; ++e) zeros.batch.logits[4 * 16 + e] = 0.0f;
    tokens.batch.logits[4 * 16] = NAN;
    tokens.routing = route_ok(tokens.batch);
    zeros.routing = route_ok(zeros.batch);
    EXPECT_EQ(sums_ok(tokens).score_sums, sums_ok(zeros).score_sums);
    EXPECT_EQ(z_sums_ok(tokens).sum, z_sums_ok(zeros).sum);
    const std::vector<float> d_logits = gradient_ok(tokens, aux, sums_ok(tokens));
    for (size_t e = 0; e < 16; ++e) EXPECT_EQ(d_logits[4 * 16 + e], 0.0f);
  }
}

// K01: any bits for logits give finite losses and gradients, and no gradient to replaced rows.
TEST(Losses, AnyBitsGiveFiniteLossesAndGradients) {
  constexpr uint64_t kSeed = 911;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  for (int round = 0; round < 100; ++round) {
    Tokens tokens = draw_tokens(random, kPresets[round % 4], 24, 1.0f, 3);
    tokens.batch.spec.on_nonfinite = OnNonfinite::kUniform;
    for (float& logit : tokens.batch.logits) {
      if (random() % 8 == 0) logit = std::bit_cast<float>(static_cast<uint32_t>(random()));
    }
    tokens.routing = route_ok(tokens.batch);
    const AuxLossSpec aux = {1.0, LossScale::kMegatron, 0};
    const BalanceSums sums = sums_ok(tokens);
    const ZLossSums z_sums = z_sums_ok(tokens);
    ASSERT_TRUE(std::isfinite(loss_ok(tokens.batch.spec, aux, sums)));
    ASSERT_TRUE(std::isfinite(z_loss(1.0, z_sums)));
    const std::vector<float> d_aux = gradient_ok(tokens, aux, sums);
    const std::vector<float> d_z = z_gradient_ok(tokens, 1e-3, z_sums.num_tokens);
    std::vector<float> d_route(d_aux.size());
    const std::vector<float> d_weights = normal_logits(random, 24 * 4, 1.0f);
    ASSERT_TRUE(route_backward(tokens.batch.spec, tokens.input().rows, tokens.routing,
                               ConstTensorView(d_weights.data(), DType::kF32, {24, 4}),
                               GradientMode::kWrite, nullptr,
                               TensorView(d_route.data(), DType::kF32, {24, 16}))
                    .ok());
    for (int64_t t = 0; t < 24; ++t) {
      const auto row = tokens.batch.row(t);
      const bool ordinary =
          tokens.batch.mask[static_cast<size_t>(t)] != 0 &&
          std::all_of(row.begin(), row.end(), [](float z) { return std::isfinite(z); });
      for (size_t i = static_cast<size_t>(t) * 16; i < static_cast<size_t>(t + 1) * 16; ++i) {
        for (const float d : {d_aux[i], d_z[i], d_route[i]}) {
          ASSERT_TRUE(ordinary ? std::isfinite(d) : d == 0.0f);
        }
      }
    }
  }
}

TEST(Losses, RefuseWhatDoesNotFit) {
  Random random(909);
  Tokens tokens = draw_tokens(random, "mixtral", 8, 1.0f, 2);
  tokens.batch.mask.assign(8, 1);
  tokens.routing = route_ok(tokens.batch);
  BalanceSums sums = sums_ok(tokens);
  const auto message_of = [](const Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  tokens.sequence[3] = 2;
  BalanceSums out;
  EXPECT_EQ(message_of(balance_sums(tokens.batch.spec, tokens.input(), nullptr, &out)),
            "sequence[3] is 2, expected 0 to 1");
  tokens.sequence[3] = 0;
  BalanceInput no_routing = tokens.input();
  no_routing.routing = nullptr;
  EXPECT_EQ(message_of(balance_sums(tokens.batch.spec, no_routing, nullptr, &out)),
            "routing is null, but counts come from it");
  BalanceSums huge = sums;
  huge.num_tokens[0] = std::numeric_limits<int64_t>::max();
  const BalanceSums before = sums;
  EXPECT_EQ(message_of(add_sums(huge, &sums)), "a count would not fit 64 bits");
  EXPECT_EQ(sums.num_tokens, before.num_tokens);
  BalanceSums small = sums;
  small.score_sums.pop_back();
  EXPECT_NE(message_of(add_sums(small, &sums)).find("cannot be added"), std::string::npos);
  EXPECT_NE(message_of(aux_loss(tokens.batch.spec, {1.0, LossScale::kMegatron, 0}, small).error())
                .find("31 score sums"),
            std::string::npos);
  EXPECT_EQ(message_of(aux_loss(tokens.batch.spec, {NAN, LossScale::kMegatron, 0}, sums).error()),
            "coeff is nan, expected finite");
  tokens.batch.logits[5 * 16 + 1] = NAN;
  EXPECT_EQ(balance_sums(tokens.batch.spec, tokens.input(), nullptr, &out).code(),
            StatusCode::kNonFinite);
  EXPECT_EQ(z_loss_sums(tokens.batch.spec, tokens.input().rows, nullptr).error().code(),
            StatusCode::kNonFinite);
}

TEST(Losses, NoTokensAnywhere) {
  Tokens none = tokens_of("mixtral", 4, 2, {}, {});
  const BalanceSums sums = sums_ok(none);
  EXPECT_EQ(loss_ok(none.batch.spec, {1.0, LossScale::kMegatron, 0}, sums), 0.0);
  EXPECT_TRUE(gradient_ok(none, {1.0, LossScale::kMegatron, 0}, sums).empty());
  EXPECT_EQ(z_loss(1.0, z_sums_ok(none)), 0.0);
}

}  // namespace
}  // namespace argosy::test
