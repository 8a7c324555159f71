// What weight gradients of bf16, fp32 and quantised operands share: the checks of their output and
// the way there. Test: tests/gemm/wgrad_test.cc, quantised_wgrad_test.cc.
#pragma once

#include <span>
#include <vector>

#include "argosy/gemm_backward.h"
#include "gemm/gradient_store.h"
#include "gemm/tiles.h"

namespace argosy::gemm {

// Groups of `num_rows` rows, alpha, and `out` [G, ..] of bf16 or fp32 with `num_dims` dims.
Status check_gradient(std::span<const int64_t> offsets, std::span<const int64_t> sizes,
                      int64_t num_rows, const WeightGradientOptions& gradient,
                      const TensorView& out, int num_dims);

// `out` is [G, n, k] with unit stride in k, and apart from what is read. A group's matrix is a
// matrix like any other; matrices may lie in any order.
Status check_gradient_matrices(int64_t n, int64_t k, std::span<const ConstTensorView> read,
                               const TensorView& out);

// Sums of a tile and panel, through alpha and the main gradient, to [G, n, k]. Keeps references.
class GradientOutput {
 public:
  GradientOutput(Level level, const WeightGradientOptions& gradient, std::span<const int64_t> sizes,
                 const TensorView& out);

  // Prefetches where rows of it go.
  void fetch(const Tile& tile, int64_t panel, const Part& rows) const;
  void store(const Tile& tile, int64_t panel, const float* products) const;
  // See BackwardProduct.
  bool moves_sums(const Tile& tile) const { return streams_ && alpha_of(tile.group) == 1.0f; }
  void finish_tile() const;

 private:
  float alpha_of(int64_t group) const;
  std::byte* first(const Tile& tile, int64_t panel) const;
  int64_t row_stride_bytes() const { return out_.stride(1) * size_of(out_.dtype); }

  const WeightGradientOptions& gradient_;
  std::span<const int64_t> sizes_;
  const TensorView& out_;
  bool streams_;
  GradientStore store_;
};

// Rows of each group's product, n or, where its gradient is left as it is, 0; the longest group.
// The rows are the calling thread's, kept so that a steady state does not allocate.
struct ProductRows {
  std::span<const int64_t> rows;
  int64_t max_size = 0;
};
ProductRows product_rows(std::span<const int64_t> sizes, int64_t n, bool accumulate);

}  // namespace argosy::gemm
