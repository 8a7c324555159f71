// The epilogue in vectors, included into the anonymous namespace of a level's file after `Vec`. Test:
// tests/gemm/kernels_test.cc.

constexpr int kVectorsOf16 = static_cast<int>(kTileColumns) / Vec::kLanes;

#include "gemm/vec_activation.inl"

// The finished products of the columns from `column` on.
template <bool kBias>
ARGOSY_KERNEL_INLINE Vec::F products_at(const float* from, const float* bias, int64_t column) {
  const Vec::F products = Vec::load(from + column);
  if constexpr (kBias) return Vec::add(products, Vec::load(bias + column));
  return products;
}

template <typename Out, bool kBias>
ARGOSY_KERNEL_TARGET void store_plain(const StoreArgs& args) {
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const float* from = args.scratch + r * kPanelColumns;
    std::byte* to = args.out + r * args.row_stride_bytes;
    for (int64_t c = 0; c < args.num_columns; c += kTileColumns) {
      Vec::F x[kVectorsOf16];
      for (int i = 0; i < kVectorsOf16; ++i) {
        x[i] = products_at<kBias>(from, args.bias, c + i * Vec::kLanes);
      }
      store_16(to + c * int64_t{sizeof(Out)}, static_cast<Out*>(nullptr), x, args.num_columns - c);
    }
  }
}

template <typename Out, typename Act, bool kBias>
ARGOSY_KERNEL_TARGET void store_gate_up(const StoreArgs& args) {
  const Constants constants{args.limit, args.alpha};
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const float* from = args.scratch + r * kPanelColumns;
    Vec::F x[kVectorsOf16];
    for (int i = 0; i < kVectorsOf16; ++i) {
      const int64_t column = i * Vec::kLanes;
      const Vec::F gate = products_at<kBias>(from, args.bias, column);
      const Vec::F up = products_at<kBias>(from, args.bias, kTileColumns + column);
      x[i] = Act::join(constants, Act::value(constants, gate), up);
    }
    store_16(args.out + r * args.row_stride_bytes, static_cast<Out*>(nullptr), x, args.num_columns);
  }
}

#include "gemm/stores_of.inl"
