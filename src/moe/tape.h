// What a MoeTape holds. Slots are those of the plan over all rounds; in latency mode, of the rows of all calls. Test:
// tests/moe/tape_test.cc, latency_backward_test.cc.
#pragma once

#include <span>
#include <vector>

#include "argosy/moe.h"
#include "argosy/quantise.h"

namespace argosy {

// As AlignedBuffer rounds.
constexpr int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Bytes of [rows, cols] as `keep` keeps it, wherever that is; not rounded.
int64_t kept_bytes(Keep keep, DType dtype, int64_t rows, int64_t cols);

// One tensor of a tape.
struct KeptMatrix {
  Keep keep = Keep::kSave;
  DType dtype = DType::kUnset;
  int64_t rows = 0, cols = 0;
  AlignedBuffer own;
  std::byte* data = nullptr;  // of `own`, or in the caller's buffer

  // Kept bit by bit, and where that is.
  bool is_plain() const { return keep == Keep::kSave || keep == Keep::kOffload; }
  TensorView plain() const { return {data, dtype, {rows, cols}}; }
  // kFp8: rows [first, first + count).
  QuantisedView codes(int64_t first, int64_t count) const;
};

struct MoeTape::State {
  TapePolicy policy;
  std::span<std::byte> offload;
  bool is_filled = false;
  bool has_gate = false;                // the layer's own routing, whose logits are there
  uint64_t layer = 0;                   // which MoeLayer filled it
  uint64_t weights_version = 0;         // of that layer
  uint64_t call = 0;                    // and in which of its calls, the same number on every rank
  MoeMode mode = MoeMode::kThroughput;  // that the call took
  TapeShape shape;
  // Latency mode. Rows that each of its calls brought, [calls, L, R] by local expert and source rank; and where several were
  // needed, the slot of every row as they came, [S].
  std::vector<int64_t> call_rows;
  std::vector<int64_t> slot_of;
  DispatchPlan plan;
  Routing routing;
  bool is_dropped = false;    // by a capacity
  Routing assigned;           // then the routing before the drop
  std::vector<uint8_t> mask;  // [T] or empty
  AlignedBuffer logits;       // fp32 [T, E]
  AlignedBuffer weights;      // fp32 [S], of the rows, where these are inside the activation
  KeptMatrix rows;            // [S, H]
  KeptMatrix gate, up;        // fp32 [S, F]
  KeptMatrix h;               // [S, F]
  KeptMatrix results;         // [S, H]

  // Of slots from `base` on; empty where combine applies them.
  std::span<const float> weights_from(int64_t base, int64_t count) const {
    if (!shape.weights_inside) return {};
    return {reinterpret_cast<const float*>(weights.data()) + base, static_cast<size_t>(count)};
  }
  const uint8_t* mask_or_null() const { return mask.empty() ? nullptr : mask.data(); }

  // Gives every tensor its place for `shape`. Errors: kCapacity, kInvalidArgument for the caller's buffer; kOutOfMemory.
  Status reserve();
};

// Groups of rows of one round: kept at slots [base, base + rows.dim(0)), unless they are made again.
Status keep_groups(const ConstTensorView& rows, const ReceivedRows& groups, int64_t base,
                   ThreadPool* pool, KeptMatrix* to);
// kFp8: slots [base, base + out.dim(0)), of these the groups, decoded.
Status decode_groups(const KeptMatrix& kept, int64_t base, const RowGroups& groups,
                     ThreadPool* pool, const TensorView& out);

}  // namespace argosy
