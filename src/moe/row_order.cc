// See row_order.h.
#include "moe/row_order.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace argosy {

void order_rows(std::span<const int64_t> rows_of, int64_t num_local, int num_ranks,
                std::vector<int64_t>* place_of) {
  const auto runs =
      static_cast<size_t>(num_local * num_ranks);  // of an expert's rows from a source
  std::vector<int64_t> next(runs + 1, 0);
  for (size_t at = 0; at < rows_of.size(); ++at) next[at % runs + 1] += rows_of[at];
  std::partial_sum(next.begin(), next.end(), next.begin());
  place_of->clear();
  place_of->reserve(static_cast<size_t>(next.back()));
  for (size_t at = 0; at < rows_of.size(); ++at) {
    int64_t& place = next[at % runs];
    for (int64_t i = 0; i < rows_of[at]; ++i) place_of->push_back(place++);
  }
}

void move_rows(std::span<const int64_t> place_of, int64_t row_bytes, std::byte* rows) {
  std::vector<bool> is_placed(place_of.size(), false);
  std::vector<std::byte> carried(static_cast<size_t>(row_bytes));
  for (size_t first = 0; first < place_of.size(); ++first) {
    if (is_placed[first] || place_of[first] == static_cast<int64_t>(first)) continue;
    // Round the cycle: what is carried changes places with what lies where it belongs.
    std::memcpy(carried.data(), rows + static_cast<int64_t>(first) * row_bytes, carried.size());
    for (auto at = static_cast<size_t>(place_of[first]); !is_placed[at];
         at = static_cast<size_t>(place_of[at])) {
      std::swap_ranges(carried.begin(), carried.end(), rows + static_cast<int64_t>(at) * row_bytes);
      is_placed[at] = true;
    }
  }
}

Status grow(AlignedBuffer* buffer, int64_t used, int64_t bytes) {
  if (bytes <= buffer->size_bytes()) return {};
  ARGOSY_ASSIGN_OR_RETURN(AlignedBuffer larger, AlignedBuffer::allocate(bytes));
  if (used > 0) std::memcpy(larger.data(), buffer->data(), static_cast<size_t>(used));
  *buffer = std::move(larger);
  return {};
}

}  // namespace argosy
