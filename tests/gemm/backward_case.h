// Matrices and groups for tests of the backward: rows that no operation may touch hold a NaN
// pattern.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "argosy/gemm_backward.h"
#include "gemm/gemm_case.h"
#include "numeric/dot.h"
#include "support/float_cases.h"

namespace argosy::testing {

// [rows, cols] of bf16 or fp32 in an exact heap block with `padding` elements after each row, all
// poisoned.
class TestMatrix {
 public:
  TestMatrix(DType dtype, int64_t rows, int64_t cols, int64_t padding = 0)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        stride_(cols + padding),
        bytes_(static_cast<size_t>(rows * stride_ * size_of(dtype)), std::byte{kPoison}) {}

  float get(int64_t row, int64_t col) const {
    return GemmCase::load(bytes_.data() + (row * stride_ + col) * size_of(dtype_), dtype_);
  }
  void set(int64_t row, int64_t col, float value) {
    GemmCase::store(bytes_.data() + (row * stride_ + col) * size_of(dtype_), dtype_, value);
  }
  void set_bits(int64_t row, int64_t col, uint32_t bits) {
    std::byte* to = bytes_.data() + (row * stride_ + col) * size_of(dtype_);
    const auto half = static_cast<uint16_t>(bits >> 16);
    if (dtype_ == DType::kF32) {
      std::memcpy(to, &bits, 4);
    } else {
      std::memcpy(to, &half, 2);
    }
  }
  void fill(std::mt19937& rng, Values values, int64_t first, int64_t count) {
    for (int64_t r = first; r < first + count; ++r) {
      for (int64_t c = 0; c < cols_; ++c) set_bits(r, c, random_bits(rng, values));
    }
  }

  TensorView view() { return with_stride(TensorView(bytes_.data(), dtype_, {rows_, cols_})); }
  ConstTensorView view() const {
    return with_stride(ConstTensorView(bytes_.data(), dtype_, {rows_, cols_}));
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DType dtype() const { return dtype_; }

 private:
  template <typename View>
  View with_stride(View view) const {
    view.strides[0] = stride_;
    return view;
  }

  DType dtype_;
  int64_t rows_, cols_, stride_;
  std::vector<std::byte> bytes_;
};

// Groups with unused rows between and after them.
struct TestGroups {
  std::vector<int64_t> sizes, offsets;
  int64_t num_rows = 0;

  TestGroups(std::mt19937& rng, std::vector<int64_t> group_sizes) : sizes(std::move(group_sizes)) {
    for (const int64_t size : sizes) {
      num_rows += below(rng, 3);
      offsets.push_back(num_rows);
      num_rows += size;
    }
    num_rows += below(rng, 3);
  }

  TestMatrix random_rows(std::mt19937& rng, Values values, DType dtype, int64_t cols) const {
    TestMatrix matrix(dtype, num_rows, cols, below(rng, 3));
    for (size_t g = 0; g < sizes.size(); ++g) matrix.fill(rng, values, offsets[g], sizes[g]);
    return matrix;
  }

  template <typename Body>
  void for_each_row(Body body) const {
    for (size_t g = 0; g < sizes.size(); ++g) {
      for (int64_t row = offsets[g]; row < offsets[g] + sizes[g]; ++row) body(g, row);
    }
  }
};

// The canonical product of two sequences of one dtype's values; `w` may be fp32 where `x` is.
inline float twin_dot(DType dtype, DotOrder order, const std::vector<float>& x,
                      const std::vector<float>& w) {
  if (dtype == DType::kF32) return numeric::dot_f32(x, std::span<const float>(w));
  std::vector<BFloat16> x16(x.size()), w16(w.size());
  for (size_t i = 0; i < x.size(); ++i) {
    x16[i].bits = static_cast<uint16_t>(bits_of(x[i]) >> 16);
    w16[i].bits = static_cast<uint16_t>(bits_of(w[i]) >> 16);
  }
  return order == DotOrder::kAmx ? numeric::dot_amx(x16, w16) : numeric::dot_vdpbf16(x16, w16);
}

// Dtype of rows, of weights, order.
struct Arithmetic {
  DType rows = DType::kBF16;
  DType weights = DType::kBF16;
  DotOrder order = DotOrder::kVdpbf16;

  std::string text() const {
    return fmt::format("rows {} weights {} order {}", argosy::name_of(rows),
                       argosy::name_of(weights), argosy::name_of(order));
  }
};
inline constexpr Arithmetic kArithmetics[] = {
    {DType::kBF16, DType::kBF16, DotOrder::kVdpbf16},
    {DType::kBF16, DType::kBF16, DotOrder::kAmx},
    {DType::kF32, DType::kBF16, DotOrder::kVdpbf16},
    {DType::kF32, DType::kF32, DotOrder::kVdpbf16},
};

inline std::unique_ptr<ThreadPool> pool_of(int threads) {
  Result<std::unique_ptr<ThreadPool>> pool = ThreadPool::create(threads);
  EXPECT_TRUE(pool.has_value());
  return std::move(pool).value();
}

// A call's error: its code, and words its message must hold.
inline void expect_error(const Status& status, StatusCode code,
                         const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "\"" << word << "\" is not in: " << status.message();
  }
}

// What a weight gradient goes to: out[g] = (out[g] +) alpha[g] * sum, with groups without rows among them.
struct WgradOutput {
  int64_t n, k;
  TestGroups groups;
  bool accumulate;
  DType out;
  TestMatrix main;  // [G * (N + 1), K] with padding: matrices and rows lie apart
  std::vector<float> alpha;

  WgradOutput(std::mt19937& rng, Values values, int64_t rows, int64_t cols,
              std::vector<int64_t> sizes)
      : n(rows),
        k(cols),
        groups(rng, std::move(sizes)),
        accumulate(rng() % 2 == 0),
        out(rng() % 2 == 0 ? DType::kF32 : DType::kBF16),
        main(out, num_groups() * (n + 1), k, below(rng, 3)) {
    const bool has_alpha = rng() % 2 == 0;
    for (int64_t g = 0; g < num_groups(); ++g) {
      if (has_alpha) alpha.push_back(std::bit_cast<float>(random_bits(rng, values)));
      if (accumulate) main.fill(rng, values, g * (n + 1), n);
    }
  }

  int64_t num_groups() const { return static_cast<int64_t>(groups.sizes.size()); }

  TensorView out_view(TestMatrix* gradient) const {
    const TensorView flat = gradient->view();
    TensorView view(flat.data, out, {num_groups(), n, k});
    view.strides[0] = flat.stride(0) * (n + 1);
    view.strides[1] = flat.stride(0);
    return view;
  }

  // By the definition; sum_of(g, i, j): what is summed.
  template <typename SumOf>
  TestMatrix of_sums(const SumOf& sum_of) const {
    TestMatrix gradient = main;
    for (size_t g = 0; g < groups.sizes.size(); ++g) {
      if (groups.sizes[g] == 0 && accumulate) continue;
      const bool has_alpha = !alpha.empty() && groups.sizes[g] > 0;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t row = static_cast<int64_t>(g) * (n + 1) + i;
        for (int64_t j = 0; j < k; ++j) {
          const float sum = sum_of(g, i, j);
          const volatile float scaled = has_alpha ? alpha[g] * sum : sum;
          gradient.set(row, j, accumulate ? main.get(row, j) + scaled : scaled);
        }
      }
    }
    return gradient;
  }
};

// Case: text(), expected(), run(level, pool), which give a TestMatrix.
template <typename Case>
void expect_all_levels(const Case& one, ThreadPool* pool) {
  SCOPED_TRACE(one.text());
  const TestMatrix want = one.expected();
  for (const Level level : usable_levels()) {
    ASSERT_TRUE(one.run(level).bytes() == want.bytes()) << argosy::name_of(level);
    ASSERT_TRUE(one.run(level, pool).bytes() == want.bytes())
        << argosy::name_of(level) << " with threads";
  }
}

// [rows, columns] of fp32 larger than 4 MiB, whose rows begin lines and may end in a part of one: what is stored past the
// caches. Dirty to begin with.
inline Tensor large_output(int64_t rows, int64_t columns, TensorView* out) {
  Tensor tensor = Tensor::zeros(DType::kF32, {rows, (columns + 15) / 16 * 16}).value();
  std::memset(tensor.view().data, 0xA5, static_cast<size_t>(tensor.num_bytes()));
  *out = tensor.view();
  out->shape[1] = columns;
  EXPECT_GE(rows * columns * 4, int64_t{4} << 20);
  return tensor;
}

// run(level, pool) gives the bytes that level reference gives.
template <typename Run>
void expect_levels_agree(const Run& run) {
  const auto pool = pool_of(2);
  const auto want = run(Level::kReference, nullptr);
  for (const Level level : usable_levels()) {
    ASSERT_TRUE(run(level, nullptr) == want) << argosy::name_of(level);
    ASSERT_TRUE(run(level, pool.get()) == want) << argosy::name_of(level) << " with threads";
  }
}

}  // namespace argosy::testing
