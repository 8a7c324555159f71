// See rank_sum.h.
#include "transport/rank_sum.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "platform/float_env.h"

namespace argosy::transport {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr auto kValueBytes = static_cast<int64_t>(sizeof(float));

// First value of rank `rank`'s slice of `count`.
int64_t slice_begin(int64_t count, int rank, int num_ranks) { return count * rank / num_ranks; }

int64_t whole_lines(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }

}  // namespace

int64_t RankSum::largest_slice() const {
  return whole_lines((chunk_values_ / endpoint_.num_ranks() + 1) * kValueBytes);
}
int64_t RankSum::values_flag(int rank) const { return rank * kLineBytes; }
int64_t RankSum::sums_flag(int rank) const { return (endpoint_.num_ranks() + rank) * kLineBytes; }
int64_t RankSum::values_offset(int rank) const {
  return int64_t{2} * endpoint_.num_ranks() * kLineBytes + rank * largest_slice();
}
int64_t RankSum::sums_offset(int64_t at) const {
  return values_offset(endpoint_.num_ranks()) + at * kValueBytes;
}

RankSum::RankSum(Endpoint& endpoint, Window window, int64_t chunk_values)
    : endpoint_(endpoint), window_(window), chunk_values_(chunk_values) {
  for (int peer = 0; peer < endpoint.num_ranks(); ++peer) {
    values_items_.push_back({.peer = peer, .offset = values_flag(peer), .value = 0});
    sums_items_.push_back({.peer = peer, .offset = sums_flag(peer), .value = 0});
  }
}

RankSum::~RankSum() {
  if (window_.id != 0) endpoint_.free(window_);
}

Result<std::unique_ptr<RankSum>> RankSum::create(Endpoint& endpoint, platform::Deadline deadline,
                                                 int64_t chunk_values) {
  if (chunk_values < 1) return base::invalid("sums of chunks of {} values", chunk_values);
  std::unique_ptr<RankSum> sum(new RankSum(endpoint, {}, chunk_values));
  const int64_t bytes = sum->sums_offset(chunk_values);
  ARGOSY_ASSIGN_OR_RETURN(sum->window_, endpoint.alloc(whole_lines(bytes), deadline));
  return sum;
}

Status RankSum::run(std::span<float> values, std::chrono::milliseconds step) {
  if (endpoint_.num_ranks() == 1) return {};
  const auto chunk = static_cast<size_t>(chunk_values_);
  for (size_t at = 0; at < values.size(); at += chunk) {
    ARGOSY_RETURN_IF_ERROR(
        run_chunk(values.subspan(at, std::min(chunk, values.size() - at)), step));
  }
  return {};
}

Status RankSum::run_chunk(std::span<float> values, std::chrono::milliseconds step) {
  ++epoch_;
  const int self = endpoint_.rank();
  const int num_ranks = endpoint_.num_ranks();
  const auto count = static_cast<int64_t>(values.size());
  for (int peer = 0; peer < num_ranks; ++peer) {
    const int64_t begin = slice_begin(count, peer, num_ranks);
    const int64_t end = slice_begin(count, peer + 1, num_ranks);
    endpoint_.put_signal(peer, window_, values_offset(self), values.data() + begin,
                         (end - begin) * kValueBytes, values_flag(self), epoch_);
    values_items_[static_cast<size_t>(peer)].value = epoch_;
    sums_items_[static_cast<size_t>(peer)].value = epoch_;
  }
  ARGOSY_RETURN_IF_ERROR(
      endpoint_.wait_all(window_, values_items_, platform::Deadline::after(step), "values to add"));
  const int64_t begin = slice_begin(count, self, num_ranks);
  const std::span<float> sums =
      values.subspan(static_cast<size_t>(begin),
                     static_cast<size_t>(slice_begin(count, self + 1, num_ranks) - begin));
  {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto* const more =
          reinterpret_cast<const float*>(endpoint_.local_ptr(window_, values_offset(rank)));
      for (size_t i = 0; i < sums.size(); ++i) sums[i] = rank == 0 ? more[i] : sums[i] + more[i];
    }
  }
  for (int peer = 0; peer < num_ranks; ++peer) {
    endpoint_.put_signal(peer, window_, sums_offset(begin), sums.data(),
                         static_cast<int64_t>(sums.size_bytes()), sums_flag(self), epoch_);
  }
  ARGOSY_RETURN_IF_ERROR(
      endpoint_.wait_all(window_, sums_items_, platform::Deadline::after(step), "sums"));
  std::memcpy(values.data(), endpoint_.local_ptr(window_, sums_offset(0)), values.size_bytes());
  return {};
}

}  // namespace argosy::transport
