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

// PackedWeights::plain_lines_of_panel() of `num_blocks` blocks of 32 k of a panel of e4m3 codes.
void find_plain_lines(const CodedLayout& layout, const std::byte* panel, int64_t num_blocks,
                      uint16_t* plain);

// Line `column` of `lines`, mxfp8, as that column of one panel.
void pack_line(const ConstQuantisedView& lines, int64_t column, std::byte* panel);

}  // namespace argosy::gemm
