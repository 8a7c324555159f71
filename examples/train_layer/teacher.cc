#include "teacher.h"

#include <array>
#include <cmath>

#include "random.h"

using argosy::DType;
using argosy::PackedWeights;
using argosy::Result;
using argosy::Tensor;

namespace {

Result<Tensor> random_matrix(std::mt19937_64& random, int64_t rows, int64_t columns) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor matrix, Tensor::zeros(DType::kF32, {rows, columns}));
  const double deviation = 1.5 / std::sqrt(static_cast<double>(columns));
  float* const values = matrix.view().as<float>();
  for (int64_t i = 0; i < rows * columns; ++i) values[i] = random_value(random, deviation);
  return matrix;
}

}  // namespace

Result<Tensor> run_teacher(argosy::ConstTensorView hidden, int64_t intermediate) {
  const int64_t num_tokens = hidden.dim(0), width = hidden.dim(1);
  std::mt19937_64 random(20);
  ARGOSY_ASSIGN_OR_RETURN(const Tensor gate, random_matrix(random, intermediate, width));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor up, random_matrix(random, intermediate, width));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor down, random_matrix(random, width, intermediate));
  ARGOSY_ASSIGN_OR_RETURN(
      PackedWeights gate_up,
      PackedWeights::create(PackedWeights::Kind::kGateUp, DType::kF32, 1, intermediate, width));
  ARGOSY_ASSIGN_OR_RETURN(
      PackedWeights packed_down,
      PackedWeights::create(PackedWeights::Kind::kPlain, DType::kF32, 1, width, intermediate));
  ARGOSY_RETURN_IF_ERROR(gate_up.set_group(0, gate.view(), up.view()));
  ARGOSY_RETURN_IF_ERROR(packed_down.set_group(0, down.view()));
  ARGOSY_ASSIGN_OR_RETURN(Tensor inner, Tensor::zeros(DType::kF32, {num_tokens, intermediate}));
  ARGOSY_ASSIGN_OR_RETURN(Tensor output, Tensor::zeros(DType::kF32, {num_tokens, width}));
  const std::array<int64_t, 1> offsets{0}, sizes{num_tokens};
  const argosy::GemmOptions options;
  ARGOSY_RETURN_IF_ERROR(
      argosy::grouped_gemm(options, {hidden, offsets, sizes}, gate_up, inner.view()));
  ARGOSY_RETURN_IF_ERROR(
      argosy::grouped_gemm(options, {inner.view(), offsets, sizes}, packed_down, output.view()));
  return output;
}
