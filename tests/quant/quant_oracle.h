// The naive twin of src/quant: tables from the formats' definitions, casts by search for the nearest value, blocks in plain
// code. fp64 where something is compared, fp32 where contract 5 says fp32. Shares nothing with the library but
// the facts of info_of().
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "argosy/bfloat16.h"
#include "argosy/quantise.h"

namespace argosy::testing {

inline const float kOracleNaN = std::bit_cast<float>(0x7FC00000u);

// A positive magnitude of a format by its definition; NaN and Inf where the format has them.
inline double definition(ElementFormat format, int code) {
  if (format == ElementFormat::kE4M3) {
    if (code == 0x7F) return std::numeric_limits<double>::quiet_NaN();
    const int e = code >> 3, m = code & 7;
    return e == 0 ? std::ldexp(m / 8.0, -6) : std::ldexp(1 + m / 8.0, e - 7);
  }
  if (format == ElementFormat::kE5M2) {
    const int e = code >> 2, m = code & 3;
    if (e == 31) {
      return m == 0 ? std::numeric_limits<double>::infinity()
                    : std::numeric_limits<double>::quiet_NaN();
    }
    return e == 0 ? std::ldexp(m / 4.0, -14) : std::ldexp(1 + m / 4.0, e - 15);
  }
  constexpr double kE2M1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return kE2M1[code];
}

inline int max_code(ElementFormat format) {
  return format == ElementFormat::kE4M3 ? 0x7E : format == ElementFormat::kE5M2 ? 0x7B : 7;
}
inline int sign_bit(ElementFormat format) { return format == ElementFormat::kE2M1 ? 8 : 0x80; }

// The value one step above the largest, had the format one more.
inline double beyond(ElementFormat format) {
  return format == ElementFormat::kE4M3 ? 480.0 : format == ElementFormat::kE5M2 ? 65536.0 : 8.0;
}

inline uint8_t oracle_encode(ElementFormat format, float value, Overflow overflow) {
  const int sign = std::signbit(value) ? sign_bit(format) : 0;
  const int most = max_code(format);
  if (std::isnan(value)) {
    const int nan = format == ElementFormat::kE4M3   ? 0x7F
                    : format == ElementFormat::kE5M2 ? 0x7E
                                                     : 0;
    return static_cast<uint8_t>(sign | nan);
  }
  const double magnitude = std::fabs(static_cast<double>(value));
  const double limit = (definition(format, most) + beyond(format)) / 2;
  // At the limit itself the even of the two neighbours wins.
  if (magnitude > limit || (magnitude == limit && most % 2 == 1)) {
    const bool nan = overflow == Overflow::kNaN && format != ElementFormat::kE2M1;
    return static_cast<uint8_t>(sign | (nan ? most + 1 : most));
  }
  int low = 0, high = most;
  while (low < high) {  // the largest code whose value is not above
    const int middle = (low + high + 1) / 2;
    if (definition(format, middle) <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (low == most) return static_cast<uint8_t>(sign | most);
  const double down = magnitude - definition(format, low);
  const double up = definition(format, low + 1) - magnitude;
  const int code = down < up || (down == up && low % 2 == 0) ? low : low + 1;
  return static_cast<uint8_t>(sign | code);
}

inline float oracle_decode(ElementFormat format, int code) {
  const double value = definition(format, code & (sign_bit(format) - 1));
  if (std::isnan(value)) return kOracleNaN;
  return static_cast<float>(code & sign_bit(format) ? -value : value);
}

// 2^(c - 127) by exact arithmetic.
inline float oracle_e8m0(int code) {
  return code == 255 ? kOracleNaN : static_cast<float>(std::ldexp(1.0, code - 127));
}

// The least c with 2^(c-127) >= quotient, or the greatest with <=, of 0..254.
inline int oracle_e8m0_code(double quotient, bool ceil) {
  if (ceil) {
    for (int c = 0; c < 254; ++c) {
      if (std::ldexp(1.0, c - 127) >= quotient) return c;
    }
    return 254;
  }
  for (int c = 254; c > 0; --c) {
    if (std::ldexp(1.0, c - 127) <= quotient) return c;
  }
  return 0;
}

struct OracleBlock {
  uint32_t scale = 0;  // stored: fp32 bits, or a code
  float divisor = 1;   // q = x / divisor
  bool nan = false;
};

inline OracleBlock oracle_block(BlockFormat format, float amax, bool finite, float tensor,
                                const QuantiseOptions& options) {
  const BlockFormatInfo info = info_of(format);
  const bool e4m3 = info.element == ElementFormat::kE4M3;
  OracleBlock block;
  if (info.scale_dtype == DType::kF32) {
    float scale = amax == 0 ? 1.0f : amax / 448.0f;
    if (scale == 0) scale = 0x1p-149f;
    block.divisor = finite ? scale : kOracleNaN;
    block.scale = std::bit_cast<uint32_t>(block.divisor);
  } else if (info.scale_dtype == DType::kE8M0) {
    bool ceil = format == BlockFormat::kE4M3Row128E8M0 || format == BlockFormat::kMxfp8Ceil;
    if (options.e8m0_rule.has_value()) ceil = *options.e8m0_rule == E8M0Rule::kCeil;
    const double largest = e4m3 ? 448 : 6;
    // floor(log2 amax) - 8 (or 2) is floor(log2(amax / 2^8)).
    const double quotient = amax / (ceil ? largest : (e4m3 ? 256.0 : 4.0));
    int code = amax == 0 ? options.zero_block_code : oracle_e8m0_code(quotient, ceil);
    if (!finite) code = 255;
    block.scale = static_cast<uint32_t>(code);
    block.divisor = oracle_e8m0(code);
  } else {
    int code = amax == 0
                   ? 0x38
                   : oracle_encode(ElementFormat::kE4M3, amax / 6.0f / tensor, Overflow::kSaturate);
    if (code == 0) code = 1;
    block.scale = static_cast<uint32_t>(finite ? code : 0x7F);
    block.divisor = amax == 0 ? 1.0f : oracle_decode(ElementFormat::kE4M3, code) * tensor;
    if (block.divisor == 0) block.divisor = 0x1p-149f;
  }
  block.nan = !finite;
  return block;
}

// A dense matrix quantised as one group.
struct OracleMatrix {
  int64_t rows = 0, cols = 0, block_rows = 0, block_cols = 0;
  std::vector<uint8_t> codes;    // one per element
  std::vector<uint32_t> scales;  // [ceil rows, ceil cols]
  float tensor = 1;
  std::vector<float> values;  // dequantised, fp32
};

inline OracleMatrix oracle_quantise(BlockFormat format, const std::vector<float>& x, int64_t rows,
                                    int64_t cols, const QuantiseOptions& options) {
  const BlockFormatInfo info = info_of(format);
  OracleMatrix m;
  m.rows = rows;
  m.cols = cols;
  m.block_rows = (rows + info.block_rows - 1) / info.block_rows;
  m.block_cols = (cols + info.block_cols - 1) / info.block_cols;
  m.codes.resize(x.size());
  m.values.resize(x.size());
  m.scales.resize(static_cast<size_t>(m.block_rows * m.block_cols));
  const auto each_block = [&](auto&& body) {
    for (int64_t b = 0; b < m.block_rows * m.block_cols; ++b) {
      std::vector<size_t> inside;
      const int64_t row = b / m.block_cols * info.block_rows;
      const int64_t col = b % m.block_cols * info.block_cols;
      float amax = 0;
      bool finite = true;
      for (int64_t r = row; r < std::min(rows, row + info.block_rows); ++r) {
        for (int64_t c = col; c < std::min(cols, col + info.block_cols); ++c) {
          inside.push_back(static_cast<size_t>(r * cols + c));
          finite = finite && std::isfinite(x[inside.back()]);
          amax = std::max(amax, std::fabs(x[inside.back()]));
        }
      }
      body(static_cast<size_t>(b), inside, amax, finite);
    }
  };
  if (info.has_tensor_scale) {
    float largest = 0;
    each_block([&](size_t, const std::vector<size_t>&, float amax, bool finite) {
      if (finite) largest = std::max(largest, amax);
    });
    m.tensor = largest == 0 ? 1.0f : largest / 2688.0f;
    if (m.tensor == 0) m.tensor = 0x1p-149f;
  }
  each_block([&](size_t b, const std::vector<size_t>& inside, float amax, bool finite) {
    const OracleBlock block = oracle_block(format, amax, finite, m.tensor, options);
    m.scales[b] = block.scale;
    float factor = std::bit_cast<float>(block.scale);
    if (info.scale_dtype == DType::kE8M0) factor = oracle_e8m0(static_cast<int>(block.scale));
    if (info.scale_dtype == DType::kE4M3) {
      factor = oracle_decode(ElementFormat::kE4M3, static_cast<int>(block.scale)) * m.tensor;
    }
    for (const size_t i : inside) {
      const float q = x[i] / block.divisor;
      m.codes[i] = block.nan ? (info.element == ElementFormat::kE4M3 ? 0x7F : 0)
                             : oracle_encode(info.element, q, options.overflow);
      const float value = oracle_decode(info.element, m.codes[i]) * factor;
      m.values[i] = std::isnan(value) ? kOracleNaN : value;
    }
  });
  return m;
}

inline constexpr BlockFormat kAllFormats[] = {
    BlockFormat::kE4M3Row128, BlockFormat::kE4M3Row128E8M0, BlockFormat::kE4M3Block128,
    BlockFormat::kMxfp8,      BlockFormat::kMxfp8Ceil,      BlockFormat::kMxfp4,
    BlockFormat::kNvfp4};

// Codes and scales of a view, one number each, in the oracle's order.
inline uint8_t code_at(const ConstQuantisedView& view, int64_t row, int64_t col) {
  if (info_of(view.format).element != ElementFormat::kE2M1) {
    return static_cast<uint8_t>(view.codes.row(row)[col]);
  }
  const auto byte = static_cast<uint8_t>(view.codes.row(row)[col / 2]);
  return col % 2 == 0 ? byte & 0xF : byte >> 4;
}
inline uint32_t stored_scale(const ConstQuantisedView& view, int64_t row, int64_t col) {
  if (view.scales.dtype != DType::kF32) return static_cast<uint8_t>(view.scales.row(row)[col]);
  return reinterpret_cast<const uint32_t*>(view.scales.row(row))[col];
}

// The levels this machine can run, one per kernel.
inline std::vector<Level> kernel_levels() {
  std::vector<Level> levels;
  const Result<const CpuInfo*> cpu = cpu_info();
  for (const Level level : {Level::kGeneric, Level::kAvx2, Level::kAvx512}) {
    if (cpu.has_value() && (*cpu)->has(level)) levels.push_back(level);
  }
  return levels;
}

}  // namespace argosy::testing
