// Gradients over a grid of expert-parallel groups and copies: the mean over the global batch and its norm, as one rank with
// the whole batch has them; errors that every rank of the grid sees.
#include "argosy/gradient_sync.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "argosy/moe.h"
#include "moe/grid_ranks.h"
#include "moe/layer_cases.h"

namespace argosy {
namespace {

using testing::grid_of;
using testing::join;
using testing::layer_of;
using testing::Matrix;
using testing::NaiveLayer;
using testing::run_grid;
using testing::Seat;

// fp32 buffers of one rank, poisoned, and the views of them.
struct Buffers {
  std::vector<std::vector<float>> values;
  MoeGradients views;

  Buffers(const NaiveLayer& layer, int64_t num_local) {
    const auto e = static_cast<int64_t>(layer.experts.size());
    const int64_t h = layer.hidden, f = layer.intermediate;
    values.reserve(12);
    views.d_expert_gate = add({num_local, f, h});
    views.d_expert_up = add({num_local, f, h});
    views.d_expert_down = add({num_local, h, f});
    if (!layer.experts[0].gate_bias.empty()) {
      views.d_expert_gate_bias = add({num_local, f});
      views.d_expert_up_bias = add({num_local, f});
      views.d_expert_down_bias = add({num_local, h});
    }
    views.d_gate = add({e, h});
    if (!layer.gate_bias.empty()) views.d_gate_bias = add({e});
    if (!layer.shared.empty()) {
      const int64_t fs = layer.shared[0].gate.rows;
      views.d_shared_gate = add({fs, h});
      views.d_shared_up = add({fs, h});
      views.d_shared_down = add({h, fs});
    }
    if (layer.shared_gate.rows > 0) views.d_shared_scale = add({1, h});
  }

 private:
  TensorView add(std::initializer_list<int64_t> dims) {
    TensorView view(static_cast<float*>(nullptr), DType::kF32, dims);
    values.emplace_back(static_cast<size_t>(view.num_elements()), std::nanf(""));
    view.data = reinterpret_cast<std::byte*>(values.back().data());
    return view;
  }
};

struct Outcome {
  std::vector<std::vector<float>> gradients;  // of all experts, then of what every rank holds
  GradientSummary summary;
};

// One backward of a batch split unevenly over the grid: rank r has the tokens [begins[r], begins[r + 1]).
Outcome run_step(const NaiveLayer& layer, const Matrix& hidden, const Matrix& d_output,
                 const RankGrid& grid, const std::vector<int64_t>& begins,
                 const GradientSyncOptions& sync = {}) {
  const Tensor input = testing::to_tensor(hidden, layer.dtype);
  const Tensor d_out = testing::to_tensor(d_output, layer.dtype);
  const auto num_ranks = static_cast<size_t>(grid.num_ranks());
  std::vector<Outcome> ranks(num_ranks);
  run_grid(grid, [&](const Seat& seat) {
    const testing::Trainer trainer(seat, layer);
    const auto at = static_cast<size_t>(seat.rank);
    const int64_t first = begins[at], count = begins[at + 1] - first;
    const ConstTensorView x = input.view().rows(first, count);
    const Placement placement{static_cast<int64_t>(layer.experts.size()), grid.ep(), 0};
    Tensor output = std::move(*Tensor::zeros(layer.dtype, {count, layer.hidden}));
    MoeTape tape;
    ASSERT_TRUE(trainer.layer->forward_train(x, nullptr, output.view(), &tape, nullptr).ok());
    Buffers buffers(layer, placement.num_local(seat.ep.rank()));
    const Status status =
        trainer.layer->backward(tape, x, d_out.view().rows(first, count), {}, buffers.views);
    ASSERT_TRUE(status.ok()) << status.to_string();
    const Result<GradientSummary> summary = trainer.sync->run(buffers.views, count, sync);
    ASSERT_TRUE(summary.has_value()) << summary.error().to_string();
    ranks[at] = {std::move(buffers.values), *summary};
  });
  const size_t num_expert_tensors = layer.experts[0].gate_bias.empty() ? 3 : 6;
  Outcome all = ranks[0];
  for (size_t rank = 1; rank < num_ranks; ++rank) {
    const Outcome& one = ranks[rank];
    EXPECT_EQ(one.summary.norm, ranks[0].summary.norm);
    EXPECT_EQ(one.summary.num_tokens, ranks[0].summary.num_tokens);
    EXPECT_EQ(one.summary.clip_scale, ranks[0].summary.clip_scale);
    const bool is_first_row = static_cast<int>(rank) < grid.ep();
    for (size_t i = 0; i < one.gradients.size(); ++i) {
      if (i >= num_expert_tensors) {
        EXPECT_EQ(one.gradients[i], all.gradients[i]) << i;  // the same on every rank
      } else if (is_first_row) {
        all.gradients[i].insert(all.gradients[i].end(), one.gradients[i].begin(),
                                one.gradients[i].end());
      } else {
        EXPECT_EQ(one.gradients[i], ranks[rank % static_cast<size_t>(grid.ep())].gradients[i]) << i;
      }
    }
  }
  return all;
}

void expect_near(const Outcome& got, const Outcome& want) {
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (size_t i = 0; i < want.gradients.size(); ++i) {
    ASSERT_EQ(got.gradients[i].size(), want.gradients[i].size()) << i;
    float peak = 0;
    for (const float value : want.gradients[i]) peak = std::max(peak, std::abs(value));
    for (size_t at = 0; at < want.gradients[i].size(); ++at) {
      ASSERT_NEAR(got.gradients[i][at], want.gradients[i][at], 1e-6f * peak) << i << " " << at;
    }
  }
  EXPECT_NEAR(got.summary.norm, want.summary.norm, 1e-6 * want.summary.norm);
  EXPECT_EQ(got.summary.num_tokens, want.summary.num_tokens);
}

Matrix rows_of(const NaiveLayer& layer, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  return testing::random_matrix(random, count, layer.hidden, 1.0f, layer.dtype == DType::kBF16);
}

// Rank 1 has none; rank r of the others a share that grows with r.
std::vector<int64_t> uneven_begins(int num_ranks, int64_t num_tokens) {
  if (num_ranks == 1) return {0, num_tokens};
  const auto share = [](int rank) { return rank == 1 ? 0 : rank + 1; };
  int64_t all = 0, before = 0;
  for (int rank = 0; rank < num_ranks; ++rank) all += share(rank);
  std::vector<int64_t> begins{0};
  for (int rank = 0; rank < num_ranks; ++rank) {
    before += share(rank);
    begins.push_back(num_tokens * before / all);
  }
  return begins;
}

class GradientSyncGrid : public ::testing::TestWithParam<testing::LayerCase> {};

TEST_P(GradientSyncGrid, IsTheOneRankGradientAndNorm) {
  const NaiveLayer layer = layer_of(GetParam());
  const Matrix hidden = rows_of(layer, 47, 5), d_output = rows_of(layer, 47, 6);
  const Outcome want = run_step(layer, hidden, d_output, grid_of(1, 1), {0, 47});
  EXPECT_EQ(want.summary.num_tokens, 47);
  double squares = 0;
  for (const auto& values : want.gradients) {
    for (const float value : values) squares += static_cast<double>(value) * value;
  }
  EXPECT_NEAR(want.summary.norm, std::sqrt(squares), 1e-12 * std::sqrt(squares));
  for (const RankGrid& grid :
       {grid_of(2, 1), grid_of(3, 1), grid_of(8, 1), grid_of(1, 2), grid_of(1, 3), grid_of(1, 4),
        grid_of(2, 2), grid_of(4, 2), grid_of(2, 3)}) {
    SCOPED_TRACE(::testing::Message() << grid.ep() << " x " << grid.copies());
    const auto begins = uneven_begins(grid.num_ranks(), 47);
    const Outcome got = run_step(layer, hidden, d_output, grid, begins);
    if (grid.copies() == 1) {
      EXPECT_EQ(got.gradients, want.gradients);
      EXPECT_EQ(got.summary.norm, want.summary.norm);
      EXPECT_EQ(got.summary.num_tokens, want.summary.num_tokens);
      continue;
    }
    expect_near(got, want);
    const Outcome again = run_step(layer, hidden, d_output, grid, begins);
    EXPECT_EQ(again.gradients, got.gradients);
    EXPECT_EQ(again.summary.norm, got.summary.norm);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GradientSyncGrid,
    ::testing::Values(testing::LayerCase{DType::kF32, DotOrder::kVdpbf16, true, true},
                      testing::LayerCase{DType::kBF16, DotOrder::kVdpbf16, false, false, true}));

TEST(GradientSync, ClipsToTheNormAndTakesAGivenCount) {
  const NaiveLayer layer = layer_of({DType::kF32, DotOrder::kVdpbf16, true, false});
  const Matrix hidden = rows_of(layer, 20, 5), d_output = rows_of(layer, 20, 6);
  const auto begins = uneven_begins(4, 20);
  const Outcome plain = run_step(layer, hidden, d_output, grid_of(2, 2), begins);
  EXPECT_EQ(plain.summary.clip_scale, 1.0f);
  const Outcome below = run_step(layer, hidden, d_output, grid_of(2, 2), begins,
                                 {.max_norm = 1.01 * plain.summary.norm});
  EXPECT_EQ(below.gradients, plain.gradients);
  const Outcome clipped = run_step(layer, hidden, d_output, grid_of(2, 2), begins,
                                   {.max_norm = 0.25 * plain.summary.norm});
  EXPECT_EQ(clipped.summary.norm, plain.summary.norm);
  EXPECT_EQ(clipped.summary.clip_scale, 0.25f);
  const Outcome quarter =
      run_step(layer, hidden, d_output, grid_of(2, 2), begins, {.global_tokens = 80});
  EXPECT_EQ(quarter.summary.num_tokens, 80);
  EXPECT_EQ(quarter.gradients, clipped.gradients);  // a power of two: no rounding
}

// Four ranks with small gradients of their own; `change` spoils those of some.
struct Synced {
  std::vector<Status> statuses;
  std::vector<double> norms;
};
Synced run_small(const std::function<void(int rank, MoeGradients*, int64_t* num_tokens,
                                          GradientSyncOptions*)>& change) {
  Synced synced{std::vector<Status>(4), std::vector<double>(4)};
  run_grid(grid_of(2, 2), [&](const Seat& seat) {
    std::vector<float> experts(12, 1.0f), gate(6, 2.0f);
    MoeGradients g;
    g.d_expert_up = TensorView(experts.data(), DType::kF32, {2, 2, 3});
    g.d_gate = TensorView(gate.data(), DType::kF32, {2, 3});
    int64_t num_tokens = 1;
    GradientSyncOptions options;
    auto sync = GradientSync::create(seat.ep, seat.copies);
    ASSERT_TRUE(sync.has_value()) << sync.error().to_string();
    change(seat.rank, &g, &num_tokens, &options);
    const Result<GradientSummary> bad = (*sync)->run(g, num_tokens, options);
    synced.statuses[static_cast<size_t>(seat.rank)] = bad.error();
    // The group goes on.
    std::vector<float> more(12, 3.0f);
    g = {};
    g.d_expert_up = TensorView(more.data(), DType::kF32, {2, 2, 3});
    const Result<GradientSummary> good = (*sync)->run(g, 1, {});
    ASSERT_TRUE(good.has_value()) << good.error().to_string();
    ASSERT_EQ(more[0], 1.5f);
    synced.norms[static_cast<size_t>(seat.rank)] = good->norm;
  });
  return synced;
}

TEST(GradientSync, CountsEveryExpertOnceAndTheGateOnce) {
  run_grid(grid_of(2, 2), [](const Seat& seat) {
    std::vector<float> experts(6, 4.0f), gate(6, 4.0f);
    MoeGradients g;
    g.d_expert_up = TensorView(experts.data(), DType::kF32, {1, 2, 3});
    g.d_gate = TensorView(gate.data(), DType::kF32, {2, 3});
    auto sync = GradientSync::create(seat.ep, seat.copies);
    ASSERT_TRUE(sync.has_value());
    const auto summary = (*sync)->run(g, 2, {});
    ASSERT_TRUE(summary.has_value());
    EXPECT_EQ(experts[5], 1.0f);  // two copies of 4 over 8 tokens
    EXPECT_EQ(gate[5], 1.0f);
    EXPECT_EQ(summary->norm, std::sqrt(18.0));  // two experts of six and one gate of six
    EXPECT_EQ(*gradient_norm(seat.ep, g), std::sqrt(18.0));
  });
}

TEST(GradientSync, BadInputOfOneRankIsEveryRanksError) {
  using Change = std::function<void(int, MoeGradients*, int64_t*, GradientSyncOptions*)>;
  std::vector<float> other(12, 1.0f);
  const struct {
    StatusCode code;
    const char* text;
    Change change;
  } cases[] = {
      {StatusCode::kInvalidArgument, "gradients of -3 tokens",
       [](int rank, MoeGradients*, int64_t* tokens, GradientSyncOptions*) {
         if (rank == 2) *tokens = -3;
       }},
      {StatusCode::kInvalidArgument, "no valid token",
       [](int, MoeGradients*, int64_t* tokens, GradientSyncOptions*) { *tokens = 0; }},
      {StatusCode::kInvalidArgument, "d_gate is BF16 [2, 3]",
       [](int rank, MoeGradients* g, int64_t*, GradientSyncOptions*) {
         if (rank == 3) g->d_gate.dtype = DType::kBF16;
       }},
      {StatusCode::kInvalidArgument, "more than int64",
       [](int, MoeGradients*, int64_t* tokens, GradientSyncOptions*) {
         *tokens = int64_t{1} << 61;
       }},
      {StatusCode::kDisagree, "copies: d_expert_up",
       [&](int rank, MoeGradients* g, int64_t*, GradientSyncOptions*) {
         if (rank == 1) g->d_expert_up = TensorView(other.data(), DType::kF32, {1, 2, 3});
       }},
      {StatusCode::kDisagree, "d_expert_up",  // of both copies, so only the row can see it
       [&](int rank, MoeGradients* g, int64_t*, GradientSyncOptions*) {
         if (rank % 2 == 1) g->d_expert_up = TensorView(other.data(), DType::kF32, {2, 3, 2});
       }},
      {StatusCode::kDisagree, "max_norm",
       [](int rank, MoeGradients*, int64_t*, GradientSyncOptions* options) {
         if (rank == 0) options->max_norm = 2;
       }},
      {StatusCode::kNonFinite, "rank 1: d_expert_up of expert 3 is nan at [1, 0]",
       [](int rank, MoeGradients* g, int64_t*, GradientSyncOptions*) {
         if (rank == 3) g->d_expert_up.as<float>()[9] = std::nanf("");
       }},
      {StatusCode::kNonFinite, "d_gate is inf at [1, 2]",
       [](int rank, MoeGradients* g, int64_t*, GradientSyncOptions*) {
         if (rank >= 2) g->d_gate.as<float>()[5] = HUGE_VALF;
       }},
  };
  for (const auto& one : cases) {
    const Synced synced = run_small(one.change);
    for (const Status& status : synced.statuses) {
      EXPECT_EQ(status.code(), one.code) << status.to_string();
      EXPECT_NE(status.message().find(one.text), std::string::npos) << status.to_string();
    }
  }
}

TEST(GradientSync, PassesNonFiniteOnesOnWhenAsked) {
  const Synced synced =
      run_small([](int rank, MoeGradients* g, int64_t*, GradientSyncOptions* options) {
        if (rank == 3) g->d_expert_up.as<float>()[9] = std::nanf("");
        options->nonfinite = NonFiniteGradients::kPass;
        options->max_norm = 1;
      });
  for (const Status& status : synced.statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// A row whose ranks stand at different places of their columns would add in different orders.
TEST(GradientSync, RefusesRanksThatStandInNoGrid) {
  std::vector<std::shared_ptr<InprocWorld>> rows{*InprocWorld::create(2), *InprocWorld::create(2)};
  std::vector<std::shared_ptr<InprocWorld>> columns{*InprocWorld::create(2),
                                                    *InprocWorld::create(2)};
  testing::run_ranks(4, [&](int rank) {
    const auto row = static_cast<size_t>(rank / 2), column = static_cast<size_t>(rank % 2);
    const auto ep = join(rows[row], static_cast<int>(column), 2);
    // Column 1 counts the other way.
    const int place = static_cast<int>(column == 0 ? row : 1 - row);
    const auto copies = join(columns[column], place, 2);
    const Status status = GradientSync::create(*ep, copies.get()).error();
    EXPECT_EQ(status.code(), StatusCode::kDisagree);
    EXPECT_NE(status.message().find("copies.rank"), std::string::npos) << status.to_string();
    // Groups crossed: the same column holds other experts.
    const Status crossed = GradientSync::create(*copies, ep.get()).error();
    EXPECT_EQ(crossed.code(), StatusCode::kDisagree) << crossed.to_string();
  });
}

}  // namespace
}  // namespace argosy
