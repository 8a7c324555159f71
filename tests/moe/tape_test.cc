// Tapes: what is kept in FP8 gives the same bits in any setup and gradients near the exact ones; what lies in the caller's
// buffer gives the exact ones; sizes are what was predicted, for every policy; errors come to every rank.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>

#include "moe/training_step.h"
#include "support/alloc_counter.h"

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

constexpr TapePolicy kAllFp8{Keep::kFp8, Keep::kFp8, Keep::kFp8, Keep::kFp8};
constexpr TapePolicy kAllOffload{Keep::kOffload, Keep::kOffload, Keep::kOffload, Keep::kOffload};
constexpr std::array kKeeps{Keep::kSave, Keep::kRecompute, Keep::kFp8, Keep::kOffload};

NaiveLayer bf16_layer() { return layer_of({DType::kBF16, DotOrder::kVdpbf16, true, true}); }

TEST(TapePolicy, NamesAreReadBack) {
  for (const Keep keep : kKeeps) {
    const Result<Keep> parsed = parse_keep(name_of(keep));
    ASSERT_TRUE(parsed.has_value());
    EXPECT_EQ(*parsed, keep);
  }
  EXPECT_EQ(parse_keep("fp9").error().code(), StatusCode::kNotFound);
  EXPECT_EQ(to_string(TapePolicy{Keep::kFp8, Keep::kSave, Keep::kRecompute, Keep::kOffload}),
            "rows fp8, preactivation save, h recompute, results offload");
}

void expect_same(Gradients got, const Gradients& want, const TapePolicy& policy) {
  EXPECT_NEAR(got.norm, want.norm, 1e-9 * want.norm);  // added rank by rank
  got.norm = want.norm;
  EXPECT_TRUE(got == want) << to_string(policy);
}

TEST(TapeFp8, BitsAreTheSameForAnySetup) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const NaiveLayer layer = layer_of({dtype, DotOrder::kVdpbf16, true, true});
    const Matrix hidden = rows_of(layer, 45, 5), d_output = rows_of(layer, 45, 6);
    for (const TapePolicy& policy :
         {kAllFp8, TapePolicy{Keep::kFp8, Keep::kRecompute, Keep::kRecompute, Keep::kRecompute},
          TapePolicy{Keep::kRecompute, Keep::kFp8, Keep::kRecompute, Keep::kFp8}}) {
      const Gradients want = run_backward(layer, hidden, d_output, nullptr, {.policy = policy});
      for (const RunSetup& setup :
           {RunSetup{.num_ranks = 3, .threads = 2, .policy = policy, .steps = 2},
            RunSetup{.num_ranks = 4, .budget_rows = 7, .policy = policy},
            RunSetup{.num_ranks = 2, .budget_rows = 12, .alignment = 4, .policy = policy},
            RunSetup{.num_ranks = 1, .level = Level::kReference, .policy = policy}}) {
        expect_same(run_backward(layer, hidden, d_output, nullptr, setup), want, policy);
      }
    }
  }
}

double error_of(const std::vector<float>& got, const std::vector<float>& want) {
  double peak = 0, error = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    peak = std::max(peak, std::abs(static_cast<double>(want[i])));
    error = std::max(error, std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i])));
  }
  return error / peak;
}

// e4m3 has 4 bits: a kept value is within 1/16 of itself (or 2^-18 of its block's peak), and a gradient within 1/16 of its
// peak. What a gradient does not read leaves its bits alone.
TEST(TapeFp8, GradientsAreNearThoseOfWhatIsKeptAsItIs) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const NaiveLayer layer = layer_of({dtype, DotOrder::kVdpbf16, true, true});
    const Matrix hidden = rows_of(layer, 200, 5), d_output = rows_of(layer, 200, 6);
    const Gradients want = run_backward(layer, hidden, d_output, nullptr, {});
    const auto with = [&](const TapePolicy& policy) {
      return run_backward(layer, hidden, d_output, nullptr, {.policy = policy});
    };
    const Gradients rows = with({.rows = Keep::kFp8});
    EXPECT_EQ(rows.expert_down, want.expert_down);
    EXPECT_TRUE(rows.hidden == want.hidden);
    EXPECT_NE(rows.expert_gate, want.expert_gate);
    const Gradients h = with({.h = Keep::kFp8});
    EXPECT_EQ(h.expert_gate, want.expert_gate);
    EXPECT_NE(h.expert_down, want.expert_down);
    const Gradients results = with({.results = Keep::kFp8});
    EXPECT_EQ(results.expert_gate, want.expert_gate);
    EXPECT_EQ(results.expert_down, want.expert_down);
    EXPECT_NE(results.topk_weights, want.topk_weights);
    const Gradients all = with(kAllFp8);
    for (const auto member :
         {&Gradients::expert_gate, &Gradients::expert_up, &Gradients::expert_down,
          &Gradients::topk_weights, &Gradients::gate}) {
      EXPECT_LT(error_of(all.*member, want.*member), 1.0 / 16);
    }
  }
}

TEST(TapeOffload, GivesTheBitsOfSave) {
  const NaiveLayer layer = bf16_layer();
  const Matrix hidden = rows_of(layer, 45, 5), d_output = rows_of(layer, 45, 6);
  const Gradients want = run_backward(layer, hidden, d_output, nullptr, {});
  const TapePolicy mixed{Keep::kOffload, Keep::kRecompute, Keep::kOffload, Keep::kSave};
  for (const RunSetup& setup : {RunSetup{.num_ranks = 1, .policy = kAllOffload},
                                RunSetup{.num_ranks = 3, .policy = kAllOffload, .steps = 2},
                                RunSetup{.num_ranks = 4, .budget_rows = 7, .policy = mixed}}) {
    expect_same(run_backward(layer, hidden, d_output, nullptr, setup), want, setup.policy);
  }
}

class OneLayer {
 public:
  OneLayer(Group& group, const NaiveLayer& layer, int64_t budget_rows,
           BlockFormat format = BlockFormat::kUnset) {
    MoeOptions options;
    options.hidden_dtype = layer.dtype;
    options.training = true;
    options.weights_inside = layer.weights_inside;
    options.training_format = format;
    options.group_alignment = 4;
    options.receive_budget_bytes = budget_rows * layer.hidden * size_of(layer.dtype);
    moe = std::move(*MoeLayer::create(
        group, layer.router,
        std::move(*testing::weights_for_rank(layer, group.rank(), group.num_ranks())), options));
  }
  std::unique_ptr<MoeLayer> moe;
};

// One step on `tokens` tokens, all gradients asked for.
void run_step(MoeLayer& moe, const NaiveLayer& layer, Group& group, const Tensor& input,
              int64_t tokens, ReplicatedGradients replicated, MoeTape* tape) {
  const Placement placement{static_cast<int64_t>(layer.experts.size()), group.num_ranks(), 0};
  Gradients mine;
  MoeGradients g = testing::make_gradients(layer, placement.num_local(group.rank()), tokens, &mine);
  g.replicated = replicated;
  const ConstTensorView x = input.view().rows(0, tokens);
  std::vector<std::byte> output(static_cast<size_t>(tokens * layer.hidden * size_of(layer.dtype)));
  const TensorView out(output.data(), layer.dtype, {tokens, layer.hidden});
  const Status forward = moe.forward_train(x, nullptr, out, tape, nullptr);
  ASSERT_TRUE(forward.ok()) << forward.to_string();
  const Status backward = moe.backward(*tape, x, x, {}, g);
  ASSERT_TRUE(backward.ok()) << backward.to_string();
}

struct SizeCase {
  int num_ranks = 1;
  bool shared = false;
  int64_t budget_rows = 100000;
  ReplicatedGradients replicated = ReplicatedGradients::kExact;
  bool weights_inside = false;
  BlockFormat format = BlockFormat::kUnset;
};

class TapeSizes : public ::testing::TestWithParam<SizeCase> {};

// Every policy of every tensor. Tokens lie unevenly: rank r has r * 7 more than 11.
TEST_P(TapeSizes, AreWhatWasPredicted) {
  const SizeCase& param = GetParam();
  NaiveLayer layer = layer_of({DType::kBF16, DotOrder::kVdpbf16, param.shared, param.shared});
  layer.weights_inside = param.weights_inside;
  const Tensor input = testing::to_tensor(rows_of(layer, 60, 5), layer.dtype);
  run_group(param.num_ranks, [&](Group& group) {
    const int64_t tokens = 11 + 7 * group.rank();
    alignas(64) std::array<std::byte, 65536> arena;
    for (size_t at = 0; at < 256; ++at) {
      const TapePolicy policy{kKeeps[at % 4], kKeeps[at / 4 % 4], kKeeps[at / 16 % 4],
                              kKeeps[at / 64]};
      const OneLayer fresh(group, layer, param.budget_rows, param.format);
      MoeTape tape(policy);
      tape.set_offload(arena);
      run_step(*fresh.moe, layer, group, input, tokens, param.replicated, &tape);
      TapeShape shape = fresh.moe->tape_shape();
      shape.replicated = param.replicated;
      shape.num_tokens = tokens;
      for (int rank = 0; rank < param.num_ranks; ++rank) shape.global_tokens += 11 + 7 * rank;
      shape.num_slots = tape.plan().receive_slots[static_cast<size_t>(group.rank())];
      shape.num_rounds = tape.plan().num_rounds;
      const TapeSize size = size_tape(policy, shape);
      EXPECT_EQ(tape.num_bytes(), size.tape_bytes) << to_string(policy);
      const MoeMemory held = fresh.moe->memory();
      EXPECT_EQ(held.forward_bytes, size.forward_bytes) << to_string(policy);
      EXPECT_EQ(held.backward_bytes, size.backward_bytes) << to_string(policy);
      EXPECT_EQ(held.exchange_bytes, size.exchange_bytes) << to_string(policy);
      ASSERT_TRUE(group.barrier().ok());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Cases, TapeSizes,
    ::testing::Values(SizeCase{1, false}, SizeCase{1, true}, SizeCase{3, true},
                      SizeCase{3, false, 24},
                      SizeCase{.num_ranks = 3, .budget_rows = 24, .weights_inside = true},
                      SizeCase{3, true, 100000, ReplicatedGradients::kReduced},
                      SizeCase{.num_ranks = 2, .budget_rows = 24, .format = BlockFormat::kMxfp8}));

// Asked of the heap: nothing is held that the prediction does not name.
TEST(TapeSizes, AreWhatTheHeapGave) {
  if (!testing::is_counting_allocations()) GTEST_SKIP() << "the sanitizer owns the heap";
  const NaiveLayer layer = bf16_layer();
  const Tensor input = testing::to_tensor(rows_of(layer, 60, 5), layer.dtype);
  std::atomic<int64_t> predicted{0};
  const auto run_all = [&](const TapePolicy& policy, BlockFormat format = BlockFormat::kUnset) {
    int64_t given = 0;
    predicted = 0;
    run_group(3, [&](Group& group) {
      const int64_t tokens = 11 + 7 * group.rank();
      alignas(64) std::array<std::byte, 65536> arena;
      const auto step = [&](MoeLayer& moe, MoeTape* tape) {
        tape->set_offload(arena);
        run_step(moe, layer, group, input, tokens, ReplicatedGradients::kExact, tape);
      };
      // What threads keep for products grows here.
      const OneLayer first(group, layer, 24, format), second(group, layer, 24, format);
      MoeTape warm(policy), tape(policy);
      step(*first.moe, &warm);
      ASSERT_TRUE(group.barrier().ok());
      const int64_t before = testing::num_aligned_bytes();
      ASSERT_TRUE(group.barrier().ok());
      step(*second.moe, &tape);
      ASSERT_TRUE(group.barrier().ok());
      if (group.rank() == 0) given = testing::num_aligned_bytes() - before;
      const TapeSize size = size_tape(policy, tape.shape());
      // Rows of the gate product, widened to fp32.
      const int64_t wide = (tokens * layer.hidden * 4 + 63) / 64 * 64;
      predicted +=
          size.tape_bytes + size.forward_bytes + size.backward_bytes + size.exchange_bytes + wide;
      ASSERT_TRUE(group.barrier().ok());
    });
    EXPECT_EQ(given, predicted) << to_string(policy);
  };
  run_all({});
  run_all(kAllFp8);
  run_all(kAllOffload);
  run_all({Keep::kRecompute, Keep::kRecompute, Keep::kRecompute, Keep::kRecompute});
  run_all({}, BlockFormat::kMxfp8);
  run_all({.preactivation = Keep::kRecompute}, BlockFormat::kMxfp8);
}

// Every rank hears of it before a row moves, and the group goes on.
TEST(TapeOffload, TooSmallOnOneRankIsEveryRanksError) {
  const NaiveLayer layer = bf16_layer();
  const Tensor input = testing::to_tensor(rows_of(layer, 60, 5), layer.dtype);
  run_group(3, [&](Group& group) {
    const OneLayer fresh(group, layer, 100000);
    alignas(64) std::array<std::byte, 65536> arena;
    const int64_t tokens = 11 + 7 * group.rank();
    const ConstTensorView x = input.view().rows(0, tokens);
    Tensor output = std::move(*Tensor::zeros(layer.dtype, {tokens, layer.hidden}));
    MoeTape tape(kAllOffload);
    const auto expect_error = [&](std::span<std::byte> mine, MoeTape* used, StatusCode code,
                                  const std::string& text) {
      used->set_offload(mine);
      const Status status = fresh.moe->forward_train(x, nullptr, output.view(), used, nullptr);
      EXPECT_EQ(status.code(), code) << status.to_string();
      EXPECT_NE(status.message().find(text), std::string::npos) << status.to_string();
    };
    tape.set_offload(arena);
    run_step(*fresh.moe, layer, group, input, tokens, ReplicatedGradients::kExact, &tape);
    TapeShape shape = tape.shape();
    const auto need = static_cast<size_t>(size_tape(kAllOffload, shape).offload_bytes);
    // The others name rank 1's numbers.
    std::array<int64_t, 3> slots{};
    std::copy_n(tape.plan().receive_slots.begin(), 3, slots.begin());
    shape.num_slots = slots[1];
    const int64_t need_1 = size_tape(kAllOffload, shape).offload_bytes;
    const std::span<std::byte> all(arena);
    expect_error(group.rank() == 1 ? all.first(need - 1) : all, &tape, StatusCode::kCapacity,
                 fmt::format("rank 1: the tape's offload buffer has {} bytes, {} slots of received "
                             "rows need {}",
                             need_1 - 1, slots[1], need_1));
    expect_error(group.rank() == 2 ? all.subspan(8) : all, &tape, StatusCode::kInvalidArgument,
                 "rank 2: the tape's offload buffer starts 8 bytes past a multiple of 64");
    MoeTape other({.h = Keep::kRecompute});
    expect_error(all, group.rank() == 2 ? &other : &tape, StatusCode::kInvalidArgument,
                 "rank 2 has \"a tape with rows save, preactivation save, h recompute, results "
                 "save\", rank 0 \"a tape with rows offload,");
    // Exactly what is needed is enough.
    tape.set_offload(all.first(need));
    EXPECT_TRUE(fresh.moe->forward_train(x, nullptr, output.view(), &tape, nullptr).ok());
    EXPECT_TRUE(fresh.moe->backward(tape, x, x, {}, {}).ok());
    ASSERT_TRUE(group.barrier().ok());
  });
}

// NaN in one token's gradient of the output: an error of every rank that names a row of one of its experts, or gradients as
// they come; the group goes on.
TEST(NonFinite, IsReportedOrPassesAsTheCallerChose) {
  const NaiveLayer layer = bf16_layer();
  const Tensor input = testing::to_tensor(rows_of(layer, 60, 5), layer.dtype);
  for (const int64_t budget_rows : {100000, 24}) {
    run_group(3, [&](Group& group) {
      const OneLayer fresh(group, layer, budget_rows);
      const ConstTensorView x = input.view().rows(20 * group.rank(), 20);
      Tensor output = std::move(*Tensor::zeros(layer.dtype, {20, layer.hidden}));
      Tensor d_output = std::move(*Tensor::zeros(layer.dtype, {20, layer.hidden}));
      std::memcpy(d_output.view().data, x.data, static_cast<size_t>(d_output.num_bytes()));
      if (group.rank() == 1) d_output.view().as<BFloat16>()[7 * layer.hidden] = BFloat16{0x7F80};
      MoeTape tape;
      ASSERT_TRUE(fresh.moe->forward_train(x, nullptr, output.view(), &tape, nullptr).ok());
      std::vector<float> d_gate;
      MoeGradients g;
      g.d_gate = testing::view_of(d_gate, {9, layer.hidden});
      EXPECT_TRUE(fresh.moe->backward(tape, x, std::as_const(d_output).view(), {}, g).ok());
      EXPECT_TRUE(std::any_of(d_gate.begin(), d_gate.end(),
                              [](float value) { return !std::isfinite(value); }));
      g.nonfinite = NonFiniteGradients::kError;
      const Status status = fresh.moe->backward(tape, x, std::as_const(d_output).view(), {}, g);
      EXPECT_EQ(status.code(), StatusCode::kNonFinite) << status.to_string();
      // The lowest expert of token 7 of rank 1 is the first one on the lowest rank.
      if (group.rank() == 1) {
        const std::vector<int32_t>& ids = tape.routing().topk_idx;
        const int32_t expert = *std::min_element(ids.begin() + 21, ids.begin() + 24);
        int64_t row = 0;
        for (size_t at = 0; at < 21; ++at) row += ids[at] == expert ? 1 : 0;
        const std::string want = fmt::format("the gradient of expert {}'s row ", expert);
        const std::string place = fmt::format("(row {} of those from rank 1) is not finite", row);
        EXPECT_NE(status.message().find(want), std::string::npos) << status.to_string() << want;
        EXPECT_NE(status.message().find(place), std::string::npos) << status.to_string() << place;
      }
      EXPECT_TRUE(fresh.moe->backward(tape, x, x, {}, g).ok());
      ASSERT_TRUE(group.barrier().ok());
    });
  }
}

// Ranks that would wait for each other in different places are told apart before anything moves.
TEST(Backward, RanksThatAskForDifferentThingsAreTold) {
  const NaiveLayer layer = bf16_layer();
  const Tensor input = testing::to_tensor(rows_of(layer, 60, 5), layer.dtype);
  run_group(2, [&](Group& group) {
    const OneLayer fresh(group, layer, 100000);
    const ConstTensorView x = input.view().rows(20 * group.rank(), 20);
    Tensor output = std::move(*Tensor::zeros(layer.dtype, {20, layer.hidden}));
    MoeTape first, second;
    for (MoeTape* const tape : {&first, &second}) {
      ASSERT_TRUE(fresh.moe->forward_train(x, nullptr, output.view(), tape, nullptr).ok());
    }
    const bool is_other = group.rank() == 1;
    const auto expect_error = [&](const MoeTape& tape, const MoeGradients& g, const char* text) {
      const Status status = fresh.moe->backward(tape, x, x, {}, g);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
      EXPECT_NE(status.message().find(text), std::string::npos) << status.to_string();
    };
    expect_error(is_other ? second : first, {}, "rank 1 has \"backward of call ");
    std::vector<float> d_gate;
    MoeGradients g;
    if (is_other) g.d_gate = testing::view_of(d_gate, {9, layer.hidden});
    expect_error(first, g, "non-finite pass, for d_gate\", rank 0");
    EXPECT_TRUE(fresh.moe->backward(first, x, x, {}, {}).ok());
    ASSERT_TRUE(group.barrier().ok());
  });
}

// A plan of another group, rank, epoch or shape: kStalePlan on every rank, and the exchange goes on.
TEST(Backward, PlansOfAnotherGroupShapeOrEpochAreRefused) {
  run_group(2, [&](Group& group) {
    ExchangeOptions options;
    options.dtype = DType::kF32;
    options.hidden = 4;
    options.num_experts = 3;
    options.top_k = 1;
    options.training = true;
    const std::unique_ptr<Exchange> exchange = std::move(*Exchange::create(group, options));
    Routing routing;
    routing.num_tokens = routing.num_valid_tokens = 2;
    routing.num_experts = 3;
    routing.top_k = 1;
    routing.topk_idx = {0, 2};
    routing.counts = {1, 0, 1};
    routing.topk_weights.values = {1, 1};
    CountsMatrix counts;
    DispatchPlan plan;
    ASSERT_TRUE(exchange->issue_counts({}, routing).ok());
    ASSERT_TRUE(exchange->wait_counts(&counts).ok());
    ASSERT_TRUE(exchange->plan(routing, counts, &plan).ok());
    const auto expect_stale = [&](const char* field, auto change) {
      DispatchPlan other = plan;
      if (group.rank() == 1) change(other);
      ASSERT_TRUE(exchange->issue_reuse({}, other).ok());
      const Status status = exchange->wait_reuse();
      EXPECT_EQ(status.code(), StatusCode::kStalePlan) << field << status.to_string();
      EXPECT_NE(status.message().find(field), std::string::npos) << status.to_string();
    };
    expect_stale("group", [](DispatchPlan& p) { ++p.group_id; });
    expect_stale("epoch", [](DispatchPlan& p) { ++p.placement_epoch; });
    expect_stale("num_experts", [](DispatchPlan& p) { ++p.num_experts; });
    expect_stale("top_k", [](DispatchPlan& p) { ++p.top_k; });
    expect_stale("round_rows", [](DispatchPlan& p) { ++p.round_rows; });
    ASSERT_TRUE(exchange->issue_reuse({}, plan).ok());
    EXPECT_TRUE(exchange->wait_reuse().ok());
    ASSERT_TRUE(group.barrier().ok());
  });
}

}  // namespace
}  // namespace argosy
