// The usual MPI recipe around any grouped MLP: pack rows by expert, exchange counts, exchange rows,
// bring them into expert order; then the way back and the weighted sum. A C interface for ctypes.
//
// Rows are bf16. Experts are owned evenly: num_experts must be a multiple of the ranks.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

float widen(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

uint16_t narrow(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  return static_cast<uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

// Rows of the groups [0, groups) one after the other: the first row of each, and the total last.
std::vector<int> begins_of(const std::vector<int>& sizes) {
  std::vector<int> begins(sizes.size() + 1);
  std::partial_sum(sizes.begin(), sizes.end(), begins.begin() + 1);
  return begins;
}

struct Exchange {
  int rank = 0, num_ranks = 1, num_local = 0;
  int64_t hidden = 0;
  MPI_Datatype row_type = MPI_DATATYPE_NULL;
  std::vector<int> send_rows, send_begin, recv_rows, recv_begin;  // per rank
  std::vector<int> slot_of;                                       // (token, k) -> sent row
  std::vector<int> sorted_of;                                     // received row -> expert order
  std::vector<uint16_t> sent, received;

  uint16_t* row(std::vector<uint16_t>& rows, int at) { return rows.data() + at * hidden; }
  size_t row_bytes() const { return static_cast<size_t>(hidden) * 2; }
};

std::vector<int> per_rank(const std::vector<int>& per_expert, int num_ranks) {
  const auto local = static_cast<ptrdiff_t>(per_expert.size()) / num_ranks;
  std::vector<int> rows;
  for (int rank = 0; rank < num_ranks; ++rank) {
    rows.push_back(std::accumulate(per_expert.begin() + rank * local,
                                   per_expert.begin() + (rank + 1) * local, 0));
  }
  return rows;
}

}  // namespace

extern "C" {

void* mpi_exchange_create(int64_t hidden, int num_experts) {
  int initialised = 0;
  MPI_Initialized(&initialised);
  if (initialised == 0) MPI_Init(nullptr, nullptr);
  auto* const made = new Exchange;
  MPI_Comm_rank(MPI_COMM_WORLD, &made->rank);
  MPI_Comm_size(MPI_COMM_WORLD, &made->num_ranks);
  made->num_local = num_experts / made->num_ranks;
  made->hidden = hidden;
  MPI_Type_contiguous(static_cast<int>(hidden), MPI_UINT16_T, &made->row_type);
  MPI_Type_commit(&made->row_type);
  return made;
}

void mpi_exchange_barrier(void*) { MPI_Barrier(MPI_COMM_WORLD); }
int mpi_exchange_rank(void* handle) { return static_cast<Exchange*>(handle)->rank; }

// Sends every row to its experts. Returns how many rows came here; rows_per_expert[num_local].
int64_t mpi_exchange_dispatch(void* handle, int num_tokens, int top_k, const uint16_t* x,
                              const int32_t* experts, int32_t* rows_per_expert) {
  Exchange& e = *static_cast<Exchange*>(handle);
  const int num_experts = e.num_local * e.num_ranks;
  std::vector<int> mine(static_cast<size_t>(num_experts)), theirs(mine.size());
  for (int i = 0; i < num_tokens * top_k; ++i) ++mine[static_cast<size_t>(experts[i])];
  std::vector<int> next = begins_of(mine);
  e.slot_of.resize(static_cast<size_t>(num_tokens * top_k));
  e.sent.resize(e.slot_of.size() * static_cast<size_t>(e.hidden));
  for (int i = 0; i < num_tokens * top_k; ++i) {
    const int slot = next[static_cast<size_t>(experts[i])]++;
    e.slot_of[static_cast<size_t>(i)] = slot;
    std::memcpy(e.row(e.sent, slot), x + i / top_k * e.hidden, e.row_bytes());
  }
  MPI_Alltoall(mine.data(), e.num_local, MPI_INT, theirs.data(), e.num_local, MPI_INT,
               MPI_COMM_WORLD);
  e.send_rows = per_rank(mine, e.num_ranks);
  e.recv_rows = per_rank(theirs, e.num_ranks);
  e.send_begin = begins_of(e.send_rows);
  e.recv_begin = begins_of(e.recv_rows);
  const int num_rows = e.recv_begin.back();
  e.received.resize(static_cast<size_t>(num_rows) * static_cast<size_t>(e.hidden));
  MPI_Alltoallv(e.sent.data(), e.send_rows.data(), e.send_begin.data(), e.row_type,
                e.received.data(), e.recv_rows.data(), e.recv_begin.data(), e.row_type,
                MPI_COMM_WORLD);
  // Received: by source rank, then expert. Wanted: by expert, then source rank.
  e.sorted_of.resize(static_cast<size_t>(num_rows));
  int sorted = 0;
  for (int local = 0; local < e.num_local; ++local) {
    const int before = sorted;
    for (int rank = 0; rank < e.num_ranks; ++rank) {
      const auto first = theirs.begin() + rank * e.num_local;
      int at = e.recv_begin[static_cast<size_t>(rank)] + std::accumulate(first, first + local, 0);
      for (int i = 0; i < first[local]; ++i) e.sorted_of[static_cast<size_t>(at++)] = sorted++;
    }
    rows_per_expert[local] = sorted - before;
  }
  return num_rows;
}

// The rows that came, in expert order.
void mpi_exchange_rows(void* handle, uint16_t* rows) {
  Exchange& e = *static_cast<Exchange*>(handle);
  for (size_t i = 0; i < e.sorted_of.size(); ++i) {
    std::memcpy(rows + e.sorted_of[i] * e.hidden, e.row(e.received, static_cast<int>(i)),
                e.row_bytes());
  }
}

// Sends the experts' rows (in expert order) home and sums them by weight in fp32.
// Built for every CPU; runs in the widest instructions of the one at hand.
__attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"))) void
mpi_exchange_combine(void* handle, int num_tokens, int top_k, const uint16_t* rows,
                     const float* weights, uint16_t* out) {
  Exchange& e = *static_cast<Exchange*>(handle);
  for (size_t i = 0; i < e.sorted_of.size(); ++i) {
    std::memcpy(e.row(e.received, static_cast<int>(i)), rows + e.sorted_of[i] * e.hidden,
                e.row_bytes());
  }
  MPI_Alltoallv(e.received.data(), e.recv_rows.data(), e.recv_begin.data(), e.row_type,
                e.sent.data(), e.send_rows.data(), e.send_begin.data(), e.row_type, MPI_COMM_WORLD);
  std::vector<float> sum(static_cast<size_t>(e.hidden));
  for (int token = 0; token < num_tokens; ++token) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int k = 0; k < top_k; ++k) {
      const int i = token * top_k + k;
      const uint16_t* const row = e.row(e.sent, e.slot_of[static_cast<size_t>(i)]);
      for (size_t h = 0; h < sum.size(); ++h) sum[h] += weights[i] * widen(row[h]);
    }
    for (size_t h = 0; h < sum.size(); ++h) {
      out[static_cast<size_t>(token) * sum.size() + h] = narrow(sum[h]);
    }
  }
}

}  // extern "C"
