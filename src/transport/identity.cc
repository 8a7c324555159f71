// One table row per launcher; the rules between rows stand in argosy/identity.h. Test:
// tests/transport/identity_test.cc.
#include "transport/identity.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <string_view>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/env.h"
#include "base/error.h"
#include "platform/process.h"

namespace argosy {
namespace transport {
namespace {

constexpr int kMaxRanks = 1024;
constexpr size_t kMaxJobLength = 64;

struct Source {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;  // null: the source has none
  const char* local_size;
};

// `argosy launch` sets LOCAL_RANK as torchrun does.
constexpr std::array<Source, 5> kSources = {{
    {"argosy", "ARGOSY_RANK", "ARGOSY_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"slurm", "SLURM_PROCID", "SLURM_NTASKS", nullptr, nullptr},
}};

constexpr const Source& kArgosy = kSources[0];
constexpr const Source& kTorchrun = kSources[1];
constexpr const Source& kSlurm = kSources[4];

Result<int> number_in(const char* variable, const std::string& text, int low, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= low && value <= high) {
    return value;
  }
  return base::invalid("{} is '{}', not a whole number from {} to {}", variable, text, low, high);
}

struct Pair {
  int rank = 0;
  int size = 1;
};

// The numbers of two variables that belong together; nullopt when neither is set.
Result<std::optional<Pair>> read_pair(const Environment& environment, const char* rank_variable,
                                      const char* size_variable) {
  const std::optional<std::string> rank = environment(rank_variable);
  const std::optional<std::string> size = environment(size_variable);
  if (!rank.has_value() && !size.has_value()) return std::optional<Pair>();
  if (!rank.has_value() || !size.has_value()) {
    return base::invalid("{} is '{}', but {} is not set; they belong together",
                         rank.has_value() ? rank_variable : size_variable,
                         rank.has_value() ? *rank : *size,
                         rank.has_value() ? size_variable : rank_variable);
  }
  Pair pair;
  ARGOSY_ASSIGN_OR_RETURN(pair.size, number_in(size_variable, *size, 1, kMaxRanks));
  if (Result<int> number = number_in(rank_variable, *rank, 0, pair.size - 1); number.has_value()) {
    pair.rank = *number;
  } else {
    return base::invalid("{}; {} is {}", number.error().message(), size_variable, *size);
  }
  return std::optional<Pair>(pair);
}

// Which job a rank of `source` belongs to, in words of that source; empty when it does not say.
std::string job_text(const Environment& environment, std::string_view source) {
  const auto value = [&](const char* name) { return environment(name).value_or(""); };
  if (source == "torchrun") {
    const std::string run = value("TORCHELASTIC_RUN_ID");
    const std::string address = value("MASTER_ADDR");
    const std::string port = value("MASTER_PORT");
    if (run.empty() && address.empty() && port.empty()) return "";
    return fmt::format("{}-{}-{}-{}", run, address, port, value("TORCHELASTIC_RESTART_COUNT"));
  }
  if (source == "openmpi" || source == "pmi") {
    for (const char* const name :
         {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "PMI_JOBID"}) {
      if (std::string text = value(name); !text.empty()) return text;
    }
  }
  if (source == "slurm") return fmt::format("{}.{}", value("SLURM_JOB_ID"), value("SLURM_STEP_ID"));
  return "";
}

bool is_plain(std::string_view text) {
  for (const char c : text) {
    const bool is_word = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (!is_word && c != '.' && c != '_' && c != '-') return false;
  }
  return true;
}

// A name that fits into a socket's; names that do not are replaced by their hash.
std::string as_job_name(const std::string& text) {
  if (text.size() <= kMaxJobLength && is_plain(text)) return text;
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string job_of(const Environment& environment, std::string_view source, int parent_process_id,
                   const IdentityOptions& options) {
  if (options.job.has_value()) return as_job_name(*options.job);
  if (const std::optional<std::string> job = environment("ARGOSY_JOB")) return as_job_name(*job);
  const std::string text = job_text(environment, source);
  if (text.empty()) return fmt::format("ppid-{}", parent_process_id);
  return as_job_name(fmt::format("{}-{}", source, text));
}

struct Found {
  const Source* source = nullptr;
  Pair pair;
};

// Rows that count in this environment, first come first.
Result<std::vector<Found>> complete_sources(const Environment& environment) {
  std::vector<Found> found;
  bool is_marked = false;  // by a launcher that makes its ranks on purpose
  for (const Source& source : kSources) {
    if (&source == &kSlurm && (!found.empty() || !environment("SLURM_STEP_ID"))) break;
    if (is_marked && &source != &kTorchrun) break;
    ARGOSY_ASSIGN_OR_RETURN(const std::optional<Pair> pair,
                            read_pair(environment, source.rank, source.size));
    if (!pair.has_value()) continue;
    found.push_back({&source, *pair});
    is_marked |= &source == &kArgosy && environment("ARGOSY_JOB").has_value();
    is_marked |= &source == &kTorchrun && environment("TORCHELASTIC_RUN_ID").has_value();
  }
  return found;
}

Status check_agreement(const std::vector<Found>& found) {
  for (const Found& other : found) {
    const Found& first = found.front();
    if (other.pair.rank == first.pair.rank && other.pair.size == first.pair.size) continue;
    return base::invalid("{}={} and {}={}, but {}={} and {}={}; unset those of one launcher",
                         first.source->rank, first.pair.rank, first.source->size, first.pair.size,
                         other.source->rank, other.pair.rank, other.source->size, other.pair.size);
  }
  return {};
}

Result<RankIdentity> explicit_identity(const IdentityOptions& options) {
  if (!options.rank.has_value() || !options.num_ranks.has_value()) {
    return base::invalid("{} is given without {}; they belong together",
                         options.rank.has_value() ? "rank" : "num_ranks",
                         options.rank.has_value() ? "num_ranks" : "rank");
  }
  RankIdentity identity;
  identity.rank = *options.rank;
  identity.num_ranks = *options.num_ranks;
  if (identity.num_ranks < 1 || identity.num_ranks > kMaxRanks) {
    return base::invalid("num_ranks is {}, it can be 1 to {}", identity.num_ranks, kMaxRanks);
  }
  if (identity.rank < 0 || identity.rank >= identity.num_ranks) {
    return base::invalid("rank {} is outside [0, {})", identity.rank, identity.num_ranks);
  }
  identity.source = "option";
  return identity;
}

Result<RankIdentity> identity_from_environment(const Environment& environment) {
  ARGOSY_ASSIGN_OR_RETURN(const std::vector<Found> found, complete_sources(environment));
  RankIdentity identity;
  identity.source = "none";
  if (found.empty()) return identity;
  ARGOSY_RETURN_IF_ERROR(check_agreement(found));
  const Found& first = found.front();
  identity.rank = first.pair.rank;
  identity.num_ranks = first.pair.size;
  identity.source = first.source->name;
  identity.size_variable = first.source->size;
  return identity;
}

// Precondition: rank, num_ranks and source are known.
Status add_local_rank(const Environment& environment, RankIdentity* identity) {
  identity->local_rank = identity->rank;
  identity->num_local_ranks = identity->num_ranks;
  for (const Source& source : kSources) {
    if (source.name != identity->source || source.local_rank == nullptr) continue;
    ARGOSY_ASSIGN_OR_RETURN(const std::optional<Pair> local,
                            read_pair(environment, source.local_rank, source.local_size));
    if (!local.has_value()) continue;
    identity->local_rank = local->rank;
    identity->num_local_ranks = local->size;
  }
  return {};
}

}  // namespace

Result<RankIdentity> rank_identity_in(const Environment& environment, int parent_process_id,
                                      const IdentityOptions& options) {
  const bool is_explicit = options.rank.has_value() || options.num_ranks.has_value();
  ARGOSY_ASSIGN_OR_RETURN(RankIdentity identity, is_explicit
                                                     ? explicit_identity(options)
                                                     : identity_from_environment(environment));
  ARGOSY_RETURN_IF_ERROR(add_local_rank(environment, &identity));
  identity.job = job_of(environment, identity.source, parent_process_id, options);
  return identity;
}

}  // namespace transport

Result<RankIdentity> rank_identity(const IdentityOptions& options) {
  return transport::rank_identity_in(base::env, platform::parent_process_id(), options);
}

}  // namespace argosy
