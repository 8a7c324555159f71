// The epilogue of the grouped GEMM, included into the anonymous namespace of each level's file so
// that each is compiled for its own instruction set. Needs ARGOSY_KERNEL_TARGET. Test: tests/gemm/.

__attribute__((always_inline)) inline void store_one(std::byte* to, BFloat16*, float value) {
  const BFloat16 rounded = BFloat16::from_float(value);
  std::memcpy(to, &rounded, sizeof(rounded));
}

__attribute__((always_inline)) inline void store_one(std::byte* to, float*, float value) {
  const float canonical = value != value ? std::bit_cast<float>(numeric::kCanonicalNaN) : value;
  std::memcpy(to, &canonical, sizeof(canonical));
}

using numeric::ClampedSwiGlu;
using numeric::GeGlu;
using numeric::GeGluTanh;
using numeric::Relu2Glu;
using numeric::SwiGlu;

// The finished product of a column.
template <bool kBias>
__attribute__((always_inline)) inline float product_at(const float* from, const float* bias,
                                                       int64_t column) {
  if constexpr (kBias) return from[column] + bias[column];
  return from[column];
}

template <typename Out, bool kBias>
ARGOSY_KERNEL_TARGET void store_plain(const StoreArgs& args) {
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const float* from = args.scratch + r * kPanelColumns;
    std::byte* to = args.out + r * args.row_stride_bytes;
    for (int64_t c = 0; c < args.num_columns; ++c) {
      store_one(to + c * int64_t{sizeof(Out)}, static_cast<Out*>(nullptr),
                product_at<kBias>(from, args.bias, c));
    }
  }
}

template <typename Out, typename Act, bool kBias>
ARGOSY_KERNEL_TARGET void store_gate_up(const StoreArgs& args) {
  const numeric::ActivationConstants constants{args.limit, args.alpha};
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const float* from = args.scratch + r * kPanelColumns;
    std::byte* to = args.out + r * args.row_stride_bytes;
    for (int64_t c = 0; c < args.num_columns; ++c) {
      const float gate = product_at<kBias>(from, args.bias, c);
      const float up = product_at<kBias>(from, args.bias, kTileColumns + c);
      store_one(to + c * int64_t{sizeof(Out)}, static_cast<Out*>(nullptr),
                Act::join(constants, Act::value(constants, gate), up));
    }
  }
}

#include "gemm/stores_of.inl"
