// Codes and scales into panels. Test: tests/gemm/packed_quantised_test.cc.
#pragma once

#include "argosy/gemm.h"
#include "gemm/packed_layout.h"

namespace argosy::gemm {

// Format and shape against the packed weights', then whatever check_quantised() finds, `name` before it.
Status check_quantised_matrix(const PackedWeights& packed, const char* name,
                              const ConstQuantisedView& w);

// Writes the rows of `w` as columns of a group's panels. Precondition: checked.
void pack_quantised(const ConstQuantisedView& w, std::byte* group_data, int64_t panel_bytes,
                    ColumnOf column_of);

// Line `column` of `lines`, mxfp8, as that column of one panel.
void pack_line(const ConstQuantisedView& lines, int64_t column, std::byte* panel);

}  // namespace argosy::gemm
