// Weights in both directions: the panels of quantise() and transpose_quantise() of each matrix,
// threads, buffers used again, biases, what is refused; the gradient of rows by them against fp64,
// and pre-activations of quantised rows against grouped_gemm.
//
// Mutations tried, each makes a test fail: the halves of a block of n exchanged, the bias left out.
#include "argosy/quantised_weights.h"

#include <cmath>

#include "gemm/backward_case.h"
#include "gemm/quantised_case.h"

namespace argosy {
namespace {

using testing::bits_of;
using testing::expect_error;
using testing::TestGroups;
using testing::TestMatrix;
using testing::Values;
using Kind = PackedWeights::Kind;

QuantisedTensor quantised(BlockFormat format, const TestMatrix& values, bool transposed) {
  const int64_t rows = transposed ? values.cols() : values.rows();
  const int64_t cols = transposed ? values.rows() : values.cols();
  QuantisedTensor codes =
      std::move(QuantisedTensor::create(quantised_layout(format, rows, cols).value())).value();
  const Status status = transposed ? transpose_quantise({}, values.view(), codes.view())
                                   : quantise({}, values.view(), codes.view());
  EXPECT_TRUE(status.ok()) << status.to_string();
  return codes;
}

void expect_equal(const PackedWeights& got, const PackedWeights& want) {
  ASSERT_EQ(got.kind(), want.kind());
  ASSERT_EQ(got.format(), want.format());
  ASSERT_EQ(got.n(), want.n());
  ASSERT_EQ(got.k(), want.k());
  ASSERT_EQ(got.num_bytes(), want.num_bytes());
  for (int64_t g = 0; g < want.num_groups(); ++g) {
    for (int64_t p = 0; p < want.num_panels(); ++p) {
      ASSERT_EQ(
          std::memcmp(got.panel(g, p), want.panel(g, p), static_cast<size_t>(want.panel_bytes())),
          0)
          << "group " << g << " panel " << p;
    }
  }
}

// bf16 weights of two groups, packed, and the same matrices.
struct Master {
  std::vector<TestMatrix> first, up;  // of each group; plain weights have no up
  PackedWeights packed;

  Master(std::mt19937& rng, Kind kind, Values values, int64_t n, int64_t k) {
    packed = std::move(PackedWeights::create(kind, DType::kBF16, 2, n, k)).value();
    for (int64_t g = 0; g < 2; ++g) {
      for (std::vector<TestMatrix>* side : {&first, &up}) {
        side->emplace_back(DType::kBF16, n, k).fill(rng, values, 0, n);
      }
      const Status status = kind == Kind::kPlain
                                ? packed.set_group(g, std::as_const(first.back()).view())
                                : packed.set_group(g, std::as_const(first.back()).view(),
                                                   std::as_const(up.back()).view());
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }

  PackedWeights along_k(BlockFormat format) const {
    PackedWeights made =
        std::move(PackedWeights::create_quantised(packed.kind(), format, 2, packed.n(), packed.k()))
            .value();
    for (size_t g = 0; g < 2; ++g) {
      const auto at = static_cast<int64_t>(g);
      const QuantisedTensor a = quantised(format, first[g], false);
      const QuantisedTensor b = quantised(format, up[g], false);
      EXPECT_TRUE((packed.kind() == Kind::kPlain ? made.set_group(at, a.view())
                                                 : made.set_group(at, a.view(), b.view()))
                      .ok());
    }
    return made;
  }

  // gate and up one below the other, zeros between, transposed.
  PackedWeights along_n(BlockFormat format) const {
    const GradientColumns columns = gradient_columns(packed.kind(), packed.n());
    PackedWeights made = std::move(PackedWeights::create_quantised(Kind::kPlain, format, 2,
                                                                   packed.k(), columns.total))
                             .value();
    for (size_t g = 0; g < 2; ++g) {
      TestMatrix joined(DType::kBF16, columns.total, packed.k());
      for (int64_t row = 0; row < columns.total; ++row) {
        for (int64_t c = 0; c < packed.k(); ++c) joined.set(row, c, 0.0f);
      }
      for (int64_t row = 0; row < packed.n(); ++row) {
        for (int64_t c = 0; c < packed.k(); ++c) {
          joined.set_bits(row, c, bits_of(first[g].get(row, c)));
          if (columns.up > 0) joined.set_bits(columns.up + row, c, bits_of(up[g].get(row, c)));
        }
      }
      const QuantisedTensor codes = quantised(format, joined, true);
      EXPECT_TRUE(made.set_group(static_cast<int64_t>(g), codes.view()).ok());
    }
    return made;
  }
};

TEST(QuantisedWeights, BothDirectionsAreWhatQuantiseGives) {
  constexpr uint32_t kSeed = 20261140;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(3);
  int at = 0;
  for (const Kind kind : {Kind::kPlain, Kind::kGateUp}) {
    for (const int64_t n : {1, 15, 16, 17, 32, 33, 48, 65}) {
      for (const int64_t k : {1, 31, 33, 64, 97}) {
        const BlockFormat format = at % 2 == 0 ? BlockFormat::kMxfp8 : BlockFormat::kMxfp8Ceil;
        const Values values = testing::kAllValues[static_cast<size_t>(at++ % 4)];
        SCOPED_TRACE(fmt::format("n {} k {} {}", n, k, argosy::name_of(format)));
        const Master master(rng, kind, values, n, k);
        QuantisedWeights got;
        QuantiseOptions options;
        options.pool = at % 3 == 0 ? pool.get() : nullptr;
        ASSERT_TRUE(quantise_weights(options, master.packed, format, &got).ok());
        expect_equal(got.along_k, master.along_k(format));
        expect_equal(got.along_n, master.along_n(format));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A step later: other values, the same buffers; every level the same bytes.
TEST(QuantisedWeights, BuffersAreUsedAgain) {
  std::mt19937 rng(20261141);
  QuantisedWeights got;
  const std::byte* kept = nullptr;
  for (int step = 0; step < 3; ++step) {
    Master master(rng, Kind::kGateUp, Values::kOrdinary, 40, 70);
    ASSERT_TRUE(master.packed.add_bias().ok());
    TestMatrix bias(DType::kF32, 2, 40);
    bias.fill(rng, Values::kOrdinary, 0, 2);
    const ConstTensorView rows = std::as_const(bias).view();
    const ConstTensorView gate(rows.row(0), DType::kF32, {40}), up(rows.row(1), DType::kF32, {40});
    ASSERT_TRUE(master.packed.set_bias(1, gate, up).ok());
    QuantiseOptions options;
    options.level = testing::usable_levels()[static_cast<size_t>(step)];
    ASSERT_TRUE(quantise_weights(options, master.packed, BlockFormat::kMxfp8, &got).ok());
    PackedWeights want = master.along_k(BlockFormat::kMxfp8);
    ASSERT_TRUE(want.add_bias().ok());
    expect_equal(got.along_k, want);
    expect_equal(got.along_n, master.along_n(BlockFormat::kMxfp8));
    EXPECT_EQ(got.along_k.bias_of_panel(1, 2)[7], gate.as<float>()[2 * 16 + 7]);
    EXPECT_EQ(got.along_k.bias_of_panel(1, 2)[16 + 7], up.as<float>()[2 * 16 + 7]);
    if (step > 0) {
      EXPECT_EQ(got.along_k.panel(0, 0), kept);
    }
    kept = got.along_k.panel(0, 0);
  }
}

TEST(QuantisedWeights, Refuses) {
  std::mt19937 rng(20261142);
  Master master(rng, Kind::kPlain, Values::kOrdinary, 5, 70);
  QuantisedWeights out;
  const StatusCode kInvalid = StatusCode::kInvalidArgument;
  expect_error(quantise_weights({}, PackedWeights(), BlockFormat::kMxfp8, &out), kInvalid,
               {"never created"});
  expect_error(quantise_weights({}, master.packed, BlockFormat::kMxfp4, &out),
               StatusCode::kUnsupported, {"mxfp4"});
  expect_error(quantise_weights({}, master.packed, BlockFormat::kUnset, &out),
               StatusCode::kUnsupported, {"unset"});
  const PackedWeights f32 =
      std::move(PackedWeights::create(Kind::kPlain, DType::kF32, 1, 4, 4)).value();
  expect_error(quantise_weights({}, f32, BlockFormat::kMxfp8, &out), kInvalid, {"F32"});
  ASSERT_TRUE(quantise_weights({}, master.packed, BlockFormat::kMxfp8, &out).ok());
  QuantisedWeights twice;
  expect_error(quantise_weights({}, out.along_k, BlockFormat::kMxfp8, &twice),
               StatusCode::kUnsupported, {"mxfp8 already"});
  // The first block in the order of tasks, whatever the threads.
  master.first[1].set(3, 40, INFINITY);
  ASSERT_TRUE(master.packed.set_group(1, std::as_const(master.first[1]).view()).ok());
  const auto pool = testing::pool_of(3);
  QuantiseOptions strict;
  strict.on_non_finite = OnNonFinite::kError;
  strict.pool = pool.get();
  expect_error(quantise_weights(strict, master.packed, BlockFormat::kMxfp8, &out),
               StatusCode::kNonFinite, {"row 3", "block 1"});
}

// d_x = d_gate . w_gate + d_up . w_up of what dequantises, in fp64; odd n, so that both operands
// end in a part of a block.
TEST(QuantisedWeights, TheGradientOfRowsAgreesWithFp64) {
  constexpr uint32_t kSeed = 20261143;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  constexpr int64_t kN = 45, kK = 37;
  const Master master(rng, Kind::kGateUp, Values::kOrdinary, kN, kK);
  QuantisedWeights weights;
  ASSERT_TRUE(quantise_weights({}, master.packed, BlockFormat::kMxfp8, &weights).ok());
  const TestGroups groups(rng, {3, 20});
  const GradientColumns columns = gradient_columns(Kind::kGateUp, kN);
  TestMatrix d_y = groups.random_rows(rng, Values::kOrdinary, DType::kBF16, columns.total);
  groups.for_each_row([&](size_t, int64_t row) {
    for (int64_t c = 0; c < columns.total; ++c) {
      if (c % columns.up >= kN) d_y.set(row, c, 0.0f);
    }
  });
  const RowGroups ragged{groups.offsets, groups.sizes};
  QuantisedTensor codes =
      std::move(QuantisedTensor::create(
                    quantised_layout(BlockFormat::kMxfp8, groups.num_rows, columns.total, ragged)
                        .value()))
          .value();
  ASSERT_TRUE(quantise({}, std::as_const(d_y).view(), codes.view(), ragged).ok());
  TestMatrix d_x(DType::kF32, groups.num_rows, kK);
  ASSERT_TRUE(grouped_gemm({.level = testing::usable_levels().back(), .dot_order = DotOrder::kAmx},
                           {std::as_const(codes).view(), groups.offsets, groups.sizes},
                           weights.along_n, d_x.view())
                  .ok());
  TestMatrix rows(DType::kF32, groups.num_rows, columns.total);
  ASSERT_TRUE(dequantise({}, std::as_const(codes).view(), rows.view(), ragged).ok());
  const auto exact = [](const TestMatrix& matrix) {
    const QuantisedTensor of = quantised(BlockFormat::kMxfp8, matrix, true);
    TestMatrix values(DType::kF32, matrix.cols(), matrix.rows());
    EXPECT_TRUE(dequantise({}, of.view(), values.view()).ok());
    return values;  // [k, n]
  };
  const std::vector<TestMatrix> gate = {exact(master.first[0]), exact(master.first[1])};
  const std::vector<TestMatrix> up = {exact(master.up[0]), exact(master.up[1])};
  groups.for_each_row([&](size_t g, int64_t row) {
    for (int64_t k = 0; k < kK; ++k) {
      double want = 0, size = 0;
      for (int64_t n = 0; n < kN; ++n) {
        const double a = double{rows.get(row, n)} * double{gate[g].get(k, n)};
        const double b = double{rows.get(row, columns.up + n)} * double{up[g].get(k, n)};
        want += a + b;
        size += std::fabs(a) + std::fabs(b);
      }
      ASSERT_NEAR(double{d_x.get(row, k)}, want, size * 200 * 0x1p-24);
    }
  });
}

// gate and up beside h: the products of plain weights, and grouped_gemm's h, bit for bit.
TEST(QuantisedWeights, PreactivationsOfQuantisedRows) {
  constexpr uint32_t kSeed = 20261144;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  const auto pool = testing::pool_of(3);
  for (const int64_t n : {5, 16, 33, 40}) {
    constexpr int64_t kK = 70;
    Master master(rng, Kind::kGateUp, Values::kOrdinary, n, kK);
    if (n % 2 == 1) {
      ASSERT_TRUE(master.packed.add_bias().ok());
      TestMatrix bias(DType::kF32, 1, n);
      bias.fill(rng, Values::kOrdinary, 0, 1);
      const ConstTensorView row(std::as_const(bias).view().data, DType::kF32, {n});
      ASSERT_TRUE(master.packed.set_bias(0, row, row).ok());
    }
    QuantisedWeights weights;
    ASSERT_TRUE(quantise_weights({}, master.packed, BlockFormat::kMxfp8Ceil, &weights).ok());
    const TestGroups groups(rng, {4, 21});
    QuantisedTensor x =
        testing::random_quantised(rng, BlockFormat::kMxfp8, groups.num_rows, kK, Values::kOrdinary);
    const RaggedQuantisedRows rows{std::as_const(x).view(), groups.offsets, groups.sizes};
    for (const Level level : testing::usable_levels()) {
      const GemmOptions options{
          .level = level, .dot_order = DotOrder::kVdpbf16, .pool = n == 16 ? pool.get() : nullptr};
      TestMatrix gate(DType::kF32, groups.num_rows, n, 1), up(DType::kF32, groups.num_rows, n, 2);
      TestMatrix h(DType::kBF16, groups.num_rows, n), want(DType::kBF16, groups.num_rows, n);
      ASSERT_TRUE(grouped_gemm(options, rows, weights.along_k, want.view()).ok());
      ASSERT_TRUE(grouped_gemm_preactivation(options, rows, weights.along_k, gate.view(), up.view(),
                                             h.view())
                      .ok());
      ASSERT_TRUE(h.bytes() == want.bytes()) << name_of(level);
      TestMatrix again(DType::kBF16, groups.num_rows, n);
      ASSERT_TRUE(activation_forward(options,
                                     {std::as_const(gate).view(),
                                      std::as_const(up).view(),
                                      groups.offsets,
                                      groups.sizes,
                                      {}},
                                     again.view())
                      .ok());
      ASSERT_TRUE(again.bytes() == want.bytes()) << name_of(level);
      const std::vector<std::byte> gate_with_h = gate.bytes(), up_with_h = up.bytes();
      ASSERT_TRUE(
          grouped_gemm_preactivation(options, rows, weights.along_k, gate.view(), up.view()).ok());
      ASSERT_TRUE(gate.bytes() == gate_with_h && up.bytes() == up_with_h) << name_of(level);
    }
  }
  const Master plain(rng, Kind::kPlain, Values::kOrdinary, 8, 8);
  QuantisedWeights weights;
  ASSERT_TRUE(quantise_weights({}, plain.packed, BlockFormat::kMxfp8, &weights).ok());
  QuantisedTensor x = testing::random_quantised(rng, BlockFormat::kMxfp8, 2, 8, Values::kOrdinary);
  const std::vector<int64_t> offsets = {0, 1}, sizes = {1, 1};
  TestMatrix gate(DType::kF32, 2, 8);
  expect_error(grouped_gemm_preactivation({.level = Level::kGeneric, .dot_order = DotOrder::kAmx},
                                          {std::as_const(x).view(), offsets, sizes},
                                          weights.along_k, gate.view(), gate.view()),
               StatusCode::kInvalidArgument, {"these are plain"});
}

}  // namespace
}  // namespace argosy
