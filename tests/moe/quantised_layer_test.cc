// The layer on quantised experts. Where one scale block covers a row of weights and its scale is a power of two,
// scaling the finished product or its weights is the same to the bit: the naive bf16 layer on dequantised weights is the oracle.
#include <gtest/gtest.h>

#include <utility>

#include "argosy/moe.h"
#include "argosy/quantise.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::Matrix;
using testing::NaiveExpert;
using testing::NaiveLayer;

QuantisedTensor quantised(const Matrix& matrix, BlockFormat format) {
  const Tensor values = testing::to_tensor(matrix, DType::kF32);
  const Result<QuantisedLayout> layout = quantised_layout(format, matrix.rows, matrix.columns);
  QuantisedTensor codes = std::move(QuantisedTensor::create(*layout)).value();
  EXPECT_TRUE(quantise({}, values.view(), codes.view()).ok());
  return codes;
}

// The matrix as its codes have it; quantising that again gives the same codes.
void round_to(BlockFormat format, Matrix* matrix) {
  const QuantisedTensor codes = quantised(*matrix, format);
  EXPECT_TRUE(
      dequantise({}, codes.view(),
                 TensorView(matrix->values.data(), DType::kF32, {matrix->rows, matrix->columns}))
          .ok());
}

void round_to(BlockFormat format, std::vector<NaiveExpert>* experts) {
  for (NaiveExpert& expert : *experts) {
    round_to(format, &expert.gate);
    round_to(format, &expert.up);
    round_to(format, &expert.down);
  }
}

Status pack(const std::vector<NaiveExpert>& experts, int64_t first, int64_t count,
            BlockFormat format, PackedWeights* gate_up, PackedWeights* down) {
  const Matrix& shape = experts[0].gate;
  ARGOSY_ASSIGN_OR_RETURN(
      *gate_up, PackedWeights::create_quantised(PackedWeights::Kind::kGateUp, format, count,
                                                shape.rows, shape.columns));
  ARGOSY_ASSIGN_OR_RETURN(
      *down, PackedWeights::create_quantised(PackedWeights::Kind::kPlain, format, count,
                                             shape.columns, shape.rows));
  for (int64_t i = 0; i < count; ++i) {
    const NaiveExpert& expert = experts[static_cast<size_t>(first + i)];
    const QuantisedTensor gate = quantised(expert.gate, format);
    const QuantisedTensor up = quantised(expert.up, format);
    const QuantisedTensor narrow = quantised(expert.down, format);
    ARGOSY_RETURN_IF_ERROR(gate_up->set_group(i, gate.view(), up.view()));
    ARGOSY_RETURN_IF_ERROR(down->set_group(i, narrow.view()));
  }
  return {};
}

Result<MoeWeights> quantised_weights(const NaiveLayer& layer, BlockFormat format, int rank,
                                     int num_ranks) {
  ARGOSY_ASSIGN_OR_RETURN(MoeWeights weights, testing::weights_for_rank(layer, rank, num_ranks));
  ARGOSY_RETURN_IF_ERROR(pack(layer.experts, weights.first_expert, weights.gate_up.num_groups(),
                              format, &weights.gate_up, &weights.down));
  ARGOSY_RETURN_IF_ERROR(
      pack(layer.shared, 0, 1, format, &weights.shared_gate_up, &weights.shared_down));
  return weights;
}

void expect_equal(const NaiveLayer& layer, BlockFormat format, const Matrix& hidden,
                  const Tensor& want, int num_ranks, Level level) {
  const Tensor input = testing::to_tensor(hidden, layer.dtype);
  Tensor output = std::move(Tensor::zeros(layer.dtype, {hidden.rows, layer.hidden})).value();
  testing::run_group(
      num_ranks,
      [&](Group& group) {
        Result<MoeWeights> weights =
            quantised_weights(layer, format, group.rank(), group.num_ranks());
        ASSERT_TRUE(weights.has_value()) << weights.error().to_string();
        MoeOptions options;
        options.hidden_dtype = layer.dtype;
        auto moe = MoeLayer::create(group, layer.router, std::move(*weights), options);
        ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
        const int64_t first = owned_begin(hidden.rows, group.num_ranks(), group.rank());
        const int64_t count = owned_begin(hidden.rows, group.num_ranks(), group.rank() + 1) - first;
        const Status status = (*moe)->forward(input.view().rows(first, count), nullptr,
                                              output.view().rows(first, count), nullptr);
        ASSERT_TRUE(status.ok()) << status.to_string();
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) {
        options.dot_order = layer.order;
        options.level = level;
      });
  EXPECT_TRUE(std::equal(output.bytes().begin(), output.bytes().end(), want.bytes().begin()))
      << name_of(format) << " " << num_ranks << " ranks, level " << name_of(level);
}

TEST(QuantisedLayer, EqualsTheNaiveLayerOnDequantisedWeights) {
  for (const BlockFormat format :
       {BlockFormat::kMxfp4, BlockFormat::kMxfp8, BlockFormat::kE4M3Row128E8M0}) {
    const int64_t block = info_of(format).block_cols;
    for (const auto& [dtype, order] :
         {std::pair(DType::kBF16, DotOrder::kVdpbf16), std::pair(DType::kBF16, DotOrder::kAmx),
          std::pair(DType::kF32, DotOrder::kVdpbf16)}) {
      NaiveLayer layer =
          testing::random_layer(43, dtype, order, 6, 2, block - 3, block - 13, true, true);
      round_to(format, &layer.experts);
      round_to(format, &layer.shared);
      std::mt19937_64 random(7);
      const Matrix hidden =
          testing::random_matrix(random, 40, layer.hidden, 1.0f, dtype == DType::kBF16);
      const Tensor want =
          testing::to_tensor(testing::naive_forward(layer, hidden, nullptr), layer.dtype);
      const Level best = *resolve_level(std::nullopt);
      for (const int num_ranks : {1, 3, 7}) {
        expect_equal(layer, format, hidden, want, num_ranks, best);
      }
      expect_equal(layer, format, hidden, want, 2, Level::kReference);
    }
  }
}

}  // namespace
}  // namespace argosy
