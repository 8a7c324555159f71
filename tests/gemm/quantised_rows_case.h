// One random grouped GEMM on quantised rows, and its result by a definition written here from contract 4.3 and 5: the
// scales of both sides meet as whole exponents where they are e8m0.
#pragma once

#include <optional>

#include "gemm/quantised_case.h"

namespace argosy::testing {

inline constexpr BlockFormat kRowFormats[] = {BlockFormat::kE4M3Row128,
                                              BlockFormat::kE4M3Row128E8M0, BlockFormat::kMxfp8,
                                              BlockFormat::kMxfp8Ceil};

struct QuantisedRowsSpec {
  BlockFormat rows = BlockFormat::kMxfp8;
  BlockFormat weights = BlockFormat::kUnset;  // bf16
  DotOrder order = DotOrder::kAmx;
  PackedWeights::Kind kind = PackedWeights::Kind::kPlain;
  DType out = DType::kF32;
  int64_t n = 1;
  int64_t k = 1;
  std::vector<int64_t> sizes = {};
  Values values = Values::kOrdinary;
  uint32_t seed = 1;

  std::string text() const {
    const bool is_bf16 = weights == BlockFormat::kUnset;
    return fmt::format("seed {} rows {} weights {} order {} out {} {} n {} k {} values {} sizes {}",
                       seed, argosy::name_of(rows), is_bf16 ? "bf16" : argosy::name_of(weights),
                       argosy::name_of(order), argosy::name_of(out),
                       kind == PackedWeights::Kind::kPlain ? "plain" : "gate_up", n, k,
                       testing::name_of(values), fmt::join(sizes, " "));
  }
};

// Every format of rows by bf16 and by every format of weights, in both orders.
inline std::vector<QuantisedRowsSpec> all_quantised_rows() {
  std::vector<BlockFormat> weights(std::begin(kGemmFormats), std::end(kGemmFormats));
  weights.push_back(BlockFormat::kUnset);
  std::vector<QuantisedRowsSpec> specs;
  for (const BlockFormat rows : kRowFormats) {
    for (const BlockFormat format : weights) {
      for (const DotOrder order : {DotOrder::kAmx, DotOrder::kVdpbf16}) {
        specs.push_back({.rows = rows, .weights = format, .order = order});
      }
    }
  }
  return specs;
}

// Some scales at the ends of their range, so that products of two leave it: always with values that are not ordinary.
inline void stretch_scales(std::mt19937& rng, const QuantisedView& view) {
  constexpr uint8_t kCodes[] = {0, 1, 2, 60, 67, 126, 127, 128, 187, 190, 253, 254};
  constexpr float kFloats[] = {0.0f,   0x1p-149f, 0x1p-126f,      0x1.8p-64f,
                               1.0f,   0x1.8p63f, 0x1.000002p63f, 0x1p64f,
                               0x1p0f, 0x1p127f,  0x1.fffffep127f};
  for (int64_t i = 0; i < view.scales.num_elements(); ++i) {
    if (rng() % 3 != 0) continue;
    if (view.scales.dtype == DType::kE8M0) {
      view.scales.as<uint8_t>()[i] = kCodes[rng() % std::size(kCodes)];
    } else {
      view.scales.as<float>()[i] = kFloats[rng() % std::size(kFloats)];
    }
  }
}

// The matrix of weights of one group.
struct RowsWeights {
  std::optional<QuantisedTensor> codes;  // else bf16 [n, k]
  std::vector<BFloat16> values;

  float at(int64_t n, int64_t k, int64_t width) const {
    return codes ? code_of(std::as_const(*codes).view(), n, k)
                 : values[static_cast<size_t>(n * width + k)].to_float();
  }
};

// A scale as the contract sees it.
struct OneScale {
  float value = 1;
  int exponent = 0;     // of e8m0, and of bf16 weights
  bool is_e8m0 = true;  // bf16 weights go with either
  bool is_bf16 = false;
};
inline OneScale one_scale(const ConstQuantisedView& w, int64_t row, int64_t k) {
  OneScale scale{.value = scale_of(w, row, k)};
  const BlockFormatInfo info = info_of(w.format);
  scale.is_e8m0 = info.scale_dtype == DType::kE8M0;
  const int64_t at = row / info.block_rows * w.scales.dim(1) + k / info.block_cols;
  if (scale.is_e8m0) scale.exponent = int{w.scales.as<uint8_t>()[at]} - 127;
  return scale;
}

// Called with denormals flushed.
__attribute__((noinline)) inline float added(float partial, const OneScale& x, const OneScale& w,
                                             float acc) {
  if (x.value != x.value || w.value != w.value) return std::bit_cast<float>(0x7FC00000u);
  if (x.is_e8m0 && w.is_e8m0) {
    const int exponent = x.exponent + w.exponent;
    if (exponent < -126) return std::fma(partial, 0.0f, acc);
    if (exponent <= 127) return std::fma(partial, std::ldexp(1.0f, exponent), acc);
    return std::fma(partial * x.value, w.value, acc);
  }
  const float scale = x.value * w.value;
  return scale > 0x1p127f ? std::fma(partial * x.value, w.value, acc)
                          : std::fma(partial, scale, acc);
}

class QuantisedRowsCase {
 public:
  explicit QuantisedRowsCase(const QuantisedRowsSpec& spec) : spec_(spec), rng_(spec.seed) {
    for (const int64_t size : spec.sizes) {
      ++num_rows_;  // nobody's
      offsets_.push_back(num_rows_);
      num_rows_ += size;
    }
    rows_ = random_quantised(rng_, spec.rows, num_rows_, spec.k, spec.values);
    if (spec.values != Values::kOrdinary) stretch_scales(rng_, rows_.view());
    make_weights();
    spoil_unused();
  }

  Status run(Level level, std::vector<std::byte>* out, ThreadPool* pool = nullptr) const {
    out->assign(out_bytes(), std::byte{kPoison});
    GemmOptions options;
    options.level = level;
    options.dot_order = spec_.order;
    options.pool = pool;
    return grouped_gemm(options, {std::as_const(rows_).view(), offsets_, spec_.sizes}, packed_,
                        TensorView(out->data(), spec_.out, {num_rows_, spec_.n}));
  }

  std::vector<std::byte> expected() const {
    std::vector<std::byte> out(out_bytes(), std::byte{kPoison});
    for (size_t g = 0; g < spec_.sizes.size(); ++g) {
      for (int64_t row = offsets_[g]; row < offsets_[g] + spec_.sizes[g]; ++row) {
        for (int64_t n = 0; n < spec_.n; ++n) {
          float value = dot(row, first_[g], n);
          if (spec_.kind == PackedWeights::Kind::kGateUp) {
            value = numeric::silu_f32(value) * dot(row, up_[g], n);
          }
          GemmCase::store(out.data() + (row * spec_.n + n) * size_of(spec_.out), spec_.out, value);
        }
      }
    }
    return out;
  }

 private:
  size_t out_bytes() const { return static_cast<size_t>(num_rows_ * spec_.n * size_of(spec_.out)); }

  float dot(int64_t row, const RowsWeights& w, int64_t n) const {
    const platform::ScopedFloatEnv flush(platform::Denormals::kFlush);
    return flushed_dot(row, w, n);
  }

  __attribute__((noinline)) float flushed_dot(int64_t row, const RowsWeights& w, int64_t n) const {
    const ConstQuantisedView x = rows_.view();
    int64_t block_k = info_of(spec_.rows).block_cols;
    if (w.codes) block_k = std::min(block_k, info_of(spec_.weights).block_cols);
    const auto product = [&](int64_t k, float chain) {
      return k < spec_.k ? std::fma(code_of(x, row, k), w.at(n, k, spec_.k), chain) : chain;
    };
    float acc = 0;
    for (int64_t begin = 0; begin < spec_.k; begin += block_k) {
      const int64_t end = std::min(spec_.k, begin + block_k);
      float partial = 0;
      for (int64_t first = begin; first < end; first += 32) {
        if (spec_.order == DotOrder::kVdpbf16) {
          for (int64_t k = first; k < first + 32; k += 2)
            partial = product(k, product(k + 1, partial));
          continue;
        }
        float even = 0, odd = 0;
        for (int64_t k = first; k < first + 32; k += 2) {
          even = product(k, even);
          odd = product(k + 1, odd);
        }
        partial = partial + (even + odd);
      }
      const OneScale scale_w =
          w.codes ? one_scale(std::as_const(*w.codes).view(), n, begin) : OneScale{};
      acc = added(partial, one_scale(x, row, begin), scale_w, acc);
    }
    return acc + 0.0f;
  }

  RowsWeights random_weights() {
    RowsWeights w;
    if (spec_.weights == BlockFormat::kUnset) {
      w.values = random_bf16(rng_, spec_.values, static_cast<size_t>(spec_.n * spec_.k));
      return w;
    }
    w.codes = random_quantised(rng_, spec_.weights, spec_.n, spec_.k, spec_.values);
    if (spec_.values != Values::kOrdinary) stretch_scales(rng_, w.codes->view());
    return w;
  }

  void make_weights() {
    const auto groups = static_cast<int64_t>(spec_.sizes.size());
    const bool is_bf16 = spec_.weights == BlockFormat::kUnset;
    Result<PackedWeights> packed =
        is_bf16
            ? PackedWeights::create(spec_.kind, DType::kBF16, groups, spec_.n, spec_.k)
            : PackedWeights::create_quantised(spec_.kind, spec_.weights, groups, spec_.n, spec_.k);
    ASSERT_TRUE(packed.has_value()) << packed.error().to_string();
    packed_ = std::move(packed).value();
    const auto set = [&](int64_t g, const auto& view_of) {
      const Status status = spec_.kind == PackedWeights::Kind::kPlain
                                ? packed_.set_group(g, view_of(first_.back()))
                                : packed_.set_group(g, view_of(first_.back()), view_of(up_.back()));
      ASSERT_TRUE(status.ok()) << status.to_string();
    };
    for (int64_t g = 0; g < groups; ++g) {
      first_.push_back(random_weights());
      up_.push_back(random_weights());
      if (is_bf16) {
        set(g, [this](const RowsWeights& w) {
          return ConstTensorView(w.values.data(), DType::kBF16, {spec_.n, spec_.k});
        });
      } else {
        set(g, [](const RowsWeights& w) { return std::as_const(*w.codes).view(); });
      }
    }
  }

  // Rows of no group: a scale that would be refused.
  void spoil_unused() {
    for (const int64_t offset : offsets_) {
      const TensorView row = rows_.view().scales.rows(offset - 1, 1);
      std::memset(row.data, 0xFF, static_cast<size_t>(row.num_elements() * size_of(row.dtype)));
      if (row.dtype == DType::kF32) row.as<float>()[0] = -1.0f;
    }
  }

  QuantisedRowsSpec spec_;
  std::mt19937 rng_;
  std::vector<int64_t> offsets_;
  int64_t num_rows_ = 0;
  QuantisedTensor rows_;
  std::vector<RowsWeights> first_, up_;
  PackedWeights packed_;
};

}  // namespace argosy::testing
