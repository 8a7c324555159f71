// Who this process is among the ranks of its job, from the environment of whatever started it.
//
// First hit wins: explicit options, ARGOSY_* (argosy launch, or set by hand), RANK and WORLD_SIZE
// (torchrun), OMPI_COMM_WORLD_* (Open MPI), PMI_* (MPICH, Intel MPI), SLURM_* inside a step. With
// none of them the process is rank 0 of 1. A source gives rank and size together; sources are never
// mixed, and two that are both there must agree, with these exceptions:
//   - ARGOSY_JOB with ARGOSY_RANK, or TORCHELASTIC_RUN_ID with RANK, marks a rank that its launcher
//     made on purpose; what an enclosing mpirun left in the environment (OMPI_*, PMI_*) is then not
//     looked at. `argosy launch` sets RANK too, so a RANK that differs from ARGOSY_RANK is an error.
//   - SLURM_* counts only when nothing else is there: every process below an srun inherits it.
// Test: tests/transport/identity_test.cc.
#pragma once

#include <optional>
#include <string>

#include "argosy/status.h"

namespace argosy {

struct IdentityOptions {
  // Both or none.
  std::optional<int> rank;
  std::optional<int> num_ranks;
  std::optional<std::string> job;
};

struct RankIdentity {
  int rank = 0;
  int num_ranks = 1;
  // On this host; the same as rank and num_ranks when the source does not say.
  int local_rank = 0;
  int num_local_ranks = 1;
  // The same on every rank of one job, different between jobs of one host; at most 64 characters of
  // [A-Za-z0-9._-]. For GroupOptions::job.
  std::string job;
  // "option", "argosy", "torchrun", "openmpi", "pmi", "slurm" or "none".
  std::string source;
  // The variable that num_ranks came from, for messages; empty for "option" and "none".
  std::string size_variable;
};

// Threads: any, as long as none changes the environment. Errors: kInvalidArgument names variables
// and values when a source is half set, holds no numbers with 0 <= rank < size <= 1024, or
// disagrees with another.
Result<RankIdentity> rank_identity(const IdentityOptions& options = {});

}  // namespace argosy
