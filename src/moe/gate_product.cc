// See gate_product.h. Rows that are bf16, or among which some are masked, pass through a block of fp32 rows that
// stays in L2.
#include "moe/gate_product.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "argosy/bfloat16.h"
#include "platform/float_env.h"

namespace argosy {
namespace {

// Rows of a block for each thread: enough for the kernels' row blocks, few enough for L2.
constexpr int64_t kRowsPerThread = 48;

void widen(const ConstTensorView& hidden, int64_t row, float* out) {
  const int64_t n = hidden.dim(1);
  if (hidden.dtype == DType::kF32) {
    std::memcpy(out, hidden.row(row), static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const auto* const values = reinterpret_cast<const BFloat16*>(hidden.row(row));
  for (int64_t i = 0; i < n; ++i) out[i] = values[i].to_float();
}

}  // namespace

Result<GateProduct> GateProduct::create(const ConstTensorView& gate, const ConstTensorView& bias) {
  GateProduct product;
  ARGOSY_ASSIGN_OR_RETURN(
      product.weights_,
      PackedWeights::create(PackedWeights::Kind::kPlain, gate.dtype, 1, gate.dim(0), gate.dim(1)));
  ARGOSY_RETURN_IF_ERROR(product.weights_.set_group(0, gate));
  if (bias.dtype == DType::kUnset) return product;
  const int64_t num_experts = gate.dim(0);
  ARGOSY_RETURN_IF_ERROR(product.bias_.reserve(num_experts * int64_t{sizeof(float)}));
  auto* const values = reinterpret_cast<float*>(product.bias_.data());
  for (int64_t e = 0; e < num_experts; ++e) {
    values[e] =
        bias.dtype == DType::kBF16 ? bias.as<BFloat16>()[e].to_float() : bias.as<float>()[e];
  }
  return product;
}

Status GateProduct::run(const GemmOptions& options, const ConstTensorView& hidden,
                        const uint8_t* mask, const TensorView& logits) {
  const int64_t num_tokens = hidden.dim(0);
  const int64_t width = weights_.k();
  if (hidden.dtype == DType::kF32 && mask == nullptr) return run_block(options, hidden, logits);
  const int64_t threads = options.pool == nullptr ? 1 : options.pool->num_threads();
  const int64_t block_rows = std::min(num_tokens, kRowsPerThread * threads);
  ARGOSY_RETURN_IF_ERROR(wide_.reserve(block_rows * width * int64_t{sizeof(float)}));
  auto* const wide = reinterpret_cast<float*>(wide_.data());
  for (int64_t first = 0; first < num_tokens; first += block_rows) {
    const int64_t count = std::min(block_rows, num_tokens - first);
    const auto widen_row = [&](int64_t row, int) {
      float* const out = wide + row * width;
      if (mask == nullptr || mask[first + row] != 0) {
        widen(hidden, first + row, out);
      } else {
        std::fill(out, out + width, 0.0f);
      }
    };
    if (options.pool == nullptr) {
      for (int64_t row = 0; row < count; ++row) widen_row(row, 0);
    } else {
      options.pool->parallel_for(count, widen_row);
    }
    const ConstTensorView rows(wide_.data(), DType::kF32, {count, width});
    ARGOSY_RETURN_IF_ERROR(run_block(options, rows, logits.rows(first, count)));
  }
  return {};
}

Status GateProduct::run_block(const GemmOptions& options, const ConstTensorView& rows,
                              const TensorView& logits) const {
  const std::array<int64_t, 1> offsets{0};
  const std::array<int64_t, 1> sizes{rows.dim(0)};
  ARGOSY_RETURN_IF_ERROR(grouped_gemm(options, {rows, offsets, sizes}, weights_, logits));
  if (bias_.data() != nullptr) finish(logits);
  return {};
}

// + bias, and one NaN for all.
void GateProduct::finish(const TensorView& logits) const {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  const auto* const bias = reinterpret_cast<const float*>(bias_.data());
  for (int64_t token = 0; token < logits.dim(0); ++token) {
    auto* const row = reinterpret_cast<float*>(logits.row(token));
    for (int64_t e = 0; e < logits.dim(1); ++e) {
      const float sum = row[e] + bias[e];
      row[e] = sum != sum ? std::numeric_limits<float>::quiet_NaN() : sum;
    }
  }
}

}  // namespace argosy
