// One rank's share of the student: fp32 master weights of its experts and of the gate, their gradients, AdamW, and the way into
// the layer's packed weights.
#pragma once

#include <vector>

#include "argosy/moe.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

struct StudentShape {
  int64_t num_experts = 16;
  int64_t top_k = 2;
  int64_t hidden = 0;
  int64_t intermediate = 32;
  argosy::DType dtype = argosy::DType::kBF16;  // of the packed weights
};

struct AdamW {
  float learning_rate = 4e-3f;
  float beta1 = 0.9f;
  float beta2 = 0.99f;
  float epsilon = 1e-8f;
  float weight_decay = 1e-2f;
};

class Student {
 public:
  Student(const StudentShape& shape, int rank, int num_ranks);

  // The weights that a layer is made with.
  argosy::Result<argosy::MoeWeights> make_weights() const;
  // Writes the master weights into a layer's: MoeLayer::update_weights calls it after every step.
  argosy::Status write(argosy::MoeWeights& weights) const;

  // Where backward puts the gradients of the weights.
  argosy::MoeGradients gradients();
  // One step of AdamW on the gradients.
  void step(const AdamW& adam);

  // Added to the scores for selection, moved by the loads alone: no gradient.
  std::vector<float>& selection_bias() { return selection_bias_; }

 private:
  // A tensor with what AdamW keeps of it, all fp32.
  struct Parameter {
    std::vector<float> value, gradient, first, second;
    bool decays = true;
  };
  Parameter make(int64_t count, int64_t fan_in, uint64_t seed);
  void append(Parameter* to, const Parameter& more);

  StudentShape shape_;
  argosy::Placement placement_;
  int rank_;
  int64_t num_local_;
  Parameter gate_;                                   // [E, H]
  Parameter expert_gate_, expert_up_, expert_down_;  // [L, F, H], [L, F, H], [L, H, F]
  std::vector<float> selection_bias_;                // [E]
  float power1_ = 1, power2_ = 1;                    // beta^steps
};
