// One random grouped GEMM on quantised weights, and its result by a definition written here from contract 4.3,
// which shares nothing with the library but std::fma and the values of codes.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "argosy/gemm.h"
#include "argosy/number_formats.h"
#include "gemm/gemm_case.h"
#include "platform/float_env.h"

namespace argosy::testing {

inline constexpr BlockFormat kGemmFormats[] = {
    BlockFormat::kE4M3Row128, BlockFormat::kE4M3Row128E8M0, BlockFormat::kE4M3Block128,
    BlockFormat::kMxfp8,      BlockFormat::kMxfp8Ceil,      BlockFormat::kMxfp4};

struct QuantisedSpec {
  BlockFormat format = BlockFormat::kE4M3Row128;
  PackedWeights::Kind kind = PackedWeights::Kind::kPlain;
  DType rows = DType::kBF16;
  DotOrder order = DotOrder::kAmx;
  int64_t n = 1;
  int64_t k = 1;
  std::vector<int64_t> sizes = {};
  Values values = Values::kOrdinary;
  uint32_t seed = 1;

  std::string text() const {
    return fmt::format("seed {} format {} rows {} order {} {} n {} k {} values {} sizes {}", seed,
                       argosy::name_of(format), argosy::name_of(rows), argosy::name_of(order),
                       kind == PackedWeights::Kind::kPlain ? "plain" : "gate_up", n, k,
                       testing::name_of(values), fmt::join(sizes, " "));
  }
};

// Every arithmetic on quantised weights.
inline std::vector<QuantisedSpec> all_quantised() {
  std::vector<QuantisedSpec> specs;
  for (const BlockFormat format : kGemmFormats) {
    for (const auto& [rows, order] :
         {std::pair(DType::kBF16, DotOrder::kAmx), std::pair(DType::kBF16, DotOrder::kVdpbf16),
          std::pair(DType::kF32, DotOrder::kAuto)}) {
      specs.push_back({.format = format, .rows = rows, .order = order});
    }
  }
  return specs;
}

// Codes and scales of one matrix: any that the format allows, NaN among them with kSpecial only. Of every three matrices of
// e4m3 one has only codes of normal numbers, and one very few others: kernels tell such lines apart.
inline QuantisedTensor random_quantised(std::mt19937& rng, BlockFormat format, int64_t rows,
                                        int64_t cols, Values values) {
  QuantisedTensor tensor =
      std::move(QuantisedTensor::create(std::move(quantised_layout(format, rows, cols)).value()))
          .value();
  const QuantisedView view = tensor.view();
  const bool special = values == Values::kSpecial;
  auto* codes = view.codes.as<uint8_t>();
  constexpr uint32_t kNever = 0;
  const uint32_t one_in = std::array<uint32_t, 3>{1, 300, kNever}[rng() % 3];
  for (int64_t i = 0; i < view.codes.num_elements(); ++i) {
    codes[i] = static_cast<uint8_t>(rng());
    const bool is_nan = view.codes.dtype == DType::kE4M3 && (codes[i] & 0x7F) == 0x7F;
    if (is_nan && (!special || rng() % 8 != 0)) codes[i] ^= 0x10;
    if (view.codes.dtype != DType::kE4M3 || (one_in != kNever && rng() % one_in == 0)) continue;
    codes[i] = static_cast<uint8_t>((codes[i] & 0x80) | (0x08 + codes[i] % 0x77));
  }
  for (int64_t i = 0; i < view.scales.num_elements(); ++i) {
    const uint32_t bits = random_bits(rng, values) & 0x7FFFFFFFu;
    if (view.scales.dtype == DType::kE8M0) {
      const bool is_nan = special && rng() % 64 == 0;
      view.scales.as<uint8_t>()[i] = is_nan ? kE8M0NaN : static_cast<uint8_t>(bits >> 23 & 0xFE);
    } else {
      view.scales.as<uint32_t>()[i] = bits == 0x7F800000u ? 0 : bits;
    }
  }
  return tensor;
}

inline float code_of(const ConstQuantisedView& w, int64_t n, int64_t k) {
  if (w.format != BlockFormat::kMxfp4) {
    return decode_element(ElementFormat::kE4M3, w.codes.as<uint8_t>()[n * w.cols + k]);
  }
  const uint8_t two = w.codes.as<uint8_t>()[n * w.codes.dim(1) + k / 2];
  return decode_element(ElementFormat::kE2M1, static_cast<uint8_t>(k % 2 == 0 ? two : two >> 4));
}

inline float scale_of(const ConstQuantisedView& w, int64_t n, int64_t k) {
  const BlockFormatInfo info = info_of(w.format);
  const int64_t at = n / info.block_rows * w.scales.dim(1) + k / info.block_cols;
  return info.scale_dtype == DType::kE8M0 ? decode_e8m0(w.scales.as<uint8_t>()[at])
                                          : w.scales.as<float>()[at];
}

// Row n of `w` by x, whose elements are fp32 already. Called with denormals flushed.
__attribute__((noinline)) inline float quantised_dot(const std::vector<float>& x,
                                                     const ConstQuantisedView& w, int64_t n,
                                                     bool f32_rows, DotOrder order) {
  const int64_t block_k = info_of(w.format).block_cols;
  const auto size = static_cast<int64_t>(x.size());
  const auto product = [&](int64_t k, float chain) {
    return k < size ? std::fma(x[static_cast<size_t>(k)], code_of(w, n, k), chain) : chain;
  };
  float acc = 0;
  for (int64_t begin = 0; begin < size; begin += block_k) {
    const int64_t end = std::min(size, begin + block_k);
    float partial = 0;
    if (f32_rows) {
      for (int64_t k = begin; k < end; ++k) partial = product(k, partial);
    } else if (order == DotOrder::kVdpbf16) {
      for (int64_t k = begin; k < end; k += 2) partial = product(k, product(k + 1, partial));
    } else {
      for (int64_t first = begin; first < end; first += 32) {
        float even = 0, odd = 0;
        for (int64_t k = first; k < first + 32; k += 2) {
          even = product(k, even);
          odd = product(k + 1, odd);
        }
        partial = partial + (even + odd);
      }
    }
    acc = std::fma(partial, scale_of(w, n, begin), acc);
  }
  return acc + 0.0f;
}

class QuantisedCase {
 public:
  explicit QuantisedCase(const QuantisedSpec& spec) : spec_(spec), rng_(spec.seed) {
    for (const int64_t size : spec.sizes) {
      offsets_.push_back(num_rows_);
      num_rows_ += size;
    }
    for (int64_t i = 0; i < num_rows_ * spec.k; ++i) {
      const uint32_t mask = spec.rows == DType::kBF16 ? 0xFFFF0000u : 0xFFFFFFFFu;
      values_.push_back(std::bit_cast<float>(random_bits(rng_, spec.values) & mask));
    }
    rows_.resize(values_.size() * static_cast<size_t>(size_of(spec.rows)));
    for (size_t i = 0; i < values_.size(); ++i) {
      // The bits, not a rounding: NaN keeps its payload.
      const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(values_[i]) >> 16);
      if (spec.rows == DType::kBF16) std::memcpy(rows_.data() + i * 2, &half, 2);
      if (spec.rows == DType::kF32) std::memcpy(rows_.data() + i * 4, &values_[i], 4);
    }
    make_weights();
  }

  const PackedWeights& packed() const { return packed_; }

  std::vector<std::byte> run(Level level, ThreadPool* pool = nullptr) const {
    std::vector<std::byte> out(out_bytes(), std::byte{kPoison});
    GemmOptions options;
    options.level = level;
    options.dot_order = spec_.order;
    options.pool = pool;
    const Status status = grouped_gemm(
        options,
        {ConstTensorView(rows_.data(), spec_.rows, {num_rows_, spec_.k}), offsets_, spec_.sizes},
        packed_, TensorView(out.data(), spec_.rows, {num_rows_, spec_.n}));
    EXPECT_TRUE(status.ok()) << status.to_string();
    return out;
  }

  std::vector<std::byte> expected() const {
    std::vector<std::byte> out(out_bytes());
    for (size_t g = 0; g < spec_.sizes.size(); ++g) {
      for (int64_t row = offsets_[g]; row < offsets_[g] + spec_.sizes[g]; ++row) {
        const auto first = values_.begin() + row * spec_.k;
        const std::vector<float> x(first, first + spec_.k);
        for (int64_t n = 0; n < spec_.n; ++n) {
          float value = dot(x, first_[g], n);
          if (spec_.kind == PackedWeights::Kind::kGateUp) {
            value = numeric::silu_f32(value) * dot(x, up_[g], n);
          }
          GemmCase::store(out.data() + (row * spec_.n + n) * size_of(spec_.rows), spec_.rows,
                          value);
        }
      }
    }
    return out;
  }

 private:
  float dot(const std::vector<float>& x, const QuantisedTensor& w, int64_t n) const {
    const platform::ScopedFloatEnv flush(platform::Denormals::kFlush);
    return quantised_dot(x, w.view(), n, spec_.rows == DType::kF32, spec_.order);
  }

  size_t out_bytes() const {
    return static_cast<size_t>(num_rows_ * spec_.n * size_of(spec_.rows));
  }

  void make_weights() {
    const auto groups = static_cast<int64_t>(spec_.sizes.size());
    Result<PackedWeights> packed =
        PackedWeights::create_quantised(spec_.kind, spec_.format, groups, spec_.n, spec_.k);
    ASSERT_TRUE(packed.has_value()) << packed.error().to_string();
    packed_ = std::move(packed).value();
    for (int64_t g = 0; g < groups; ++g) {
      first_.push_back(random_quantised(rng_, spec_.format, spec_.n, spec_.k, spec_.values));
      up_.push_back(random_quantised(rng_, spec_.format, spec_.n, spec_.k, spec_.values));
      const Status status = spec_.kind == PackedWeights::Kind::kPlain
                                ? packed_.set_group(g, std::as_const(first_.back()).view())
                                : packed_.set_group(g, std::as_const(first_.back()).view(),
                                                    std::as_const(up_.back()).view());
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
  }

  QuantisedSpec spec_;
  std::mt19937 rng_;
  std::vector<int64_t> offsets_;
  int64_t num_rows_ = 0;
  std::vector<float> values_;
  std::vector<std::byte> rows_;
  std::vector<QuantisedTensor> first_, up_;
  PackedWeights packed_;
};

}  // namespace argosy::testing
