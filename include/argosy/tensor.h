// Dtypes, tensor views with strides, and an owning tensor.
//
// Shapes and strides are int64 and counted in elements. A view never owns; who owns the memory is
// said by the function that takes or returns the view. Test: tests/base/tensor_test.cc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "argosy/status.h"

namespace argosy {

enum class DType : uint8_t {
  kUnset = 0,
  kF64,
  kF32,
  kF16,
  kBF16,
  kE4M3,
  kE5M2,
  kE8M0,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
};

// Bytes of one element; 0 for kUnset.
int64_t size_of(DType dtype);

// The safetensors spelling: "F32", "BF16", "F8_E4M3", ...
std::string_view name_of(DType dtype);

// kNotFound names the word and the known spellings.
Result<DType> parse_dtype(std::string_view name);

inline constexpr int kMaxTensorDims = 5;

// A view of strided elements. `Byte` is std::byte (may be written) or const std::byte.
template <typename Byte>
struct BasicTensorView {
  Byte* data = nullptr;
  DType dtype = DType::kUnset;
  int num_dims = 0;
  std::array<int64_t, kMaxTensorDims> shape{};
  std::array<int64_t, kMaxTensorDims> strides{};  // in elements

  BasicTensorView() = default;

  // A dense row-major view. Precondition: at most kMaxTensorDims dims, and checked_num_bytes()
  // accepts them (so that neither strides nor sizes overflow).
  BasicTensorView(void* base, DType element, std::span<const int64_t> dims) : dtype(element) {
    data = static_cast<Byte*>(base);
    init(dims);
  }
  BasicTensorView(const void* base, DType element,
                  std::span<const int64_t> dims) requires std::is_const_v<Byte> : dtype(element) {
    data = static_cast<Byte*>(base);
    init(dims);
  }
  BasicTensorView(void* base, DType element, std::initializer_list<int64_t> dims)
      : BasicTensorView(base, element, std::span<const int64_t>(dims.begin(), dims.size())) {}
  BasicTensorView(const void* base, DType element,
                  std::initializer_list<int64_t> dims) requires std::is_const_v<Byte>
      : BasicTensorView(base, element, std::span<const int64_t>(dims.begin(), dims.size())) {}

  // A read-only view of a writable one.
  template <typename Other>
  requires(std::is_const_v<Byte> && !std::is_const_v<Other>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT(google-explicit-constructor)
      : data(other.data),
        dtype(other.dtype),
        num_dims(other.num_dims),
        shape(other.shape),
        strides(other.strides) {}

  int64_t num_elements() const {
    int64_t count = 1;
    for (int i = 0; i < num_dims; ++i) count *= shape[static_cast<size_t>(i)];
    return count;
  }

  int64_t dim(int i) const { return shape[static_cast<size_t>(i)]; }
  int64_t stride(int i) const { return strides[static_cast<size_t>(i)]; }

  // Address of row `i` of the first dimension.
  Byte* row(int64_t i) const { return data + i * strides[0] * size_of(dtype); }

  // The same elements, rows [first, first + count) of the first dimension. Precondition: in range.
  BasicTensorView rows(int64_t first, int64_t count) const {
    BasicTensorView view = *this;
    view.data = data == nullptr ? nullptr : row(first);
    view.shape[0] = count;
    return view;
  }

  // True when elements lie row-major without gaps (dims of size 0 or 1 may have any stride).
  bool is_dense() const {
    for (int i = 0; i < num_dims; ++i) {
      if (dim(i) == 0) return true;
    }
    int64_t want = 1;
    for (int i = num_dims - 1; i >= 0; --i) {
      const auto at = static_cast<size_t>(i);
      if (shape[at] != 1 && strides[at] != want) return false;
      // More than 2^63 elements: no memory holds them, and the next stride cannot be named.
      if (__builtin_mul_overflow(want, shape[at], &want)) return i == 0;
    }
    return true;
  }

  template <typename T>
  auto* as() const {
    if constexpr (std::is_const_v<Byte>) {
      return reinterpret_cast<const T*>(data);
    } else {
      return reinterpret_cast<T*>(data);
    }
  }

 private:
  void init(std::span<const int64_t> dims) {
    num_dims = static_cast<int>(dims.size());
    int64_t stride_elements = 1;
    for (int i = num_dims - 1; i >= 0; --i) {
      const auto at = static_cast<size_t>(i);
      shape[at] = dims[at];
      strides[at] = stride_elements;
      stride_elements *= dims[at];
    }
  }
};

using TensorView = BasicTensorView<std::byte>;
using ConstTensorView = BasicTensorView<const std::byte>;

// "BF16 [512, 64]" or, when not dense, "BF16 [512, 64] strides [128, 1]".
std::string describe(const ConstTensorView& view);

// Bytes of a dense tensor of `dims`, or kInvalidArgument when a dim is negative or the product
// times `element_bytes` does not fit int64. For that test a dim of 0 counts as 1: strides of an
// empty tensor must fit too. Precondition: element_bytes >= 1.
Result<int64_t> checked_num_bytes(std::span<const int64_t> dims, int64_t element_bytes);

// Owns 64-byte aligned memory. Contents start unspecified unless said otherwise. Moved from, it is
// empty.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::move(other.data_)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    data_ = std::move(other.data_);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
    return *this;
  }

  // kOutOfMemory names the bytes asked for, kInvalidArgument a negative number. Zero bytes are
  // legal and give data() == nullptr.
  static Result<AlignedBuffer> allocate(int64_t bytes);

  std::byte* data() const { return data_.get(); }
  int64_t size_bytes() const { return size_bytes_; }  // rounded up to 64

  // Grows to at least `bytes` (contents are lost when it grows). Never shrinks, so a steady state
  // does not allocate. Errors: those of allocate(); after kOutOfMemory the buffer is empty.
  Status reserve(int64_t bytes);

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
  int64_t size_bytes_ = 0;
};

// A dense tensor that owns its memory. Moved from, it is empty().
class Tensor {
 public:
  Tensor() = default;
  Tensor(Tensor&& other) noexcept
      : buffer_(std::move(other.buffer_)), view_(std::exchange(other.view_, {})) {}
  Tensor& operator=(Tensor&& other) noexcept {
    buffer_ = std::move(other.buffer_);
    view_ = std::exchange(other.view_, {});
    return *this;
  }

  // Errors: kInvalidArgument (dims), kOutOfMemory. Contents are zero.
  static Result<Tensor> zeros(DType dtype, std::span<const int64_t> dims);
  static Result<Tensor> zeros(DType dtype, std::initializer_list<int64_t> dims) {
    return zeros(dtype, std::span<const int64_t>(dims.begin(), dims.size()));
  }

  TensorView view() { return view_; }
  ConstTensorView view() const { return view_; }
  int64_t num_bytes() const { return view_.num_elements() * size_of(view_.dtype); }
  bool empty() const { return view_.dtype == DType::kUnset; }
  std::span<const std::byte> bytes() const {
    return {view_.data, static_cast<size_t>(num_bytes())};
  }

 private:
  AlignedBuffer buffer_;
  TensorView view_;
};

}  // namespace argosy
