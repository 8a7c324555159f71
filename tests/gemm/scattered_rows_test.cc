// Rows from anywhere and results to anywhere: the bits of the same product in one matrix, at every level, for every
// payload; rows outside the groups are never looked at.
#include <gtest/gtest.h>

#include <memory>

#include "argosy/payload.h"
#include "gemm/gemm_case.h"

namespace argosy {
namespace {

using testing::all_arithmetics;
using testing::GemmCase;
using testing::GemmSpec;

const std::vector<Level> kLevels = testing::usable_levels();

// Every row in memory of its own, in another order than in the matrix.
struct Pieces {
  std::vector<std::unique_ptr<std::byte[]>> memory;
  std::vector<std::byte*> rows;

  Pieces(int64_t count, int64_t bytes) : rows(static_cast<size_t>(count), nullptr) {
    for (size_t i = rows.size(); i-- > 0;) {
      memory.push_back(std::make_unique<std::byte[]>(static_cast<size_t>(bytes)));
      std::memset(memory.back().get(), testing::kPoison, static_cast<size_t>(bytes));
      rows[i] = memory.back().get();
    }
  }
  std::vector<const std::byte*> const_rows() const { return {rows.begin(), rows.end()}; }
};

GemmOptions options_of(const GemmSpec& spec, Level level) {
  GemmOptions options;
  options.level = level;
  options.dot_order = spec.order;
  options.activation = spec.activation;
  return options;
}

bool is_live(const RaggedRows& rows, int64_t row) {
  for (size_t g = 0; g < rows.sizes.size(); ++g) {
    if (row >= rows.offsets[g] && row < rows.offsets[g] + rows.sizes[g]) return true;
  }
  return false;
}

GemmSpec with_shape(GemmSpec spec) {
  spec.n = 37;
  spec.k = 70;
  spec.sizes = {1, 0, 7, 40};
  spec.gaps = {0, 2};
  spec.tail = 3;
  return spec;
}

TEST(ScatteredRows, EqualRowsInOneMatrix) {
  for (const GemmSpec& arithmetic : all_arithmetics()) {
    const GemmSpec spec = with_shape(arithmetic);
    SCOPED_TRACE(spec.text());
    const GemmCase gemm(spec);
    const RaggedRows rows = gemm.ragged();
    const int64_t num_rows = rows.rows.dim(0);
    Pieces pieces(num_rows, spec.k * size_of(spec.rows));
    for (int64_t row = 0; row < num_rows; ++row) {
      const auto at = static_cast<size_t>(row);
      if (!is_live(rows, row)) {
        pieces.rows[at] = nullptr;
        continue;
      }
      std::memcpy(pieces.rows[at], rows.rows.row(row),
                  static_cast<size_t>(spec.k * size_of(spec.rows)));
    }
    const std::vector<const std::byte*> addresses = pieces.const_rows();
    const ScatteredRows scattered{*payload_layout(spec.rows, BlockFormat::kUnset, spec.k),
                                  addresses, rows.offsets, rows.sizes};
    for (const Level level : kLevels) {
      std::vector<std::byte> out(gemm.expected().size(), std::byte{testing::kPoison});
      const TensorView view(out.data(), spec.rows, {num_rows, spec.n});
      const Status status = grouped_gemm(options_of(spec, level), scattered, gemm.weights(), view);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_TRUE(out == gemm.expected()) << name_of(level);
    }
  }
}

// A payload is decoded to bf16 rows first: the same as multiplying the decoded matrix.
TEST(ScatteredRows, QuantisedPayloadsAreDecodedFirst) {
  for (const char* name : {"fp8_128", "fp8_128_e8m0", "mxfp8"}) {
    for (const GemmSpec& arithmetic : all_arithmetics()) {
      if (arithmetic.rows != DType::kBF16) continue;
      const GemmSpec spec = with_shape(arithmetic);
      SCOPED_TRACE(spec.text() + " " + name);
      const GemmCase gemm(spec);
      const RaggedRows rows = gemm.ragged();
      const int64_t num_rows = rows.rows.dim(0);
      const PayloadLayout payload = *payload_layout(DType::kBF16, *parse_payload(name), spec.k);
      const Pieces pieces(num_rows, payload.num_bytes);
      std::vector<BFloat16> decoded(static_cast<size_t>(num_rows * spec.k), BFloat16{0xFFFF});
      for (int64_t row = 0; row < num_rows; ++row) {
        if (!is_live(rows, row)) continue;
        std::byte* const at = pieces.rows[static_cast<size_t>(row)];
        encode_payload(payload, rows.rows.row(row), at);
        decode_payload(payload, at, reinterpret_cast<std::byte*>(decoded.data() + row * spec.k));
      }
      const std::vector<const std::byte*> addresses = pieces.const_rows();
      const ScatteredRows scattered{payload, addresses, rows.offsets, rows.sizes};
      const RaggedRows dense{ConstTensorView(decoded.data(), DType::kBF16, {num_rows, spec.k}),
                             rows.offsets, rows.sizes};
      std::vector<std::byte> want(gemm.expected().size(), std::byte{testing::kPoison});
      ASSERT_TRUE(grouped_gemm(options_of(spec, Level::kReference), dense, gemm.weights(),
                               TensorView(want.data(), spec.rows, {num_rows, spec.n}))
                      .ok());
      EXPECT_FALSE(want == gemm.expected());  // the rounding of the payload shows
      for (const Level level : kLevels) {
        std::vector<std::byte> out(want.size(), std::byte{testing::kPoison});
        const Status status = grouped_gemm(options_of(spec, level), scattered, gemm.weights(),
                                           TensorView(out.data(), spec.rows, {num_rows, spec.n}));
        ASSERT_TRUE(status.ok()) << status.to_string();
        EXPECT_TRUE(out == want) << name_of(level);
      }
    }
  }
}

TEST(ScatteredRows, ResultsGoWhereTheyBelong) {
  for (const GemmSpec& arithmetic : all_arithmetics()) {
    const GemmSpec spec = with_shape(arithmetic);
    SCOPED_TRACE(spec.text());
    const GemmCase gemm(spec);
    const RaggedRows rows = gemm.ragged();
    const int64_t num_rows = rows.rows.dim(0);
    const auto row_bytes = static_cast<size_t>(spec.n * size_of(spec.rows));
    for (const Level level : kLevels) {
      const Pieces pieces(num_rows, static_cast<int64_t>(row_bytes));
      std::vector<std::byte*> addresses = pieces.rows;
      for (int64_t row = 0; row < num_rows; ++row) {
        if (!is_live(rows, row)) addresses[static_cast<size_t>(row)] = nullptr;
      }
      const Status status = grouped_gemm(options_of(spec, level), rows, gemm.weights(), addresses);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (int64_t row = 0; row < num_rows; ++row) {
        const auto at = static_cast<size_t>(row);
        EXPECT_EQ(std::memcmp(pieces.rows[at], gemm.expected().data() + at * row_bytes, row_bytes),
                  0)
            << name_of(level) << " row " << row;
      }
    }
  }
}

TEST(ScatteredRows, ErrorsNameRowAndGroup) {
  GemmSpec spec;
  spec.n = 4;
  spec.k = 8;
  spec.sizes = {2, 1};
  const GemmCase gemm(spec);
  const RaggedRows rows = gemm.ragged();
  const Pieces pieces(3, 16);
  std::vector<const std::byte*> from = pieces.const_rows();
  std::vector<std::byte*> to = pieces.rows;
  const PayloadLayout payload = *payload_layout(DType::kBF16, BlockFormat::kUnset, 8);
  std::vector<std::byte> out(3 * 4 * 2);
  const TensorView view(out.data(), DType::kBF16, {3, 4});
  const GemmOptions options = options_of(spec, Level::kGeneric);
  const auto refused = [&](const PayloadLayout& layout) {
    return grouped_gemm(options, ScatteredRows{layout, from, rows.offsets, rows.sizes},
                        gemm.weights(), view)
        .to_string();
  };
  EXPECT_EQ(refused(payload), "Ok");
  EXPECT_EQ(refused(*payload_layout(DType::kBF16, BlockFormat::kUnset, 9)),
            "InvalidArgument: the rows have 9 columns, the weights ask for 8");
  from[2] = nullptr;
  EXPECT_EQ(refused(payload), "InvalidArgument: row 2 of group 1 has no data");
  from[2] = pieces.rows[2] + 1;
  EXPECT_NE(refused(payload).find("row 2 of group 1 is at address"), std::string::npos);
  from.pop_back();
  EXPECT_NE(refused(payload).find("there are 2 BF16 rows"), std::string::npos);
  to[0] = nullptr;
  EXPECT_EQ(grouped_gemm(options, rows, gemm.weights(), to).to_string(),
            "InvalidArgument: output row 0 of group 0 has no data");
  to.pop_back();
  EXPECT_EQ(grouped_gemm(options, rows, gemm.weights(), to).to_string(),
            "InvalidArgument: there are 2 output rows for 3 rows");
}

}  // namespace
}  // namespace argosy
