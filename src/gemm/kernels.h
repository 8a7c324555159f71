// The seam between the grouped GEMM driver and one level of kernels: a table of functions.
//
// A level is one file that fills one table; the driver knows nothing else of it. The driver calls
// `dot` with denormals flushed and `store` with denormals kept, each through its pointer, so that
// no compiler can move arithmetic across the change. Test: tests/gemm/kernels_test.cc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "argosy/activation.h"
#include "argosy/cpu.h"
#include "argosy/tensor.h"
#include "gemm/packed_layout.h"

namespace argosy::gemm {

// Largest Dot::row_block; the driver's scratch on the stack is this many rows of 32 fp32.
inline constexpr int64_t kMaxRowBlock = 256;

// Rows as a kernel reads them, written once for all panels: [block of 32 k][row], each `staged_bytes` of the
// kernel's Dot, zero past k.
struct StageArgs {
  const std::byte* rows = nullptr;  // row 0; nothing past element k of a row may be read
  int64_t row_stride_bytes = 0;
  int64_t num_rows = 0;  // in [1, row_block]
  int64_t k = 0;
  std::byte* staged = nullptr;                // 64-byte aligned
  const std::byte* const* rows_at = nullptr;  // [num_rows] where every row lies; null: as above

  const std::byte* row(int64_t r) const {
    return rows_at != nullptr ? rows_at[r] : rows + r * row_stride_bytes;
  }
};
using StageKernel = void (*)(const StageArgs& args);

// scratch[r][0..31] = row r . the 32 columns of `panel`, finished by + 0 (which changes no chain that goes on).
struct DotArgs {
  const std::byte* rows =
      nullptr;  // staged, or row 0: then nothing past element k of a row may be read
  int64_t row_stride_bytes = 0;  // of rows that are not staged
  int64_t num_rows = 0;          // in [1, row_block]; as many as were staged
  int64_t k = 0;
  const std::byte* panel = nullptr;
  float* scratch = nullptr;  // 64-byte aligned, [num_rows][32]
  // The chains go on from what scratch holds: this call's k follow those of the last, a multiple of 32. Of plain
  // panels only, with scales only of such as are decoded, and not at level reference.
  bool resumes = false;
  // Where to prefetch to L2 while computing: this many lines of 64 bytes per block of 32 k, one
  // after the other. An address, for it may lie past the weights: a prefetch cannot fault.
  uintptr_t prefetch = 0;
  int64_t prefetch_lines = 0;
  // Bytes from one block's lines to the next's; 0: they follow one another.
  int64_t prefetch_stride = 0;
};
using DotKernel = void (*)(const DotArgs& args);

// What a block of rows fetches ahead while it goes over a panel: DotArgs::prefetch and what follows.
struct Prefetch {
  uintptr_t from = 0;
  int64_t lines_per_block = 0;
  int64_t stride = 0;
};

// Number `at` of `parts` shares of the `bytes` at `address`, for a call over `k_blocks` blocks of 32 k.
struct Share {
  int64_t at = 0;
  int64_t parts = 1;
};
constexpr Prefetch part_ahead(uintptr_t address, int64_t bytes, int64_t k_blocks,
                              const Share& share) {
  constexpr int64_t kLineBytes = 64;
  const int64_t per_line = share.parts * k_blocks * kLineBytes;
  const int64_t lines = (bytes + per_line - 1) / per_line;
  return {address + static_cast<uintptr_t>(share.at * lines * kLineBytes * k_blocks), lines};
}

// 32 k by 32 columns of codes to a block of a bf16 panel, exactly. `block` is 64-byte aligned.
using DecodeKernel = void (*)(const std::byte* codes, std::byte* block);
struct Decoders {
  DecodeKernel e4m3 = nullptr;
  DecodeKernel e2m1 = nullptr;
};
const Decoders& base_decoders();
const Decoders& avx2_decoders();
const Decoders& vbmi_decoders();  // needs Level::kAvx512 and AVX512_VBMI; chosen beside GFNI only
// The best that this CPU has and `level` may use.
const Decoders& decoders_for(Level level);

// Scales of the rows of one kernel call, as fp32; e8m0 code 0 is 0.
struct RowScales {
  const float* values = nullptr;  // [scale block of the rows][row]; null: rows without scales
  int block_shift = 0;            // blocks of CodedPanel::block_k in one of theirs: 1 << shift
};

// A panel with scales on either side, in place of DotArgs::panel. `decoded`, when not null, holds its codes as a
// bf16 panel; else a kernel decodes block by block.
struct CodedPanel {
  CodedLayout layout;  // block_k 0: bf16 weights, which are `decoded` as they stand
  const std::byte* panel = nullptr;
  DecodeKernel decode = nullptr;
  const std::byte* decoded = nullptr;
  int64_t block_k = 0;    // the shorter of both sides' scale blocks: a partial is so long
  int block_shift = 0;    // blocks of block_k in one of the weights': 1 << shift
  bool are_e8m0 = false;  // both sides' scales: exponents are added
  RowScales rows;
  // PackedWeights::plain_lines_of_panel(); null: unknown.
  const uint16_t* plain_lines = nullptr;
};
using ScaledKernel = void (*)(const DotArgs& args, const CodedPanel& panel);

struct Dot {
  DotKernel run = nullptr;
  int64_t row_block = 0;        // rows a call takes at most
  StageKernel stage = nullptr;  // null: `run` reads the rows where they are
  int64_t staged_bytes = 0;     // of 32 k of a row
  // Tiles of at most so many rows are for `few`.
  int64_t few_rows = 0;
  const Dot* few = nullptr;
  ScaledKernel run_scaled = nullptr;  // null: `few` has one, for any number of rows

  const Dot& for_rows(int64_t num_rows) const { return num_rows <= few_rows ? *few : *this; }
};

// Columns [0, num_columns) of the finished products, plus bias, through the activation, to the output rows.
// gate_up: column c of the output is made of columns c (gate) and 16 + c (up) of the scratch.
struct StoreArgs {
  const float* scratch = nullptr;
  const float* bias = nullptr;  // [32], read only by the stores with bias
  float limit = 0;              // of the activation, read only where it has them
  float alpha = 0;
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  std::byte* out = nullptr;  // row 0, first column
  int64_t row_stride_bytes = 0;
};
using StoreKernel = void (*)(const StoreArgs& args);

// The stores of one output dtype, each without and with a bias.
struct Stores {
  using WithoutAndWithBias = std::array<StoreKernel, 2>;
  WithoutAndWithBias plain = {};
  std::array<WithoutAndWithBias, kNumActivations> gate_up = {};  // by ActivationKind
};

struct KernelTable {
  // Rows and weights: bf16 and bf16 in two orders, fp32 and bf16, fp32 and fp32.
  Dot bf16_amx;
  Dot bf16_vdpbf16;
  Dot f32_bf16;
  Dot f32_f32;
  Stores store_bf16;
  Stores store_f32;
};

// One per level; generic has two builds of the same source, avx512_bf16 two of its kernels for few rows, chosen by the CPU. All but
// reference and generic need their level's instructions.
const KernelTable& reference_kernels();
const KernelTable& generic_kernels();
const KernelTable& generic_fma_kernels();  // needs Level::kAvx2
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
const KernelTable& avx512_bf16_kernels();
const KernelTable& avx512_bf16_half_width_kernels();  // for platform::has_half_width_avx512()
const KernelTable& amx_kernels();

// The table of `level`, whatever this CPU has; generic is the build without FMA.
const KernelTable& kernels_of(Level level);

// The table that runs at `level`. Errors: those of resolve_level.
Result<const KernelTable*> kernels_for(Level level);

}  // namespace argosy::gemm
