// The insides of MoeLayer::backward: one call's buffers and steps. Test: tests/moe/backward_test.cc.
#pragma once

#include <string>
#include <vector>

#include "argosy/gemm_backward.h"
#include "moe/gradient_rows.h"
#include "moe/layer_state.h"
#include "moe/row_gather.h"
#include "moe/tape.h"

namespace argosy {

// Rows of valid tokens, one after the other; their parts of the gradients of what every rank holds.
struct SharedBackward {
  int64_t num_rows = 0;             // valid tokens Tv
  std::vector<int64_t> tokens;      // [Tv] which
  std::vector<int64_t> rank_rows;   // [R] Tv of every rank
  AlignedBuffer hidden, d_output;   // [Tv, H]
  AlignedBuffer gate, up, h, rows;  // shared experts again
  AlignedBuffer d_rows, d_h, d_gate, d_up;
  AlignedBuffer scale, d_scale;  // fp32 [Tv], of the shared experts' gate
  AlignedBuffer d_hidden;        // fp32 [Tv, H] through the shared experts
  AlignedBuffer d_logits;        // fp32 [Tv, E]
};

// Bytes: tape_size.cc.
struct BackwardBuffers {
  AlignedBuffer rows, gate, up, h;          // what the tape does not have bit by bit
  AlignedBuffer d_rows, d_h, d_gate, d_up;  // [S, ..]
  AlignedBuffer d_logits;                   // fp32 [T, E]
  AlignedBuffer d_hidden_gate;              // fp32 [T, H] through the router
  std::vector<float> d_assigned;            // [T, K] of the weights before a drop
  ReturnedRows returned;
  ReceivedRows received;
  SharedBackward shared;
  AlignedBuffer gathered_x, gathered_y, partial;
  AlignedBuffer codes, more_codes;  // with training_format: operands of a product
  // Latency mode. Results that the tape does not have bit by bit, [S, H]; gradients of a call's rows side by side; and where
  // several calls are needed, its part of gate and up, and what came home, [T, K, H] in all.
  AlignedBuffer results, slot_results, part_gate, part_up, home;
  ReturnedRows part_returned;
};

// One backward call.
class Backward {
 public:
  Backward(MoeLayer::State& layer, const MoeTape::State& tape, const ConstTensorView& hidden,
           const ConstTensorView& d_output, const ConstTensorView& d_logits,
           const MoeGradients& gradients)
      : layer_(layer),
        tape_(tape),
        hidden_(hidden),
        d_output_(d_output),
        d_logits_(d_logits),
        out_(gradients),
        b_(*layer.backward) {}

  // This rank's input, before anything is sent.
  Status check() const;
  // Its buffers, likewise.
  Status reserve();
  // What must be the same on every rank, in words.
  std::string asked_for() const;
  // After all ranks agreed that theirs is fine.
  Status run();
  // Whether every rank has the error that run() gave.
  bool is_agreed() const { return is_agreed_; }
  // The same in latency mode, agreement included: `local` is what check() and reserve() said. *declined: every rank's tape is of
  // throughput mode.
  Status run_latency(const Status& local, bool* declined);

 private:
  int64_t num_slots() const { return tape_.shape.num_slots; }
  TensorView matrix(AlignedBuffer& buffer, DType dtype, int64_t rows, int64_t cols) const {
    return {buffer.data(), dtype, {rows, cols}};
  }
  ExpertProducts experts() { return {layer_.weights, layer_.quantised, &b_.codes, &b_.more_codes}; }
  RaggedRows of_slots(const ConstTensorView& rows) const;

  // backward.cc: routed experts.
  Status dispatch_rows_again();
  Status restore();
  Status restore_results(int64_t base, int64_t end);
  Status run_round(int64_t round);
  Status weigh_rows(int64_t base, int64_t end);
  float weigh_row(const std::byte* d_out, float weight, const std::byte* result,
                  std::byte* d_row) const;
  Status run_experts(int64_t base, int64_t count, const ConstTensorView& gate,
                     const ConstTensorView& up, const TensorView& results,
                     std::span<float> d_weights);
  Status finish();
  bool is_finite(const std::byte* row, float number) const;
  void find_nonfinite(int64_t round);
  Status nonfinite() const;
  Status agree_on_finite();
  Status expert_weight_gradients();
  Status router_gradients();
  void sum_hidden() const;

  // latency_training.cc
  Status run_latency_mode();
  template <typename Body>
  Status for_each_call(const ConstTensorView& rows, const float* numbers, const Body& body);
  Status dispatch_slots_again();
  Status restore_slot_results();
  Status run_slots(int64_t base);
  void keep_returned(int64_t first);
  // Of the row that came as the `row`-th.
  int64_t slot_of(int64_t row) const;

  // backward_shared.cc: what every rank holds.
  Status take_valid_tokens();
  Status run_shared();
  Status replicated_gradients();
  Status gate_gradient(const AlignedBuffer& d_logits, int64_t num_outputs, const TensorView& d_gate,
                       const TensorView& d_bias);
  Status product_gradient(const AlignedBuffer& d_y, int64_t n, const AlignedBuffer& x, int64_t k,
                          const TensorView& out);
  template <typename Compute>
  Status replicated(const AlignedBuffer& x, int64_t x_bytes, const AlignedBuffer& y,
                    int64_t y_bytes, const TensorView& out, const Compute& compute);

  MoeLayer::State& layer_;
  const MoeTape::State& tape_;
  const ConstTensorView hidden_, d_output_, d_logits_;
  const MoeGradients& out_;
  BackwardBuffers& b_;
  ConstTensorView rows_, gate_, up_, h_;  // of all slots, kept or made again
  int64_t nonfinite_slot_ = -1;           // the first one whose gradient is
  bool is_agreed_ = false;
  ConstTensorView results_;  // of the round's slots; in latency mode of all
  // Latency mode: how far the ranks' agreement is, which travels with the first call.
  struct Calls {
    bool is_sent = false, is_accepted = false;
    std::vector<int64_t> rows;  // [L, R] of one call
  } calls_;
};

}  // namespace argosy
