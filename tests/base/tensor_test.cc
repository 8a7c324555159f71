// Dtypes, views, shape arithmetic and owning memory: no shape overflows, views address what they
// say, moved-from owners are empty.
#include "argosy/tensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace argosy {
namespace {

constexpr int64_t kHuge = int64_t{1} << 62;

TEST(DTypeTest, SizesNamesAndBack) {
  struct Row {
    DType dtype;
    int64_t bytes;
    std::string_view name;
  };
  constexpr Row kRows[] = {
      {DType::kF64, 8, "F64"},      {DType::kF32, 4, "F32"},      {DType::kF16, 2, "F16"},
      {DType::kBF16, 2, "BF16"},    {DType::kE4M3, 1, "F8_E4M3"}, {DType::kE5M2, 1, "F8_E5M2"},
      {DType::kE8M0, 1, "F8_E8M0"}, {DType::kI64, 8, "I64"},      {DType::kI32, 4, "I32"},
      {DType::kI16, 2, "I16"},      {DType::kI8, 1, "I8"},        {DType::kU64, 8, "U64"},
      {DType::kU32, 4, "U32"},      {DType::kU16, 2, "U16"},      {DType::kU8, 1, "U8"},
      {DType::kBool, 1, "BOOL"},
  };
  static_assert(std::size(kRows) == static_cast<size_t>(DType::kBool));
  for (const Row& row : kRows) {
    EXPECT_EQ(size_of(row.dtype), row.bytes) << row.name;
    EXPECT_EQ(name_of(row.dtype), row.name);
    const Result<DType> parsed = parse_dtype(row.name);
    ASSERT_TRUE(parsed.has_value()) << parsed.error().to_string();
    EXPECT_EQ(*parsed, row.dtype);
  }
  EXPECT_EQ(size_of(DType::kUnset), 0);
  EXPECT_EQ(name_of(DType::kUnset), "unset");
}

TEST(DTypeTest, UnknownNamesListTheKnownOnes) {
  for (const std::string_view name : {"", "f32", "F32 ", "unset", "F8"}) {
    const Result<DType> parsed = parse_dtype(name);
    ASSERT_FALSE(parsed.has_value()) << name;
    EXPECT_EQ(parsed.error().code(), StatusCode::kNotFound);
    EXPECT_NE(parsed.error().message().find("\"" + std::string(name) + "\""), std::string::npos);
    EXPECT_NE(parsed.error().message().find("F64, F32, F16, BF16, F8_E4M3"), std::string::npos);
  }
}

TEST(ViewTest, RowMajorStridesAndAddresses) {
  std::vector<float> data(2 * 3 * 4);
  const TensorView view(data.data(), DType::kF32, {2, 3, 4});
  EXPECT_EQ(view.num_dims, 3);
  EXPECT_EQ(view.num_elements(), 24);
  EXPECT_EQ(view.stride(0), 12);
  EXPECT_EQ(view.stride(1), 4);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(reinterpret_cast<float*>(view.row(1)), data.data() + 12);
  EXPECT_EQ(view.as<float>(), data.data());
  EXPECT_TRUE(view.is_dense());
  static_assert(std::is_same_v<decltype(view.as<float>()), float*>);
  const ConstTensorView fixed = view;
  static_assert(std::is_same_v<decltype(fixed.as<float>()), const float*>);
  static_assert(!std::is_convertible_v<ConstTensorView, TensorView>);
  EXPECT_EQ(fixed.as<float>(), data.data());
  EXPECT_EQ(fixed.dim(2), 4);
}

TEST(ViewTest, RowsKeepsStrides) {
  std::vector<uint16_t> data(10 * 8);
  TensorView view(data.data(), DType::kBF16, {10, 5});
  view.strides[0] = 8;
  const TensorView part = view.rows(3, 4);
  EXPECT_EQ(part.dim(0), 4);
  EXPECT_EQ(part.dim(1), 5);
  EXPECT_EQ(part.stride(0), 8);
  EXPECT_EQ(reinterpret_cast<uint16_t*>(part.data), data.data() + 24);
  EXPECT_EQ(reinterpret_cast<uint16_t*>(part.row(2)), data.data() + 40);
  EXPECT_EQ(view.rows(10, 0).num_elements(), 0);

  const TensorView none(nullptr, DType::kF32, {0, 64});
  EXPECT_EQ(none.rows(0, 0).data, nullptr);
}

TEST(ViewTest, DenseIgnoresStridesOfDimsOfSizeZeroOrOne) {
  TensorView view(nullptr, DType::kF32, {3, 1, 4});
  EXPECT_TRUE(view.is_dense());
  view.strides[1] = 77;
  EXPECT_TRUE(view.is_dense());
  view.strides[0] = 5;
  EXPECT_FALSE(view.is_dense());
  view.shape[0] = 1;
  EXPECT_TRUE(view.is_dense());
  view.strides[2] = 2;
  EXPECT_FALSE(view.is_dense());
  // Without elements there is no gap, wherever the zero stands.
  for (size_t at = 0; at < 3; ++at) {
    TensorView empty(nullptr, DType::kF32, {3, 2, 4});
    empty.strides = {9, 9, 9};
    EXPECT_FALSE(empty.is_dense());
    empty.shape[at] = 0;
    EXPECT_TRUE(empty.is_dense()) << at;
  }
}

TEST(ViewTest, ScalarHasOneElement) {
  float value = 0;
  const TensorView view(&value, DType::kF32, std::span<const int64_t>());
  EXPECT_EQ(view.num_elements(), 1);
  EXPECT_TRUE(view.is_dense());
  EXPECT_EQ(describe(view), "F32 []");
}

TEST(DescribeTest, NamesDtypeShapeAndOddStrides) {
  TensorView view(nullptr, DType::kBF16, {512, 64});
  EXPECT_EQ(describe(view), "BF16 [512, 64]");
  view.strides[0] = 128;
  EXPECT_EQ(describe(view), "BF16 [512, 64] strides [128, 1]");
  EXPECT_EQ(describe(ConstTensorView()), "unset []");
  view.shape[0] = view.shape[1] = int64_t{1} << 62;
  EXPECT_EQ(describe(view), "BF16 [4611686018427387904, 4611686018427387904] strides [128, 1]");
  view.num_dims = -3;
  EXPECT_EQ(describe(view).substr(0, 23), "a view of -3 dimensions");
}

TEST(ShapeTest, BytesAtTheEdgesOfInt64) {
  const auto bytes = [](std::vector<int64_t> dims, int64_t element) {
    return checked_num_bytes(dims, element);
  };
  EXPECT_EQ(*bytes({}, 4), 4);
  EXPECT_EQ(*bytes({2, 3}, 4), 24);
  EXPECT_EQ(*bytes({0}, 8), 0);
  EXPECT_EQ(*bytes({5, 0, 7}, 8), 0);
  EXPECT_EQ(*bytes({kHuge}, 1), kHuge);
  EXPECT_EQ(*bytes({std::numeric_limits<int64_t>::max()}, 1), std::numeric_limits<int64_t>::max());
  EXPECT_FALSE(bytes({kHuge}, 2).has_value());
  EXPECT_FALSE(bytes({kHuge, 2}, 1).has_value());
  EXPECT_FALSE(bytes({int64_t{1} << 32, int64_t{1} << 31}, 1).has_value());
  EXPECT_EQ(*bytes({(int64_t{1} << 32) - 1, int64_t{1} << 31}, 1),
            kHuge - (int64_t{1} << 31) + kHuge);
  // An empty tensor whose strides would not fit.
  EXPECT_FALSE(bytes({0, kHuge, kHuge}, 1).has_value());
  EXPECT_FALSE(bytes({kHuge, kHuge, 0}, 1).has_value());
}

// Without elements, but with strides beyond int64: no view can hold it.
TEST(ShapeTest, EmptyTensorWhoseStridesOverflowIsRefused) {
  constexpr int64_t kWide = int64_t{1} << 40;
  for (const auto& dims : {std::vector<int64_t>{kWide, kWide, 0}, {0, kWide, kWide}}) {
    const Result<Tensor> tensor = Tensor::zeros(DType::kF32, dims);
    ASSERT_FALSE(tensor.has_value());
    EXPECT_EQ(tensor.error().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(tensor.error().message().find("1099511627776"), std::string::npos);
  }
  const Result<Tensor> fits = Tensor::zeros(DType::kF32, {kWide, 0, 1024});
  ASSERT_TRUE(fits.has_value());
  EXPECT_EQ(fits->num_bytes(), 0);
}

TEST(ShapeTest, MessagesNameTheShape) {
  const Result<int64_t> negative = checked_num_bytes(std::vector<int64_t>{4, -1}, 2);
  ASSERT_FALSE(negative.has_value());
  EXPECT_EQ(negative.error().to_string(),
            "InvalidArgument: shape [4, -1] has a negative dimension");
  const Result<int64_t> large = checked_num_bytes(std::vector<int64_t>{kHuge, 3}, 2);
  ASSERT_FALSE(large.has_value());
  EXPECT_EQ(large.error().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(large.error().message().find("[4611686018427387904, 3] of 2-byte"), std::string::npos);
}

TEST(ShapeTest, AgreesWithWideArithmetic) {
  const uint32_t seed = 20240607;
  RecordProperty("seed", static_cast<int>(seed));
  std::mt19937_64 random(seed);
  for (int run = 0; run < 20000; ++run) {
    std::vector<int64_t> dims(random() % 6);
    bool has_zero = false;
    const int64_t element = int64_t{1} << (random() % 4);
    for (int64_t& dim : dims) {
      dim = static_cast<int64_t>(random() >> (1 + random() % 63));
      has_zero = has_zero || dim == 0;
    }
    // Five factors below 2^63 overflow 128 bits: stop at the first product beyond int64.
    __extension__ unsigned __int128 product = static_cast<uint64_t>(element);
    bool fits = true;
    for (const int64_t dim : dims) {
      if (dim != 0) product *= static_cast<uint64_t>(dim);
      fits = fits && product <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
      if (!fits) break;
    }
    const Result<int64_t> bytes = checked_num_bytes(dims, element);
    ASSERT_EQ(bytes.has_value(), fits) << "seed " << seed << " run " << run;
    if (fits) {
      ASSERT_EQ(*bytes, has_zero ? 0 : static_cast<int64_t>(product))
          << "seed " << seed << " run " << run;
    }
  }
}

TEST(AlignedBufferTest, AlignedRoundedAndWritable) {
  for (const int64_t bytes : {1, 63, 64, 65, 1000}) {
    Result<AlignedBuffer> buffer = AlignedBuffer::allocate(bytes);
    ASSERT_TRUE(buffer.has_value());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 64, 0u);
    EXPECT_EQ(buffer->size_bytes(), (bytes + 63) / 64 * 64);
    buffer->data()[buffer->size_bytes() - 1] = std::byte{1};
  }
}

TEST(AlignedBufferTest, ZeroIsLegalNegativeIsNot) {
  Result<AlignedBuffer> none = AlignedBuffer::allocate(0);
  ASSERT_TRUE(none.has_value());
  EXPECT_EQ(none->data(), nullptr);
  EXPECT_EQ(none->size_bytes(), 0);
  const Result<AlignedBuffer> negative = AlignedBuffer::allocate(-5);
  ASSERT_FALSE(negative.has_value());
  EXPECT_EQ(negative.error().to_string(), "InvalidArgument: cannot allocate -5 bytes");
}

TEST(AlignedBufferTest, TooMuchIsAnErrorThatNamesTheBytes) {
  for (const int64_t bytes : {kHuge, std::numeric_limits<int64_t>::max()}) {
    Result<AlignedBuffer> buffer = AlignedBuffer::allocate(bytes);
    ASSERT_FALSE(buffer.has_value());
    EXPECT_EQ(buffer.error().code(), StatusCode::kOutOfMemory);
    EXPECT_NE(buffer.error().message().find(std::to_string(bytes)), std::string::npos);
  }
}

TEST(AlignedBufferTest, ReserveKeepsWhatIsLargeEnough) {
  AlignedBuffer buffer;
  ASSERT_TRUE(buffer.reserve(1000).ok());
  const std::byte* data = buffer.data();
  ASSERT_TRUE(buffer.reserve(10).ok());
  ASSERT_TRUE(buffer.reserve(1024).ok());  // fits into the rounding
  EXPECT_EQ(buffer.data(), data);
  EXPECT_EQ(buffer.size_bytes(), 1024);
  ASSERT_TRUE(buffer.reserve(1025).ok());
  EXPECT_EQ(buffer.size_bytes(), 1088);
  // A failed growth leaves an empty buffer that can be used again.
  EXPECT_FALSE(buffer.reserve(kHuge).ok());
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.size_bytes(), 0);
  ASSERT_TRUE(buffer.reserve(64).ok());
  EXPECT_NE(buffer.data(), nullptr);
}

TEST(AlignedBufferTest, MovedFromIsEmpty) {
  AlignedBuffer first;
  ASSERT_TRUE(first.reserve(100).ok());
  std::byte* data = first.data();
  AlignedBuffer second = std::move(first);
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(second.size_bytes(), 128);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): the state is documented
  EXPECT_EQ(first.size_bytes(), 0);
  ASSERT_TRUE(first.reserve(10).ok());
  EXPECT_NE(first.data(), nullptr);
  first = std::move(second);
  EXPECT_EQ(first.data(), data);
  EXPECT_EQ(second.size_bytes(), 0);  // NOLINT(bugprone-use-after-move)
}

TEST(TensorTest, ZerosAreZeroAndDense) {
  Result<Tensor> tensor = Tensor::zeros(DType::kF32, {3, 5});
  ASSERT_TRUE(tensor.has_value());
  EXPECT_EQ(tensor->num_bytes(), 60);
  EXPECT_EQ(tensor->bytes().size(), 60u);
  EXPECT_TRUE(tensor->view().is_dense());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->view().data) % 64, 0u);
  for (const std::byte byte : tensor->bytes()) EXPECT_EQ(byte, std::byte{0});
  EXPECT_FALSE(tensor->empty());
}

TEST(TensorTest, WithoutElementsItStillHasAShape) {
  Result<Tensor> tensor = Tensor::zeros(DType::kBF16, {0, 64});
  ASSERT_TRUE(tensor.has_value());
  EXPECT_EQ(tensor->num_bytes(), 0);
  EXPECT_EQ(tensor->view().dim(1), 64);
  EXPECT_EQ(tensor->bytes().size(), 0u);
  EXPECT_FALSE(tensor->empty());  // it has a dtype: only a default Tensor is empty()
}

TEST(TensorTest, RefusedShapes) {
  const auto code = [](DType dtype, std::vector<int64_t> dims) {
    return Tensor::zeros(dtype, dims).error().code();
  };
  EXPECT_EQ(code(DType::kUnset, {1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kF32, {1, 1, 1, 1, 1, 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kF32, {1, 1, 1, 1, 1}), StatusCode::kOk);
  EXPECT_EQ(code(DType::kF32, {-1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kF32, {kHuge}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kF32, {0, kHuge, kHuge}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kU8, {kHuge}), StatusCode::kOutOfMemory);
}

TEST(TensorTest, MovedFromIsEmpty) {
  Result<Tensor> made = Tensor::zeros(DType::kF32, {4});
  ASSERT_TRUE(made.has_value());
  Tensor first = std::move(made).value();
  first.view().as<float>()[2] = 3.0f;
  const std::byte* data = first.view().data;
  Tensor second = std::move(first);
  EXPECT_EQ(second.view().data, data);
  EXPECT_EQ(second.view().as<float>()[2], 3.0f);
  EXPECT_TRUE(first.empty());  // NOLINT(bugprone-use-after-move): the state is documented
  EXPECT_EQ(first.view().data, nullptr);
  EXPECT_TRUE(first.bytes().empty());
  first = std::move(second);
  EXPECT_EQ(first.view().as<float>()[2], 3.0f);
  EXPECT_TRUE(second.empty());  // NOLINT(bugprone-use-after-move)
}

}  // namespace
}  // namespace argosy
