// The layer's backward in latency mode: the bytes of throughput mode for every gradient, whatever the ranks, ways home, number of
// calls, policies and order of messages; errors that every rank sees; mode auto, and tapes of both modes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <span>

#include "argosy/moe.h"
#include "moe/layer_cases.h"
#include "moe/row_order.h"
#include "moe/training_step.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::Gradients;
using testing::layer_of;
using testing::LayerCase;
using testing::Matrix;
using testing::NaiveLayer;
using testing::rows_of;
using testing::run_backward;
using testing::run_group;
using testing::RunSetup;

// Bit for bit; of the norm, which is added rank by rank, all but the last digits.
void expect_same(Gradients got, const Gradients& want) {
  EXPECT_NEAR(got.norm, want.norm, 1e-9 * want.norm);
  got.norm = want.norm;
  EXPECT_EQ(got.expert_gate, want.expert_gate);
  EXPECT_TRUE(got == want);
}

constexpr Keep kAgain = Keep::kRecompute;
constexpr TapePolicy kNothing{kAgain, kAgain, kAgain, kAgain};
constexpr TapePolicy kMixed{Keep::kOffload, Keep::kSave, Keep::kOffload, kAgain};
constexpr TapePolicy kAllFp8{Keep::kFp8, Keep::kFp8, Keep::kFp8, Keep::kFp8};

MoeOptions latency_mode(ReturnPath path = ReturnPath::kPull) {
  MoeOptions options;
  options.mode = MoeMode::kLatency;
  options.max_tokens = 64;
  options.return_path = path;
  return options;
}
// Calls of at most so many tokens.
MoeOptions chunks_of(int64_t tokens, ReturnPath path = ReturnPath::kPull) {
  MoeOptions options = latency_mode(path);
  options.max_tokens = tokens;
  options.chunk = true;
  return options;
}
MoeOptions automatic(int64_t max_tokens) {
  MoeOptions options = chunks_of(max_tokens);
  options.mode = MoeMode::kAuto;
  return options;
}

class LatencyBackward : public ::testing::TestWithParam<LayerCase> {};

TEST_P(LatencyBackward, EqualsThroughputModeForAnySetup) {
  const NaiveLayer layer = layer_of(GetParam());
  const Matrix hidden = rows_of(layer, 45, 5), d_output = rows_of(layer, 45, 6);
  const Gradients want = run_backward(layer, hidden, d_output, nullptr, {});
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const MoeOptions& moe : {latency_mode(), chunks_of(4, ReturnPath::kPush)}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, calls of " << moe.max_tokens);
      const RunSetup setup{.num_ranks = ranks, .steps = 2, .moe = moe};
      expect_same(run_backward(layer, hidden, d_output, nullptr, setup), want);
    }
  }
  int index = 0;
  for (const RunSetup& setup :
       {RunSetup{.num_ranks = 3, .threads = 2, .steps = 3, .moe = chunks_of(1)},
        RunSetup{.num_ranks = 4, .moe = latency_mode(ReturnPath::kPush)},
        RunSetup{.num_ranks = 4, .policy = kNothing, .steps = 2, .moe = chunks_of(3)},
        RunSetup{.num_ranks = 3, .policy = kNothing, .moe = latency_mode()},
        RunSetup{.num_ranks = 2,
        .policy = {Keep::kSave, kAgain, kAgain, Keep::kSave},
        .moe = chunks_of(7)},
        RunSetup{
            .num_ranks = 2, .policy = {kAgain, Keep::kSave, kAgain, kAgain}, .moe = chunks_of(9)},
        RunSetup{.num_ranks = 3, .steps = 2, .moe = chunks_of(5), .shm = true},
        RunSetup{.num_ranks = 2, .moe = latency_mode(ReturnPath::kPush), .shm = true},
        RunSetup{.num_ranks = 3, .level = Level::kReference, .moe = latency_mode()},
        RunSetup{.num_ranks = 3, .steps = 2, .moe = automatic(64)},
        RunSetup{.num_ranks = 3, .steps = 2, .moe = automatic(4)}}) {
    SCOPED_TRACE(::testing::Message() << "setup " << index++);
    expect_same(run_backward(layer, hidden, d_output, nullptr, setup), want);
  }
}

// Masked tokens: rows of zeros, never read, part of no gradient.
TEST_P(LatencyBackward, MaskedTokensTakePartInNothing) {
  const NaiveLayer layer = layer_of(GetParam());
  Matrix hidden = rows_of(layer, 20, 5), d_output = rows_of(layer, 20, 6);
  std::vector<uint8_t> mask(20, 1);
  for (int64_t token = 0; token < 20; token += 3) {
    mask[static_cast<size_t>(token)] = 0;
    std::fill_n(hidden.values.data() + token * layer.hidden, layer.hidden, std::nanf(""));
    std::fill_n(d_output.values.data() + token * layer.hidden, layer.hidden, std::nanf(""));
  }
  const Gradients want = run_backward(layer, hidden, d_output, mask.data(), {});
  for (const float value : want.expert_down) ASSERT_TRUE(std::isfinite(value));
  for (const MoeOptions& moe : {latency_mode(), chunks_of(2)}) {
    expect_same(run_backward(layer, hidden, d_output, mask.data(), {.num_ranks = 3, .moe = moe}),
                want);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, LatencyBackward,
                         ::testing::Values(LayerCase{DType::kBF16, DotOrder::kAmx, true, true},
                                           LayerCase{DType::kBF16, DotOrder::kVdpbf16, true, false},
                                           LayerCase{DType::kF32, DotOrder::kVdpbf16, true, true},
                                           LayerCase{DType::kBF16, DotOrder::kVdpbf16, false, false,
                                                     true}));

// One hot expert, all rows to the experts of one rank, no token on some ranks or on all.
TEST(LatencyBackwardRouting, SkewedEmptyAndAllToOne) {
  NaiveLayer layer = layer_of({DType::kBF16, DotOrder::kVdpbf16, false, false, true});
  for (const size_t hot : {0u, 1u, 3u}) {
    for (size_t expert = 0; expert < hot; ++expert) {
      layer.gate_bias[expert] = 1000.0f + static_cast<float>(expert);
    }
    for (const int64_t tokens : {0, 1, 2, 23}) {
      SCOPED_TRACE(::testing::Message() << hot << " hot experts, " << tokens << " tokens");
      const Matrix hidden = rows_of(layer, tokens, 5), d_output = rows_of(layer, tokens, 6);
      const Gradients want = run_backward(layer, hidden, d_output, nullptr, {});
      for (const MoeOptions& moe : {latency_mode(), chunks_of(2, ReturnPath::kPush)}) {
        const RunSetup setup{.num_ranks = 5, .steps = 2, .moe = moe};
        expect_same(run_backward(layer, hidden, d_output, nullptr, setup), want);
      }
    }
  }
}

// No order of arrival that the endpoint allows, and no slow rank, changes a bit.
TEST(LatencyBackwardRouting, LateAndReorderedMessagesChangeNothing) {
  const NaiveLayer layer = layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true});
  const Matrix hidden = rows_of(layer, 21, 5), d_output = rows_of(layer, 21, 6);
  const Gradients want = run_backward(layer, hidden, d_output, nullptr, {});
  for (const std::string seed : {"1", "2"}) {
    for (const MoeOptions& moe : {chunks_of(3), latency_mode(ReturnPath::kPush)}) {
      const RunSetup setup{.num_ranks = 3,
                           .policy = kNothing,
                           .steps = 2,
                           .moe = moe,
                           .simulate = "seed=" + seed + ",delay_us=80,pause_us=40"};
      expect_same(run_backward(layer, hidden, d_output, nullptr, setup), want);
    }
  }
}

TEST(LatencyBackwardRouting, AccumulatesAndTakesLossGradients) {
  const NaiveLayer layer = layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true});
  const Matrix hidden = rows_of(layer, 30, 5), d_output = rows_of(layer, 30, 6);
  const Gradients want =
      run_backward(layer, hidden, d_output, nullptr, {.accumulated = 2, .d_logits = 0.5f});
  const RunSetup setup{.num_ranks = 3, .accumulated = 2, .d_logits = 0.5f, .moe = chunks_of(4)};
  expect_same(run_backward(layer, hidden, d_output, nullptr, setup), want);
}

// What one rank of two does with a layer.
struct OneRank {
  OneRank(Group& the_group, const NaiveLayer& naive, const MoeOptions& moe)
      : group(the_group), layer(make(the_group, naive, moe)), other(make(the_group, naive, moe)) {
    output = std::move(*Tensor::zeros(naive.dtype, {64, naive.hidden}));
  }
  static std::unique_ptr<MoeLayer> make(Group& group, const NaiveLayer& naive, MoeOptions options) {
    options.hidden_dtype = naive.dtype;
    options.training = true;
    return std::move(*MoeLayer::create(
        group, naive.router,
        std::move(*testing::weights_for_rank(naive, group.rank(), group.num_ranks())), options));
  }
  MoeMode fill(const ConstTensorView& x, MoeTape* tape) {
    MoeReport report;
    const Status status =
        layer->forward_train(x, nullptr, output.view().rows(0, x.dim(0)), tape, &report);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return report.mode;
  }
  static void expect_error(const Status& status, StatusCode code, const std::string& text) {
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_NE(status.message().find(text), std::string::npos) << status.to_string();
  }

  Group& group;
  std::unique_ptr<MoeLayer> layer, other;
  Tensor output;
};

// What is wrong with one rank's call is every rank's error, and the group goes on.
TEST(LatencyBackwardErrors, AreEveryRanksAndTheGroupGoesOn) {
  const NaiveLayer naive = layer_of({DType::kBF16, DotOrder::kVdpbf16, false, false});
  const Tensor input = testing::to_tensor(rows_of(naive, 12, 5), naive.dtype);
  for (const MoeOptions& moe : {latency_mode(), chunks_of(2), automatic(64)}) {
    for (const TapePolicy& policy : {TapePolicy{}, kNothing}) {
      run_group(
          2,
          [&](Group& group) {
            OneRank rank(group, naive, moe);
            const ConstTensorView x = input.view().rows(group.rank() * 6, 6);
            MoeTape tape(policy), empty(policy);
            rank.fill(x, &tape);
            const bool is_bad = group.rank() == 1;
            for (int repeat = 0; repeat < 3; ++repeat) {
              OneRank::expect_error(rank.layer->backward(is_bad ? empty : tape, x, x, {}, {}),
                                    StatusCode::kStalePlan, "rank 1: the tape is empty");
              OneRank::expect_error(rank.other->backward(tape, x, x, {}, {}),
                                    StatusCode::kStalePlan,
                                    "rank 0: the tape was filled by another layer");
              OneRank::expect_error(
                  rank.layer->backward(tape, x, is_bad ? x.rows(0, 2) : x, {}, {}),
                  StatusCode::kInvalidArgument, "rank 1: d_output is BF16 [2, 37]");
              OneRank::expect_error(
                  rank.layer->backward(tape, is_bad ? x.rows(0, 5) : x, x, {}, {}),
                  StatusCode::kInvalidArgument, "rank 1: hidden is BF16 [5, 37]");
              MoeGradients wrong;
              std::vector<float> values;
              if (is_bad) wrong.d_gate = testing::view_of(values, {9, 36});
              OneRank::expect_error(rank.layer->backward(tape, x, x, {}, wrong),
                                    StatusCode::kInvalidArgument, "rank 1: d_gate is F32 [9, 36]");
              EXPECT_TRUE(rank.layer->backward(tape, x, x, {}, {}).ok());
            }
            EXPECT_TRUE(
                rank.layer->forward(x, nullptr, rank.output.view().rows(0, 6), nullptr).ok());
            // Tapes of two calls, and different wishes.
            MoeTape older(policy);
            rank.fill(x, &older);
            rank.fill(x, &tape);
            OneRank::expect_error(rank.layer->backward(is_bad ? older : tape, x, x, {}, {}),
                                  StatusCode::kInvalidArgument, "rank 1 has \"backward of call ");
            MoeGradients reduced;
            if (is_bad) reduced.replicated = ReplicatedGradients::kReduced;
            OneRank::expect_error(rank.layer->backward(tape, x, x, {}, reduced),
                                  StatusCode::kInvalidArgument, " of layer 1, exact");
            EXPECT_TRUE(rank.layer->backward(older, x, x, {}, {}).ok());
            // A row that is not finite: named, or passed.
            std::vector<std::byte> bytes(static_cast<size_t>(6 * naive.hidden * 2));
            if (is_bad) std::fill(bytes.begin(), bytes.end(), std::byte{0xFF});
            const ConstTensorView nan(bytes.data(), naive.dtype, {6, naive.hidden});
            MoeGradients checked;
            checked.nonfinite = NonFiniteGradients::kError;
            OneRank::expect_error(rank.layer->backward(tape, x, nan, {}, checked),
                                  StatusCode::kNonFinite, "of those from rank 1) is not finite");
            EXPECT_TRUE(rank.layer->backward(tape, x, nan, {}, {}).ok());
            EXPECT_TRUE(rank.layer->backward(tape, x, x, {}, checked).ok());
            ASSERT_TRUE(group.barrier().ok());
          },
          [&](GroupOptions& options) { options.dot_order = naive.order; });
    }
  }
}

// A quantised payload is refused by name, and so is a plan of latency mode by an Exchange.
TEST(LatencyBackwardErrors, WhatIsNotThereYet) {
  const NaiveLayer naive = layer_of({DType::kBF16, DotOrder::kVdpbf16, false, false});
  const Tensor input = testing::to_tensor(rows_of(naive, 6, 5), naive.dtype);
  run_group(
      1,
      [&](Group& group) {
        MoeOptions options = latency_mode();
        options.hidden_dtype = naive.dtype;
        options.training = true;
        options.payload = BlockFormat::kMxfp8;
        OneRank::expect_error(
            MoeLayer::create(group, naive.router,
                             std::move(*testing::weights_for_rank(naive, 0, 1)), options)
                .error(),
            StatusCode::kUnsupported, "training with a quantised payload");
        OneRank rank(group, naive, latency_mode());
        MoeTape tape;
        rank.fill(input.view(), &tape);
        ExchangeOptions throughput{naive.dtype, naive.hidden, 9, 3};
        throughput.training = true;
        const std::unique_ptr<Exchange> exchange = std::move(*Exchange::create(group, throughput));
        ASSERT_TRUE(exchange->issue_reuse({}, tape.plan()).ok());
        OneRank::expect_error(exchange->wait_reuse(), StatusCode::kStalePlan, "round_rows 0");
      },
      [&](GroupOptions& options) { options.dot_order = naive.order; });
}

// The mode is chosen call by call; backward takes that of the tape, and tapes of different modes are an error on every rank.
TEST(LatencyBackwardAuto, TapesOfBothModes) {
  const NaiveLayer naive = layer_of({DType::kF32, DotOrder::kVdpbf16, true, true});
  const Matrix hidden = rows_of(naive, 40, 5), d_output = rows_of(naive, 40, 6);
  const Tensor x = testing::to_tensor(hidden, naive.dtype);
  const Tensor d = testing::to_tensor(d_output, naive.dtype);
  const Gradients want = run_backward(naive, hidden, d_output, nullptr, {.num_ranks = 2});
  MoeOptions moe = automatic(8);
  moe.chunk = false;
  run_group(
      2,
      [&](Group& group) {
        OneRank rank(group, naive, moe);
        const int64_t first = group.rank() * 20;
        const ConstTensorView mine = x.view().rows(first, 20), d_mine = d.view().rows(first, 20);
        const ConstTensorView none = mine.rows(0, 0);
        MoeTape many, zero;
        for (int step = 0; step < 2; ++step) {
          EXPECT_EQ(rank.fill(mine, &many), MoeMode::kThroughput);  // more than max_tokens
          EXPECT_EQ(rank.fill(none, &zero), MoeMode::kLatency);     // never too many
          Gradients got;
          const MoeGradients g =
              testing::make_gradients(naive, Placement{9, 2, 0}.num_local(group.rank()), 20, &got);
          ASSERT_TRUE(rank.layer->backward(many, mine, d_mine, {}, g).ok());
          EXPECT_EQ(got.gate, want.gate);
          EXPECT_EQ(got.shared_down, want.shared_down);
          EXPECT_TRUE(std::equal(got.hidden.begin(), got.hidden.end(),
                                 want.hidden.begin() + first * naive.hidden * 4));
          EXPECT_TRUE(rank.layer->backward(zero, none, none, {}, {}).ok());
          const bool is_many = group.rank() == step;
          const Status status = is_many ? rank.layer->backward(many, mine, d_mine, {}, {})
                                        : rank.layer->backward(zero, none, none, {}, {});
          OneRank::expect_error(status, StatusCode::kInvalidArgument, "\"backward of call ");
        }
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) { options.dot_order = naive.order; });
}

// Tapes in the caller's buffer give the same bits; in FP8 those of throughput mode in FP8. Products on MXFP8 operands likewise.
TEST(LatencyBackwardTape, EveryPolicyAndFormatGivesTheBitsOfThroughputMode) {
  const NaiveLayer layer = layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true});
  const Matrix hidden = rows_of(layer, 30, 5), d_output = rows_of(layer, 30, 6);
  MoeOptions throughput;
  for (const BlockFormat format : {BlockFormat::kUnset, BlockFormat::kMxfp8}) {
    throughput.training_format = format;
    for (const TapePolicy& policy : {kMixed, kAllFp8, kNothing}) {
      const Gradients want =
          run_backward(layer, hidden, d_output, nullptr, {.policy = policy, .moe = throughput});
      for (MoeOptions moe : {latency_mode(), chunks_of(4)}) {
        moe.training_format = format;
        const RunSetup setup{.num_ranks = 3, .policy = policy, .steps = 2, .moe = moe};
        expect_same(run_backward(layer, hidden, d_output, nullptr, setup), want);
      }
    }
  }
}

// forward() of a layer that trains in MXFP8: the bits of its forward_train, rows quantised on their way into the products.
TEST(LatencyBackwardTape, ForwardInMxfp8IsThatOfTraining) {
  const NaiveLayer naive = layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true});
  const Tensor input = testing::to_tensor(rows_of(naive, 12, 5), naive.dtype);
  for (MoeOptions moe : {latency_mode(), chunks_of(4)}) {
    moe.training_format = BlockFormat::kMxfp8;
    run_group(
        2,
        [&](Group& group) {
          OneRank rank(group, naive, moe);
          const ConstTensorView x = input.view().rows(group.rank() * 6, 6);
          MoeTape tape;
          rank.fill(x, &tape);
          const std::vector<std::byte> kept(rank.output.bytes().begin(), rank.output.bytes().end());
          std::fill_n(rank.output.view().data, kept.size(), std::byte{0x55});
          ASSERT_TRUE(rank.layer->forward(x, nullptr, rank.output.view().rows(0, 6), nullptr).ok());
          EXPECT_TRUE(std::equal(kept.begin(), kept.begin() + 6 * naive.hidden * 2,
                                 rank.output.bytes().begin()));
          ASSERT_TRUE(group.barrier().ok());
        },
        [&](GroupOptions& options) { options.dot_order = naive.order; });
  }
}

TEST(LatencyBackwardTape, SizesAreWhatWasPredicted) {
  const NaiveLayer naive = layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true});
  const Tensor input = testing::to_tensor(rows_of(naive, 40, 5), naive.dtype);
  MoeOptions in_mxfp8 = chunks_of(3);
  in_mxfp8.training_format = BlockFormat::kMxfp8;
  for (const MoeOptions& moe : {latency_mode(), chunks_of(3), in_mxfp8}) {
    for (const TapePolicy& policy :
         {TapePolicy{}, kNothing, kAllFp8, TapePolicy{Keep::kSave, kAgain, Keep::kSave, kAgain}}) {
      run_group(
          2,
          [&](Group& group) {
            OneRank rank(group, naive, moe);
            MoeTape tape(policy);
            const ConstTensorView x = input.view().rows(group.rank() * 20, 20);
            rank.fill(x, &tape);
            Gradients mine;
            ASSERT_TRUE(
                rank.layer
                    ->backward(tape, x, x, {},
                               testing::make_gradients(
                                   naive, Placement{9, 2, 0}.num_local(group.rank()), 20, &mine))
                    .ok());
            const DispatchPlan& plan = tape.plan();
            TapeShape shape = rank.layer->tape_shape();
            shape.num_tokens = 20;
            shape.global_tokens = 40;
            shape.num_slots = plan.receive_slots[static_cast<size_t>(group.rank())];
            shape.num_calls = moe.chunk ? 7 : 1;
            shape.call_slots = tape.shape().call_slots;
            EXPECT_EQ(plan.group_offsets.back(), shape.num_slots);
            EXPECT_EQ(plan.topk_idx, tape.routing().topk_idx);
            const TapeSize size = size_tape(policy, shape);
            EXPECT_EQ(tape.num_bytes(), size.tape_bytes) << to_string(policy);
            EXPECT_EQ(rank.layer->memory().forward_bytes, size.forward_bytes) << to_string(policy);
            EXPECT_EQ(rank.layer->memory().backward_bytes, size.backward_bytes);
            ASSERT_TRUE(group.barrier().ok());
          },
          [&](GroupOptions& options) { options.dot_order = naive.order; });
    }
  }
}

// Known only when the rows are there: an error on every rank, and the group goes on.
TEST(LatencyBackwardTape, OneThatIsTooSmallIsEveryRanksError) {
  const NaiveLayer naive = layer_of({DType::kBF16, DotOrder::kVdpbf16, false, false});
  const Tensor input = testing::to_tensor(rows_of(naive, 12, 5), naive.dtype);
  for (const MoeOptions& moe : {latency_mode(), chunks_of(2)}) {
    run_group(
        2,
        [&](Group& group) {
          OneRank rank(group, naive, moe);
          const ConstTensorView x = input.view().rows(group.rank() * 6, 6);
          alignas(64) std::array<std::byte, 65536> arena;
          const bool is_bad = group.rank() == 1;
          MoeTape tape(kMixed), again(kNothing);
          tape.set_offload(std::span(arena).first(is_bad ? 64 : arena.size()));
          const auto forward = [&](MoeTape* used) {
            return rank.layer->forward_train(x, nullptr, rank.output.view().rows(0, 6), used,
                                             nullptr);
          };
          OneRank::expect_error(forward(&tape), StatusCode::kCapacity,
                                "rank 1: the tape's offload buffer has 64 bytes");
          tape.set_offload(arena);
          OneRank::expect_error(forward(is_bad ? &again : &tape), StatusCode::kInvalidArgument,
                                "rank 1 has \"a tape with rows recompute,");
          OneRank::expect_error(rank.layer->backward(tape, x, x, {}, {}), StatusCode::kStalePlan,
                                "the tape is empty");
          EXPECT_TRUE(forward(&tape).ok());
          EXPECT_TRUE(rank.layer->backward(tape, x, x, {}, {}).ok());
          ASSERT_TRUE(group.barrier().ok());
        },
        [&](GroupOptions& options) { options.dot_order = naive.order; });
  }
}

// Against a sort by expert, source and token.
TEST(RowOrder, IsThatOfOneCall) {
  struct Row {
    int64_t expert, source, token;
    auto operator<=>(const Row&) const = default;
  };
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    const auto draw = [&](int64_t count) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(count));
    };
    const int64_t num_local = draw(4);
    const int num_ranks = 1 + static_cast<int>(draw(3));
    std::vector<Row> rows, sorted;
    std::vector<int64_t> counts;
    for (int64_t call = 0; call < 1 + draw(5); ++call) {
      for (int64_t expert = 0; expert < num_local; ++expert) {
        for (int source = 0; source < num_ranks; ++source) {
          counts.push_back(draw(4));
          for (int64_t i = 0; i < counts.back(); ++i) {
            rows.push_back({expert, source, call * 100 + i});
          }
        }
      }
    }
    sorted = rows;
    std::sort(sorted.begin(), sorted.end());
    std::vector<int64_t> place_of;
    order_rows(counts, num_local, num_ranks, &place_of);
    ASSERT_EQ(place_of.size(), rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_TRUE(sorted[static_cast<size_t>(place_of[i])] == rows[i]);
    }
    move_rows(place_of, sizeof(Row), reinterpret_cast<std::byte*>(rows.data()));
    ASSERT_TRUE(rows == sorted);
  }
}

}  // namespace
}  // namespace argosy
