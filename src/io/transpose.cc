// See transpose.h. In strips of rows: their lines stay in the L1 cache while the columns go by.
// Test: tests/io/checkpoint_test.cc.
#include "io/transpose.h"

#include <algorithm>

#include "base/error.h"

namespace argosy::io {
namespace {

constexpr int64_t kStripRows = 64;

template <typename Element>
void transpose(const ConstTensorView& from, int64_t first, int64_t step, std::byte* to) {
  const int64_t rows = from.dim(0);
  const int64_t columns = from.dim(1);
  const auto* const source = reinterpret_cast<const Element*>(from.data);
  auto* const target = reinterpret_cast<Element*>(to);
  for (int64_t strip = 0; strip < rows; strip += kStripRows) {
    const int64_t end = std::min(rows, strip + kStripRows);
    for (int64_t column = first, at = 0; column < columns; column += step, ++at) {
      for (int64_t row = strip; row < end; ++row) {
        target[at * rows + row] = source[row * columns + column];
      }
    }
  }
}

}  // namespace

Result<Tensor> transposed_columns(const ConstTensorView& from, int64_t first, int64_t step,
                                  std::span<const int64_t> shape) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor result, Tensor::zeros(from.dtype, shape));
  if (from.dtype == DType::kBF16) {
    transpose<uint16_t>(from, first, step, result.view().data);
  } else {
    transpose<uint32_t>(from, first, step, result.view().data);
  }
  return result;
}

}  // namespace argosy::io
