// Products with scales on either side in any vector width, included by vec_dot.inl: the same steps over blocks of
// decoded codes, and per scale block acc = fma(partial, scale, acc).
//
// The running sums, touched once per scale block, stay in the scratch: the registers are the partials'. Test:
// tests/gemm/quantised_gemm_test.cc.

// The first lines of a block's share of the prefetches; the decoder has no steps to spread them over.
ARGOSY_KERNEL_INLINE void prefetch_block(const DotArgs& args, int64_t block) {
  NoPrefetch::of(args, block);
}

// sums[r] = fma(partial[r], scales, sums[r]) for the vectors of columns of a pass.
template <int kRows, int kVectors>
ARGOSY_KERNEL_INLINE void add_scaled(const Vec::F (&partial)[kRows][kVectors], const float* scales,
                                     float* sums) {
  for (int c = 0; c < kVectors; ++c) {
    const Vec::F scale = Vec::load(scales + c * Vec::kLanes);
    for (int r = 0; r < kRows; ++r) {
      float* sum = sums + r * kPanelColumns + c * Vec::kLanes;
      Vec::store(sum, Vec::fma(partial[r][c], scale, Vec::load(sum)));
    }
  }
}

// The vectors of columns of a pass, of rows kPanelColumns apart.
struct ScaledSpan {
  int64_t num_rows = 0;
  int num_vectors = 0;
};

// sums[r] plus partials[r] by the scales of its row and of the columns. In vectors where the product of the two scales is an
// ordinary number, else, rarely, by the rules one by one. In memory: a choice per row is too much for registers.
ARGOSY_KERNEL_TARGET __attribute__((noinline)) void add_row_scaled(const ScaledSpan& span,
                                                                   const float* partials,
                                                                   const float* row_scales,
                                                                   const float* scales,
                                                                   bool are_e8m0, float* sums) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  // Code 0 of e8m0 is 0 here: a product of 0 is to be looked at.
  const Vec::F least = Vec::splat(are_e8m0 ? std::numeric_limits<float>::min() : kNone);
  const Vec::F largest = Vec::splat(0x1p127f);
  for (int64_t r = 0; r < span.num_rows; ++r) {
    const Vec::F row_scale = Vec::splat(row_scales[r]);
    for (int64_t c = 0; c < span.num_vectors * Vec::kLanes; c += Vec::kLanes) {
      const float* partial = partials + r * kPanelColumns + c;
      float* sum = sums + r * kPanelColumns + c;
      const Vec::F scale = Vec::mul(row_scale, Vec::load(scales + c));
      if (!Vec::any_outside(scale, least, largest)) {
        Vec::store(sum, Vec::fma(Vec::load(partial), scale, Vec::load(sum)));
        continue;
      }
      for (int i = 0; i < Vec::kLanes; ++i) {
        sum[i] = numeric::add_scaled(partial[i], row_scales[r], scales[c + i], are_e8m0, sum[i]);
      }
    }
  }
}

// One pass: kRows rows by the vectors of columns from `first_vector` on.
template <typename Order, int kRows>
ARGOSY_KERNEL_TARGET void scaled_rows(const DotArgs& args, const CodedPanel& panel,
                                      int first_vector) {
  constexpr int kVectors = vectors_per_pass(kRows, Order::kChains);
  const int64_t first_column = int64_t{first_vector} * Vec::kLanes;
  // Codes are decoded a block ahead: what was stored just now is slow to load.
  alignas(64) std::byte rooms[2][kDecodedBlockBytes];
  alignas(64) float scales[kPanelColumns];
  alignas(64) float partials[kRows * kPanelColumns];
  float* sums = args.scratch + first_column;
  for (int r = 0; r < kRows && !args.resumes; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      Vec::store(sums + r * kPanelColumns + c * Vec::kLanes, Vec::zero());
    }
  }
  const bool has_row_scales = panel.rows.values != nullptr;
  const float* x = reinterpret_cast<const float*>(args.rows);
  const int64_t k_blocks = (args.k + kBlockK - 1) / kBlockK;
  const int64_t blocks_per_scale = panel.block_k / kBlockK;
  const std::byte* decoded = decoded_block(panel, 0, rooms[0]);
  for (int64_t block = 0; block * blocks_per_scale < k_blocks; ++block) {
    const int64_t first = block * blocks_per_scale;
    const int64_t count = std::min(blocks_per_scale, k_blocks - first);
    Vec::F acc[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kVectors; ++c) {
        acc[r][c] = Vec::zero();
        if constexpr (Order::kChains == 2) {
          Vec::store(partials + r * kPanelColumns + first_column + c * Vec::kLanes, Vec::zero());
        }
      }
    }
    for (int64_t at = first; at < first + count; ++at, x += kRows * Order::Rows::kStaged) {
      prefetch_block(args, at);
      const BlockArgs from{x, decoded, first_vector};
      if (at + 1 < k_blocks) decoded = decoded_block(panel, at + 1, rooms[(at + 1) % 2]);
      if constexpr (Order::kChains == 2) {
        Order::template block<kRows, kVectors>(from, NoPrefetch{0}, partials);
      } else {
        Order::template block<kRows, kVectors>(from, NoPrefetch{0}, acc);
      }
    }
    load_scales(panel, block, scales);
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kVectors; ++c) {
        float* partial = partials + r * kPanelColumns + first_column + c * Vec::kLanes;
        if constexpr (Order::kChains == 2) {
          acc[r][c] = Vec::load(partial);
        } else if (has_row_scales) {
          Vec::store(partial, acc[r][c]);
        }
      }
    }
    if (has_row_scales) {
      add_row_scaled({kRows, kVectors}, partials + first_column, row_scales_at(args, panel, block),
                     scales + first_column, panel.are_e8m0, sums);
    } else {
      add_scaled(acc, scales + first_column, sums);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      float* sum = sums + r * kPanelColumns + c * Vec::kLanes;
      Vec::store(sum, Vec::add(Vec::load(sum), Vec::zero()));
    }
  }
}

using ScaledPass = void (*)(const DotArgs& args, const CodedPanel& panel, int first_vector);
template <typename Order, typename Rows>
struct ScaledRowKernels;
template <typename Order, int... kRows>
struct ScaledRowKernels<Order, std::integer_sequence<int, kRows...>> {
  static constexpr ScaledPass kTable[] = {scaled_rows<Order, kRows + 1>...};
};

// All passes over the panel; only the first of them prefetches.
template <typename Order, int kMaxRows>
void scaled_dot(const DotArgs& args, const CodedPanel& panel) {
  using Counts = std::make_integer_sequence<int, kMaxRows>;
  const ScaledPass pass =
      ScaledRowKernels<Order, Counts>::kTable[static_cast<size_t>(args.num_rows - 1)];
  const int num_vectors = vectors_per_pass(static_cast<int>(args.num_rows), Order::kChains);
  DotArgs now = args;
  for (int first = 0; first < kPanelColumns / Vec::kLanes; first += num_vectors) {
    pass(now, panel, first);
    now.prefetch_lines = 0;
  }
}
