// See row_gather.h.
#include "moe/row_gather.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace argosy {
namespace {

constexpr int64_t kChunkBytes = int64_t{256} << 10;

}  // namespace

Result<std::unique_ptr<RowGather>> RowGather::create(Group& group) {
  ARGOSY_ASSIGN_OR_RETURN(
      std::unique_ptr<transport::AllGather> gather,
      transport::AllGather::create(group.endpoint(), kChunkBytes,
                                   platform::Deadline::after(group.step_deadline())));
  return std::unique_ptr<RowGather>(new RowGather(group, std::move(gather)));
}

Status RowGather::gather(std::span<const int64_t> rows, int64_t row_bytes, const std::byte* mine,
                         AlignedBuffer* room, const std::byte** all) {
  if (rows.size() == 1) {
    *all = mine;
    return {};
  }
  int64_t most = 0;
  int64_t total = 0;
  std::vector<int64_t> begins;
  for (const int64_t count : rows) {
    begins.push_back(total * row_bytes);
    total += count;
    most = std::max(most, count * row_bytes);
  }
  ARGOSY_RETURN_IF_ERROR(room->reserve(total * row_bytes));
  const int64_t own = rows[static_cast<size_t>(group_.rank())] * row_bytes;
  for (int64_t at = 0; at < most; at += kChunkBytes) {
    const int64_t size = std::clamp<int64_t>(own - at, 0, kChunkBytes);
    ARGOSY_RETURN_IF_ERROR(
        gather_->issue({size > 0 ? mine + at : mine, static_cast<size_t>(size)}));
    ARGOSY_RETURN_IF_ERROR(gather_->wait(platform::Deadline::after(group_.step_deadline()),
                                         "rows for gradients of shared weights"));
    for (int rank = 0; rank < group_.num_ranks(); ++rank) {
      const auto peer = static_cast<size_t>(rank);
      const std::span<const std::byte> bytes = gather_->from(rank);
      const int64_t fits = std::clamp<int64_t>(rows[peer] * row_bytes - at, 0, kChunkBytes);
      std::memcpy(room->data() + begins[peer] + at, bytes.data(),
                  std::min(bytes.size(), static_cast<size_t>(fits)));
    }
  }
  *all = room->data();
  return {};
}

}  // namespace argosy
