// What quantising has cost, value by value: distance, zeros, saturated values. Test: tests/cli/quantise_test.cc.
#pragma once

#include <cstdint>

#include "argosy/quantise.h"
#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy::tools {

struct QuantiseError {
  int64_t elements = 0;
  int64_t non_finite = 0;  // NaN or Inf before, or NaN after: left out of all that follows
  int64_t zeros = 0;       // codes that are zero
  int64_t flushed = 0;     // of these, whose value was not
  int64_t saturated =
      0;  // beyond the largest value that the block's scale reaches, by more than rounding
  double max_abs = 0;      // largest |value - dequantised|
  double peak = 0;         // largest |value|
  double sum_squares = 0;  // of values
  double sum_squared_errors = 0;

  void add(const QuantiseError& other);
  double relative_max() const;  // max_abs / peak; 0 where peak is
  double relative_rms() const;  // rms of the difference by rms of the values
};

// values: bf16 or fp32 [rows, cols], dense; made: what quantise() made of them. Allocates the fp32 values of `made`.
Result<QuantiseError> measure_error(const ConstTensorView& values, const ConstQuantisedView& made);

}  // namespace argosy::tools
