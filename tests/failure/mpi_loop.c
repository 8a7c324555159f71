// An all-to-all loop over Open MPI in which one rank kills or stops itself: what scripts/failures sets beside
// Argosy. argv: kill|stop|none. Errors are returned, not fatal, so that survivors could go on.
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { kCount = 1024, kMaxRanks = 16 };

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  static double from[kMaxRanks * kCount], to[kMaxRanks * kCount];
  int counts[kMaxRanks], offsets[kMaxRanks];
  for (int i = 0; i < size; ++i) {
    counts[i] = kCount;
    offsets[i] = i * kCount;
  }
  for (int step = 0; step < 4000; ++step) {
    if (step == 1000 && rank == size - 1 && argc > 1) {
      if (strcmp(argv[1], "kill") == 0) kill(getpid(), SIGKILL);
      if (strcmp(argv[1], "stop") == 0) kill(getpid(), SIGSTOP);
    }
    const int code = MPI_Alltoallv(from, counts, offsets, MPI_DOUBLE, to, counts, offsets,
                                   MPI_DOUBLE, MPI_COMM_WORLD);
    if (code != MPI_SUCCESS) {
      printf("rank %d got error %d at step %d\n", rank, code, step);
      fflush(stdout);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  }
  MPI_Finalize();
  return 0;
}
