// Quantised rows: every level against the definition in quantised_rows_case.h, bit for bit, over formats of both sides,
// orders, ends of k and n, numbers of rows and threads; an fp64 product of what dequantises; single sums by hand;
// everything that is refused.
//
// Mutations tried, each makes a test fail: the rules for scales out of range left out, the rows' scale taken per short block.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "gemm/quantised_rows_case.h"

namespace argosy {
namespace {

using testing::all_quantised_rows;
using testing::kAllValues;
using testing::QuantisedRowsCase;
using testing::QuantisedRowsSpec;
using testing::Values;

const std::vector<Level> kLevels = testing::usable_levels();

void expect_levels_equal_definition(const QuantisedRowsSpec& spec) {
  SCOPED_TRACE(spec.text());
  const QuantisedRowsCase gemm(spec);
  const std::vector<std::byte> want = gemm.expected();
  for (const Level level : kLevels) {
    std::vector<std::byte> got;
    const Status status = gemm.run(level, &got);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_TRUE(got == want) << "level " << name_of(level);
  }
}

TEST(QuantisedRows, EveryEndOfK) {
  std::mt19937 rng(20250401);
  for (QuantisedRowsSpec spec : all_quantised_rows()) {
    for (const int64_t k : {1, 31, 32, 33, 96, 127, 128, 129, 257, 300, 520}) {
      spec.n = 19;
      spec.k = k;
      spec.sizes = {1, 0, 2, 13};
      spec.values = kAllValues[rng() % 4];
      spec.seed = static_cast<uint32_t>(rng());
      expect_levels_equal_definition(spec);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(QuantisedRows, EveryEndOfNBothKindsBothOutputs) {
  std::mt19937 rng(20250402);
  for (QuantisedRowsSpec spec : all_quantised_rows()) {
    for (const auto kind : {PackedWeights::Kind::kPlain, PackedWeights::Kind::kGateUp}) {
      for (const int64_t n : {1, 16, 17, 33, 130}) {
        spec.kind = kind;
        spec.out = rng() % 2 == 0 ? DType::kBF16 : DType::kF32;
        spec.n = n;
        spec.k = 140;
        spec.sizes = {2, 1};
        spec.values = kAllValues[rng() % 4];
        spec.seed = static_cast<uint32_t>(rng());
        expect_levels_equal_definition(spec);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Every number that a kernel takes at once, and several blocks of rows and tiles.
TEST(QuantisedRows, EveryNumberOfRows) {
  std::mt19937 rng(20250403);
  for (QuantisedRowsSpec spec : all_quantised_rows()) {
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 33, 100}) {
      spec.n = 5;
      spec.k = 165;
      spec.sizes = {rows};
      spec.values = rows % 2 == 0 ? Values::kOrdinary : Values::kWide;
      spec.seed = static_cast<uint32_t>(rng());
      expect_levels_equal_definition(spec);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(QuantisedRows, ThreadsDoNotChangeBits) {
  for (QuantisedRowsSpec spec : all_quantised_rows()) {
    spec.n = 70;
    spec.k = 130;
    spec.sizes = {3, 0, 40, 1};
    SCOPED_TRACE(spec.text());
    const QuantisedRowsCase gemm(spec);
    const std::vector<std::byte> want = gemm.expected();
    for (const int threads : {2, 3}) {
      auto pool = ThreadPool::create(threads);
      ASSERT_TRUE(pool.has_value());
      for (const Level level : kLevels) {
        std::vector<std::byte> got;
        ASSERT_TRUE(gemm.run(level, &got, pool->get()).ok());
        ASSERT_TRUE(got == want) << threads << " " << name_of(level);
      }
    }
  }
}

QuantisedTensor quantised(const std::vector<float>& values, BlockFormat format, int64_t rows,
                          int64_t cols) {
  QuantisedTensor codes =
      std::move(QuantisedTensor::create(*quantised_layout(format, rows, cols))).value();
  EXPECT_TRUE(
      quantise({}, ConstTensorView(values.data(), DType::kF32, {rows, cols}), codes.view()).ok());
  return codes;
}

std::vector<float> dequantised(const QuantisedTensor& codes, int64_t rows, int64_t cols) {
  std::vector<float> values(static_cast<size_t>(rows * cols));
  EXPECT_TRUE(
      dequantise({}, codes.view(), TensorView(values.data(), DType::kF32, {rows, cols})).ok());
  return values;
}

// Both sides quantised, multiplied, against fp64 on what dequantises from them.
TEST(QuantisedRows, AgreesWithFp64OnDequantisedSides) {
  constexpr int64_t kRows = 3, kN = 37, kK = 300;
  std::mt19937 rng(20250405);
  SCOPED_TRACE("seed 20250405");
  std::normal_distribution<float> normal;
  std::vector<float> w(kN * kK), x(kRows * kK), out(kRows * kN);
  for (float& value : w) value = normal(rng);
  for (float& value : x) value = normal(rng);
  for (const QuantisedRowsSpec& spec : all_quantised_rows()) {
    if (spec.weights == BlockFormat::kUnset) continue;
    SCOPED_TRACE(spec.text());
    const QuantisedTensor rows = quantised(x, spec.rows, kRows, kK);
    const QuantisedTensor weights = quantised(w, spec.weights, kN, kK);
    auto packed = PackedWeights::create_quantised(spec.kind, spec.weights, 1, kN, kK);
    ASSERT_TRUE(packed->set_group(0, weights.view()).ok());
    const int64_t offset = 0, size = kRows;
    GemmOptions options;
    options.dot_order = spec.order;
    ASSERT_TRUE(grouped_gemm(options, RaggedQuantisedRows{rows.view(), {&offset, 1}, {&size, 1}},
                             *packed, TensorView(out.data(), DType::kF32, {kRows, kN}))
                    .ok());
    const std::vector<float> xs = dequantised(rows, kRows, kK);
    const std::vector<float> ws = dequantised(weights, kN, kK);
    for (size_t i = 0; i < out.size(); ++i) {
      double want = 0, magnitude = 0;
      for (size_t k = 0; k < kK; ++k) {
        const double product = double{xs[i / kN * kK + k]} * double{ws[i % kN * kK + k]};
        want += product;
        magnitude += std::fabs(product);
      }
      ASSERT_NEAR(out[i], want, 2 * 0x1p-24 * (kK + 12) * magnitude) << i;
    }
  }
}

// One row of one block by one column, both of `value` in element 0, with these scales.
struct OneProduct {
  BlockFormat rows = BlockFormat::kMxfp8;
  BlockFormat weights = BlockFormat::kMxfp8;
  float scale_x = 1;
  float scale_w = 1;
  float x = 1;
  float w = 1;
};

void set_one(const QuantisedView& view, float value, float scale) {
  view.codes.as<uint8_t>()[0] = encode_element(ElementFormat::kE4M3, value);
  if (view.scales.dtype == DType::kF32) {
    view.scales.as<float>()[0] = scale;
  } else {
    view.scales.as<uint8_t>()[0] = encode_e8m0(scale, E8M0Rule::kFloor);
  }
}

float product_of(const OneProduct& one, Level level) {
  QuantisedTensor x = std::move(QuantisedTensor::create(*quantised_layout(one.rows, 1, 3))).value();
  QuantisedTensor w =
      std::move(QuantisedTensor::create(*quantised_layout(one.weights, 1, 3))).value();
  set_one(x.view(), one.x, one.scale_x);
  set_one(w.view(), one.w, one.scale_w);
  auto packed = PackedWeights::create_quantised(PackedWeights::Kind::kPlain, one.weights, 1, 1, 3);
  EXPECT_TRUE(packed->set_group(0, std::as_const(w).view()).ok());
  float out = -7;
  const int64_t offset = 0, size = 1;
  GemmOptions options;
  options.level = level;
  options.dot_order = DotOrder::kVdpbf16;
  EXPECT_TRUE(grouped_gemm(options,
                           RaggedQuantisedRows{std::as_const(x).view(), {&offset, 1}, {&size, 1}},
                           *packed, TensorView(&out, DType::kF32, {1, 1}))
                  .ok());
  return out;
}

// Codes 0, 1, 254 and 255 of e8m0 on either side (K18), and where two scales leave the range of fp32.
TEST(QuantisedRows, ScalesThatMeetAtTheEndsOfTheirRange) {
  constexpr auto kF32 = BlockFormat::kE4M3Row128;
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const Level level : kLevels) {
    SCOPED_TRACE(name_of(level));
    const auto of = [level](const OneProduct& one) { return product_of(one, level); };
    // 2^-127 counts while the sum of exponents is in range, and is nothing as an fp32 factor.
    EXPECT_EQ(of({.scale_x = 0x1p-127f, .scale_w = 0x1p10f}), 0x1p-117f);
    EXPECT_EQ(of({.scale_x = 0x1p10f, .scale_w = 0x1p-127f}), 0x1p-117f);
    EXPECT_EQ(of({.scale_x = 0x1p-127f, .scale_w = 1, .x = 448, .w = 448}), 0.0f);
    EXPECT_EQ(of({.scale_x = 0x1p-127f, .scale_w = 0x1p1f}), 0x1p-126f);
    EXPECT_EQ(of({.rows = kF32, .scale_x = 0x1p10f, .scale_w = 0x1p-127f}), 0.0f);
    EXPECT_EQ(of({.rows = kF32, .scale_x = 0x1p-130f, .scale_w = 0x1p30f}), 0.0f);
    // Below 2^-126: 0, though the block would lift the result into range.
    EXPECT_EQ(of({.scale_x = 0x1p-63f, .scale_w = 0x1p-63f, .x = 256, .w = 256}), 0x1p-110f);
    EXPECT_EQ(of({.scale_x = 0x1p-63f, .scale_w = 0x1p-64f, .x = 256, .w = 256}), 0.0f);
    EXPECT_EQ(of({.rows = kF32, .scale_x = 0x1p-63f, .scale_w = 0x1p-64f, .x = 256}), 0.0f);
    // Above 2^127: the block brings the result back, where one factor would be Inf.
    EXPECT_EQ(of({.scale_x = 0x1p127f, .scale_w = 0x1p10f, .x = 0x1p-9f, .w = 0x1p-9f}), 0x1p119f);
    EXPECT_EQ(
        of({.rows = kF32, .scale_x = 0x1p70f, .scale_w = 0x1p70f, .x = 0x1p-9f, .w = 0x1p-9f}),
        0x1p122f);
    EXPECT_TRUE(std::isnan(of({.scale_x = kNaN})));
    EXPECT_TRUE(std::isnan(of({.scale_w = kNaN, .x = 0})));
    EXPECT_TRUE(std::isnan(of({.scale_x = 0x1p-127f, .scale_w = kNaN})));
    EXPECT_TRUE(std::isnan(of({.rows = kF32, .scale_x = kNaN})));
    EXPECT_TRUE(std::isnan(of({.rows = kF32, .scale_x = 0, .scale_w = kNaN})));
  }
}

// A call that is right; each test makes one thing wrong.
struct Call {
  static constexpr int64_t kRows = 10, kN = 4, kK = 200;
  BlockFormat format = BlockFormat::kE4M3Row128;
  QuantisedTensor x =
      std::move(QuantisedTensor::create(*quantised_layout(format, kRows, kK))).value();
  std::vector<float> out = std::vector<float>(kRows * kN, 7.0f);
  std::vector<int64_t> offsets = {0, 4, 4}, sizes = {4, 0, 5};
  GemmOptions options;
  ConstQuantisedView rows = std::as_const(x).view();
  TensorView out_view = TensorView(out.data(), DType::kF32, {kRows, kN});
  PackedWeights weights =
      PackedWeights::create(PackedWeights::Kind::kPlain, DType::kBF16, 3, kN, kK).value();

  Call() { options.dot_order = DotOrder::kAmx; }
  Status run() {
    return grouped_gemm(options, RaggedQuantisedRows{rows, offsets, sizes}, weights, out_view);
  }
};

struct Refusal {
  const char* name;
  std::function<void(Call&)> spoil;
  std::vector<const char*> parts;  // of the message
  StatusCode code = StatusCode::kInvalidArgument;
};

TEST(QuantisedRows, Refusals) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const Refusal refusals[] = {
      {"no format", [](Call& c) { c.rows.format = BlockFormat::kUnset; }, {"need a format"}},
      {"4 bits",
       [](Call& c) { c.rows.format = BlockFormat::kMxfp4; },
       {"mxfp4", "e4m3_1x128"},
       StatusCode::kUnsupported},
      {"blocks of rows",
       [](Call& c) { c.rows.format = BlockFormat::kE4M3Block128; },
       {"e4m3_128x128"},
       StatusCode::kUnsupported},
      {"another tag",
       [](Call& c) { c.rows.format = BlockFormat::kMxfp8; },
       {"scales is", "[10, 7]"}},
      {"columns", [](Call& c) { c.rows.cols = 199; }, {"[10, 199]", "200 columns"}},
      {"rows", [](Call& c) { c.rows.rows = 11; }, {"codes is", "[11, 200]"}},
      {"negative rows", [](Call& c) { c.rows.rows = -1; }, {"[-1, 200]"}},
      {"no codes", [](Call& c) { c.rows.codes.data = nullptr; }, {"codes", "no data"}},
      {"order", [](Call& c) { c.options.dot_order = DotOrder::kAuto; }, {"dot_order is auto"}},
      {"fp32 weights",
       [](Call& c) {
         c.weights =
             PackedWeights::create(PackedWeights::Kind::kPlain, DType::kF32, 3, Call::kN, Call::kK)
                 .value();
       },
       {"fp32 weights need fp32 rows"}},
      {"rows of out", [](Call& c) { c.out_view = c.out_view.rows(0, 9); }, {"[9, 4]", "10 rows"}},
      {"out is codes",
       [](Call& c) { c.out_view.data = reinterpret_cast<std::byte*>(c.x.view().codes.data); },
       {"overlaps"}},
      {"out is scales", [](Call& c) { c.out_view.data = c.x.view().scales.data; }, {"overlaps"}},
      {"groups", [](Call& c) { c.sizes[2] = 7; }, {"group 2", "10 rows"}},
      {"negative scale",
       [](Call& c) { c.x.view().scales.as<float>()[2 * 8 + 1] = -1.0f; },
       {"row 8 block 1", "-1"},
       StatusCode::kCorruptData},
      {"infinite scale",
       [](Call& c) { c.x.view().scales.as<float>()[0] = kInf; },
       {"row 0 block 0", "inf"},
       StatusCode::kCorruptData},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    Call call;
    refusal.spoil(call);
    const Status status = call.run();
    EXPECT_EQ(status.code(), refusal.code) << status.to_string();
    for (const char* part : refusal.parts) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << part << " in: " << status.message();
    }
    EXPECT_EQ(call.out, std::vector<float>(Call::kRows * Call::kN, 7.0f));
  }
  Call call;
  EXPECT_TRUE(call.run().ok());
}

TEST(QuantisedRows, NoRowsAtAll) {
  Call call;
  call.rows = {};
  call.rows.format = BlockFormat::kMxfp8;
  call.rows.cols = Call::kK;
  call.rows.codes =
      ConstTensorView(static_cast<const std::byte*>(nullptr), DType::kE4M3, {0, Call::kK});
  call.rows.scales = ConstTensorView(static_cast<const std::byte*>(nullptr), DType::kE8M0, {0, 7});
  call.out_view = call.out_view.rows(0, 0);
  call.offsets = {0, 0, 0, 0};
  call.sizes = {0, 0, 0};
  const Status status = call.run();
  EXPECT_TRUE(status.ok()) << status.to_string();
}

}  // namespace
}  // namespace argosy
