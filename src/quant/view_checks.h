// Checks of what a caller hands in, before a byte is read. Test: tests/quant/arguments_test.cc.
#pragma once

#include "argosy/quantise.h"

namespace argosy::quant {

// Shapes, dtypes and strides of codes and scales against the layout.
Status check_quantised_view(const ConstQuantisedView& view, const QuantisedLayout& layout);

// bf16 or fp32 [rows, cols], unit stride in cols.
Status check_values(const ConstTensorView& values, int64_t rows, int64_t cols);

// Rows of something that is written must not overlap.
Status check_distinct_rows(const char* name, const ConstTensorView& view);

}  // namespace argosy::quant
