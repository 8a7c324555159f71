// gate_logits(): the gate product as one fp32 FMA chain an output (contract 4.3), in tiles of 8
// tokens x 16 experts whose chains are independent. Scratch is on the stack. Test:
// tests/router/gate_test.cc.
#include <algorithm>
#include <limits>

#include "argosy/bfloat16.h"
#include "argosy/router.h"
#include "base/error.h"
#include "platform/float_env.h"
#include "router/kernel.h"

namespace argosy {
namespace {

using base::invalid;
using router::kGateExperts;
using router::kGateHidden;
using router::kGateTokens;

constexpr int64_t kTokensPerTask = 64;  // a packed panel of the gate is used for that many tokens

// Rows of bf16 or fp32, read as fp32.
struct Rows {
  const std::byte* base;
  int64_t row_bytes;
  bool is_bf16;

  explicit Rows(const ConstTensorView& view)
      : base(view.data),
        row_bytes(view.stride(0) * size_of(view.dtype)),
        is_bf16(view.dtype == DType::kBF16) {}

  // out[i * step] = element first + i of `row`.
  void widen(int64_t row, int64_t first, int64_t count, int64_t step, float* out) const {
    const std::byte* data = base + row * row_bytes;
    if (is_bf16) {
      const auto* values = reinterpret_cast<const BFloat16*>(data) + first;
      for (int64_t i = 0; i < count; ++i) out[i * step] = values[i].to_float();
    } else {
      const auto* values = reinterpret_cast<const float*>(data) + first;
      for (int64_t i = 0; i < count; ++i) out[i * step] = values[i];
    }
  }
};

struct Job {
  Rows hidden;
  Rows gate;
  const ConstTensorView* bias;
  float* logits;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t num_hidden;
};

// The sums of a task: chains run on from one panel to the next.
using TaskSums = float[kTokensPerTask * kGateExperts];

// The chains of tokens [first_token, last_token) and the 16 experts from first_expert. What a
// tile has beyond the tensor's edge is zero and never read back.
void multiply(const Job& job, int64_t first_token, int64_t last_token, int64_t first_expert,
              float* sums) {
  const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
  const int64_t num_experts = std::min(kGateExperts, job.num_experts - first_expert);
  alignas(64) float panel[kGateHidden * kGateExperts] = {};
  alignas(64) float x[kGateTokens * kGateHidden] = {};
  for (int64_t h = 0; h < job.num_hidden; h += kGateHidden) {
    const int64_t depth = std::min(kGateHidden, job.num_hidden - h);
    for (int64_t j = 0; j < num_experts; ++j) {
      job.gate.widen(first_expert + j, h, depth, kGateExperts, panel + j);
    }
    for (int64_t token = first_token; token < last_token; token += kGateTokens) {
      const int64_t rows = std::min(kGateTokens, last_token - token);
      for (int64_t t = 0; t < rows; ++t) {
        job.hidden.widen(token + t, h, depth, 1, x + t * kGateHidden);
      }
      router::kernel().gate_tile(x, panel, depth, sums + (token - first_token) * kGateExperts);
    }
  }
}

float bias_of(const ConstTensorView& bias, int64_t expert) {
  if (bias.dtype == DType::kBF16) return bias.as<BFloat16>()[expert].to_float();
  return bias.as<float>()[expert];
}

// + 0, + bias, and one NaN for all: which NaN a chain carries on differs between compilations.
[[gnu::noinline]] void finish(const Job& job, int64_t first_token, int64_t last_token,
                              int64_t first_expert, const float* sums) {
  const int64_t num_experts = std::min(kGateExperts, job.num_experts - first_expert);
  for (int64_t token = first_token; token < last_token; ++token) {
    for (int64_t j = 0; j < num_experts; ++j) {
      float logit = sums[(token - first_token) * kGateExperts + j] + 0.0f;
      if (job.bias->dtype != DType::kUnset) logit += bias_of(*job.bias, first_expert + j);
      if (logit != logit) logit = std::numeric_limits<float>::quiet_NaN();
      job.logits[token * job.num_experts + first_expert + j] = logit;
    }
  }
}

void run_task(const Job& job, int64_t first_token, int64_t first_expert) {
  const int64_t last_token = std::min(first_token + kTokensPerTask, job.num_tokens);
  alignas(64) TaskSums sums = {};
  multiply(job, first_token, last_token, first_expert, sums);
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  finish(job, first_token, last_token, first_expert, sums);
}

bool is_float(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }

bool is_matrix(const ConstTensorView& view) {
  return view.num_dims == 2 && view.dim(0) >= 0 && view.dim(1) >= 0 &&
         (view.num_elements() == 0 || view.data != nullptr);
}

Status check(const ConstTensorView& hidden, const ConstTensorView& gate,
             const ConstTensorView& gate_bias, const TensorView& logits) {
  if (!is_float(hidden.dtype) || !is_matrix(hidden) ||
      (hidden.dim(1) > 1 && hidden.stride(1) != 1)) {
    return invalid("hidden is {}, expected BF16 or F32 [tokens, hidden] with stride 1 over hidden",
                   describe(hidden));
  }
  if (!is_float(gate.dtype) || !is_matrix(gate) || !gate.is_dense() ||
      gate.dim(1) != hidden.dim(1)) {
    return invalid("gate is {}, expected dense BF16 or F32 [experts, {}], hidden being {}",
                   describe(gate), hidden.dim(1), describe(hidden));
  }
  if (gate_bias.dtype != DType::kUnset &&
      (!is_float(gate_bias.dtype) || gate_bias.num_dims != 1 || gate_bias.dim(0) != gate.dim(0) ||
       !gate_bias.is_dense() || (gate.dim(0) > 0 && gate_bias.data == nullptr))) {
    return invalid("gate_bias is {}, expected dense F32 or BF16 [{}]", describe(gate_bias),
                   gate.dim(0));
  }
  if (logits.dtype != DType::kF32 || !is_matrix(logits) || logits.dim(0) != hidden.dim(0) ||
      logits.dim(1) != gate.dim(0) || !logits.is_dense()) {
    return invalid("logits are {}, expected dense F32 [{}, {}]", describe(logits), hidden.dim(0),
                   gate.dim(0));
  }
  return {};
}

}  // namespace

Status gate_logits(const ConstTensorView& hidden, const ConstTensorView& gate,
                   const ConstTensorView& gate_bias, ThreadPool* pool, const TensorView& logits) {
  ARGOSY_RETURN_IF_ERROR(check(hidden, gate, gate_bias, logits));
  const Job job = {Rows(hidden),  Rows(gate),  &gate_bias, logits.as<float>(),
                   hidden.dim(0), gate.dim(0), gate.dim(1)};
  const int64_t expert_blocks = (job.num_experts + kGateExperts - 1) / kGateExperts;
  const int64_t token_blocks = (job.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  const auto body = [&](int64_t task, int) {
    run_task(job, task / expert_blocks * kTokensPerTask, task % expert_blocks * kGateExperts);
  };
  if (pool != nullptr) {
    pool->parallel_for(token_blocks * expert_blocks, body);
  } else {
    for (int64_t task = 0; task < token_blocks * expert_blocks; ++task) body(task, 0);
  }
  return {};
}

}  // namespace argosy
