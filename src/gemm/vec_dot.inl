// Dot products in any vector width, by FMA or by a level's own step, included into the anonymous
// namespace of a level's file after `Vec`.
//
// A chain is a lane of an accumulator, so vector width and row block never change a sum. Rows are
// staged once for all panels: one stream in the order of use, which the hardware follows, whatever the
// row stride (at 4 KiB all rows share one set of the L1 cache). Test: tests/gemm/kernels_test.cc.

// How 32 k of a row lie in a staging block of kStaged fp32.
struct Bf16Rows {
  static constexpr int64_t kElementBytes = 2;
  static constexpr int kStaged = 32;
  static constexpr int kPairStep = 1, kOdd = 16;  // even k in [0, 16), odd k in [16, 32)

  ARGOSY_KERNEL_INLINE static void stage(const std::byte* from, float* to) {
    for (int i = 0; i < 16; i += Vec::kLanes) {
      const Vec::Bits pairs = Vec::load_bits(from + i * 4);
      Vec::store(to + i, Vec::even(pairs));
      Vec::store(to + kOdd + i, Vec::odd(pairs));
    }
  }
};

struct F32Rows {
  static constexpr int64_t kElementBytes = 4;
  static constexpr int kStaged = 32;
  static constexpr int kPairStep = 2, kOdd = 1;

  ARGOSY_KERNEL_INLINE static void stage(const std::byte* from, float* to) {
    for (int i = 0; i < kBlockK; i += Vec::kLanes) {
      Vec::store(to + i, Vec::load(reinterpret_cast<const float*>(from) + i));
    }
  }
};

template <typename Rows>
ARGOSY_KERNEL_TARGET void stage_rows(const StageArgs& args) {
  float* to = reinterpret_cast<float*>(args.staged);
  const int64_t num_full = args.k / kBlockK;
  const int64_t block_floats = args.num_rows * Rows::kStaged;
  // Row by row: the reads are the long way.
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const std::byte* row = args.row(r);
    for (int64_t block = 0; block < num_full; ++block) {
      Rows::stage(row + block * kBlockK * Rows::kElementBytes,
                  to + block * block_floats + r * Rows::kStaged);
    }
    const int64_t rest = args.k % kBlockK;
    if (rest == 0) continue;
    alignas(64) std::byte padded[kBlockK * Rows::kElementBytes] = {};
    std::memcpy(padded, row + num_full * kBlockK * Rows::kElementBytes,
                static_cast<size_t>(rest * Rows::kElementBytes));
    Rows::stage(padded, to + num_full * block_floats + r * Rows::kStaged);
  }
}

// The prefetches of one block of 32 k. Spread over its steps where whole blocks are fetched ahead
// (kLinesPerStep > 0): a burst of so many would take every miss buffer, and the rows would wait.
constexpr int64_t kBlockSteps = kBlockK / 2;

// Volatile, so that it stays where it stands: compilers gather the builtin's, and a burst is what they must not be. By a register: with
// a memory operand every sum would be stored before it.
ARGOSY_KERNEL_INLINE void prefetch_line(uintptr_t address) {
  __asm__ volatile("prefetcht1 (%0)" : : "r"(address));
}

template <int kLinesPerStep>
struct Ahead {
  static constexpr bool kStreams = kLinesPerStep > 0;
  uintptr_t from;

  ARGOSY_KERNEL_INLINE static Ahead of(const DotArgs& args, int64_t block) {
    const int64_t stride =
        args.prefetch_stride != 0 ? args.prefetch_stride : args.prefetch_lines * 64;
    const uintptr_t from = args.prefetch + static_cast<uintptr_t>(block * stride);
    if constexpr (kLinesPerStep == 0) {
      for (int64_t line = 0; line < args.prefetch_lines; ++line) {
        prefetch_line(from + static_cast<uintptr_t>(line) * 64);
      }
    }
    return {from};
  }

  ARGOSY_KERNEL_INLINE void step(int at) const {
    for (int line = 0; line < kLinesPerStep; ++line) {
      prefetch_line(from + static_cast<uintptr_t>(at * kLinesPerStep + line) * 64);
    }
  }
};

using NoPrefetch = Ahead<0>;

// Bytes from the first column to vector `v` of columns, at one k-pair of bf16 or one k of fp32.
constexpr int64_t vector_offset(int v) { return int64_t{v} * Vec::kLanes * 4; }

// chain[r][c] = fma(x[r], w[c], chain[r][c]) for the vectors c of w; x points to one k
// of row 0 of a staging block.
template <int kRows, int kVectors>
ARGOSY_KERNEL_INLINE void fma_step(const float* x, const Vec::F (&w)[kVectors],
                                   Vec::F (&chain)[kRows][kVectors]) {
  constexpr int kStaged = 32;  // of both kinds of rows
  for (int r = 0; r < kRows; ++r) {
    const Vec::F row = Vec::broadcast(x + r * kStaged);
    for (int c = 0; c < kVectors; ++c) chain[r][c] = Vec::fma(row, w[c], chain[r][c]);
  }
}

// Both elements of a pair, each into its chain; the odd one first or second.
template <bool kOddFirst, typename Rows, int kRows, int kVectors>
ARGOSY_KERNEL_INLINE void pair_step(const float* x, const std::byte* pair, int first_vector,
                                    Vec::F (&even_chain)[kRows][kVectors],
                                    Vec::F (&odd_chain)[kRows][kVectors]) {
  for (int half = 0; half < 2; ++half) {
    const bool odd = (half == 0) == kOddFirst;
    Vec::F w[kVectors];
    for (int c = 0; c < kVectors; ++c) {
      const Vec::Bits bits = Vec::load_bits(pair + vector_offset(first_vector + c));
      w[c] = odd ? Vec::odd(bits) : Vec::even(bits);
    }
    fma_step(odd ? x + Rows::kOdd : x, w, odd ? odd_chain : even_chain);
  }
}

// Compilers may not move a read of weights across: of a stream whose lines come out of order the hardware's
// prefetcher loses sight. Only where the accumulators stay in registers all the same.
template <bool kKeeps>
ARGOSY_KERNEL_INLINE void keep_order() {
  if constexpr (kKeeps) __asm__ volatile("" : : : "memory");
}

// Steps `pair` + 0, 1, .. of a block, unrolled by name: GCC would not, and the loop's own work costs up
// to a tenth.
template <typename Step, typename Ahead, int... kAt>
ARGOSY_KERNEL_INLINE void run_pairs(const Step& step, const Ahead& ahead, int pair,
                                    std::integer_sequence<int, kAt...>) {
  ((ahead.step(pair + kAt), step.run(pair + kAt), keep_order<Step::kKeepsOrder>()), ...);
}

// All pairs of a block, in the order of memory.
template <typename Step, typename Ahead>
ARGOSY_KERNEL_INLINE void for_each_pair(const Step& step, const Ahead& ahead) {
  // Weights that come from memory are read by short loops: long ones run ahead of the prefetches.
  constexpr int kUnroll = Ahead::kStreams ? Step::kStreamUnroll : Step::kUnroll;
  using Unrolled = std::make_integer_sequence<int, kUnroll>;
#pragma GCC unroll 1
  for (int pair = 0; pair < kBlockSteps; pair += kUnroll) {
    run_pairs(step, ahead, pair, Unrolled());
  }
}

// Where a block stands.
struct BlockArgs {
  const float* x;      // staged rows
  const std::byte* w;  // the block of the panel
  int first_vector;
};

template <bool kOddFirst, typename Rows, int kRows, int kVectors>
struct PairStep {
  static constexpr int kUnroll = 4, kStreamUnroll = 4;
  static constexpr bool kKeepsOrder = false;
  const BlockArgs& at;
  Vec::F (&even)[kRows][kVectors];
  Vec::F (&odd)[kRows][kVectors];

  ARGOSY_KERNEL_INLINE void run(int pair) const {
    pair_step<kOddFirst, Rows>(at.x + pair * Rows::kPairStep, at.w + pair * kPairStride,
                               at.first_vector, even, odd);
  }
};

// One chain per column over the pairs; VDPBF16PS takes the odd element of a pair first.
template <typename RowsOf, bool kOddFirst>
struct PairOrder {
  using Rows = RowsOf;
  static constexpr int kChains = 1;
  static constexpr int kNearRows = 6;
  static constexpr int64_t kWeightBlockBytes = kTileElements * 4;

  template <int kRows, int kVectors, typename Ahead>
  ARGOSY_KERNEL_INLINE static void block(const BlockArgs& at, const Ahead& ahead,
                                         Vec::F (&acc)[kRows][kVectors]) {
    const PairStep<kOddFirst, Rows, kRows, kVectors> step{at, acc, acc};
    for_each_pair(step, ahead);
  }
};

template <int kRows, int kVectors>
struct F32Step {
  static constexpr int kUnroll = 4, kStreamUnroll = 4;
  static constexpr bool kKeepsOrder = false;
  const BlockArgs& at;
  Vec::F (&acc)[kRows][kVectors];

  ARGOSY_KERNEL_INLINE void run(int pair) const {
    for (int k = 2 * pair; k < 2 * pair + 2; ++k) {
      const std::byte* row = at.w + int64_t{k} * kPanelColumns * 4;
      Vec::F w[kVectors];
      for (int c = 0; c < kVectors; ++c) {
        const std::byte* from = row + vector_offset(at.first_vector + c);
        w[c] = Vec::load(reinterpret_cast<const float*>(from));
      }
      fma_step(at.x + k, w, acc);
    }
  }
};

struct F32Order {
  using Rows = F32Rows;
  static constexpr int kChains = 1;
  static constexpr int kNearRows = 6;
  static constexpr int64_t kWeightBlockBytes = kBlockK * kPanelColumns * 4;

  template <int kRows, int kVectors, typename Ahead>
  ARGOSY_KERNEL_INLINE static void block(const BlockArgs& at, const Ahead& ahead,
                                         Vec::F (&acc)[kRows][kVectors]) {
    const F32Step<kRows, kVectors> step{at, acc};
    for_each_pair(step, ahead);
  }
};

// Staged rows of one block, copied one block ahead of their use: weights that stream from memory drive
// staged rows out of the L1 cache and keep its miss buffers busy, and few rows have nothing to do
// meanwhile. An order's kNearRows: up to how many. Measured on Zen 4: 78 -> 83 % of the read rate at 5 rows, a tenth
// lost at 11.
template <int64_t kFloats>
struct Near {
  alignas(64) float blocks[2][kFloats];

  ARGOSY_KERNEL_INLINE void load(const float* x, int64_t block) {
    for (int64_t i = 0; i < kFloats; i += Vec::kLanes) {
      Vec::store(blocks[block & 1] + i, Vec::load(x + i));
    }
  }
  ARGOSY_KERNEL_INLINE const float* at(int64_t block) const { return blocks[block & 1]; }
};

// kRows rows by kVectors vectors of columns: the accumulators live in registers.
// kResumes is a constant of each copy: as a condition at run time it cost few rows a third of their speed.
template <typename Order, int kRows, int kVectors, int kLinesPerStep, bool kResumes>
ARGOSY_KERNEL_INLINE void dot_pass(const DotArgs& args, int first_vector) {
  Vec::F acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    [[maybe_unused]] const float* from =
        args.scratch + r * kPanelColumns + first_vector * Vec::kLanes;
    for (int c = 0; c < kVectors; ++c) {
      acc[r][c] = kResumes ? Vec::load(from + c * Vec::kLanes) : Vec::zero();
    }
  }
  const float* x = reinterpret_cast<const float*>(args.rows);
  constexpr int64_t kBlockFloats = kRows * Order::Rows::kStaged;
  [[maybe_unused]] Near<kBlockFloats> near;
  if constexpr (kRows <= Order::kNearRows) near.load(x, 0);
  for (int64_t block = 0; block * kBlockK < args.k; ++block) {
    const float* from = x;
    if constexpr (kRows <= Order::kNearRows) {
      if ((block + 1) * kBlockK < args.k) near.load(x + kBlockFloats, block + 1);
      from = near.at(block);
    }
    Order::template block<kRows, kVectors>(
        {from, args.panel + block * Order::kWeightBlockBytes, first_vector},
        Ahead<kLinesPerStep>::of(args, block), acc);
    x += kRows * Order::Rows::kStaged;
  }
  for (int r = 0; r < kRows; ++r) {
    float* to = args.scratch + r * kPanelColumns + first_vector * Vec::kLanes;
    for (int c = 0; c < kVectors; ++c) {
      Vec::store(to + c * Vec::kLanes, Vec::add(acc[r][c], Vec::zero()));
    }
  }
}

// The order of TDPBF16PS: two chains per column from zero in every block; the running sum, touched once
// in 32 k, stays in the scratch.
struct AmxOrder {
  using Rows = Bf16Rows;
  static constexpr int kChains = 2;
  static constexpr int64_t kWeightBlockBytes = kTileElements * 4;

  template <int kRows, int kVectors, typename Ahead>
  ARGOSY_KERNEL_INLINE static void block(const BlockArgs& at, const Ahead& ahead, float* scratch) {
    Vec::F even[kRows][kVectors], odd[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kVectors; ++c) even[r][c] = odd[r][c] = Vec::zero();
    }
    const PairStep<false, Rows, kRows, kVectors> step{at, even, odd};
    for_each_pair(step, ahead);
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kVectors; ++c) {
        float* sum = scratch + r * kPanelColumns + (at.first_vector + c) * Vec::kLanes;
        Vec::store(sum, Vec::add(Vec::load(sum), Vec::add(even[r][c], odd[r][c])));
      }
    }
  }
};

template <int kRows, int kVectors, int kLinesPerStep>
ARGOSY_KERNEL_INLINE void amx_pass(const DotArgs& args, int first_vector) {
  float* sums = args.scratch + first_vector * Vec::kLanes;
  for (int64_t r = 0; r < args.num_rows && !args.resumes; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      Vec::store(sums + r * kPanelColumns + c * Vec::kLanes, Vec::zero());
    }
  }
  const float* x = reinterpret_cast<const float*>(args.rows);
  for (int64_t block = 0; block * kBlockK < args.k; ++block) {
    AmxOrder::block<kRows, kVectors>(
        {x, args.panel + block * AmxOrder::kWeightBlockBytes, first_vector},
        Ahead<kLinesPerStep>::of(args, block), args.scratch);
    x += kRows * AmxOrder::Rows::kStaged;
  }
  for (int64_t r = 0; r < args.num_rows; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      float* sum = sums + r * kPanelColumns + c * Vec::kLanes;
      Vec::store(sum, Vec::add(Vec::load(sum), Vec::zero()));
    }
  }
}

// Vectors of columns of one pass: the whole panel where its chains, the weights and one row fit the
// registers, else two (a pass then covers half a panel of the narrow level).
constexpr int vectors_per_pass(int rows, int chains) {
  constexpr int kPanelVectors = static_cast<int>(kPanelColumns) / Vec::kLanes;
  return rows * kPanelVectors * chains + kPanelVectors + 1 <= Vec::kRegisters ? kPanelVectors : 2;
}

// One pass: kRows rows by the vectors of columns from `first_vector` on. A function of its own for each
// way to prefetch: two of them in one function are too much for the register allocator.
template <typename Order, int kRows, bool kStream>
ARGOSY_KERNEL_TARGET void dot_rows(const DotArgs& args, int first_vector) {
  constexpr int kVectors = vectors_per_pass(kRows, Order::kChains);
  constexpr int kLinesPerStep = kStream ? Order::kWeightBlockBytes / 64 / kBlockSteps : 0;
  if constexpr (Order::kChains == 2) {
    amx_pass<kRows, kVectors, kLinesPerStep>(args, first_vector);
  } else {
    if (args.resumes) {
      dot_pass<Order, kRows, kVectors, kLinesPerStep, true>(args, first_vector);
    } else {
      dot_pass<Order, kRows, kVectors, kLinesPerStep, false>(args, first_vector);
    }
  }
}

// dot_rows for 1, 2, .. rows.
using DotPass = void (*)(const DotArgs& args, int first_vector);
template <typename Order, bool kStream, typename Rows>
struct RowKernels;
template <typename Order, bool kStream, int... kRows>
struct RowKernels<Order, kStream, std::integer_sequence<int, kRows...>> {
  static constexpr DotPass kTable[] = {dot_rows<Order, kRows + 1, kStream>...};
};

// All passes over the panel; only the first of them prefetches.
template <typename Order, int kMaxRows>
void dot(const DotArgs& args) {
  using Counts = std::make_integer_sequence<int, kMaxRows>;
  const auto at = static_cast<size_t>(args.num_rows - 1);
  const int num_vectors = vectors_per_pass(static_cast<int>(args.num_rows), Order::kChains);
  const DotPass plain = RowKernels<Order, false, Counts>::kTable[at];
  const DotPass stream = RowKernels<Order, true, Counts>::kTable[at];
  const bool whole_blocks = args.prefetch_lines == Order::kWeightBlockBytes / 64;
  (whole_blocks ? stream : plain)(args, 0);
  DotArgs rest = args;
  rest.prefetch_lines = 0;
  for (int first = num_vectors; first < kPanelColumns / Vec::kLanes; first += num_vectors) {
    plain(rest, first);
  }
}

#include "gemm/scaled_panel.inl"
#include "gemm/vec_scaled.inl"

template <typename Order, int kMaxRows>
constexpr Dot dot_of() {
  Dot dot_kernel{.run = dot<Order, kMaxRows>,
                 .row_block = kMaxRows,
                 .stage = stage_rows<typename Order::Rows>,
                 .staged_bytes = Order::Rows::kStaged * int64_t{sizeof(float)}};
  // Codes become bf16.
  constexpr bool kTakesBf16 = Order::kWeightBlockBytes == kDecodedBlockBytes;
  if constexpr (kTakesBf16) dot_kernel.run_scaled = scaled_dot<Order, kMaxRows>;
  return dot_kernel;
}
