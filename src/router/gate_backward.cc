// gate_backward(): both gradient products of the gate as fp32 FMA chains (contract 4.3), in tiles
// of 8 x 16 chains; a chain runs on from one panel of depth to the next. Scratch is on the stack.
// Test: tests/router/gate_backward_test.cc.
#include <algorithm>
#include <bit>
#include <cstring>

#include "argosy/bfloat16.h"
#include "argosy/router_backward.h"
#include "base/error.h"
#include "platform/float_env.h"
#include "router/kernel.h"

namespace argosy {
namespace {

using base::invalid;
using router::kGateExperts;
using router::kGateHidden;
using router::kGateTokens;

constexpr int64_t kTileRows = kGateTokens;
constexpr int64_t kTileColumns = kGateExperts;
constexpr int64_t kDepth = kGateHidden;  // of a panel: a tile of both sides fits L1
constexpr int64_t kTaskRows = 64;        // tokens of d_hidden, experts of d_gate
constexpr int64_t kTaskColumns = 64;     // hidden: two cache lines of bf16
constexpr int64_t kPanels = kTaskColumns / kTileColumns;

struct Job {
  ConstTensorView hidden;
  ConstTensorView gate;
  const float* d_logits;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t num_hidden;
  GateGradients out;
};

// A block of one product: left [kTaskRows x depth] . right [depth x kTaskColumns]. Clearing all of it would cost as much as
// a tenth of the products.
struct Block {
  alignas(64) float left[kTaskRows * kGateHidden];                // rows of kGateHidden
  alignas(64) float right[kPanels * kGateHidden * kTileColumns];  // kPanels panels of a gate_tile
  alignas(64) float sums[kPanels * kTaskRows * kTileColumns];
};

float* sum_at(Block* block, int64_t row, int64_t column) {
  return block->sums + (column / kTileColumns * kTaskRows + row) * kTileColumns +
         column % kTileColumns;
}

// right[depth, :] = elements [first, first + count) of a row of bf16 or fp32.
void widen(const ConstTensorView& view, int64_t row, int64_t first, int64_t count, int64_t depth,
           Block* block) {
  const std::byte* base = view.row(row);
  float values[kTaskColumns] = {};
  if (view.dtype == DType::kBF16) {
    const auto* from = reinterpret_cast<const BFloat16*>(base) + first;
    for (int64_t i = 0; i < count; ++i) values[i] = from[i].to_float();
  } else {
    std::memcpy(values, reinterpret_cast<const float*>(base) + first,
                static_cast<size_t>(count) * sizeof(float));
  }
  for (int64_t panel = 0; panel < kPanels; ++panel) {
    std::memcpy(block->right + (panel * kGateHidden + depth) * kTileColumns,
                values + panel * kTileColumns, kTileColumns * sizeof(float));
  }
}

// What a tile has beyond the block's rows: zeros, never read back.
void clear_beyond(int64_t rows, int64_t depth, Block* block) {
  for (int64_t row = rows; row % kTileRows != 0; ++row) {
    std::fill_n(block->left + row * kGateHidden, depth, 0.0f);
  }
}

// Runs the chains on over `depth` packed steps. Behind a call through a pointer, so inside the
// caller's floating-point environment.
void multiply(int64_t rows, int64_t columns, int64_t depth, Block* block) {
  for (int64_t panel = 0; panel * kTileColumns < columns; ++panel) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
      router::kernel().gate_tile(block->left + row * kGateHidden,
                                 block->right + panel * kGateHidden * kTileColumns, depth,
                                 sum_at(block, row, panel * kTileColumns));
    }
  }
}

float finished(float sum) {
  const float value = sum + 0.0f;
  return value != value ? std::bit_cast<float>(0x7FC00000u) : value;
}

// Whether a token takes part: some d_logits are not zero. Most rows show it in their first
// elements.
bool has_gradient(const Job& job, int64_t token) {
  constexpr int64_t kStep = 32;
  const float* row = job.d_logits + token * job.num_experts;
  for (int64_t first = 0; first < job.num_experts; first += kStep) {
    uint32_t bits = 0;
    for (int64_t e = first; e < std::min(first + kStep, job.num_experts); ++e) {
      bits |= std::bit_cast<uint32_t>(row[e]) << 1;
    }
    if (bits != 0) return true;
  }
  return false;
}

void hidden_task(const Job& job, int64_t first_token, int64_t first_hidden, Block* block) {
  const int64_t rows = std::min(kTaskRows, job.num_tokens - first_token);
  const int64_t columns = std::min(kTaskColumns, job.num_hidden - first_hidden);
  for (int64_t e = 0; e < job.num_experts; e += kDepth) {
    const int64_t depth = std::min(kDepth, job.num_experts - e);
    for (int64_t d = 0; d < depth; ++d) widen(job.gate, e + d, first_hidden, columns, d, block);
    for (int64_t t = 0; t < rows; ++t) {
      std::memcpy(block->left + t * kGateHidden,
                  job.d_logits + (first_token + t) * job.num_experts + e,
                  static_cast<size_t>(depth) * sizeof(float));
    }
    clear_beyond(rows, depth, block);
    multiply(rows, columns, depth, block);
  }
}

// left[e, d] = d_logits[tokens[d], first_expert + e]. A cache line of a row at a time: the rows of
// `left` are so far apart that more of them would push one another out of L1.
void pack_experts(const Job& job, const int64_t* tokens, int64_t depth, int64_t first_expert,
                  int64_t rows, Block* block) {
  constexpr int64_t kLine = 16;
  for (int64_t line = 0; line < rows; line += kLine) {
    const int64_t last = std::min(line + kLine, rows);
    for (int64_t d = 0; d < depth; ++d) {
      const float* d_row = job.d_logits + tokens[d] * job.num_experts + first_expert;
      for (int64_t e = line; e < last; ++e) block->left[e * kGateHidden + d] = d_row[e];
    }
  }
}

// Tokens without a gradient are left out of the packed depth.
void gate_task(const Job& job, int64_t first_expert, int64_t first_hidden, Block* block) {
  const int64_t rows = std::min(kTaskRows, job.num_experts - first_expert);
  const int64_t columns = std::min(kTaskColumns, job.num_hidden - first_hidden);
  int64_t tokens[kDepth];
  int64_t next = 0;
  while (next < job.num_tokens) {
    int64_t depth = 0;
    for (; next < job.num_tokens && depth < kDepth; ++next) {
      if (!has_gradient(job, next)) continue;
      widen(job.hidden, next, first_hidden, columns, depth, block);
      tokens[depth++] = next;
    }
    pack_experts(job, tokens, depth, first_expert, rows, block);
    clear_beyond(rows, depth, block);
    multiply(rows, columns, depth, block);
  }
}

[[gnu::noinline]] void run_chains(const Job& job, bool of_gate, int64_t first_row,
                                  int64_t first_hidden, Block* block) {
  const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
  if (of_gate) {
    gate_task(job, first_row, first_hidden, block);
  } else {
    hidden_task(job, first_row, first_hidden, block);
  }
}

void finish_hidden(const Job& job, int64_t first_token, int64_t first_hidden, Block* block) {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  const int64_t rows = std::min(kTaskRows, job.num_tokens - first_token);
  const int64_t columns = std::min(kTaskColumns, job.num_hidden - first_hidden);
  const bool add = job.out.d_hidden_mode == GradientMode::kAdd;
  for (int64_t t = 0; t < rows; ++t) {
    float* out = job.out.d_hidden.as<float>() + (first_token + t) * job.num_hidden + first_hidden;
    const bool has = has_gradient(job, first_token + t);
    if (add && !has) continue;
    for (int64_t h = 0; h < columns; ++h) {
      const float sum = has ? finished(*sum_at(block, t, h)) : 0.0f;
      out[h] = add ? finished(out[h] + sum) : sum;
    }
  }
}

void put_gate(GateGradientMode mode, float sum, float* out) {
  const float value = finished(sum);
  *out = mode == GateGradientMode::kAdd ? finished(*out + value) : value;
}

void finish_gate(const Job& job, int64_t first_expert, int64_t first_hidden, Block* block) {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  const int64_t rows = std::min(kTaskRows, job.num_experts - first_expert);
  const int64_t columns = std::min(kTaskColumns, job.num_hidden - first_hidden);
  for (int64_t e = 0; e < rows; ++e) {
    float* out = job.out.d_gate.as<float>() + (first_expert + e) * job.num_hidden + first_hidden;
    for (int64_t h = 0; h < columns; ++h) {
      put_gate(job.out.d_gate_mode, *sum_at(block, e, h), out + h);
    }
  }
}

// Chains of kContinue start where the buffer stands.
void start_gate(const Job& job, int64_t first_expert, int64_t first_hidden, Block* block) {
  if (job.out.d_gate_mode != GateGradientMode::kContinue) return;
  const int64_t rows = std::min(kTaskRows, job.num_experts - first_expert);
  const int64_t columns = std::min(kTaskColumns, job.num_hidden - first_hidden);
  const float* from = job.out.d_gate.as<float>();
  for (int64_t e = 0; e < rows; ++e) {
    for (int64_t h = 0; h < columns; ++h) {
      *sum_at(block, e, h) = from[(first_expert + e) * job.num_hidden + first_hidden + h];
    }
  }
}

[[gnu::noinline]] float bias_chain(const Job& job, int64_t expert, float sum) {
  const platform::ScopedFloatEnv env(platform::Denormals::kFlush);
  for (int64_t token = 0; token < job.num_tokens; ++token) {
    sum += job.d_logits[token * job.num_experts + expert];
  }
  return sum;
}

void run_bias(const Job& job, int64_t expert) {
  float* out = job.out.d_gate_bias.as<float>() + expert;
  const bool goes_on = job.out.d_gate_mode == GateGradientMode::kContinue;
  const float sum = bias_chain(job, expert, goes_on ? *out : 0.0f);
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  put_gate(job.out.d_gate_mode, sum, out);
}

void run_block(const Job& job, bool of_gate, int64_t first_row, int64_t first_hidden) {
  Block block;
  std::ranges::fill(block.sums, 0.0f);
  if (of_gate) start_gate(job, first_row, first_hidden, &block);
  run_chains(job, of_gate, first_row, first_hidden, &block);
  if (of_gate) {
    finish_gate(job, first_row, first_hidden, &block);
  } else {
    finish_hidden(job, first_row, first_hidden, &block);
  }
}

template <typename Body>
void for_tasks(ThreadPool* pool, int64_t count, Body&& body) {
  const auto task_body = [&](int64_t task, int) { body(task); };
  if (pool != nullptr) {
    pool->parallel_for(count, task_body);
  } else {
    for (int64_t task = 0; task < count; ++task) body(task);
  }
}

void run_product(const Job& job, bool of_gate, ThreadPool* pool) {
  const int64_t rows = of_gate ? job.num_experts : job.num_tokens;
  const int64_t row_blocks = (rows + kTaskRows - 1) / kTaskRows;
  const int64_t column_blocks = (job.num_hidden + kTaskColumns - 1) / kTaskColumns;
  for_tasks(pool, row_blocks * column_blocks, [&](int64_t task) {
    run_block(job, of_gate, task / column_blocks * kTaskRows, task % column_blocks * kTaskColumns);
  });
}

bool is_matrix(const ConstTensorView& view, int64_t rows, int64_t columns) {
  return view.num_dims == 2 && view.dim(0) == rows && view.dim(1) == columns &&
         (view.num_elements() == 0 || view.data != nullptr);
}

bool is_float(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }

Status check_input(const ConstTensorView& view, std::string_view name, int64_t rows,
                   bool may_have_stride) {
  const bool fits = is_float(view.dtype) && view.num_dims == 2 && view.dim(1) >= 0 &&
                    is_matrix(view, rows, view.dim(1)) &&
                    (may_have_stride ? view.dim(1) <= 1 || view.stride(1) == 1 : view.is_dense());
  if (fits) return {};
  return invalid("{} is {}, expected BF16 or F32 [{}, hidden] with stride 1 over hidden{}", name,
                 describe(view), rows, may_have_stride ? "" : ", dense");
}

Status check_output(const TensorView& view, std::string_view name, int64_t rows, int64_t columns) {
  if (view.dtype == DType::kF32 && is_matrix(view, rows, columns) && view.is_dense()) return {};
  return invalid("{} is {}, expected dense F32 [{}, {}]", name, describe(view), rows, columns);
}

Status check(const ConstTensorView& hidden, const ConstTensorView& gate,
             const ConstTensorView& d_logits, const GateGradients& out) {
  if (d_logits.dtype != DType::kF32 || d_logits.num_dims != 2 || d_logits.dim(0) < 0 ||
      d_logits.dim(1) < 0 || !d_logits.is_dense() ||
      (d_logits.num_elements() > 0 && d_logits.data == nullptr)) {
    return invalid("d_logits are {}, expected dense F32 [tokens, experts]", describe(d_logits));
  }
  if (out.d_hidden.dtype != DType::kUnset) {
    ARGOSY_RETURN_IF_ERROR(check_input(gate, "gate", d_logits.dim(1), false));
    ARGOSY_RETURN_IF_ERROR(check_output(out.d_hidden, "d_hidden", d_logits.dim(0), gate.dim(1)));
  }
  if (out.d_gate.dtype != DType::kUnset) {
    ARGOSY_RETURN_IF_ERROR(check_input(hidden, "hidden", d_logits.dim(0), true));
    ARGOSY_RETURN_IF_ERROR(check_output(out.d_gate, "d_gate", d_logits.dim(1), hidden.dim(1)));
  }
  const TensorView& bias = out.d_gate_bias;
  if (bias.dtype != DType::kUnset &&
      (bias.dtype != DType::kF32 || bias.num_dims != 1 || bias.dim(0) != d_logits.dim(1) ||
       !bias.is_dense() || (bias.dim(0) > 0 && bias.data == nullptr))) {
    return invalid("d_gate_bias is {}, expected dense F32 [{}]", describe(bias), d_logits.dim(1));
  }
  return {};
}

}  // namespace

Status gate_backward(const ConstTensorView& hidden, const ConstTensorView& gate,
                     const ConstTensorView& d_logits, ThreadPool* pool,
                     const GateGradients& gradients) {
  ARGOSY_RETURN_IF_ERROR(check(hidden, gate, d_logits, gradients));
  Job job = {hidden, gate, d_logits.as<float>(), d_logits.dim(0), d_logits.dim(1), 0, gradients};
  if (gradients.d_hidden.dtype != DType::kUnset) {
    job.num_hidden = gate.dim(1);
    run_product(job, false, pool);
  }
  if (gradients.d_gate.dtype != DType::kUnset) {
    job.num_hidden = hidden.dim(1);
    run_product(job, true, pool);
  }
  if (gradients.d_gate_bias.dtype != DType::kUnset) {
    for_tasks(pool, job.num_experts, [&](int64_t expert) { run_bias(job, expert); });
  }
  return {};
}

}  // namespace argosy
