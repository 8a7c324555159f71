// AllGather and reduce_sum. Window: one line per rank (epoch flag, then the sizes of even and odd
// epochs), then 2 x num_ranks payload slots. Flags never share bytes with payload. Test:
// tests/transport/collectives_test.cc.
#include "transport/collectives.h"

#include <cstring>
#include <utility>

#include "base/error.h"
#include "platform/float_env.h"

namespace argosy::transport {
namespace {

constexpr int64_t kLineBytes = 64;
// Payloads here are small by purpose; the bound keeps every offset below 2^63 for 1024 ranks.
constexpr int64_t kLargestMaxBytes = int64_t{1} << 40;

int64_t flag_offset(int rank) { return rank * kLineBytes; }
int64_t size_offset(int rank, uint64_t epoch) {
  return rank * kLineBytes + 8 + 8 * static_cast<int64_t>(epoch & 1);
}

Status add_to(double* sum, double value, size_t) {
  *sum += value;
  return {};
}

Status add_to(int64_t* sum, int64_t value, size_t index) {
  int64_t result = 0;
  if (__builtin_add_overflow(*sum, value, &result)) {
    return base::invalid("sum over ranks of value {} leaves int64: {} + {}", index, *sum, value);
  }
  *sum = result;
  return {};
}

template <typename T>
Status reduce_sum_of(AllGather& gather, std::span<T> values, platform::Deadline deadline) {
  ARGOSY_RETURN_IF_ERROR(gather.issue(std::as_bytes(values)));
  ARGOSY_RETURN_IF_ERROR(gather.wait(deadline, "sum over ranks"));
  const size_t want = gather.from(0).size();
  for (int rank = 1; rank < gather.num_ranks(); ++rank) {
    if (gather.from(rank).size() != want) {
      return base::invalid("sum over ranks: rank 0 gives {} values, rank {} gives {}",
                           want / sizeof(T), rank, gather.from(rank).size() / sizeof(T));
    }
  }
  const platform::ScopedFloatEnv float_env(platform::Denormals::kKeep);
  for (size_t i = 0; i < values.size(); ++i) {
    T sum{};
    for (int rank = 0; rank < gather.num_ranks(); ++rank) {
      T value;
      std::memcpy(&value, gather.from(rank).data() + i * sizeof(T), sizeof(T));
      if (rank == 0) {
        sum = value;
      } else {
        ARGOSY_RETURN_IF_ERROR(add_to(&sum, value, i));
      }
    }
    values[i] = sum;
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<AllGather>> AllGather::create(Endpoint& endpoint, int64_t max_bytes,
                                                     platform::Deadline deadline) {
  // A refused size still takes part in the allocation, as a size that no window can have, so that
  // the other ranks are not left waiting.
  const bool is_legal = max_bytes >= 0 && max_bytes <= kLargestMaxBytes;
  const int64_t slot_bytes = is_legal ? (max_bytes + kLineBytes - 1) / kLineBytes * kLineBytes : 0;
  const int64_t bytes = endpoint.num_ranks() * (kLineBytes + 2 * slot_bytes);
  Result<Window> window = endpoint.alloc(is_legal ? bytes : -1, deadline);
  if (!is_legal) {
    return base::invalid("all-gather of {} bytes per rank; the range is 0 to {}", max_bytes,
                         kLargestMaxBytes);
  }
  if (!window.has_value()) return window.error();
  return std::unique_ptr<AllGather>(new AllGather(endpoint, *window, slot_bytes));
}

AllGather::AllGather(Endpoint& endpoint, Window window, int64_t max_bytes)
    : endpoint_(endpoint),
      window_(window),
      max_bytes_(max_bytes),
      received_(static_cast<size_t>(endpoint.num_ranks())) {
  for (int peer = 0; peer < endpoint.num_ranks(); ++peer) {
    items_.push_back({.peer = peer, .offset = flag_offset(peer), .value = 0});
  }
}

AllGather::~AllGather() { endpoint_.free(window_); }

int64_t AllGather::slot_offset(int rank, uint64_t epoch) const {
  const int64_t slot = static_cast<int64_t>(epoch & 1) * endpoint_.num_ranks() + rank;
  return endpoint_.num_ranks() * kLineBytes + slot * max_bytes_;
}

Status AllGather::issue(std::span<const std::byte> mine) {
  // First: a wait that failed leaves the gather open.
  ARGOSY_RETURN_IF_ERROR(endpoint_.health());
  if (is_issued_) {
    return base::invalid("all-gather: issue of epoch {} before the wait of epoch {}", epoch_ + 1,
                         epoch_);
  }
  is_issued_ = true;
  ++epoch_;
  const auto size = static_cast<int64_t>(mine.size());
  const int64_t sent = size <= max_bytes_ ? size : 0;
  const int self = endpoint_.rank();
  for (int peer = 0; peer < endpoint_.num_ranks(); ++peer) {
    endpoint_.put(peer, window_, size_offset(self, epoch_), &size, sizeof(size));
    endpoint_.put_signal(peer, window_, slot_offset(self, epoch_), mine.data(), sent,
                         flag_offset(self), epoch_);
  }
  return {};
}

Status AllGather::wait(platform::Deadline deadline, std::string_view what,
                       std::span<int64_t> waited_ns) {
  for (WaitItem& item : items_) {
    item.value = epoch_;
    item.waited_ns = waited_ns.empty() ? nullptr : &waited_ns[static_cast<size_t>(item.peer)];
  }
  ARGOSY_RETURN_IF_ERROR(endpoint_.wait_all(window_, items_, deadline, what));
  is_issued_ = false;
  for (int rank = 0; rank < endpoint_.num_ranks(); ++rank) {
    int64_t size = 0;
    std::memcpy(&size, endpoint_.local_ptr(window_, size_offset(rank, epoch_)), sizeof(size));
    if (size < 0 || size > max_bytes_) {
      return base::invalid("{}: rank {} gives {} bytes, the limit is {}", what, rank, size,
                           max_bytes_);
    }
    received_[static_cast<size_t>(rank)] = {endpoint_.local_ptr(window_, slot_offset(rank, epoch_)),
                                            static_cast<size_t>(size)};
  }
  return {};
}

std::span<const std::byte> AllGather::from(int rank) const {
  return received_[static_cast<size_t>(rank)];
}

Status reduce_sum(AllGather& gather, std::span<double> values, platform::Deadline deadline) {
  return reduce_sum_of(gather, values, deadline);
}

Status reduce_sum(AllGather& gather, std::span<int64_t> values, platform::Deadline deadline) {
  return reduce_sum_of(gather, values, deadline);
}

}  // namespace argosy::transport
