// Training in MXFP8 against a layer written here token by token and block by block: output and all
// gradients bit for bit, for any ranks, threads, levels, receive rounds and tape policies; what is
// refused.
//
// Mutations tried, each makes a test fail: d_gate's codes where d_up's belong, the codes past each operand's end left over, the
// codes of one x used for another.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "argosy/gemm_backward.h"
#include "argosy/moe.h"
#include "argosy/quantise.h"
#include "argosy/router_backward.h"
#include "moe/backward.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::Matrix;
using testing::NaiveExpert;
using testing::NaiveLayer;
using testing::run_group;
using Values = std::vector<float>;

// A vector in blocks of 32: the codes' values and their scales.
struct Blocks {
  Values codes, scales;
};

Blocks blocks_of(BlockFormat format, const Values& values) {
  const auto n = static_cast<int64_t>(values.size());
  if (n == 0) return {};
  const Tensor row = testing::to_tensor({1, n, values}, DType::kBF16);
  QuantisedTensor made =
      std::move(QuantisedTensor::create(quantised_layout(format, 1, n).value())).value();
  EXPECT_TRUE(quantise({}, row.view(), made.view()).ok());
  Blocks blocks;
  const ConstQuantisedView view = std::as_const(made).view();
  for (int64_t i = 0; i < n; ++i) {
    blocks.codes.push_back(decode_element(ElementFormat::kE4M3, view.codes.as<uint8_t>()[i]));
  }
  for (int64_t i = 0; i < view.scales.num_elements(); ++i) {
    blocks.scales.push_back(decode_e8m0(view.scales.as<uint8_t>()[i]));
  }
  return blocks;
}

// acc goes on over the blocks of both, which are as long.
float add_blocks(DotOrder order, const Blocks& a, const Blocks& b, float acc) {
  for (size_t block = 0; block < a.scales.size(); ++block) {
    std::vector<BFloat16> x, y;
    for (size_t i = 32 * block; i < std::min(32 * block + 32, a.codes.size()); ++i) {
      x.push_back(BFloat16::from_float(a.codes[i]));
      y.push_back(BFloat16::from_float(b.codes[i]));
    }
    const float partial =
        order == DotOrder::kAmx ? numeric::dot_amx(x, y) : numeric::dot_vdpbf16(x, y);
    acc = std::fma(partial, a.scales[block] * b.scales[block], acc);
  }
  return acc;
}

float dot_blocks(DotOrder order, const Blocks& a, const Blocks& b) {
  return add_blocks(order, a, b, 0.0f) + 0.0f;
}

Values row_of(const Matrix& matrix, int64_t row) {
  return {matrix.row(row), matrix.row(row) + matrix.columns};
}
Values column_of(const Matrix& matrix, int64_t column) {
  Values values;
  for (int64_t row = 0; row < matrix.rows; ++row) values.push_back(matrix.row(row)[column]);
  return values;
}
Values rounded(Values values) {
  for (float& value : values) value = BFloat16::from_float(value).to_float();
  return values;
}

struct NaiveGradients {
  std::vector<BFloat16> output, hidden;
  Values topk_weights, gate, expert_gate, expert_up, expert_down;
};

// What an expert keeps of its rows, in global token order.
struct ExpertRows {
  std::vector<Values> x, h, d_row, d_gate, d_up;
};

class NaiveTraining {
 public:
  NaiveTraining(const NaiveLayer& layer, BlockFormat format) : layer_(layer), format_(format) {}

  NaiveGradients run(const Matrix& hidden, const Matrix& d_output) {
    const int64_t num_experts = layer_.router.num_experts, top_k = layer_.router.top_k;
    const int64_t tokens = hidden.rows, h = layer_.hidden;
    Matrix logits{tokens, num_experts, {}};
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t e = 0; e < num_experts; ++e) {
        logits.values.push_back(numeric::dot_f32(row_of(hidden, token),
                                                 std::span<const float>(row_of(layer_.gate, e))));
      }
    }
    RouterInput input;
    input.logits = ConstTensorView(logits.values.data(), DType::kF32, {tokens, num_experts});
    input.selection_bias =
        ConstTensorView(layer_.selection_bias.data(), DType::kF32, {num_experts});
    Routing routing;
    EXPECT_TRUE(route(layer_.router, input, nullptr, &routing).ok());
    NaiveGradients out;
    rows_.resize(static_cast<size_t>(num_experts));
    std::vector<Values> returned(static_cast<size_t>(tokens * top_k));
    for (int64_t token = 0; token < tokens; ++token) {
      Values sum(static_cast<size_t>(h), 0.0f);
      for (int64_t k = 0; k < top_k; ++k) {
        const auto at = static_cast<size_t>(token * top_k + k);
        const auto e = static_cast<size_t>(routing.topk_idx[at]);
        const float weight = routing.topk_weights.values[at];
        const Values result = forward(e, row_of(hidden, token));
        for (size_t i = 0; i < sum.size(); ++i) sum[i] = std::fma(weight, result[i], sum[i]);
        returned[at] = backward(e, row_of(d_output, token), weight, result, &out);
      }
      for (const float value : sum) out.output.push_back(BFloat16::from_float(value));
    }
    weight_gradients(&out);
    // The router's part, by functions that have twins of their own.
    Values d_logits(static_cast<size_t>(tokens * num_experts));
    const TensorView d_logits_view(d_logits.data(), DType::kF32, {tokens, num_experts});
    EXPECT_TRUE(
        route_backward(layer_.router, input, routing,
                       ConstTensorView(out.topk_weights.data(), DType::kF32, {tokens, top_k}),
                       GradientMode::kWrite, nullptr, d_logits_view)
            .ok());
    Values gate_part(static_cast<size_t>(tokens * h));
    out.gate.resize(static_cast<size_t>(num_experts * h));
    GateGradients gate;
    gate.d_hidden = TensorView(gate_part.data(), DType::kF32, {tokens, h});
    gate.d_gate = TensorView(out.gate.data(), DType::kF32, {num_experts, h});
    const Tensor x = testing::to_tensor(hidden, DType::kBF16);
    const Tensor w = testing::to_tensor(layer_.gate, DType::kBF16);
    EXPECT_TRUE(gate_backward(x.view(), w.view(), d_logits_view, nullptr, gate).ok());
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t i = 0; i < h; ++i) {
        float sum = 0;
        for (int64_t k = 0; k < top_k; ++k) {
          sum += returned[static_cast<size_t>(token * top_k + k)][static_cast<size_t>(i)];
        }
        out.hidden.push_back(
            BFloat16::from_float(sum + gate_part[static_cast<size_t>(token * h + i)]));
      }
    }
    return out;
  }

 private:
  Values forward(size_t e, const Values& x) {
    const NaiveExpert& expert = layer_.experts[e];
    const Blocks blocks = blocks_of(format_, x);
    gate_.clear();
    up_.clear();
    Values inner;
    for (int64_t i = 0; i < layer_.intermediate; ++i) {
      gate_.push_back(dot_blocks(layer_.order, blocks, blocks_of(format_, row_of(expert.gate, i))));
      up_.push_back(dot_blocks(layer_.order, blocks, blocks_of(format_, row_of(expert.up, i))));
      inner.push_back(testing::naive_activation(layer_.activation, gate_.back(), up_.back(), 1.0f));
    }
    inner = rounded(inner);
    rows_[e].x.push_back(x);
    rows_[e].h.push_back(inner);
    const Blocks inner_blocks = blocks_of(format_, inner);
    Values result;
    for (int64_t i = 0; i < layer_.hidden; ++i) {
      result.push_back(
          dot_blocks(layer_.order, inner_blocks, blocks_of(format_, row_of(expert.down, i))));
    }
    return rounded(result);
  }

  // Right after forward() of the same row.
  Values backward(size_t e, const Values& d_out, float weight, const Values& result,
                  NaiveGradients* out) {
    const NaiveExpert& expert = layer_.experts[e];
    const int64_t h = layer_.hidden, f = layer_.intermediate;
    const Tensor d = testing::to_tensor({1, h, d_out}, DType::kBF16);
    const Tensor r = testing::to_tensor({1, h, result}, DType::kBF16);
    out->topk_weights.push_back(
        static_cast<float>(dot_rows(DType::kBF16, d.view().data, r.view().data, h)));
    Values d_row = d_out;
    for (float& value : d_row) value *= weight;
    d_row = rounded(d_row);
    const Blocks d_blocks = blocks_of(format_, d_row);
    Values d_h;
    for (int64_t i = 0; i < f; ++i) {
      d_h.push_back(
          dot_blocks(layer_.order, d_blocks, blocks_of(format_, column_of(expert.down, i))));
    }
    const std::vector<int64_t> offsets = {0}, sizes = {1};
    Values d_gate(d_h.size()), d_up(d_h.size());
    const auto view = [&](Values& values) {
      return TensorView(values.data(), DType::kF32, {1, f});
    };
    EXPECT_TRUE(activation_backward({.activation = layer_.activation},
                                    {view(gate_), view(up_), offsets, sizes, {}}, view(d_h),
                                    {view(d_gate), view(d_up), {}, {}})
                    .ok());
    d_gate = rounded(d_gate);
    d_up = rounded(d_up);
    rows_[e].d_row.push_back(d_row);
    rows_[e].d_gate.push_back(d_gate);
    rows_[e].d_up.push_back(d_up);
    const Blocks gate_blocks = blocks_of(format_, d_gate), up_blocks = blocks_of(format_, d_up);
    Values d_x;
    for (int64_t i = 0; i < h; ++i) {
      const float acc = add_blocks(layer_.order, gate_blocks,
                                   blocks_of(format_, column_of(expert.gate, i)), 0.0f);
      d_x.push_back(
          add_blocks(layer_.order, up_blocks, blocks_of(format_, column_of(expert.up, i)), acc) +
          0.0f);
    }
    return rounded(d_x);
  }

  void weight_gradients(NaiveGradients* out) const {
    for (const ExpertRows& rows : rows_) {
      append(rows.d_gate, rows.x, layer_.intermediate, layer_.hidden, &out->expert_gate);
      append(rows.d_up, rows.x, layer_.intermediate, layer_.hidden, &out->expert_up);
      append(rows.d_row, rows.h, layer_.hidden, layer_.intermediate, &out->expert_down);
    }
  }

  void append(const std::vector<Values>& d_y, const std::vector<Values>& x, int64_t n, int64_t k,
              Values* out) const {
    const auto columns = [&](const std::vector<Values>& rows, int64_t width) {
      std::vector<Blocks> blocks;
      for (int64_t c = 0; c < width; ++c) {
        Values values;
        for (const Values& row : rows) values.push_back(row[static_cast<size_t>(c)]);
        blocks.push_back(blocks_of(format_, values));
      }
      return blocks;
    };
    const std::vector<Blocks> left = columns(d_y, n), right = columns(x, k);
    for (const Blocks& a : left) {
      for (const Blocks& b : right) out->push_back(dot_blocks(layer_.order, a, b));
    }
  }

  const NaiveLayer& layer_;
  BlockFormat format_;
  std::vector<ExpertRows> rows_;
  Values gate_, up_;  // of the last row
};

struct RunSetup {
  int num_ranks = 1;
  int threads = 1;
  Level level = Level::kGeneric;
  int64_t budget_rows = 100000;
  TapePolicy policy = {};
  int steps = 1;
};

NaiveGradients run_layer(const NaiveLayer& layer, BlockFormat format, const Matrix& hidden,
                         const Matrix& d_output, const RunSetup& setup) {
  const Tensor input = testing::to_tensor(hidden, DType::kBF16);
  const Tensor d_out = testing::to_tensor(d_output, DType::kBF16);
  const auto e = static_cast<int64_t>(layer.experts.size());
  const int64_t h = layer.hidden, f = layer.intermediate, k = layer.router.top_k;
  NaiveGradients all;
  const auto rows = static_cast<size_t>(hidden.rows * h);
  all.output.assign(rows, {0xFFFF});
  all.hidden.assign(rows, {0xFFFF});
  const auto floats = [](int64_t count) {
    return Values(static_cast<size_t>(count), std::nanf(""));
  };
  all.topk_weights = floats(hidden.rows * k);
  all.gate = floats(e * h);
  for (Values* const one : {&all.expert_gate, &all.expert_up, &all.expert_down}) {
    *one = floats(e * f * h);
  }
  run_group(
      setup.num_ranks,
      [&](Group& group) {
        MoeOptions options;
        options.hidden_dtype = DType::kBF16;
        options.training = true;
        options.training_format = format;
        options.receive_budget_bytes = setup.budget_rows * h * 2;
        auto moe = MoeLayer::create(
            group, layer.router,
            std::move(*testing::weights_for_rank(layer, group.rank(), group.num_ranks())), options);
        ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
        const int64_t first = owned_begin(hidden.rows, group.num_ranks(), group.rank());
        const int64_t count = owned_begin(hidden.rows, group.num_ranks(), group.rank() + 1) - first;
        const Placement placement{e, group.num_ranks(), 0};
        const int64_t from = placement.begin(group.rank());
        const int64_t local = placement.num_local(group.rank());
        MoeGradients g;
        g.d_hidden = TensorView(all.hidden.data() + first * h, DType::kBF16, {count, h});
        Values gate = floats(e * h);
        g.d_gate = TensorView(gate.data(), DType::kF32, {e, h});
        const int64_t at = from * f * h;
        g.d_expert_gate = TensorView(all.expert_gate.data() + at, DType::kF32, {local, f, h});
        g.d_expert_up = TensorView(all.expert_up.data() + at, DType::kF32, {local, f, h});
        g.d_expert_down = TensorView(all.expert_down.data() + at, DType::kF32, {local, h, f});
        g.d_topk_weights = TensorView(all.topk_weights.data() + first * k, DType::kF32, {count, k});
        const TensorView output(all.output.data() + first * h, DType::kBF16, {count, h});
        const ConstTensorView x = input.view().rows(first, count);
        MoeTape tape(setup.policy);
        for (int step = 0; step < setup.steps; ++step) {
          Status status = (*moe)->forward_train(x, nullptr, output, &tape, nullptr);
          ASSERT_TRUE(status.ok()) << status.to_string();
          status = (*moe)->backward(tape, x, d_out.view().rows(first, count), {}, g);
          ASSERT_TRUE(status.ok()) << status.to_string();
        }
        // Without a tape: the same bits.
        std::vector<BFloat16> again(static_cast<size_t>(count * h));
        ASSERT_TRUE(
            (*moe)
                ->forward(x, nullptr, TensorView(again.data(), DType::kBF16, {count, h}), nullptr)
                .ok());
        ASSERT_TRUE(count == 0 || std::memcmp(again.data(), output.data, again.size() * 2) == 0);
        if (group.rank() == 0) all.gate = gate;
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) {
        options.dot_order = layer.order;
        options.level = setup.level;
        options.threads_per_rank = setup.threads;
      });
  return all;
}

template <typename T>
void expect_same(const char* name, const std::vector<T>& got, const std::vector<T>& want) {
  ASSERT_EQ(got.size(), want.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(T)), 0) << name << " " << i;
  }
}

void expect_equal(const NaiveGradients& got, const NaiveGradients& want) {
  expect_same("output", got.output, want.output);
  expect_same("d_topk_weights", got.topk_weights, want.topk_weights);
  expect_same("d_expert_down", got.expert_down, want.expert_down);
  expect_same("d_expert_gate", got.expert_gate, want.expert_gate);
  expect_same("d_expert_up", got.expert_up, want.expert_up);
  expect_same("d_gate", got.gate, want.gate);
  expect_same("d_hidden", got.hidden, want.hidden);
}

// 5 experts, top-2; hidden and width end in parts of a block, and an expert's rows do.
NaiveLayer layer_of(DotOrder order) {
  return testing::random_layer(44, DType::kBF16, order, 5, 2, 69, 45, false, false);
}

Matrix rows_of(const NaiveLayer& layer, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  return testing::random_matrix(random, count, layer.hidden, 1.0f, true);
}

TEST(QuantisedTraining, EqualsTheNaiveLayerInEverySetup) {
  const TapePolicy nothing{Keep::kRecompute, Keep::kRecompute, Keep::kRecompute, Keep::kRecompute};
  const TapePolicy no_h{Keep::kRecompute, Keep::kSave, Keep::kRecompute, Keep::kSave};
  const Level best = *resolve_level(std::nullopt);
  for (const auto& [order, format] : {std::pair(DotOrder::kVdpbf16, BlockFormat::kMxfp8),
                                      std::pair(DotOrder::kAmx, BlockFormat::kMxfp8Ceil)}) {
    const NaiveLayer layer = layer_of(order);
    const Matrix hidden = rows_of(layer, 90, 5), d_output = rows_of(layer, 90, 6);
    const NaiveGradients want = NaiveTraining(layer, format).run(hidden, d_output);
    for (const RunSetup& setup :
         {RunSetup{.level = best}, RunSetup{.level = Level::kReference},
          RunSetup{.num_ranks = 2, .threads = 2, .policy = nothing, .steps = 2},
          RunSetup{.num_ranks = 3, .level = best, .budget_rows = 11, .policy = no_h},
          RunSetup{.num_ranks = 7, .steps = 2}}) {
      SCOPED_TRACE(std::string(name_of(format)) + ", " + std::to_string(setup.num_ranks) +
                   " ranks, " + std::string(name_of(setup.level)));
      expect_equal(run_layer(layer, format, hidden, d_output, setup), want);
      if (HasFatalFailure()) return;
    }
  }
}

// No token on some ranks, nothing at all.
TEST(QuantisedTraining, EmptyRanksAndNoTokens) {
  const NaiveLayer layer = layer_of(DotOrder::kVdpbf16);
  for (const int64_t tokens : {0, 1}) {
    const Matrix hidden = rows_of(layer, tokens, 5), d_output = rows_of(layer, tokens, 6);
    const NaiveGradients want = NaiveTraining(layer, BlockFormat::kMxfp8).run(hidden, d_output);
    expect_equal(run_layer(layer, BlockFormat::kMxfp8, hidden, d_output, {.num_ranks = 3}), want);
  }
}

TEST(QuantisedTraining, Refusals) {
  const NaiveLayer layer = layer_of(DotOrder::kVdpbf16);
  const auto refusal = [&](const NaiveLayer& of, const MoeOptions& options, StatusCode code,
                           const char* text) {
    run_group(1, [&](Group& group) {
      const auto moe = MoeLayer::create(group, of.router,
                                        std::move(*testing::weights_for_rank(of, 0, 1)), options);
      ASSERT_FALSE(moe.has_value());
      EXPECT_EQ(moe.error().code(), code) << moe.error().to_string();
      EXPECT_NE(moe.error().message().find(text), std::string::npos) << moe.error().to_string();
    });
  };
  MoeOptions options;
  options.hidden_dtype = DType::kBF16;
  options.training_format = BlockFormat::kMxfp8;
  refusal(layer, options, StatusCode::kInvalidArgument,
          "training_format is mxfp8, but the layer is not made with training");
  options.training = true;
  options.training_format = BlockFormat::kMxfp4;
  refusal(layer, options, StatusCode::kUnsupported, "training in mxfp4");
  options.training_format = BlockFormat::kMxfp8;
  options.hidden_dtype = DType::kF32;
  refusal(testing::random_layer(44, DType::kF32, DotOrder::kVdpbf16, 5, 2, 69, 45, false, false),
          options, StatusCode::kInvalidArgument, "rows of F32");
}

}  // namespace
}  // namespace argosy
