// The layout of a batch over ranks does not change what it trains: random splits over data, tensor-parallel replicas,
// context-parallel parts of sequences, expert-parallel groups, their copies and micro-batches against one rank with the whole
// batch. Outputs and gradients of tokens are the same bits, over expert parallelism alone all of them; losses and gradients of
// weights are within 1e-6, counts exact.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <numeric>

#include "argosy/balance_loss.h"
#include "argosy/gradient_sync.h"
#include "moe/grid_ranks.h"
#include "moe/training_step.h"

namespace argosy {
namespace {

using testing::Gradients;
using testing::grid_of;
using testing::layer_of;
using testing::Matrix;
using testing::NaiveLayer;
using testing::run_grid;
using testing::Seat;

// The batch: tokens of sequences, one after the other.
struct Batch {
  Matrix hidden, d_output;
  std::vector<int32_t> sequence;  // [T]
  int64_t num_sequences = 1;
};

Batch batch_of(const NaiveLayer& layer, std::vector<int64_t> lengths, uint64_t seed) {
  Batch batch;
  const int64_t num_tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  batch.hidden = testing::rows_of(layer, num_tokens, seed);
  batch.d_output = testing::rows_of(layer, num_tokens, seed + 1);
  batch.num_sequences = static_cast<int64_t>(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    batch.sequence.insert(batch.sequence.end(), static_cast<size_t>(lengths[i]),
                          static_cast<int32_t>(i));
  }
  return batch;
}

// Ranks with the same tokens are one data group: group d runs the tokens [cuts[d * M + m], cuts[d * M + m + 1]) in its micro-
// batch m of M. Cuts fall anywhere, within sequences too, which is what context parallelism does.
struct Layout {
  RankGrid grid = grid_of(1, 1);
  int num_micro_batches = 1;
  std::vector<int64_t> cuts;

  int num_data_groups() const { return grid.num_ranks() / grid.token_replicas(); }
  TokenRange tokens_of(int rank, int micro_batch) const {
    const int at = rank / grid.token_replicas() * num_micro_batches + micro_batch;
    const int64_t first = cuts[static_cast<size_t>(at)];
    TokenRange share = grid.token_share(rank, cuts[static_cast<size_t>(at) + 1] - first);
    share.first += first;
    return share;
  }
  std::string to_string() const {
    return fmt::format("ep {} copies {} replicas {} micro-batches {} cuts {}", grid.ep(),
                       grid.copies(), grid.token_replicas(), num_micro_batches,
                       ::testing::PrintToString(cuts));
  }
};

Layout even_layout(const RankGrid& grid, int64_t num_tokens) {
  Layout layout{grid, 1, {}};
  for (int d = 0; d <= layout.num_data_groups(); ++d) {
    layout.cuts.push_back(owned_begin(num_tokens, layout.num_data_groups(), d));
  }
  return layout;
}

Layout draw_layout(std::mt19937_64& random, int64_t num_tokens) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  while (true) {
    const auto num_ranks = static_cast<int>(draw(1, 8));
    const Result<RankGrid> grid =
        RankGrid::create({.num_ranks = num_ranks,
                          .ep = static_cast<int>(draw(1, num_ranks)),
                          .token_replicas = static_cast<int>(draw(1, 4))});
    if (!grid.has_value()) continue;
    Layout layout{*grid, static_cast<int>(draw(1, 3)), {0}};
    for (int i = 1; i < layout.num_data_groups() * layout.num_micro_batches; ++i) {
      layout.cuts.push_back(draw(0, num_tokens));  // empty parts are normal
    }
    layout.cuts.push_back(num_tokens);
    std::sort(layout.cuts.begin(), layout.cuts.end());
    return layout;
  }
}

struct Losses {
  double aux_of_batch = 0, aux_of_sequences = 0, z = 0;
};

struct Outcome {
  std::vector<float> output, d_hidden;  // [T, H]
  Gradients weights;                    // means over the batch
  std::vector<int64_t> counts;          // [E] of the losses' totals
  std::vector<int64_t> received_rows;   // [E] that the experts computed
  Losses losses;
  GradientSummary summary;
};

constexpr double kAux = 0.05, kAuxSequence = 0.03, kZ = 0.01;

// What one rank knows of one micro-batch: its logits and what they add up to.
struct Part {
  TokenRange tokens;
  std::vector<float> logits;
  Routing routing;
  BalanceSums batch, sequences;
  ZLossSums z;

  BalanceInput input(const NaiveLayer& layer, const Batch& all, bool by_sequence) const {
    BalanceInput made;
    made.rows.logits =
        ConstTensorView(logits.data(), DType::kF32, {tokens.count, layer.router.num_experts});
    made.routing = &routing;
    if (!by_sequence) return made;
    made.sequence = all.sequence.data() + tokens.first;
    made.num_sequences = all.num_sequences;
    return made;
  }
};

Part part_of(const NaiveLayer& layer, const Batch& batch, const Tensor& input,
             const TokenRange& tokens) {
  Part part;
  part.tokens = tokens;
  const int64_t num_experts = layer.router.num_experts;
  part.logits.resize(static_cast<size_t>(tokens.count * num_experts));
  const Tensor gate = testing::to_tensor(layer.gate, layer.dtype);
  const TensorView logits(part.logits.data(), DType::kF32, {tokens.count, num_experts});
  EXPECT_TRUE(
      gate_logits(input.view().rows(tokens.first, tokens.count), gate.view(), {}, nullptr, logits)
          .ok());
  RouterInput rows;
  rows.logits = logits;
  Tensor bias;
  if (!layer.selection_bias.empty()) {
    bias = testing::to_vector(layer.selection_bias, DType::kF32);
    rows.selection_bias = bias.view();
  }
  EXPECT_TRUE(route(layer.router, rows, nullptr, &part.routing).ok());
  EXPECT_TRUE(
      balance_sums(layer.router, part.input(layer, batch, false), nullptr, &part.batch).ok());
  EXPECT_TRUE(
      balance_sums(layer.router, part.input(layer, batch, true), nullptr, &part.sequences).ok());
  part.z = *z_loss_sums(layer.router, rows, nullptr);
  return part;
}

// Sums over all ranks and micro-batches, in rank order.
struct Totals {
  BalanceSums batch, sequences;
  ZLossSums z;

  void add(const Part& part) {
    EXPECT_TRUE(add_sums(part.batch, &batch).ok());
    EXPECT_TRUE(add_sums(part.sequences, &sequences).ok());
    z.sum += part.z.sum;
    z.num_tokens += part.z.num_tokens;
  }
};

AuxLossSpec batch_loss() { return {.coeff = kAux}; }
AuxLossSpec sequence_loss(const Batch& batch) {
  return {.coeff = kAuxSequence, .num_sequences = batch.num_sequences};
}

// Of the losses times the number of tokens, since d_output is the gradient of a sum too.
std::vector<float> loss_gradient(const NaiveLayer& layer, const Batch& batch, const Part& part,
                                 const Totals& totals) {
  std::vector<float> d_logits(part.logits.size());
  const TensorView view(d_logits.data(), DType::kF32,
                        {part.tokens.count, layer.router.num_experts});
  const auto scale = static_cast<double>(totals.z.num_tokens);
  const BalanceInput whole = part.input(layer, batch, false);
  EXPECT_TRUE(aux_loss_backward(layer.router, batch_loss(), whole, totals.batch, scale,
                                GradientMode::kWrite, nullptr, view)
                  .ok());
  EXPECT_TRUE(aux_loss_backward(layer.router, sequence_loss(batch), part.input(layer, batch, true),
                                totals.sequences, scale, GradientMode::kAdd, nullptr, view)
                  .ok());
  EXPECT_TRUE(z_loss_backward(layer.router, kZ, whole.rows, totals.z.num_tokens, scale,
                              GradientMode::kAdd, nullptr, view)
                  .ok());
  return d_logits;
}

// One micro-batch of one rank, forward and backward, into the rows of its tokens.
void run_part(MoeLayer& layer, const Batch& batch, const Tensor& input, const Tensor& d_out,
              const Part& part, const std::vector<float>& d_logits, MoeGradients gradients,
              Outcome* all, std::vector<int64_t>* received) {
  const int64_t h = batch.hidden.columns;
  const TokenRange& tokens = part.tokens;
  const auto rows_in = [&](std::vector<float>& values) {
    return TensorView(values.data() + tokens.first * h, DType::kF32, {tokens.count, h});
  };
  MoeTape tape;
  MoeReport report;
  const ConstTensorView x = input.view().rows(tokens.first, tokens.count);
  Status status = layer.forward_train(x, nullptr, rows_in(all->output), &tape, &report);
  ASSERT_TRUE(status.ok()) << status.to_string();
  ASSERT_EQ(layer.routing().topk_idx, part.routing.topk_idx);
  gradients.d_hidden = rows_in(all->d_hidden);
  const ConstTensorView extra(d_logits.data(), DType::kF32,
                              {tokens.count, layer.routing().num_experts});
  status = layer.backward(tape, x, d_out.view().rows(tokens.first, tokens.count), extra, gradients);
  ASSERT_TRUE(status.ok()) << status.to_string();
  received->resize(report.rows_per_expert.size());
  for (size_t i = 0; i < received->size(); ++i) (*received)[i] += report.rows_per_expert[i];
}

Outcome run_layout(const NaiveLayer& layer, const Batch& batch, const Layout& layout) {
  const Tensor input = testing::to_tensor(batch.hidden, layer.dtype);
  const Tensor d_out = testing::to_tensor(batch.d_output, layer.dtype);
  const auto num_ranks = static_cast<size_t>(layout.grid.num_ranks());
  Outcome all;
  all.output.assign(batch.hidden.values.size(), std::nanf(""));
  all.d_hidden = all.output;
  std::vector<std::vector<Part>> parts(num_ranks);
  std::vector<Gradients> gradients(num_ranks);
  std::vector<std::vector<int64_t>> received(num_ranks);
  std::vector<GradientSummary> summaries(num_ranks);
  std::barrier all_have_sums(static_cast<ptrdiff_t>(num_ranks));
  const auto add_parts = [&] {
    Totals totals;
    for (const auto& own : parts) {
      for (const Part& part : own) totals.add(part);
    }
    return totals;
  };
  run_grid(layout.grid, [&](const Seat& seat) {
    const auto at = static_cast<size_t>(seat.rank);
    const testing::Trainer trainer(seat, layer);
    int64_t num_tokens = 0;
    for (int m = 0; m < layout.num_micro_batches; ++m) {
      parts[at].push_back(part_of(layer, batch, input, layout.tokens_of(seat.rank, m)));
      num_tokens += parts[at].back().tokens.count;
    }
    all_have_sums.arrive_and_wait();
    const Totals totals = add_parts();  // an all-reduce
    const Placement placement{layer.router.num_experts, layout.grid.ep(), 0};
    MoeGradients g =
        testing::make_gradients(layer, placement.num_local(seat.ep.rank()), 0, &gradients[at]);
    g.d_topk_weights = {};
    for (const Part& part : parts[at]) {
      run_part(*trainer.layer, batch, input, d_out, part, loss_gradient(layer, batch, part, totals),
               g, &all, &received[at]);
      g.accumulate = true;
    }
    g.d_hidden = {};
    const Result<GradientSummary> summary = trainer.sync->run(g, num_tokens, {});
    ASSERT_TRUE(summary.has_value()) << summary.error().to_string();
    summaries[at] = *summary;
  });
  const Totals totals = add_parts();
  all.counts = totals.batch.counts;
  all.losses = {*aux_loss(layer.router, batch_loss(), totals.batch),
                *aux_loss(layer.router, sequence_loss(batch), totals.sequences),
                z_loss(kZ, totals.z)};
  all.summary = summaries[0];
  all.weights = gradients[0];
  for (int rank = 1; rank < layout.grid.ep(); ++rank) {
    testing::append(gradients[static_cast<size_t>(rank)].expert_gate, &all.weights.expert_gate);
    testing::append(gradients[static_cast<size_t>(rank)].expert_up, &all.weights.expert_up);
    testing::append(gradients[static_cast<size_t>(rank)].expert_down, &all.weights.expert_down);
  }
  all.received_rows.assign(static_cast<size_t>(layer.router.num_experts), 0);
  for (int row = 0; row < layout.grid.copies(); ++row) {  // every rank of a row reports all of it
    for (size_t i = 0; i < all.received_rows.size(); ++i) {
      all.received_rows[i] += received[static_cast<size_t>(row * layout.grid.ep())][i];
    }
  }
  return all;
}

void expect_near(const std::vector<float>& got, const std::vector<float>& want, const char* name) {
  ASSERT_EQ(got.size(), want.size()) << name;
  float peak = 0;
  for (const float value : want) peak = std::max(peak, std::abs(value));
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], 1e-6f * peak) << name << " " << i;
  }
}

void expect_same_training(const Outcome& got, const Outcome& want, const Layout& layout) {
  EXPECT_EQ(got.counts, want.counts);
  EXPECT_EQ(got.received_rows, want.received_rows);
  EXPECT_EQ(got.summary.num_tokens, want.summary.num_tokens);
  EXPECT_EQ(got.output, want.output);  // bit for bit
  EXPECT_EQ(got.d_hidden, want.d_hidden);
  EXPECT_NEAR(got.losses.aux_of_batch, want.losses.aux_of_batch, 1e-6 * kAux);
  EXPECT_NEAR(got.losses.aux_of_sequences, want.losses.aux_of_sequences, 1e-6 * kAuxSequence);
  EXPECT_NEAR(got.losses.z, want.losses.z, 1e-6 * want.losses.z);
  EXPECT_NEAR(got.summary.norm, want.summary.norm, 1e-6 * want.summary.norm);
  const bool is_ep_alone = layout.grid.copies() == 1 && layout.num_micro_batches == 1;
  const std::pair<const char*, std::vector<float> Gradients::*> tensors[] = {
      {"gate", &Gradients::gate},
      {"expert_gate", &Gradients::expert_gate},
      {"expert_up", &Gradients::expert_up},
      {"expert_down", &Gradients::expert_down},
      {"shared_gate", &Gradients::shared_gate},
      {"shared_down", &Gradients::shared_down}};
  for (const auto& [name, tensor] : tensors) {
    if (is_ep_alone) {
      EXPECT_EQ(got.weights.*tensor, want.weights.*tensor) << name;
    }
    expect_near(got.weights.*tensor, want.weights.*tensor, name);
  }
}

NaiveLayer test_layer() {
  return layer_of({DType::kF32, DotOrder::kVdpbf16, /*shared=*/true, false});
}

// Cases C053 (2 x 2), C056 (EP 2 x TP 2, EP 4, one rank) and C059 (sequences cut in two) among them.
TEST(Layout, NamedOnesTrainTheSame) {
  const NaiveLayer layer = test_layer();
  const Batch batch = batch_of(layer, {9, 14, 1, 16}, 71);
  const Outcome want = run_layout(layer, batch, even_layout(grid_of(1, 1), 40));
  const std::pair<const char*, RankGrid> grids[] = {
      {"ep 4", grid_of(4, 1)},
      {"ep 2, data parallel 2", grid_of(2, 2)},
      {"ep 2, tensor parallel 2", grid_of(2, 2, 2)},
      {"ep 4, tensor parallel 2", grid_of(4, 1, 2)},
      {"ep 2, the same tokens on all", grid_of(2, 2, 4)},
      {"context parallel 2", grid_of(2, 1)},
  };
  for (const auto& [name, grid] : grids) {
    SCOPED_TRACE(name);
    const Layout layout = even_layout(grid, 40);
    expect_same_training(run_layout(layer, batch, layout), want, layout);
  }
}

TEST(Layout, RandomOnesTrainTheSame) {
  constexpr uint64_t kSeed = 72;
  const NaiveLayer layer = test_layer();
  const Batch batch = batch_of(layer, {9, 14, 1, 16}, 73);
  const Outcome want = run_layout(layer, batch, even_layout(grid_of(1, 1), 40));
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 24; ++round) {
    const Layout layout = draw_layout(random, 40);
    SCOPED_TRACE(fmt::format("seed {} round {}: {}", kSeed, round, layout.to_string()));
    expect_same_training(run_layout(layer, batch, layout), want, layout);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Case C057: two replicas of 3 tokens within EP 4: 3 * K rows come for every 3 tokens, and what counts them says so. Case C065:
// two ranks with the same 3 tokens, K = 2: the load of all is 6.
TEST(Layout, ReplicatedTokensCountOnce) {
  NaiveLayer layer = test_layer();
  layer.router.top_k = 2;
  const auto rows_of = [&](const RankGrid& grid, int64_t num_tokens) {
    const Batch batch = batch_of(layer, {num_tokens}, 74);
    const Outcome got = run_layout(layer, batch, even_layout(grid, num_tokens));
    EXPECT_EQ(got.counts, got.received_rows);
    EXPECT_EQ(got.summary.num_tokens, num_tokens);
    return std::accumulate(got.counts.begin(), got.counts.end(), int64_t{0});
  };
  EXPECT_EQ(rows_of(grid_of(4, 1, 2), 6), 6 * 2);  // two data groups of 3 tokens
  EXPECT_EQ(rows_of(grid_of(4, 1, 4), 3), 3 * 2);
  EXPECT_EQ(rows_of(grid_of(2, 2, 4), 3), 3 * 2);
  EXPECT_EQ(rows_of(grid_of(2, 1, 2), 3), 3 * 2);
  EXPECT_EQ(rows_of(grid_of(1, 2, 2), 3), 3 * 2);
}

// Case C059: gradients of a loss that comes as a mean, without its number of tokens, cannot be put together with those of other
// ranks: refused on every rank. With sums and counts the norm is that of one rank (above).
TEST(Layout, GradientsWithoutACountOfTokensAreRefused) {
  run_grid(grid_of(2, 1), [](const Seat& seat) {
    std::vector<float> gate(6, 1.0f);
    MoeGradients g;
    g.d_gate = TensorView(gate.data(), DType::kF32, {2, 3});
    const auto sync = GradientSync::create(seat.ep, seat.copies);
    ASSERT_TRUE(sync.has_value());
    const Status status = (*sync)->run(g, 0, {}).error();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("no valid token"), std::string::npos) << status.to_string();
    EXPECT_EQ(gate[0], 1.0f);
  });
}

}  // namespace
}  // namespace argosy
