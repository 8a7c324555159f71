// One random grouped GEMM: rows, weights, a poisoned output, and the result by the naive twin.
//
// The twin never sees packed weights: it takes the matrices as they were before packing. All that
// no operation may touch (gaps between groups, row and output padding) holds a NaN pattern, and
// under the address sanitizer reading those rows is a fault.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "argosy/cpu.h"
#include "argosy/gemm.h"
#include "numeric/activation.h"
#include "numeric/dot.h"
#include "support/float_cases.h"

#if defined(__SANITIZE_ADDRESS__)
#define ARGOSY_TEST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARGOSY_TEST_ASAN 1
#endif
#endif
#ifdef ARGOSY_TEST_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace argosy::testing {

// Random in [0, bound).
inline int64_t below(std::mt19937& rng, int64_t bound) {
  return static_cast<int64_t>(rng() % static_cast<uint64_t>(bound));
}

// Every level that this CPU and this build have.
inline std::vector<Level> usable_levels() {
  std::vector<Level> levels;
  for (const Level level : built_levels()) {
    if (resolve_level(level).has_value()) levels.push_back(level);
  }
  return levels;
}

inline constexpr uint8_t kPoison = 0xFF;  // as bf16 and fp32: NaN

struct GemmSpec {
  PackedWeights::Kind kind = PackedWeights::Kind::kPlain;
  DType rows = DType::kBF16;
  DType weights = DType::kBF16;
  DotOrder order = DotOrder::kAmx;
  Activation activation = {};
  bool bias = false;
  int64_t n = 1;
  int64_t k = 1;
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> gaps = {};  // unused rows before group i; missing ones are 0
  int64_t tail = 0;                // unused rows at the end
  int64_t row_padding = 0;         // unused elements after a row
  int64_t out_padding = 0;
  Values values = Values::kOrdinary;
  uint32_t seed = 1;

  std::string text() const {
    return fmt::format("seed {} rows {} weights {} order {} {}{} n {} k {} values {} sizes {}",
                       seed, argosy::name_of(rows), argosy::name_of(weights),
                       argosy::name_of(order),
                       kind == PackedWeights::Kind::kPlain ? "plain" : to_string(activation),
                       bias ? " bias" : "", n, k, testing::name_of(values), fmt::join(sizes, " "));
  }
};

// The dtypes and orders that are legal, plain and by both activations, with and without bias. The limit is
// low, so that random products are clamped.
inline std::vector<GemmSpec> all_arithmetics() {
  const GemmSpec epilogues[] = {
      {},
      {.bias = true},
      {.kind = PackedWeights::Kind::kGateUp},
      {.kind = PackedWeights::Kind::kGateUp,
       .activation = {ActivationKind::kClampedSwiGlu, 1.25f, 1.702f},
       .bias = true},
  };
  std::vector<GemmSpec> specs;
  for (const GemmSpec& epilogue : epilogues) {
    const auto add = [&](DType rows, DType weights, DotOrder order) {
      specs.push_back(epilogue);
      specs.back().rows = rows;
      specs.back().weights = weights;
      specs.back().order = order;
    };
    add(DType::kBF16, DType::kBF16, DotOrder::kAmx);
    add(DType::kBF16, DType::kBF16, DotOrder::kVdpbf16);
    add(DType::kF32, DType::kBF16, DotOrder::kAmx);
    add(DType::kF32, DType::kF32, DotOrder::kAmx);
  }
  return specs;
}

class GemmCase {
 public:
  explicit GemmCase(const GemmSpec& spec) : spec_(spec), rng_(spec.seed) {
    place_groups();
    fill_rows();
    fill_weights();
  }
  GemmCase(const GemmCase&) = delete;
  GemmCase& operator=(const GemmCase&) = delete;
  ~GemmCase() { ASAN_UNPOISON_MEMORY_REGION(rows_.data(), rows_.size()); }

  const PackedWeights& weights() const { return packed_; }
  RaggedRows ragged() const { return {rows_view(), offsets_, spec_.sizes}; }
  ConstTensorView rows_view() const {
    ConstTensorView view(rows_.data(), spec_.rows, {num_rows_, spec_.k});
    view.strides[0] = spec_.k + spec_.row_padding;
    return view;
  }
  void set_element(int64_t row, int64_t k, float value) {
    store(rows_.data() + (row * (spec_.k + spec_.row_padding) + k) * size_of(spec_.rows),
          spec_.rows, value);
  }

  // The whole output buffer after a run, padding and unused rows included.
  std::vector<std::byte> run(Level level, ThreadPool* pool = nullptr) const {
    std::vector<std::byte> out(out_bytes(), std::byte{kPoison});
    TensorView view(out.data(), spec_.rows, {num_rows_, spec_.n});
    view.strides[0] = spec_.n + spec_.out_padding;
    GemmOptions options;
    options.level = level;
    options.dot_order = spec_.order;
    options.pool = pool;
    options.activation = spec_.activation;
    const Status status = grouped_gemm(options, ragged(), packed_, view);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return out;
  }

  // What `run` must give: the twin in live rows, poison everywhere else.
  std::vector<std::byte> expected() const {
    std::vector<std::byte> out(out_bytes(), std::byte{kPoison});
    for (size_t g = 0; g < spec_.sizes.size(); ++g) {
      for (int64_t row = offsets_[g]; row < offsets_[g] + spec_.sizes[g]; ++row) {
        for (int64_t n = 0; n < spec_.n; ++n) {
          store(out.data() + (row * (spec_.n + spec_.out_padding) + n) * size_of(spec_.rows),
                spec_.rows, output_element(g, row, n));
        }
      }
    }
    return out;
  }

  float output_element(size_t group, int64_t row, int64_t n) const {
    const float first = product(row, first_[group], first_bias_[group], n);
    if (spec_.kind == PackedWeights::Kind::kPlain) return first;
    const float up = product(row, up_[group], up_bias_[group], n);
    return activated(first, up);
  }
  // Finished products, bias included.
  float gate_product(size_t group, int64_t row, int64_t n) const {
    return product(row, first_[group], first_bias_[group], n);
  }
  float up_product(size_t group, int64_t row, int64_t n) const {
    return product(row, up_[group], up_bias_[group], n);
  }

  double row_element(int64_t row, int64_t k) const {
    return load(rows_.data() + (row * (spec_.k + spec_.row_padding) + k) * size_of(spec_.rows),
                spec_.rows);
  }
  const std::vector<float>& first_matrix(size_t group) const {
    return first_[group];
  }  // w, or gate
  const std::vector<float>& up_matrix(size_t group) const { return up_[group]; }
  // 0 without bias.
  double first_bias(size_t group, int64_t n) const { return bias_at(first_bias_[group], n); }
  double up_bias(size_t group, int64_t n) const { return bias_at(up_bias_[group], n); }
  const std::vector<int64_t>& offsets() const { return offsets_; }
  int64_t num_rows() const { return num_rows_; }

  static float load(const std::byte* from, DType dtype) {
    if (dtype == DType::kF32) {
      float value;
      std::memcpy(&value, from, sizeof(value));
      return value;
    }
    BFloat16 value;
    std::memcpy(&value, from, sizeof(value));
    return value.to_float();
  }
  static void store(std::byte* to, DType dtype, float value) {
    if (dtype == DType::kF32) {
      const float canonical = value != value ? std::bit_cast<float>(0x7FC00000u) : value;
      std::memcpy(to, &canonical, sizeof(canonical));
    } else {
      const BFloat16 rounded = BFloat16::from_float(value);
      std::memcpy(to, &rounded, sizeof(rounded));
    }
  }

 private:
  float activated(float gate, float up) const {
    const numeric::ActivationConstants c{spec_.activation.limit, spec_.activation.alpha};
    switch (spec_.activation.kind) {
      case ActivationKind::kSwiGlu:
        return numeric::silu_f32(gate) * up;
      case ActivationKind::kClampedSwiGlu:
        return numeric::clamped_swiglu_f32(gate, up, c.limit, c.alpha);
      case ActivationKind::kGeGlu:
        return numeric::GeGlu::value(c, gate) * up;
      case ActivationKind::kGeGluTanh:
        return numeric::GeGluTanh::value(c, gate) * up;
      case ActivationKind::kRelu2Glu:
        return numeric::Relu2Glu::value(c, gate) * up;
    }
    return 0;
  }

  void place_groups() {
    int64_t at = 0;
    for (size_t g = 0; g < spec_.sizes.size(); ++g) {
      at += g < spec_.gaps.size() ? spec_.gaps[g] : 0;
      offsets_.push_back(at);
      at += spec_.sizes[g];
    }
    num_rows_ = at + spec_.tail;
  }

  size_t out_bytes() const {
    return static_cast<size_t>(num_rows_ * (spec_.n + spec_.out_padding) * size_of(spec_.rows));
  }

  uint32_t element_bits(DType dtype) {
    return random_bits(rng_, spec_.values) & (dtype == DType::kBF16 ? 0xFFFF0000u : 0xFFFFFFFFu);
  }

  void fill_rows() {
    const int64_t element = size_of(spec_.rows);
    const int64_t stride = (spec_.k + spec_.row_padding) * element;
    rows_.assign(static_cast<size_t>(num_rows_ * stride), std::byte{kPoison});
    std::vector<bool> live(static_cast<size_t>(num_rows_), false);
    for (size_t g = 0; g < spec_.sizes.size(); ++g) {
      for (int64_t row = offsets_[g]; row < offsets_[g] + spec_.sizes[g]; ++row) {
        live[static_cast<size_t>(row)] = true;
        for (int64_t k = 0; k < spec_.k; ++k) write_bits(rows_.data() + row * stride + k * element);
      }
    }
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t used = live[static_cast<size_t>(row)] ? spec_.k * element : 0;
      ASAN_POISON_MEMORY_REGION(rows_.data() + row * stride + used,
                                static_cast<size_t>(stride - used));
    }
  }

  void write_bits(std::byte* to) {
    const uint32_t word = element_bits(spec_.rows);
    if (spec_.rows == DType::kF32) {
      std::memcpy(to, &word, 4);
    } else {
      const auto half = static_cast<uint16_t>(word >> 16);
      std::memcpy(to, &half, 2);
    }
  }

  static float bias_at(const std::vector<float>& bias, int64_t n) {
    return bias.empty() ? 0.0f : bias[static_cast<size_t>(n)];
  }

  float product(int64_t row, const std::vector<float>& matrix, const std::vector<float>& bias,
                int64_t n) const {
    const float finished = dot(row, matrix, n);
    return bias.empty() ? finished : finished + bias_at(bias, n);
  }

  std::vector<float> random_values(int64_t count) {
    std::vector<float> matrix(static_cast<size_t>(count));
    for (float& value : matrix) value = std::bit_cast<float>(element_bits(spec_.weights));
    return matrix;
  }

  void fill_weights() {
    const auto groups = static_cast<int64_t>(spec_.sizes.size());
    Result<PackedWeights> packed =
        PackedWeights::create(spec_.kind, spec_.weights, groups, spec_.n, spec_.k);
    ASSERT_TRUE(packed.has_value()) << packed.error().to_string();
    packed_ = std::move(packed).value();
    if (spec_.bias) {
      ASSERT_TRUE(packed_.add_bias().ok());
    }
    const bool is_plain = spec_.kind == PackedWeights::Kind::kPlain;
    for (int64_t g = 0; g < groups; ++g) {
      first_.push_back(random_values(spec_.n * spec_.k));
      up_.push_back(random_values(is_plain ? 0 : spec_.n * spec_.k));
      first_bias_.push_back(random_values(spec_.bias ? spec_.n : 0));
      up_bias_.push_back(random_values(spec_.bias && !is_plain ? spec_.n : 0));
      std::vector<uint16_t> halves[2];
      const ConstTensorView first = matrix_view(first_.back(), halves[0]);
      const Status status = is_plain
                                ? packed_.set_group(g, first)
                                : packed_.set_group(g, first, matrix_view(up_.back(), halves[1]));
      ASSERT_TRUE(status.ok()) << status.to_string();
      if (spec_.bias) set_bias(g);
    }
  }

  void set_bias(int64_t g) {
    const auto at = static_cast<size_t>(g);
    std::vector<uint16_t> halves[2];
    const ConstTensorView first = vector_view(first_bias_[at], halves[0]);
    const Status status = spec_.kind == PackedWeights::Kind::kPlain
                              ? packed_.set_bias(g, first)
                              : packed_.set_bias(g, first, vector_view(up_bias_[at], halves[1]));
    ASSERT_TRUE(status.ok()) << status.to_string();
  }

  ConstTensorView vector_view(const std::vector<float>& values,
                              std::vector<uint16_t>& halves) const {
    if (spec_.weights == DType::kF32) return {values.data(), DType::kF32, {spec_.n}};
    for (const float value : values) halves.push_back(static_cast<uint16_t>(bits_of(value) >> 16));
    return {halves.data(), DType::kBF16, {spec_.n}};
  }

  ConstTensorView matrix_view(const std::vector<float>& matrix,
                              std::vector<uint16_t>& halves) const {
    if (spec_.weights == DType::kF32) return {matrix.data(), DType::kF32, {spec_.n, spec_.k}};
    for (const float value : matrix) halves.push_back(static_cast<uint16_t>(bits_of(value) >> 16));
    return {halves.data(), DType::kBF16, {spec_.n, spec_.k}};
  }

  float dot(int64_t row, const std::vector<float>& matrix, int64_t n) const {
    const auto k = static_cast<size_t>(spec_.k);
    const std::span<const float> column(matrix.data() + static_cast<size_t>(n) * k, k);
    const std::byte* from =
        rows_.data() + row * (spec_.k + spec_.row_padding) * size_of(spec_.rows);
    if (spec_.rows == DType::kF32) {
      std::vector<float> x(k);
      std::memcpy(x.data(), from, k * sizeof(float));
      return numeric::dot_f32(x, column);
    }
    std::vector<BFloat16> x(k), w(k);
    std::memcpy(x.data(), from, k * sizeof(BFloat16));
    for (size_t i = 0; i < k; ++i) w[i].bits = static_cast<uint16_t>(bits_of(column[i]) >> 16);
    return spec_.order == DotOrder::kAmx ? numeric::dot_amx(x, w) : numeric::dot_vdpbf16(x, w);
  }

  GemmSpec spec_;
  std::mt19937 rng_;
  std::vector<int64_t> offsets_;
  int64_t num_rows_ = 0;
  std::vector<std::byte> rows_;
  std::vector<std::vector<float>> first_, up_, first_bias_, up_bias_;
  PackedWeights packed_;
};

}  // namespace argosy::testing
