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

template <typename Out>
ARGOSY_KERNEL_TARGET void store_plain(const StoreArgs& args) {
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const float* from = args.scratch + r * kPanelColumns;
    std::byte* to = args.out + r * args.row_stride_bytes;
    for (int64_t c = 0; c < args.num_columns; ++c) {
      store_one(to + c * int64_t{sizeof(Out)}, static_cast<Out*>(nullptr), from[c]);
    }
  }
}

template <typename Out>
ARGOSY_KERNEL_TARGET void store_gate_up(const StoreArgs& args) {
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const float* gate = args.scratch + r * kPanelColumns;
    const float* up = gate + kTileColumns;
    std::byte* to = args.out + r * args.row_stride_bytes;
    for (int64_t c = 0; c < args.num_columns; ++c) {
      const float activated = numeric::silu_f32(gate[c]);
      store_one(to + c * int64_t{sizeof(Out)}, static_cast<Out*>(nullptr), activated * up[c]);
    }
  }
}
