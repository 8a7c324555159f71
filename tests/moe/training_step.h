// One training step of a random layer in a given setup, and all its gradients, experts and tokens in order.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "argosy/moe.h"
#include "moe/layer_cases.h"
#include "platform/local_socket.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy::testing {

struct RunSetup {
  int num_ranks = 1;
  int threads = 1;
  Level level = Level::kGeneric;
  int64_t budget_rows = 100000;
  int64_t alignment = 1;
  TapePolicy policy = {};
  int steps = 1;  // the earlier ones on other values: the last one finds dirty buffers
  ReplicatedGradients replicated = ReplicatedGradients::kExact;
  int accumulated = 0;    // further backward calls, each added to the gradients
  float d_logits = 0.0f;  // of every logit, as a loss would give; 0: none
  MoeOptions moe = {};    // mode and what belongs to it; the rest is set by the run
  bool shm = false;       // ranks that map memory as processes do
  std::string simulate = {};
};

// All gradients of a layer, experts in order.
struct Gradients {
  std::vector<float> gate, gate_bias, expert_gate, expert_up, expert_down;
  std::vector<float> expert_gate_bias, expert_up_bias, expert_down_bias;
  std::vector<float> shared_gate, shared_up, shared_down, shared_scale, topk_weights;
  std::vector<std::byte> output, hidden;
  double norm = 0;

  bool operator==(const Gradients&) const = default;
};

inline TensorView view_of(std::vector<float>& values, std::initializer_list<int64_t> dims) {
  TensorView view(static_cast<float*>(nullptr), DType::kF32, dims);
  values.assign(static_cast<size_t>(view.num_elements()), std::nanf(""));  // poison
  view.data = reinterpret_cast<std::byte*>(values.data());
  return view;
}

inline void append(const std::vector<float>& more, std::vector<float>* to) {
  to->insert(to->end(), more.begin(), more.end());
}

// Gradients of one rank, experts and tokens its own.
inline MoeGradients make_gradients(const NaiveLayer& layer, int64_t num_local, int64_t num_tokens,
                                   Gradients* mine) {
  const auto e = static_cast<int64_t>(layer.experts.size());
  const int64_t h = layer.hidden, f = layer.intermediate;
  MoeGradients g;
  mine->hidden.assign(static_cast<size_t>(num_tokens * h * size_of(layer.dtype)), std::byte{0xFF});
  g.d_hidden = TensorView(mine->hidden.data(), layer.dtype, {num_tokens, h});
  g.d_gate = view_of(mine->gate, {e, h});
  if (!layer.gate_bias.empty()) g.d_gate_bias = view_of(mine->gate_bias, {e});
  g.d_expert_gate = view_of(mine->expert_gate, {num_local, f, h});
  g.d_expert_up = view_of(mine->expert_up, {num_local, f, h});
  g.d_expert_down = view_of(mine->expert_down, {num_local, h, f});
  if (!layer.experts[0].gate_bias.empty()) {
    g.d_expert_gate_bias = view_of(mine->expert_gate_bias, {num_local, f});
    g.d_expert_up_bias = view_of(mine->expert_up_bias, {num_local, f});
    g.d_expert_down_bias = view_of(mine->expert_down_bias, {num_local, h});
  }
  if (!layer.shared.empty()) {
    const int64_t fs = layer.shared[0].gate.rows;
    g.d_shared_gate = view_of(mine->shared_gate, {fs, h});
    g.d_shared_up = view_of(mine->shared_up, {fs, h});
    g.d_shared_down = view_of(mine->shared_down, {h, fs});
    if (layer.shared_gate.rows > 0) g.d_shared_scale = view_of(mine->shared_scale, {1, h});
  }
  g.d_topk_weights = view_of(mine->topk_weights, {num_tokens, layer.router.top_k});
  return g;
}

// Room for the tensors that the policy puts there, for all rows on one rank; poisoned.
inline AlignedBuffer offload_buffer(const MoeLayer& layer, const RunSetup& setup,
                                    int64_t num_tokens) {
  TapeShape shape = layer.tape_shape();
  shape.num_slots = num_tokens * shape.top_k + shape.num_experts * setup.alignment;
  const int64_t bytes = size_tape(setup.policy, shape).offload_bytes;
  AlignedBuffer buffer = std::move(AlignedBuffer::allocate(bytes)).value();
  if (bytes > 0) std::memset(buffer.data(), 0xFF, static_cast<size_t>(buffer.size_bytes()));
  return buffer;
}

inline Gradients run_backward(const NaiveLayer& layer, const Matrix& hidden, const Matrix& d_output,
                              const uint8_t* mask, const RunSetup& setup) {
  const Tensor input = to_tensor(hidden, layer.dtype);
  const Tensor d_out = to_tensor(d_output, layer.dtype);
  std::vector<Gradients> ranks(static_cast<size_t>(setup.num_ranks));
  static std::atomic<int> num_jobs{0};
  const std::string job = "training-step-" + std::to_string(platform::own_pid()) + "-" +
                          std::to_string(num_jobs.fetch_add(1));
  run_group(
      setup.num_ranks,
      [&](Group& group) {
        Result<MoeWeights> weights = weights_for_rank(layer, group.rank(), group.num_ranks());
        ASSERT_TRUE(weights.has_value()) << weights.error().to_string();
        MoeOptions options = setup.moe;
        options.hidden_dtype = layer.dtype;
        options.training = true;
        options.weights_inside = layer.weights_inside;
        options.receive_budget_bytes = setup.budget_rows * layer.hidden * size_of(layer.dtype);
        options.group_alignment = setup.alignment;
        Result<std::unique_ptr<MoeLayer>> moe =
            MoeLayer::create(group, layer.router, std::move(*weights), options);
        ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
        const auto first = owned_begin(hidden.rows, group.num_ranks(), group.rank());
        const auto count = owned_begin(hidden.rows, group.num_ranks(), group.rank() + 1) - first;
        const Placement placement{static_cast<int64_t>(layer.experts.size()), group.num_ranks(), 0};
        Gradients& mine = ranks[static_cast<size_t>(group.rank())];
        Tensor output = std::move(*Tensor::zeros(layer.dtype, {count, layer.hidden}));
        MoeTape tape(setup.policy);
        const AlignedBuffer offload = offload_buffer(**moe, setup, hidden.rows);
        tape.set_offload({offload.data(), static_cast<size_t>(offload.size_bytes())});
        std::vector<float> loss(static_cast<size_t>(count) * layer.experts.size(), setup.d_logits);
        ConstTensorView extra;
        if (setup.d_logits != 0.0f) {
          extra = ConstTensorView(loss.data(), DType::kF32,
                                  {count, static_cast<int64_t>(layer.experts.size())});
        }
        for (int step = 0; step < setup.steps; ++step) {
          MoeGradients g = make_gradients(layer, placement.num_local(group.rank()), count, &mine);
          g.replicated = setup.replicated;
          ConstTensorView x = input.view().rows(first, count), d = d_out.view().rows(first, count);
          if (step + 1 < setup.steps) std::swap(x, d);
          Status status = (*moe)->forward_train(x, mask == nullptr ? nullptr : mask + first,
                                                output.view(), &tape, nullptr);
          ASSERT_TRUE(status.ok()) << status.to_string();
          mine.output.assign(output.bytes().begin(), output.bytes().end());
          status = (*moe)->backward(tape, x, d, extra, g);
          ASSERT_TRUE(status.ok()) << status.to_string();
          g.accumulate = true;
          for (int more = 0; more < setup.accumulated; ++more) {
            ASSERT_TRUE((*moe)->backward(tape, x, d, extra, g).ok());
          }
          const Result<double> norm = gradient_norm(group, g);
          ASSERT_TRUE(norm.has_value());
          mine.norm = *norm;
        }
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) {
        options.dot_order = layer.order;
        options.level = setup.level;
        options.threads_per_rank = setup.threads;
        options.simulate = setup.simulate;
        if (!setup.shm) return;
        options.transport = TransportKind::kShm;
        options.inproc = nullptr;
        options.job = job;
      });
  Gradients all = ranks[0];
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    const Gradients& one = ranks[rank];
    // What every rank holds is the same on each.
    EXPECT_EQ(std::memcmp(one.gate.data(), all.gate.data(), all.gate.size() * 4), 0);
    EXPECT_EQ(one.shared_down, all.shared_down);
    append(one.expert_gate, &all.expert_gate);
    append(one.expert_up, &all.expert_up);
    append(one.expert_down, &all.expert_down);
    append(one.expert_gate_bias, &all.expert_gate_bias);
    append(one.expert_up_bias, &all.expert_up_bias);
    append(one.expert_down_bias, &all.expert_down_bias);
    append(one.topk_weights, &all.topk_weights);
    all.output.insert(all.output.end(), one.output.begin(), one.output.end());
    all.hidden.insert(all.hidden.end(), one.hidden.begin(), one.hidden.end());
  }
  return all;
}

inline Matrix rows_of(const NaiveLayer& layer, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  return random_matrix(random, count, layer.hidden, 1.0f, layer.dtype == DType::kBF16);
}

}  // namespace argosy::testing
