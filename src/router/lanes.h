// The one order of a double sum in the router: eight lanes, lane i mod 8, then a fixed tree. A SIMD
// version with two, four or eight lanes a register gives the same bits. Test:
// tests/router/kernel_test.cc.
#pragma once

#include <cstdint>

#include "numeric/elementary.h"

namespace argosy::router {

// A sum that grows piece by piece.
struct LaneSum {
  double lanes[8] = {};
};

// A multiple of 8 values, but for the last piece.
template <typename T>
ARGOSY_INLINE void add_lanes(const T* values, int64_t count, LaneSum* sum) {
  double lanes[8];
  for (int j = 0; j < 8; ++j) lanes[j] = sum->lanes[j];
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8; ++j) lanes[j] += static_cast<double>(values[i + j]);
  }
  for (int j = 0; i + j < count; ++j) lanes[j] += static_cast<double>(values[i + j]);
  for (int j = 0; j < 8; ++j) sum->lanes[j] = lanes[j];
}

ARGOSY_INLINE double total(const LaneSum& sum) {
  const double* const lanes = sum.lanes;
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <typename T>
ARGOSY_INLINE double sum_lanes(const T* values, int64_t count) {
  LaneSum sum;
  add_lanes(values, count, &sum);
  return total(sum);
}

}  // namespace argosy::router
