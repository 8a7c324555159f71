// Shapes, names and tags: one sizing function for both directions, and a tag that a receiver can refuse (kind K19).
#include <gtest/gtest.h>

#include "quant/quant_cases.h"

namespace argosy::testing {
namespace {

TEST(Layout, ShapesOfPartialBlocks) {
  const QuantisedLayout rows = layout_of(BlockFormat::kE4M3Row128, 5, 300);
  EXPECT_EQ(rows.codes, (std::array<int64_t, 2>{5, 300}));
  EXPECT_EQ(rows.scales, (std::array<int64_t, 2>{5, 3}));
  EXPECT_EQ(rows.code_bytes(), 1500);
  EXPECT_EQ(rows.scale_bytes(), 60);
  const QuantisedLayout square = layout_of(BlockFormat::kE4M3Block128, 160, 64);
  EXPECT_EQ(square.scales, (std::array<int64_t, 2>{2, 1}));
  const QuantisedLayout fp4 = layout_of(BlockFormat::kMxfp4, 2, 33);
  EXPECT_EQ(fp4.codes, (std::array<int64_t, 2>{2, 17}));
  EXPECT_EQ(fp4.scales, (std::array<int64_t, 2>{2, 2}));
  const QuantisedLayout nvfp4 = layout_of(BlockFormat::kNvfp4, 2, 33);
  EXPECT_EQ(nvfp4.scales, (std::array<int64_t, 2>{2, 3}));
  EXPECT_EQ(nvfp4.num_tensor_scales, 1);
  EXPECT_EQ(nvfp4.scale_bytes(), 6 + 4);
}

TEST(Layout, GroupsCountTheirBlocksFromTheirStart) {
  const std::vector<int64_t> offsets = {0, 130, 130, 160}, sizes = {129, 0, 20, 128};
  const RowGroups groups{offsets, sizes};
  const QuantisedLayout square = layout_of(BlockFormat::kE4M3Block128, 300, 130, groups);
  EXPECT_EQ(square.first_block, (std::vector<int64_t>{0, 2, 2, 3, 4}));
  EXPECT_EQ(square.scales, (std::array<int64_t, 2>{4, 2}));
  const QuantisedLayout turned = layout_of(BlockFormat::kMxfp8, 130, 300, groups, GroupAxis::kCols);
  EXPECT_EQ(turned.first_block, (std::vector<int64_t>{0, 5, 5, 6, 10}));
  EXPECT_EQ(turned.scales, (std::array<int64_t, 2>{130, 10}));
  EXPECT_TRUE(layout_of(BlockFormat::kMxfp8, 300, 130, groups).first_block.empty());
  EXPECT_EQ(layout_of(BlockFormat::kNvfp4, 300, 130, groups).num_tensor_scales, 4);
}

TEST(Layout, MaxGroupBlocksIsTheMostThereCanBe) {
  for (int64_t total = 0; total <= 12; ++total) {
    for (const int64_t block : {1, 2, 3, 5}) {
      int64_t most = 0;  // over every split into three groups
      for (int64_t a = 0; a <= total; ++a) {
        for (int64_t b = 0; a + b <= total; ++b) {
          int64_t blocks = 0;
          for (const int64_t size : {a, b, total - a - b}) blocks += (size + block - 1) / block;
          most = std::max(most, blocks);
        }
      }
      EXPECT_EQ(max_group_blocks(total, 3, block), most) << total << " " << block;
    }
  }
}

TEST(Layout, BadSizesAreRefused) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  EXPECT_FALSE(quantised_layout(BlockFormat::kUnset, 1, 1).has_value());
  EXPECT_FALSE(quantised_layout(BlockFormat::kMxfp8, -1, 1).has_value());
  EXPECT_FALSE(quantised_layout(BlockFormat::kMxfp8, kHuge, kHuge).has_value());
  const std::vector<int64_t> offsets = {0, 3}, sizes = {4, 1}, odd = {0, 5};
  const Result<QuantisedLayout> overlap =
      quantised_layout(BlockFormat::kMxfp8, 9, 9, {offsets, sizes});
  ASSERT_FALSE(overlap.has_value());
  EXPECT_NE(overlap.error().message().find("group 1 begins at 3, the one before ends at 4"),
            std::string::npos);
  EXPECT_FALSE(quantised_layout(BlockFormat::kMxfp8, 4, 9, {odd, sizes}).has_value());
  EXPECT_FALSE(quantised_layout(BlockFormat::kMxfp8, 9, 9, {{}, sizes}).has_value());
  EXPECT_TRUE(quantised_layout(BlockFormat::kMxfp4, 9, 9, {odd, sizes}).has_value());
  EXPECT_FALSE(
      quantised_layout(BlockFormat::kMxfp4, 9, 9, {odd, sizes}, GroupAxis::kCols).has_value());
}

TEST(Layout, NamesGoBothWays) {
  for (const BlockFormat format : kAllFormats) {
    const Result<BlockFormat> parsed = parse_block_format(name_of(format));
    ASSERT_TRUE(parsed.has_value());
    EXPECT_EQ(*parsed, format);
  }
  const Result<BlockFormat> bad = parse_block_format("mxfp6");
  ASSERT_FALSE(bad.has_value());
  EXPECT_EQ(bad.error().code(), StatusCode::kNotFound);
  EXPECT_NE(bad.error().message().find("'mxfp6'"), std::string::npos);
  EXPECT_NE(bad.error().message().find("e4m3_128x128"), std::string::npos);
}

TEST(Tag, IsAcceptedByItsLikeOnly) {
  for (const BlockFormat sent : kAllFormats) {
    const Result<uint64_t> tag = make_payload_tag(sent, 7168);
    ASSERT_TRUE(tag.has_value());
    for (const BlockFormat expected : kAllFormats) {
      EXPECT_EQ(check_payload_tag(*tag, expected, 7168).ok(), sent == expected);
    }
    const Status narrow = check_payload_tag(*tag, sent, 7167);
    EXPECT_EQ(narrow.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(narrow.message().find("7168"), std::string::npos);
    EXPECT_EQ(check_payload_tag(*tag ^ uint64_t{1} << 40, sent, 7168).code(),
              StatusCode::kUnsupported);
    EXPECT_EQ(check_payload_tag(*tag ^ uint64_t{1} << 48, sent, 7168).code(),
              StatusCode::kCorruptData);
    EXPECT_EQ(check_payload_tag(*tag | uint64_t{0xFF} << 32, sent, 7168).code(),
              StatusCode::kUnsupported);
  }
  EXPECT_EQ(check_payload_tag(0, BlockFormat::kMxfp8, 0).code(), StatusCode::kCorruptData);
  EXPECT_FALSE(make_payload_tag(BlockFormat::kUnset, 1).has_value());
  EXPECT_FALSE(make_payload_tag(BlockFormat::kMxfp8, int64_t{1} << 32).has_value());
  EXPECT_FALSE(make_payload_tag(BlockFormat::kMxfp8, -1).has_value());
}

// Quantise, hand codes and scales over as bytes, dequantise there: the local result, T = 0 included.
TEST(HandOver, EqualsTheLocalResult) {
  std::mt19937 rng(7);
  for (const BlockFormat format : kAllFormats) {
    for (const int64_t tokens : {0, 1, 5}) {
      for (const int64_t hidden : {1, 64, 128, 256, 7168}) {
        const std::vector<float> x = case_values(rng, tokens, hidden, DType::kBF16, true);
        const Stored values(x, tokens, hidden, hidden, DType::kBF16);
        const QuantisedLayout layout = layout_of(format, tokens, hidden);
        QuantisedTensor local = make_quantised(layout);
        ASSERT_TRUE(quantise({}, values.view, local.view()).ok());
        const ConstQuantisedView sent = std::as_const(local).view();
        // The wire: exactly the bytes that the layout names.
        std::vector<std::byte> wire(sent.codes.data, sent.codes.data + layout.code_bytes());
        const int64_t scale_bytes = layout.scale_bytes() - layout.num_tensor_scales * 4;
        std::vector<std::byte> wire_scales(sent.scales.data, sent.scales.data + scale_bytes);
        ConstQuantisedView received = sent;
        received.codes.data = wire.data();
        received.scales.data = wire_scales.data();
        Result<Tensor> here = Tensor::zeros(DType::kBF16, {tokens, hidden});
        Result<Tensor> there = Tensor::zeros(DType::kBF16, {tokens, hidden});
        ASSERT_TRUE(here.has_value() && there.has_value());
        ASSERT_TRUE(dequantise({}, sent, here->view()).ok());
        ASSERT_TRUE(dequantise({}, received, there->view()).ok());
        EXPECT_TRUE(std::ranges::equal(here->bytes(), there->bytes()));
      }
    }
  }
}

TEST(HandOver, TwoScaleBlocksOfOneRow) {  // C184
  std::vector<float> x(256, 0.5f);
  x[0] = 448.0f;
  for (size_t i = 128; i < 256; ++i) x[i] = 32.0f;
  x[128] = 64.0f * 448.0f;
  const Stored values(x, 1, 256, 256, DType::kF32);
  QuantisedTensor out = make_quantised(layout_of(BlockFormat::kE4M3Row128, 1, 256));
  ASSERT_TRUE(quantise({}, values.view, out.view()).ok());
  EXPECT_EQ(out.view().scales.as<float>()[0], 1.0f);
  EXPECT_EQ(out.view().scales.as<float>()[1], 64.0f);
  Result<Tensor> back = Tensor::zeros(DType::kF32, {1, 256});
  ASSERT_TRUE(back.has_value());
  ASSERT_TRUE(dequantise({}, std::as_const(out).view(), back->view()).ok());
  for (size_t i = 0; i < 256; ++i) EXPECT_EQ(back->view().as<float>()[i], x[i]);
}

}  // namespace
}  // namespace argosy::testing
