// Every level against the naive twin, bit for bit, over shapes around every tile; thread counts; an
// fp64 oracle that knows nothing of the twin.
#include <gtest/gtest.h>
#include <immintrin.h>

#include <cmath>

#include "gemm/gemm_case.h"

namespace argosy {
namespace {

using testing::all_arithmetics;
using testing::below;
using testing::GemmCase;
using testing::GemmSpec;
using testing::kAllValues;
using testing::Values;

const std::vector<Level> kLevels = testing::usable_levels();
constexpr int64_t kRowTile = 32;  // the widest row block of a level
constexpr int64_t kSizes[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 130};

void expect_levels_equal_twin(const GemmSpec& spec) {
  SCOPED_TRACE(spec.text());
  const GemmCase gemm(spec);
  const std::vector<std::byte> want = gemm.expected();
  for (const Level level : kLevels) {
    ASSERT_TRUE(gemm.run(level) == want) << "level " << name_of(level);
  }
}

TEST(GroupedGemm, EveryShapeAroundTheTiles) {
  std::mt19937 rng(20240612);
  for (GemmSpec spec : all_arithmetics()) {
    for (const int64_t n : kSizes) {
      for (const int64_t k : kSizes) {
        spec.n = n;
        spec.k = k;
        spec.seed = static_cast<uint32_t>(rng());
        spec.sizes = {below(rng, 6), 0, below(rng, 40)};
        spec.gaps = {below(rng, 2), 0, below(rng, 3)};
        spec.tail = below(rng, 2);
        spec.values = kAllValues[rng() % 4];
        expect_levels_equal_twin(spec);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(GroupedGemm, EveryGroupSizeUpToThreeTiles) {
  for (GemmSpec spec : all_arithmetics()) {
    spec.n = 35;
    spec.k = 37;
    for (int64_t size = 0; size <= 3 * kRowTile + 1; ++size) {
      spec.sizes = {size, 1};
      spec.seed = static_cast<uint32_t>(size);
      expect_levels_equal_twin(spec);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(GroupedGemm, RandomRaggedGroupsOfEveryValueClass) {
  std::mt19937 rng(20240613);
  for (GemmSpec spec : all_arithmetics()) {
    for (const Values values : kAllValues) {
      spec.values = values;
      spec.n = 1 + below(rng, 70);
      spec.k = 1 + below(rng, 150);
      spec.sizes.clear();
      for (int64_t groups = 1 + below(rng, 7); groups > 0; --groups) {
        spec.sizes.push_back(below(rng, 3) == 0 ? 0 : below(rng, 3 * kRowTile + 2));
      }
      spec.seed = static_cast<uint32_t>(rng());
      expect_levels_equal_twin(spec);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(GroupedGemm, AnyRowStride) {
  for (GemmSpec spec : all_arithmetics()) {
    spec.n = 33;
    spec.k = 35;
    spec.sizes = {5, 0, 40};
    for (const int64_t padding : {1, 29, 93}) {
      spec.row_padding = padding;
      spec.out_padding = padding / 2;
      expect_levels_equal_twin(spec);
    }
  }
}

TEST(GroupedGemm, ThreadsDoNotChangeBits) {
  for (GemmSpec spec : all_arithmetics()) {
    spec.n = 200;
    spec.k = 70;
    spec.gaps = {1, 2};
    for (const auto& sizes : {std::vector<int64_t>{3, 0, 70, 1}, std::vector<int64_t>{1}}) {
      spec.sizes = sizes;
      SCOPED_TRACE(spec.text());
      const GemmCase gemm(spec);
      const std::vector<std::byte> want = gemm.expected();
      for (const int threads : {1, 2, 3, 4}) {
        auto pool = ThreadPool::create(threads);
        ASSERT_TRUE(pool.has_value());
        for (const Level level : kLevels)
          EXPECT_TRUE(gemm.run(level, pool->get()) == want) << threads;
      }
    }
  }
}

TEST(GroupedGemm, TheCallersMxcsrNeitherMattersNorChanges) {
  const GemmSpec spec{.kind = PackedWeights::Kind::kGateUp,
                      .rows = DType::kF32,
                      .n = 20,
                      .k = 40,
                      .sizes = {9},
                      .values = Values::kTiny};
  const GemmCase gemm(spec);
  const std::vector<std::byte> want = gemm.expected();
  const unsigned saved = _mm_getcsr();
  for (const unsigned csr : {0x1F80u, 0x9FC0u, 0x3F80u}) {
    _mm_setcsr(csr);
    const std::vector<std::byte> got = gemm.run(Level::kGeneric);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    EXPECT_EQ(after & ~0x3Fu, csr) << "but for sticky flags";
    EXPECT_TRUE(got == want) << std::hex << csr;
  }
}

// |error| of a sum of K products in any order: (K + 2) eps sum|x w|, with a factor of 2 for the
// blocks.
TEST(GroupedGemm, AgreesWithFp64) {
  for (GemmSpec spec : all_arithmetics()) {
    spec.n = 37;
    spec.k = 130;
    spec.sizes = {4, 3};
    SCOPED_TRACE(spec.text());
    const GemmCase gemm(spec);
    const std::vector<std::byte> out = gemm.run(Level::kGeneric);
    for (size_t g = 0; g < 2; ++g) {
      for (int64_t row = gemm.offsets()[g]; row < gemm.offsets()[g] + spec.sizes[g]; ++row) {
        for (int64_t n = 0; n < spec.n; ++n) {
          double gate = 0, up = 0, gate_size = 0, up_size = 0;
          for (int64_t k = 0; k < spec.k; ++k) {
            const double x = gemm.row_element(row, k);
            const auto at = static_cast<size_t>(n * spec.k + k);
            gate += x * gemm.first_matrix(g)[at];
            gate_size += std::fabs(x * gemm.first_matrix(g)[at]);
            if (spec.kind == PackedWeights::Kind::kPlain) continue;
            up += x * gemm.up_matrix(g)[at];
            up_size += std::fabs(x * gemm.up_matrix(g)[at]);
          }
          gate += gemm.first_bias(g, n);
          gate_size += std::fabs(gemm.first_bias(g, n));
          up += gemm.up_bias(g, n);
          up_size += std::fabs(gemm.up_bias(g, n));
          const double eps = 2 * static_cast<double>(spec.k + 3) * 0x1p-24;
          double want = gate, bound = eps * gate_size;
          if (spec.kind == PackedWeights::Kind::kGateUp) {
            double slope = 1;
            if (spec.activation.kind == ActivationKind::kClampedSwiGlu) {
              const double limit = spec.activation.limit;
              gate = std::min(gate, limit);
              up = std::clamp(up, -limit, limit) + 1;
              slope = spec.activation.alpha;
            }
            const double activated = gate / (1 + std::exp(-slope * gate));
            want = activated * up;
            // d activated <= 1.1 d gate, whatever the slope
            bound = 1.1 * eps * gate_size * (std::fabs(up) + eps * up_size) +
                    std::fabs(activated) * (eps * up_size + 0x1p-20 * std::fabs(up));
          }
          bound += std::fabs(want) * (spec.rows == DType::kBF16 ? 0x1p-8 : 0x1p-22) + 1e-30;
          const double got =
              GemmCase::load(out.data() + (row * spec.n + n) * size_of(spec.rows), spec.rows);
          ASSERT_NEAR(got, want, bound) << "row " << row << " n " << n;
        }
      }
    }
  }
}

TEST(GroupedGemm, GateAndUpAreNotSwapped) {
  // gate 0 gives silu 0; up 0 gives 0 too, so the pair (gate 2, up -3) decides: silu(2) * -3.
  const float gate[] = {2}, up[] = {-3}, x[] = {1};
  auto weights = PackedWeights::create(PackedWeights::Kind::kGateUp, DType::kF32, 1, 1, 1);
  ASSERT_TRUE(weights
                  ->set_group(0, ConstTensorView(gate, DType::kF32, {1, 1}),
                              ConstTensorView(up, DType::kF32, {1, 1}))
                  .ok());
  float out = 0;
  const int64_t offset = 0, size = 1;
  const RaggedRows rows{ConstTensorView(x, DType::kF32, {1, 1}), {&offset, 1}, {&size, 1}};
  ASSERT_TRUE(grouped_gemm({}, rows, *weights, TensorView(&out, DType::kF32, {1, 1})).ok());
  EXPECT_NEAR(out, 2 / (1 + std::exp(-2.0)) * -3, 1e-6);
}

// The published formula on one element: clamps above and below, + 1, alpha, biases before the clamps, and what
// a swap of gate and up would give instead.
TEST(GroupedGemm, TheClampedActivationByHand) {
  const auto published = [](double gate, double up) {
    const double g = std::min(gate, 7.0);
    return (std::clamp(up, -7.0, 7.0) + 1) * (g / (1 + std::exp(-1.702 * g)));
  };
  for (const auto& [gate, up] :
       {std::pair(2.0f, -3.0f), std::pair(-3.0f, 2.0f), std::pair(9.0f, 0.5f),
        std::pair(0.5f, 9.0f), std::pair(0.5f, -9.0f), std::pair(-9.0f, 1.0f),
        std::pair(7.0f, 7.0f), std::pair(1.0f, -1.0f)}) {
    auto weights = PackedWeights::create(PackedWeights::Kind::kGateUp, DType::kF32, 1, 1, 1);
    ASSERT_TRUE(weights->add_bias().ok());
    // x = 2: half of each product is the bias.
    const float half_gate = gate / 4, half_up = up / 4, gate_bias = gate / 2, up_bias = up / 2;
    const ConstTensorView one(&half_gate, DType::kF32, {1, 1}), two(&half_up, DType::kF32, {1, 1});
    ASSERT_TRUE(weights->set_group(0, one, two).ok());
    ASSERT_TRUE(weights
                    ->set_bias(0, ConstTensorView(&gate_bias, DType::kF32, {1}),
                               ConstTensorView(&up_bias, DType::kF32, {1}))
                    .ok());
    const float x = 2;
    float out = 0;
    const int64_t offset = 0, size = 1;
    const RaggedRows rows{ConstTensorView(&x, DType::kF32, {1, 1}), {&offset, 1}, {&size, 1}};
    GemmOptions options;
    options.activation.kind = ActivationKind::kClampedSwiGlu;
    ASSERT_TRUE(grouped_gemm(options, rows, *weights, TensorView(&out, DType::kF32, {1, 1})).ok());
    EXPECT_NEAR(out, published(gate, up), 1e-5) << gate << " " << up;
  }
}

}  // namespace
}  // namespace argosy
