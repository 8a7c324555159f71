// Level `reference` of the backward: the naive twins, one output element after the other from the
// canonical dot product; no blocks, no tiles. Arguments were checked. Test:
// tests/gemm/dgrad_test.cc, wgrad_test.cc.
#pragma once

#include "argosy/gemm_backward.h"

namespace argosy::gemm {

// `d_up` is null for plain weights.
void reference_dgrad(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView* d_up,
                     const PackedWeights& w, const TensorView& d_x);
void reference_wgrad(const GemmOptions& options, const RaggedRows& d_y, const ConstTensorView& x,
                     const WeightGradientOptions& gradient, const TensorView& out);
// Of operands with a scale per 32 rows of a group; `blocks[g]` is the first of group g.
void reference_wgrad(const GemmOptions& options, const RaggedQuantisedColumns& d_y,
                     const ConstQuantisedView& x, std::span<const int64_t> blocks,
                     const WeightGradientOptions& gradient, const TensorView& out);
// gate and up in one; `h` as in grouped_gemm_preactivation.
void reference_preactivation(const GemmOptions& options, const RaggedRows& x,
                             const PackedWeights& w, const TensorView& gate, const TensorView& up,
                             const TensorView& h);

}  // namespace argosy::gemm
