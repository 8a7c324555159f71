// A plan as bytes and back: "ARGPLAN" + version, scalars, then vectors with their lengths, then an
// XXH3-64 of all before it. parse_plan believes nothing: lengths against the bytes left, every
// index against its range. Little endian, as the platform. Test: tests/plan/plan_serial_test.cc.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "argosy/plan.h"
#include "base/error.h"

namespace argosy {
namespace {

constexpr uint64_t kMagic = 0x01'4E'41'4C'50'47'52'41;  // "ARGPLAN", 1

// Calls visit(name, field) for every field, in file order.
template <typename Plan, typename Visit>
void for_each_scalar(Plan& plan, const Visit& visit) {
  visit("version", plan.version);
  visit("group_id", plan.group_id);
  visit("placement_epoch", plan.placement_epoch);
  visit("num_ranks", plan.num_ranks);
  visit("rank", plan.rank);
  visit("num_tokens", plan.num_tokens);
  visit("num_experts", plan.num_experts);
  visit("top_k", plan.top_k);
  visit("group_alignment", plan.group_alignment);
  visit("round_rows", plan.round_rows);
  visit("num_rounds", plan.num_rounds);
  visit("rows_leaving", plan.rows_leaving);
  visit("rows_leaving_dedup", plan.rows_leaving_dedup);
}

template <typename Plan, typename Visit>
void for_each_vector(Plan& plan, const Visit& visit) {
  visit("topk_idx", plan.topk_idx);
  visit("dest_rank", plan.dest_rank);
  visit("dest_slot", plan.dest_slot);
  visit("group_sizes", plan.group_sizes);
  visit("group_offsets", plan.group_offsets);
  visit("source_rows", plan.source_rows);
  visit("receive_rows", plan.receive_rows);
  visit("receive_slots", plan.receive_slots);
  visit("send_slots", plan.send_slots);
  visit("send_rows", plan.send_rows);
}

Status corrupt(std::string_view what, int64_t have, int64_t want) {
  return base::error(StatusCode::kCorruptData, "plan bytes: {} is {}, want {}", what, have, want);
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  bool read(T* value) {
    if (bytes_.size() < sizeof(T)) return false;
    std::memcpy(value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return true;
  }

  template <typename T>
  bool read(std::vector<T>* values) {
    uint64_t count = 0;
    if (!read(&count) || count > bytes_.size() / sizeof(T)) return false;
    values->resize(count);
    if (count > 0) std::memcpy(values->data(), bytes_.data(), count * sizeof(T));
    bytes_ = bytes_.subspan(count * sizeof(T));
    return true;
  }

  size_t left() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};

Status check_scalars(const DispatchPlan& plan) {
  if (plan.version != DispatchPlan::kVersion)
    return corrupt("version", plan.version, plan.kVersion);
  const auto at_least = [](std::string_view name, int64_t have, int64_t least) -> Status {
    if (have >= least) return {};
    return base::error(StatusCode::kCorruptData, "plan bytes: {} is {}, want at least {}", name,
                       have, least);
  };
  ARGOSY_RETURN_IF_ERROR(at_least("num_ranks", plan.num_ranks, 1));
  ARGOSY_RETURN_IF_ERROR(at_least("rank", plan.rank, 0));
  ARGOSY_RETURN_IF_ERROR(at_least("num_ranks - rank", plan.num_ranks - int64_t{plan.rank}, 1));
  ARGOSY_RETURN_IF_ERROR(at_least("num_tokens", plan.num_tokens, 0));
  ARGOSY_RETURN_IF_ERROR(at_least("num_experts", plan.num_experts, 1));
  ARGOSY_RETURN_IF_ERROR(at_least("top_k", plan.top_k, 1));
  ARGOSY_RETURN_IF_ERROR(at_least("group_alignment", plan.group_alignment, 1));
  ARGOSY_RETURN_IF_ERROR(at_least("round_rows", plan.round_rows, plan.group_alignment));
  ARGOSY_RETURN_IF_ERROR(at_least("num_rounds", plan.num_rounds, 1));
  if (plan.round_rows % plan.group_alignment != 0) {
    return corrupt("round_rows modulo group_alignment", plan.round_rows % plan.group_alignment, 0);
  }
  return {};
}

Status check_lengths(const DispatchPlan& plan) {
  int64_t ids = 0;
  if (__builtin_mul_overflow(plan.num_tokens, plan.top_k, &ids)) {
    return corrupt("num_tokens with this top_k", plan.num_tokens, 0);
  }
  const int64_t local = owned_begin(plan.num_experts, plan.num_ranks, plan.rank + 1) -
                        owned_begin(plan.num_experts, plan.num_ranks, plan.rank);
  const auto length = [](std::string_view name, size_t have, int64_t want) -> Status {
    if (static_cast<int64_t>(have) == want) return {};
    return base::error(StatusCode::kCorruptData, "plan bytes: {} has {} entries, want {}", name,
                       have, want);
  };
  ARGOSY_RETURN_IF_ERROR(length("topk_idx", plan.topk_idx.size(), ids));
  ARGOSY_RETURN_IF_ERROR(length("dest_rank", plan.dest_rank.size(), ids));
  ARGOSY_RETURN_IF_ERROR(length("dest_slot", plan.dest_slot.size(), ids));
  ARGOSY_RETURN_IF_ERROR(length("send_slots", plan.send_slots.size(), plan.num_experts));
  ARGOSY_RETURN_IF_ERROR(length("send_rows", plan.send_rows.size(), plan.num_experts));
  ARGOSY_RETURN_IF_ERROR(length("receive_rows", plan.receive_rows.size(), plan.num_ranks));
  ARGOSY_RETURN_IF_ERROR(length("receive_slots", plan.receive_slots.size(), plan.num_ranks));
  ARGOSY_RETURN_IF_ERROR(length("group_sizes", plan.group_sizes.size(), local));
  ARGOSY_RETURN_IF_ERROR(length("group_offsets", plan.group_offsets.size(), local + 1));
  return length("source_rows", plan.source_rows.size(), local * plan.num_ranks);
}

// The receive layout follows from source_rows and the alignment alone.
Status check_receiving(const DispatchPlan& plan) {
  const auto ranks = static_cast<size_t>(plan.num_ranks);
  int64_t offset = 0;
  int64_t rows = 0;
  for (size_t group = 0; group < plan.group_sizes.size(); ++group) {
    int64_t size = 0;
    for (size_t source = 0; source < ranks; ++source) {
      const int64_t from = plan.source_rows[group * ranks + source];
      if (from < 0 || __builtin_add_overflow(size, from, &size))
        return corrupt("source_rows", from, 0);
    }
    if (plan.group_offsets[group] != offset)
      return corrupt("group_offsets", plan.group_offsets[group], offset);
    if (plan.group_sizes[group] != size)
      return corrupt("group_sizes", plan.group_sizes[group], size);
    int64_t padded = 0;
    if (__builtin_add_overflow(size, plan.group_alignment - 1, &padded) ||
        __builtin_add_overflow(offset, padded / plan.group_alignment * plan.group_alignment,
                               &offset)) {
      return corrupt("group_sizes", size, 0);
    }
    rows += size;
  }
  if (plan.group_offsets.back() != offset)
    return corrupt("last group_offset", plan.group_offsets.back(), offset);
  const auto own = static_cast<size_t>(plan.rank);
  if (plan.receive_slots[own] != offset)
    return corrupt("receive_slots", plan.receive_slots[own], offset);
  if (plan.receive_rows[own] != rows) return corrupt("receive_rows", plan.receive_rows[own], rows);
  int64_t most = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (plan.receive_rows[rank] < 0 || plan.receive_rows[rank] > plan.receive_slots[rank]) {
      return corrupt("receive_rows", plan.receive_rows[rank], plan.receive_slots[rank]);
    }
    most = std::max(most, plan.receive_slots[rank]);
  }
  const int64_t rounds =
      std::max<int64_t>(1, most / plan.round_rows + (most % plan.round_rows != 0 ? 1 : 0));
  if (plan.num_rounds != rounds) return corrupt("num_rounds", plan.num_rounds, rounds);
  return {};
}

// Every (token, k) goes to its expert's owner, to the next slot of this rank's run there.
Status check_sending(const DispatchPlan& plan) {
  const Placement placement{plan.num_experts, plan.num_ranks, plan.placement_epoch};
  std::vector<int64_t> seen(static_cast<size_t>(plan.num_experts), 0);
  for (size_t expert = 0; expert < seen.size(); ++expert) {
    const int owner = placement.owner(static_cast<int64_t>(expert));
    int64_t end = 0;
    if (plan.send_rows[expert] < 0 || plan.send_slots[expert] < 0 ||
        __builtin_add_overflow(plan.send_slots[expert], plan.send_rows[expert], &end) ||
        end > plan.receive_slots[static_cast<size_t>(owner)]) {
      return corrupt("send_rows", plan.send_rows[expert], 0);
    }
  }
  std::vector<int64_t> last_token(seen.size(), -1);
  for (size_t at = 0; at < plan.topk_idx.size(); ++at) {
    const int32_t expert = plan.topk_idx[at];
    if (expert < -1 || expert >= plan.num_experts) return corrupt("topk_idx", expert, -1);
    int32_t rank = -1;
    int64_t slot = -1;
    if (expert >= 0) {
      const auto to = static_cast<size_t>(expert);
      const int64_t token = static_cast<int64_t>(at) / plan.top_k;
      if (std::exchange(last_token[to], token) == token) {
        return base::error(StatusCode::kCorruptData, "plan bytes: token {} has expert {} twice",
                           token, expert);
      }
      // Before the sum: beyond its send_rows an expert's slot may not fit int64.
      if (seen[to] == plan.send_rows[to])
        return corrupt("send_rows", plan.send_rows[to], seen[to] + 1);
      rank = placement.owner(expert);
      slot = plan.send_slots[to] + seen[to]++;
    }
    if (plan.dest_rank[at] != rank) return corrupt("dest_rank", plan.dest_rank[at], rank);
    if (plan.dest_slot[at] != slot) return corrupt("dest_slot", plan.dest_slot[at], slot);
  }
  for (size_t expert = 0; expert < seen.size(); ++expert) {
    if (seen[expert] != plan.send_rows[expert])
      return corrupt("send_rows", plan.send_rows[expert], seen[expert]);
  }
  return {};
}

}  // namespace

std::vector<std::byte> serialize_plan(const DispatchPlan& plan) {
  size_t length = sizeof(kMagic) + sizeof(uint64_t);
  for_each_scalar(plan, [&](std::string_view, const auto& value) { length += sizeof(value); });
  for_each_vector(plan, [&](std::string_view, const auto& values) {
    length += sizeof(uint64_t) + values.size() * sizeof(values[0]);
  });
  std::vector<std::byte> bytes;
  bytes.reserve(length);  // growing would ask for twice the plan
  const auto append = [&bytes](const void* data, size_t size) {
    const size_t at = bytes.size();
    bytes.resize(at + size);
    std::memcpy(bytes.data() + at, data, size);
  };
  append(&kMagic, sizeof(kMagic));
  for_each_scalar(plan,
                  [&](std::string_view, const auto& value) { append(&value, sizeof(value)); });
  for_each_vector(plan, [&](std::string_view, const auto& values) {
    const uint64_t count = values.size();
    append(&count, sizeof(count));
    if (count > 0) append(values.data(), count * sizeof(values[0]));
  });
  const uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
  append(&hash, sizeof(hash));
  return bytes;
}

Result<DispatchPlan> parse_plan(std::span<const std::byte> bytes) {
  uint64_t magic = 0;
  if (bytes.size() < 2 * sizeof(uint64_t)) {
    return corrupt("length", static_cast<int64_t>(bytes.size()), 2 * sizeof(uint64_t));
  }
  const auto body = bytes.first(bytes.size() - sizeof(uint64_t));
  uint64_t hash = 0;
  std::memcpy(&hash, bytes.data() + body.size(), sizeof(hash));
  Reader reader(body);
  if (!reader.read(&magic) || magic != kMagic) {
    return base::error(StatusCode::kCorruptData, "plan bytes start with {:#018x}, want {:#018x}",
                       magic, kMagic);
  }
  if (const uint64_t have = XXH3_64bits(body.data(), body.size()); have != hash) {
    return base::error(StatusCode::kCorruptData, "plan bytes hash to {:#018x}, they say {:#018x}",
                       have, hash);
  }
  DispatchPlan plan;
  Status status;
  const auto read = [&](std::string_view name, auto& field) {
    if (status.ok() && !reader.read(&field)) {
      status = base::error(StatusCode::kCorruptData, "plan bytes end inside {}, {} bytes left",
                           name, reader.left());
    }
  };
  for_each_scalar(plan, read);
  for_each_vector(plan, read);
  ARGOSY_RETURN_IF_ERROR(status);
  if (reader.left() != 0)
    return corrupt("bytes after the end", static_cast<int64_t>(reader.left()), 0);
  ARGOSY_RETURN_IF_ERROR(check_scalars(plan));
  ARGOSY_RETURN_IF_ERROR(check_lengths(plan));
  ARGOSY_RETURN_IF_ERROR(check_receiving(plan));
  ARGOSY_RETURN_IF_ERROR(check_sending(plan));
  return plan;
}

}  // namespace argosy
