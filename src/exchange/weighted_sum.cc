// See weighted_sum.h.
#include "exchange/weighted_sum.h"

#include <cstring>

#include "base/error.h"
#include "exchange/combine_kernel.h"

namespace argosy {
namespace {

using base::invalid;

Status check_rows(const char* name, const ConstTensorView& view, DType dtype, int64_t rows,
                  int64_t columns) {
  const bool right = view.dtype == dtype && view.num_dims == 2 && view.dim(0) == rows &&
                     view.dim(1) == columns && (rows == 0 || columns == 1 || view.stride(1) == 1);
  if (right) return {};
  return invalid("{} is {}, combine needs {} [{}, {}] with unit stride in the last dimension", name,
                 describe(view), name_of(dtype), rows, columns);
}

}  // namespace

Status check_combine(const SumShape& shape, const CombineInput& input, const TensorView& output) {
  ARGOSY_RETURN_IF_ERROR(check_rows("output", output, shape.dtype, shape.num_tokens, shape.hidden));
  ARGOSY_RETURN_IF_ERROR(
      check_rows("topk_weights", input.topk_weights, DType::kF32, shape.num_tokens, shape.top_k));
  for (const auto& [name, view] :
       {std::pair{"shared", &input.shared}, {"residual", &input.residual}}) {
    if (view->dtype == DType::kUnset) continue;
    ARGOSY_RETURN_IF_ERROR(check_rows(name, *view, shape.dtype, shape.num_tokens, shape.hidden));
  }
  const ConstTensorView& bias = input.bias;
  if (bias.dtype != DType::kUnset && (bias.dtype != DType::kF32 || bias.num_dims != 1 ||
                                      bias.dim(0) != shape.hidden || !bias.is_dense())) {
    return invalid("bias is {}, combine needs F32 [{}]", describe(bias), shape.hidden);
  }
  return {};
}

void sum_token(const SumShape& shape, const CombineInput& input, const TensorView& output,
               int64_t token, const TokenRows& rows, const TokenRows& next) {
  if (input.mask != nullptr && input.mask[token] == 0) {
    std::memset(output.row(token), 0, static_cast<size_t>(shape.hidden * size_of(shape.dtype)));
    return;
  }
  CombineArgs args;
  args.rows = rows.rows;
  args.weights = rows.weights;
  args.num_rows = rows.count;
  args.next_rows = next.rows;
  args.num_next = next.count;
  if (input.shared.dtype != DType::kUnset) args.shared = input.shared.row(token);
  if (input.shared_scale != nullptr) args.shared_scale = input.shared_scale[token];
  if (input.residual.dtype != DType::kUnset) args.residual = input.residual.row(token);
  if (input.bias.dtype != DType::kUnset) args.bias = input.bias.as<float>();
  args.n = shape.hidden;
  args.out = output.row(token);
  args.stream = is_streamed(shape);
  const CombineKernel& kernel = combine_kernel();
  (shape.dtype == DType::kBF16 ? kernel.combine_bf16 : kernel.combine_f32)(args);
}

}  // namespace argosy
