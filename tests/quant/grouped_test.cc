// Ragged groups: each group is quantised as if it stood alone, in both directions; what lies outside is neither read nor
// written.
#include <gtest/gtest.h>

#include "quant/quant_cases.h"

namespace argosy::testing {
namespace {

constexpr uint32_t kSeed = 424242;
constexpr int64_t kCols = 150;

struct Groups {
  std::vector<int64_t> offsets, sizes;
  int64_t total = 0;
  RowGroups view() const { return {offsets, sizes}; }
};

// Empty groups, sizes around every block, padding between them; even offsets.
Groups draw_groups(std::mt19937& rng) {
  constexpr int64_t kSizes[] = {0, 1, 2, 15, 16, 17, 31, 33, 100, 127, 128, 129, 200};
  Groups groups;
  for (int g = 0; g < 6; ++g) {
    groups.sizes.push_back(kSizes[rng() % 13]);
    groups.offsets.push_back(groups.total);
    groups.total += groups.sizes.back() + static_cast<int64_t>(rng() % 3);
    groups.total += groups.total % 2;
  }
  return groups;
}

struct Case {
  Groups groups;
  std::vector<float> x;  // [total, kCols], NaN outside the groups
};

Case draw_case(uint32_t seed, DType dtype) {
  std::mt19937 rng(seed);
  Case one;
  one.groups = draw_groups(rng);
  one.x = case_values(rng, one.groups.total, kCols, dtype, false);
  std::vector<bool> inside(static_cast<size_t>(one.groups.total));
  for (size_t g = 0; g < one.groups.sizes.size(); ++g) {
    for (int64_t i = 0; i < one.groups.sizes[g]; ++i) {
      inside[static_cast<size_t>(one.groups.offsets[g] + i)] = true;
    }
  }
  for (size_t i = 0; i < one.x.size(); ++i) {
    if (!inside[i / kCols]) one.x[i] = kOracleNaN;
  }
  return one;
}

std::vector<float> group_values(const Case& one, size_t g, bool turned) {
  const int64_t begin = one.groups.offsets[g], size = one.groups.sizes[g];
  std::vector<float> values;
  for (int64_t a = 0; a < (turned ? kCols : size); ++a) {
    for (int64_t b = 0; b < (turned ? size : kCols); ++b) {
      values.push_back(
          one.x[static_cast<size_t>((begin + (turned ? b : a)) * kCols + (turned ? a : b))]);
    }
  }
  return values;
}

void fill(const QuantisedTensor& tensor, uint8_t value) {
  const ConstQuantisedView view = tensor.view();
  for (const ConstTensorView& part : {view.codes, view.scales}) {
    std::fill_n(const_cast<std::byte*>(part.data), part.num_elements() * size_of(part.dtype),
                std::byte{value});
  }
}

TEST(Grouped, EveryGroupIsAsIfAloneInBothDirections) {
  for (uint32_t seed = kSeed; seed < kSeed + 6; ++seed) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const Case one = draw_case(seed, dtype);
      const Stored values(one.x, one.groups.total, kCols, kCols, dtype);
      for (const BlockFormat format : kAllFormats) {
        for (const bool turned : {false, true}) {
          SCOPED_TRACE("seed " + std::to_string(seed) + " " + std::string(name_of(format)) +
                       (turned ? " turned" : ""));
          const BlockFormatInfo info = info_of(format);
          const GroupAxis axis = turned ? GroupAxis::kCols : GroupAxis::kRows;
          const QuantisedLayout layout =
              layout_of(format, turned ? kCols : one.groups.total,
                        turned ? one.groups.total : kCols, one.groups.view(), axis);
          QuantisedTensor out = make_quantised(layout);
          QuantiseOptions options;
          options.on_non_finite = OnNonFinite::kError;  // the NaN outside must not be seen
          const Status status =
              turned ? transpose_quantise(options, values.view, out.view(), one.groups.view())
                     : quantise(options, values.view, out.view(), one.groups.view());
          ASSERT_TRUE(status.ok()) << status.message();
          for (size_t g = 0; g < one.groups.sizes.size(); ++g) {
            const int64_t size = one.groups.sizes[g], begin = one.groups.offsets[g];
            const OracleMatrix want =
                oracle_quantise(format, group_values(one, g, turned), turned ? kCols : size,
                                turned ? size : kCols, {});
            Origin at;
            const int64_t block = turned ? info.block_cols : info.block_rows;
            const int64_t first = block == 1 ? begin : layout.first_block[g];
            (turned ? at.col : at.row) = begin;
            (turned ? at.block_col : at.block_row) = first;
            at.group = static_cast<int64_t>(g);
            expect_quantised(std::as_const(out).view(), want, at);
            if (HasFatalFailure()) return;
          }
          // And back: the groups' values, nothing else.
          Result<Tensor> back = Tensor::zeros(DType::kF32, {layout.rows, layout.cols});
          ASSERT_TRUE(back.has_value());
          ASSERT_TRUE(
              dequantise({}, std::as_const(out).view(), back->view(), one.groups.view(), axis)
                  .ok());
          for (int64_t i = 0; i < one.groups.total * kCols; ++i) {
            const int64_t row = turned ? i % one.groups.total : i / kCols;
            const int64_t col = turned ? i / one.groups.total : i % kCols;
            const float x = one.x[static_cast<size_t>(row * kCols + col)];
            ASSERT_TRUE(!std::isnan(x) || back->view().as<float>()[i] == 0.0f) << "written outside";
          }
        }
      }
    }
  }
}

TEST(Grouped, NothingOutsideTheGroupsIsWritten) {
  const Case one = draw_case(kSeed + 50, DType::kBF16);
  const Stored values(one.x, one.groups.total, kCols, kCols, DType::kBF16);
  for (const BlockFormat format : kAllFormats) {
    QuantisedTensor a =
        make_quantised(layout_of(format, one.groups.total, kCols, one.groups.view()));
    QuantisedTensor b =
        make_quantised(layout_of(format, one.groups.total, kCols, one.groups.view()));
    fill(a, 0x11);
    fill(b, 0xEE);
    ASSERT_TRUE(quantise({}, values.view, a.view(), one.groups.view()).ok());
    ASSERT_TRUE(quantise({}, values.view, b.view(), one.groups.view()).ok());
    for (int64_t r = 0; r < one.groups.total; ++r) {
      const bool outside = std::isnan(one.x[static_cast<size_t>(r * kCols)]);
      const auto byte_a = static_cast<uint8_t>(a.view().codes.row(r)[0]);
      const auto byte_b = static_cast<uint8_t>(b.view().codes.row(r)[0]);
      if (outside) {
        EXPECT_EQ(byte_a, 0x11);
        EXPECT_EQ(byte_b, 0xEE);
      } else {
        EXPECT_EQ(byte_a, byte_b);
      }
    }
  }
}

TEST(Grouped, NoGroupsAtAllTouchNothing) {
  const int64_t zero = 0;
  const RowGroups none{{&zero, 1}, {}};
  const std::vector<float> x(64, kOracleNaN);
  const Stored values(x, 1, 64, 64, DType::kF32);
  for (const BlockFormat format : kAllFormats) {
    QuantisedTensor out = make_quantised(layout_of(format, 1, 64, none));
    QuantiseOptions options;
    options.on_non_finite = OnNonFinite::kError;
    EXPECT_TRUE(quantise(options, values.view, out.view(), none).ok());
  }
}

}  // namespace
}  // namespace argosy::testing
