// Times Open MPI's way to exchange a few tokens, call by call: pack, exchange counts, exchange rows, unpack; and the way
// back with the weighted sum. For `argosy bench latency`, which gives the routing.
//
//   mpirun -n R argosy_mpi_latency ROUTING TOKENS TOP_K EXPERTS HIDDEN ITERATIONS OUTPUT
//
// ROUTING: for every rank its experts (int32 [T, K]) and weights (fp32 [T, K]). OUTPUT: JSON of seconds.
#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

extern "C" {
void* mpi_exchange_create(int64_t hidden, int num_experts);
int64_t mpi_exchange_dispatch(void* handle, int num_tokens, int top_k, const uint16_t* x,
                              const int32_t* experts, int32_t* rows_per_expert);
void mpi_exchange_rows(void* handle, uint16_t* rows);
void mpi_exchange_combine(void* handle, int num_tokens, int top_k, const uint16_t* rows,
                          const float* weights, uint16_t* out);
}

namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// From the first rank's start to the last one's end; on rank 0.
double spread(double begin, double end) {
  double first = 0;
  double last = 0;
  MPI_Reduce(&begin, &first, 1, MPI_DOUBLE, MPI_MIN, 0, MPI_COMM_WORLD);
  MPI_Reduce(&end, &last, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  return last - first;
}

void write_list(std::ofstream& file, const char* name, const std::vector<double>& values) {
  file << "\"" << name << "\": [";
  for (size_t i = 0; i < values.size(); ++i) file << (i == 0 ? "" : ", ") << values[i];
  file << "]";
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 8) {
    std::fprintf(stderr, "usage: %s ROUTING TOKENS TOP_K EXPERTS HIDDEN ITERATIONS OUTPUT\n",
                 argv[0]);
    return 2;
  }
  const int num_tokens = std::atoi(argv[2]);
  const int top_k = std::atoi(argv[3]);
  const int num_experts = std::atoi(argv[4]);
  const int64_t hidden = std::atoll(argv[5]);
  const int iterations = std::atoi(argv[6]);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const auto ids = static_cast<size_t>(num_tokens * top_k);
  std::vector<int32_t> experts(ids);
  std::vector<float> weights(ids);
  std::ifstream routing(argv[1], std::ios::binary);
  routing.seekg(static_cast<std::streamoff>(static_cast<size_t>(rank) * ids * 8));
  routing.read(reinterpret_cast<char*>(experts.data()), static_cast<std::streamsize>(ids * 4));
  routing.read(reinterpret_cast<char*>(weights.data()), static_cast<std::streamsize>(ids * 4));
  if (!routing) {
    std::fprintf(stderr, "rank %d: %s is too short\n", rank, argv[1]);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  void* const exchange = mpi_exchange_create(hidden, num_experts);
  std::vector<uint16_t> x(static_cast<size_t>(num_tokens) * static_cast<size_t>(hidden));
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<uint16_t>(0x3F00 + i * 2654435761u % 256);
  std::vector<uint16_t> out(x.size());
  std::vector<int32_t> rows_per_expert(static_cast<size_t>(num_experts));
  std::vector<uint16_t> rows;
  std::vector<double> dispatch, combine;
  constexpr int kWarm = 3;
  for (int i = -kWarm; i < iterations; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = now_seconds();
    const int64_t count = mpi_exchange_dispatch(exchange, num_tokens, top_k, x.data(),
                                                experts.data(), rows_per_expert.data());
    rows.resize(static_cast<size_t>(count * hidden));
    mpi_exchange_rows(exchange, rows.data());
    const double middle = now_seconds();
    const double dispatched = spread(begin, middle);
    MPI_Barrier(MPI_COMM_WORLD);
    const double again = now_seconds();
    mpi_exchange_combine(exchange, num_tokens, top_k, rows.data(), weights.data(), out.data());
    const double combined = spread(again, now_seconds());
    if (i < 0) continue;
    dispatch.push_back(dispatched);
    combine.push_back(combined);
  }
  if (rank == 0) {
    std::ofstream file(argv[7]);
    file << "{\"latency\": {";
    write_list(file, "dispatch", dispatch);
    file << ", ";
    write_list(file, "combine", combine);
    file << "}}\n";
  }
  MPI_Finalize();
  return 0;
}
