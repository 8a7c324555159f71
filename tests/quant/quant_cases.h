// Matrices for the tests of block formats: random ones with the blocks of kind K18 strewn in, by seed.
#pragma once

#include <random>
#include <vector>

#include "argosy/tensor.h"
#include "quant/quant_oracle.h"
#include "support/float_cases.h"

namespace argosy::testing {

// Values as the dtype holds them: bf16 ones have 8 bits.
inline float as_dtype(float value, DType dtype) {
  return dtype == DType::kBF16 ? BFloat16::from_float(value).to_float() : value;
}

// Every 16 values of a row begin another kind of content, so that every block length sees all of them, alone and mixed.
inline std::vector<float> case_values(std::mt19937& rng, int64_t rows, int64_t cols, DType dtype,
                                      bool specials) {
  std::vector<float> values(static_cast<size_t>(rows * cols));
  const auto draw = [&rng](uint32_t below) { return static_cast<uint32_t>(rng()) % below; };
  std::uniform_real_distribution<float> unit(-1.0f, 1.0f);
  for (int64_t row = 0; row < rows; ++row) {
    // Half of the rows have one kind all along: whole blocks of any length of zeros, denormals, ...
    const uint32_t row_kind = draw(2) == 0 ? draw(10) : 10;
    uint32_t kind = row_kind;
    float magnitude = 1;
    for (int64_t col = 0; col < cols; ++col) {
      if (col % 16 == 0) {
        if (row_kind == 10) kind = draw(10);
        magnitude = std::ldexp(1.0f, static_cast<int>(draw(12)) - 6);
      }
      float value = unit(rng) * magnitude;
      if (kind == 1) value = draw(2) == 0 ? 0.0f : -0.0f;
      if (kind == 2) value = col % 16 == 3 ? 1e-38f : 0.0f;            // C183
      if (kind == 3) value = col % 16 == 5 ? -1e-45f : 0.0f;           // C183
      if (kind == 4) value = std::bit_cast<float>(draw(0x00800000u));  // denormals
      if (kind ==
          5) {  // powers of two times 1.75, 1.5, 448 and neighbours: the borders of the rules
        constexpr float kBorders[] = {1.0f, 1.75f, 1.5f, 1.7500001f, 1.5000001f, 3.5f, 480.0f};
        value = std::ldexp(kBorders[draw(7)], static_cast<int>(draw(40)) - 20);
      }
      if (kind == 6) value = std::bit_cast<float>(random_bits(rng, Values::kWide));
      if (kind == 7) value = std::bit_cast<float>(random_bits(rng, Values::kTiny));
      if (kind == 8) {  // ties: small integers over a block whose largest is 448 or 7 * 2^n
        value = static_cast<float>(static_cast<int>(draw(897)) - 448);
      }
      if (specials && kind == 9 && draw(64) == 0) {
        constexpr uint32_t kBits[] = {0x7FC00000u, 0x7F800000u, 0xFF800000u, 0xFF810000u};
        value = std::bit_cast<float>(kBits[draw(4)]);
      } else if (!specials && !std::isfinite(as_dtype(value, dtype))) {
        value = 1.0f;
      }
      values[static_cast<size_t>(row * cols + col)] = as_dtype(value, dtype);
    }
  }
  return values;
}

// A matrix in memory of its own, rows `stride` apart, whatever lies between them NaN.
struct Stored {
  std::vector<std::byte> bytes;
  ConstTensorView view;

  Stored(const std::vector<float>& values, int64_t rows, int64_t cols, int64_t stride, DType dtype)
      : bytes(static_cast<size_t>((rows * stride + 1) * size_of(dtype)), std::byte{0xFF}) {
    std::byte* const first = bytes.data() + size_of(dtype);  // an odd element: no alignment
    for (int64_t i = 0; i < rows * cols; ++i) {
      std::byte* const at = first + (i / cols * stride + i % cols) * size_of(dtype);
      const float value = values[static_cast<size_t>(i)];
      if (dtype == DType::kBF16) {
        *reinterpret_cast<BFloat16*>(at) =
            BFloat16{static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16)};
      } else {
        *reinterpret_cast<float*>(at) = value;
      }
    }
    view = ConstTensorView(first, dtype, {rows, cols});
    view.strides[0] = stride;
  }
};

inline QuantisedTensor make_quantised(const QuantisedLayout& layout) {
  Result<QuantisedTensor> made = QuantisedTensor::create(layout);
  EXPECT_TRUE(made.has_value()) << made.error().message();
  return std::move(made).value();
}

inline QuantisedLayout layout_of(BlockFormat format, int64_t rows, int64_t cols,
                                 const RowGroups& groups = {}, GroupAxis axis = GroupAxis::kRows) {
  const Result<QuantisedLayout> layout = quantised_layout(format, rows, cols, groups, axis);
  EXPECT_TRUE(layout.has_value()) << layout.error().message();
  return layout.has_value() ? *layout : QuantisedLayout{};
}

// Codes and scales against the oracle's, [row0, col0) of the stored matrix being the oracle's origin.
struct Origin {
  int64_t row = 0, col = 0, block_row = 0, block_col = 0, group = 0;
};
inline void expect_quantised(const ConstQuantisedView& got, const OracleMatrix& want,
                             const Origin& at = {}) {
  for (int64_t r = 0; r < want.block_rows; ++r) {
    for (int64_t c = 0; c < want.block_cols; ++c) {
      ASSERT_EQ(stored_scale(got, at.block_row + r, at.block_col + c),
                want.scales[static_cast<size_t>(r * want.block_cols + c)])
          << name_of(got.format) << " scale " << r << ", " << c;
    }
  }
  for (int64_t r = 0; r < want.rows; ++r) {
    for (int64_t c = 0; c < want.cols; ++c) {
      ASSERT_EQ(code_at(got, at.row + r, at.col + c),
                want.codes[static_cast<size_t>(r * want.cols + c)])
          << name_of(got.format) << " code " << r << ", " << c;
    }
  }
  if (info_of(got.format).has_tensor_scale) {
    ASSERT_EQ(got.tensor_scales.as<float>()[at.group], want.tensor);
  }
}

}  // namespace argosy::testing
