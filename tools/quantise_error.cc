// See quantise_error.h. Test: tests/cli/quantise_test.cc.
#include "tools/quantise_error.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tools/tensor_values.h"

namespace argosy::tools {
namespace {

// A quotient may exceed the largest code by the rounding of the scale alone.
constexpr double kRounding = 1 + 0x1p-20;

// Magnitude bits of the code of one element.
uint8_t magnitude_at(const ConstTensorView& codes, bool packed, int64_t row, int64_t col) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(codes.row(row));
  if (!packed) return bytes[col] & 0x7F;
  return (col % 2 == 0 ? bytes[col / 2] : bytes[col / 2] >> 4) & 0x7;
}

}  // namespace

void QuantiseError::add(const QuantiseError& other) {
  elements += other.elements;
  non_finite += other.non_finite;
  zeros += other.zeros;
  flushed += other.flushed;
  saturated += other.saturated;
  max_abs = std::max(max_abs, other.max_abs);
  peak = std::max(peak, other.peak);
  sum_squares += other.sum_squares;
  sum_squared_errors += other.sum_squared_errors;
}

double QuantiseError::relative_max() const { return peak > 0 ? max_abs / peak : 0; }

double QuantiseError::relative_rms() const {
  return sum_squares > 0 ? std::sqrt(sum_squared_errors / sum_squares) : 0;
}

Result<QuantiseError> measure_error(const ConstTensorView& values, const ConstQuantisedView& made) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor back, Tensor::zeros(DType::kF32, {made.rows, made.cols}));
  ARGOSY_RETURN_IF_ERROR(dequantise({}, made, back.view()));
  const bool packed = info_of(made.format).element == ElementFormat::kE2M1;
  const uint8_t largest = packed ? 0x7 : 0x7E;
  QuantiseError error;
  error.elements = made.rows * made.cols;
  for (int64_t row = 0; row < made.rows; ++row) {
    const std::vector<double> row_values = values_of(values, row * made.cols, made.cols);
    const float* const row_back = reinterpret_cast<const float*>(back.view().row(row));
    for (int64_t col = 0; col < made.cols; ++col) {
      const double value = row_values[static_cast<size_t>(col)];
      const double got = row_back[col];
      if (!std::isfinite(value) || !std::isfinite(got)) {
        ++error.non_finite;
        continue;
      }
      const uint8_t magnitude = magnitude_at(made.codes, packed, row, col);
      error.zeros += magnitude == 0;
      error.flushed += magnitude == 0 && value != 0;
      error.saturated += magnitude == largest && std::abs(value) > std::abs(got) * kRounding;
      error.max_abs = std::max(error.max_abs, std::abs(value - got));
      error.peak = std::max(error.peak, std::abs(value));
      error.sum_squares += value * value;
      error.sum_squared_errors += (value - got) * (value - got);
    }
  }
  return error;
}

}  // namespace argosy::tools
