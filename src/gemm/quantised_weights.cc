// Panel by panel of the result: its 32 columns are put together as lines of bf16 from the packed
// weights, quantised by quantise(), and spread over the panel. Test:
// tests/gemm/quantised_weights_test.cc.
#include "argosy/quantised_weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/error.h"
#include "gemm/backward_moves.h"
#include "gemm/pack_quantised.h"
#include "gemm/packed_layout.h"
#include "gemm/tiles.h"

namespace argosy {
namespace gemm {
namespace {

constexpr int64_t kTileBytes = kTileElements * 2;

// 32 lines of a panel's columns, as values and as codes.
struct Lines {
  std::byte* values = nullptr;  // bf16 [32][k], stride_bytes apart, zeros to a multiple of 32
  int64_t stride_bytes = 0;
  QuantisedView codes;  // [32, k]
};

class WeightQuantiser {
 public:
  WeightQuantiser(const QuantiseOptions& options, Level level, const PackedWeights& w,
                  QuantisedWeights* out)
      : options_(options), moves_(moves_for(level)), w_(w), out_(*out) {
    options_.pool = nullptr;
  }

  // Panels of along_k, then those of along_n, of one group after the other.
  int64_t num_tasks() const { return w_.num_groups() * panels_of_group(); }

  Status run(int64_t task) const {
    const int64_t group = task / panels_of_group();
    const int64_t panel = task % panels_of_group();
    const int64_t along_k = out_.along_k.num_panels();
    if (panel < along_k) return quantise_along_k(group, panel);
    return quantise_along_n(group, panel - along_k);
  }

 private:
  int64_t panels_of_group() const { return out_.along_k.num_panels() + out_.along_n.num_panels(); }

  // The calling thread's.
  static Result<Lines> lines_for(const PackedWeights& to) {
    const int64_t k = to.k(), blocks = ceil_div(k, kBlockK);
    Lines lines;
    // A line more: rows 4 KiB apart would share a set of the L1 cache.
    lines.stride_bytes = to.padded_k() * 2 + 64;
    const int64_t value_bytes = kPanelColumns * lines.stride_bytes;
    const int64_t code_bytes = kPanelColumns * (to.padded_k() + blocks);
    thread_local AlignedBuffer room;
    ARGOSY_RETURN_IF_ERROR(room.reserve(value_bytes + code_bytes));
    lines.values = room.data();
    lines.codes.format = to.format();
    lines.codes.rows = kPanelColumns;
    lines.codes.cols = k;
    lines.codes.codes = TensorView(room.data() + value_bytes, DType::kE4M3, {kPanelColumns, k});
    lines.codes.codes.strides[0] = to.padded_k();
    lines.codes.scales = TensorView(room.data() + value_bytes + kPanelColumns * to.padded_k(),
                                    DType::kE8M0, {kPanelColumns, blocks});
    return lines;
  }

  // The same columns by the same k.
  Status quantise_along_k(int64_t group, int64_t panel) const {
    ARGOSY_ASSIGN_OR_RETURN(const Lines lines, lines_for(out_.along_k));
    const std::byte* from = w_.panel(group, panel);
    for (int64_t block = 0; block < w_.padded_k() / kBlockK; ++block, from += kDecodedBlockBytes) {
      for (int64_t tile = 0; tile < 2; ++tile) {
        moves_.transpose(
            from + tile * kTileStride, kPairStride,
            lines.values + tile * kTileColumns * lines.stride_bytes + block * kBlockK * 2,
            lines.stride_bytes);
      }
    }
    return pack(lines, group, panel, &out_.along_k);
  }

  // Columns are 32 k, blocks are of n.
  Status quantise_along_n(int64_t group, int64_t panel) const {
    ARGOSY_ASSIGN_OR_RETURN(const Lines lines, lines_for(out_.along_n));
    const bool is_plain = w_.kind() == PackedWeights::Kind::kPlain;
    const int64_t num_blocks = out_.along_n.padded_k() / kBlockK;
    const int64_t operand_blocks = is_plain ? num_blocks : num_blocks / 2;
    for (int64_t block = 0; block < num_blocks; ++block) {
      alignas(64) std::byte rows[kBlockK * 64];  // [32 n][32 k]
      for (int64_t half = 0; half < 2; ++half) {
        // 16 columns n: a tile of a panel. Of gate_up two panels hold 32 of one operand.
        const int64_t source = is_plain ? block : 2 * (block % operand_blocks) + half;
        const int64_t tile = is_plain ? half : block / operand_blocks;
        std::byte* to = rows + half * kTileBytes;
        if (source >= w_.num_panels()) {
          std::memset(to, 0, kTileBytes);
          continue;
        }
        moves_.transpose(w_.panel(group, source) + panel * kDecodedBlockBytes + tile * kTileStride,
                         kPairStride, to, 64);
      }
      transpose_rows(moves_, DType::kBF16, {rows, 64, kBlockK, kPanelColumns},
                     lines.values + block * kBlockK * 2, lines.stride_bytes);
    }
    return pack(lines, group, panel, &out_.along_n);
  }

  // Lines that are columns go to the panel; padding stays as it was made.
  Status pack(const Lines& lines, int64_t group, int64_t panel, PackedWeights* to) const {
    ConstTensorView values(lines.values, DType::kBF16, {kPanelColumns, to->k()});
    values.strides[0] = lines.stride_bytes / 2;
    ARGOSY_RETURN_IF_ERROR(quantise(options_, values, lines.codes));
    const bool is_plain = to->kind() == PackedWeights::Kind::kPlain;
    const int64_t width = is_plain ? kPanelColumns : kTileColumns;
    const int64_t count = std::min(width, to->n() - panel * width);
    std::byte* const data = PanelAccess::panel(to, group, panel);
    for (int64_t first = 0; first < kPanelColumns; first += width) {
      for (int64_t c = first; c < first + count; ++c) pack_line(lines.codes, c, data);
    }
    return {};
  }

  QuantiseOptions options_;
  const MoveKernels& moves_;
  const PackedWeights& w_;
  QuantisedWeights& out_;
};

bool fits(const PackedWeights& made, PackedWeights::Kind kind, BlockFormat format,
          int64_t num_groups, int64_t n, int64_t k) {
  return made.kind() == kind && made.format() == format && made.num_groups() == num_groups &&
         made.n() == n && made.k() == k && (num_groups == 0 || made.panel(0, 0) != nullptr);
}

Status make_room(const PackedWeights& w, BlockFormat format, QuantisedWeights* out) {
  const int64_t groups = w.num_groups();
  if (!fits(out->along_k, w.kind(), format, groups, w.n(), w.k()) ||
      (out->along_k.has_bias() && !w.has_bias())) {
    ARGOSY_ASSIGN_OR_RETURN(
        out->along_k, PackedWeights::create_quantised(w.kind(), format, groups, w.n(), w.k()));
  }
  const GradientColumns columns = gradient_columns(w.kind(), w.n());
  constexpr auto kPlain = PackedWeights::Kind::kPlain;
  if (!fits(out->along_n, kPlain, format, groups, w.k(), columns.total)) {
    ARGOSY_ASSIGN_OR_RETURN(out->along_n, PackedWeights::create_quantised(kPlain, format, groups,
                                                                          w.k(), columns.total));
  }
  if (!w.has_bias()) return {};
  ARGOSY_RETURN_IF_ERROR(out->along_k.add_bias());
  PanelAccess::copy_bias(w, &out->along_k);
  return {};
}

}  // namespace
}  // namespace gemm

GradientColumns gradient_columns(PackedWeights::Kind kind, int64_t n) {
  if (kind == PackedWeights::Kind::kPlain) return {n, 0};
  const int64_t padded = gemm::ceil_div(n, gemm::kBlockK) * gemm::kBlockK;
  return {2 * padded, padded};
}

Status quantise_weights(const QuantiseOptions& options, const PackedWeights& w, BlockFormat format,
                        QuantisedWeights* out) {
  if (w.dtype() == DType::kUnset) return base::invalid("the weights were never created");
  if (w.format() != BlockFormat::kUnset) {
    return base::error(StatusCode::kUnsupported, "the weights are {} already: only bf16",
                       name_of(w.format()));
  }
  if (w.dtype() != DType::kBF16) {
    return base::invalid("the weights are {}, only BF16 is quantised", name_of(w.dtype()));
  }
  if (format != BlockFormat::kMxfp8 && format != BlockFormat::kMxfp8Ceil) {
    return base::error(StatusCode::kUnsupported,
                       "weights in both directions are mxfp8 or mxfp8_ceil, not {}",
                       format == BlockFormat::kUnset ? "unset" : name_of(format));
  }
  ARGOSY_ASSIGN_OR_RETURN(const Level level, resolve_level(options.level));
  ARGOSY_RETURN_IF_ERROR(gemm::make_room(w, format, out));
  const gemm::WeightQuantiser quantiser(options, level, w, out);
  const int64_t num_tasks = quantiser.num_tasks();
  std::atomic<int64_t> first_failed{num_tasks};
  const auto run = [&](int64_t task, int) {
    if (quantiser.run(task).ok()) return;
    // Relaxed: only the least number matters; parallel_for publishes it.
    int64_t least = first_failed.load(std::memory_order_relaxed);
    while (task < least &&
           !first_failed.compare_exchange_weak(least, task, std::memory_order_relaxed)) {
    }
  };
  if (options.pool != nullptr && num_tasks > 1) {
    options.pool->parallel_for(num_tasks, run);
  } else {
    for (int64_t task = 0; task < num_tasks; ++task) run(task, 0);
  }
  // Once more, for what it says: the same whatever the threads.
  const int64_t failed = first_failed.load(std::memory_order_relaxed);
  return failed == num_tasks ? Status() : quantiser.run(failed);
}

}  // namespace argosy
