// Who a rank is, from every launcher's variables, alone and beside each other.
#include "transport/identity.h"

#include <gtest/gtest.h>

#include <map>

namespace argosy::transport {
namespace {

using Variables = std::map<std::string, std::string>;

Result<RankIdentity> identity_in(const Variables& variables, const IdentityOptions& options = {}) {
  const auto environment = [&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end() || found->second.empty()) return std::nullopt;
    return found->second;
  };
  return rank_identity_in(environment, 4711, options);
}

struct Known {
  Variables variables;
  RankIdentity want;
};

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "2654470145"}};
const Variables kTorchrun = {{"RANK", "3"},          {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},    {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_PORT", "295"}, {"TORCHELASTIC_RUN_ID", "none"}};
const Variables kLaunched = {
    {"ARGOSY_RANK", "5"}, {"ARGOSY_WORLD_SIZE", "6"}, {"ARGOSY_JOB", "ab"},     {"RANK", "5"},
    {"WORLD_SIZE", "6"},  {"LOCAL_RANK", "5"},        {"LOCAL_WORLD_SIZE", "6"}};
const Variables kStep = {
    {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}};

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

TEST(Identity, EverySourceGivesItsRank) {
  const std::vector<Known> table = {
      {{}, {0, 1, 0, 1, "ppid-4711", "none", ""}},
      {{{"RANK", ""}, {"WORLD_SIZE", ""}}, {0, 1, 0, 1, "ppid-4711", "none", ""}},
      {{{"ARGOSY_RANK", "1"}, {"ARGOSY_WORLD_SIZE", "3"}},
       {1, 3, 1, 3, "ppid-4711", "argosy", "ARGOSY_WORLD_SIZE"}},
      {kLaunched, {5, 6, 5, 6, "ab", "argosy", "ARGOSY_WORLD_SIZE"}},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, {0, 1, 0, 1, "ppid-4711", "torchrun", "WORLD_SIZE"}},
      {kTorchrun, {3, 8, 1, 2, "torchrun-none--295-", "torchrun", "WORLD_SIZE"}},
      {kOpenMpi, {2, 4, 0, 2, "openmpi-2654470145", "openmpi", "OMPI_COMM_WORLD_SIZE"}},
      {{{"PMI_RANK", "6"}, {"PMI_SIZE", "7"}}, {6, 7, 6, 7, "ppid-4711", "pmi", "PMI_SIZE"}},
      {kStep, {1, 2, 1, 2, "slurm-77.0", "slurm", "SLURM_NTASKS"}},
      // A shell of sbatch or salloc, not a step.
      {{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "77"}},
       {0, 1, 0, 1, "ppid-4711", "none", ""}},
  };
  for (const Known& known : table) {
    const Result<RankIdentity> seen = identity_in(known.variables);
    ASSERT_TRUE(seen.has_value()) << known.want.source << ": " << seen.error().message();
    SCOPED_TRACE(known.want.source);
    EXPECT_EQ(seen->source, known.want.source);
    EXPECT_EQ(seen->rank, known.want.rank);
    EXPECT_EQ(seen->num_ranks, known.want.num_ranks);
    EXPECT_EQ(seen->local_rank, known.want.local_rank);
    EXPECT_EQ(seen->num_local_ranks, known.want.num_local_ranks);
    EXPECT_EQ(seen->job, known.want.job);
    EXPECT_EQ(seen->size_variable, known.want.size_variable);
  }
}

TEST(Identity, MarkedRanksWinOverWhatEnclosesThem) {
  EXPECT_EQ(identity_in(with(kLaunched, kOpenMpi))->source, "argosy");
  EXPECT_EQ(identity_in(with(kTorchrun, kOpenMpi))->source, "torchrun");
  // Below srun everything inherits the step's variables.
  EXPECT_EQ(identity_in(with(kTorchrun, kStep))->source, "torchrun");
  EXPECT_EQ(identity_in(with(kOpenMpi, kStep))->source, "openmpi");
  EXPECT_EQ(identity_in(with(kLaunched, kStep))->source, "argosy");
  // What is not looked at cannot be half set either.
  EXPECT_EQ(identity_in(with(kLaunched, {{"PMI_RANK", "x"}}))->source, "argosy");
}

TEST(Identity, SourcesThatAgreeAreFine) {
  const Variables both = {{"RANK", "2"}, {"WORLD_SIZE", "4"}};
  const Result<RankIdentity> seen = identity_in(with(kOpenMpi, both));
  ASSERT_TRUE(seen.has_value()) << seen.error().message();
  EXPECT_EQ(seen->source, "torchrun");
}

struct Refused {
  Variables variables;
  std::vector<std::string> named;
};

TEST(Identity, HalfSetConflictingAndBadValuesAreNamed) {
  const std::vector<Refused> table = {
      {{{"RANK", "1"}}, {"RANK is '1'", "WORLD_SIZE is not set"}},
      {{{"WORLD_SIZE", "4"}}, {"WORLD_SIZE is '4'", "RANK is not set"}},
      {{{"ARGOSY_RANK", "1"}}, {"ARGOSY_RANK", "ARGOSY_WORLD_SIZE is not set"}},
      {{{"OMPI_COMM_WORLD_SIZE", "1"}}, {"OMPI_COMM_WORLD_RANK is not set"}},
      {with(kStep, {{"SLURM_NTASKS", ""}}), {"SLURM_PROCID is '1'", "SLURM_NTASKS is not set"}},
      {{{"RANK", "4"}, {"WORLD_SIZE", "4"}}, {"RANK is '4'", "0 to 3", "WORLD_SIZE is 4"}},
      {{{"RANK", "-1"}, {"WORLD_SIZE", "4"}}, {"RANK is '-1'"}},
      {{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, {"WORLD_SIZE is '0'", "1 to 1024"}},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1025"}}, {"'1025'"}},
      {{{"RANK", "1x"}, {"WORLD_SIZE", "4"}}, {"RANK is '1x'"}},
      {{{"RANK", "0"}, {"WORLD_SIZE", "99999999999999999999"}}, {"'99999999999999999999'"}},
      {{{"RANK", " 1"}, {"WORLD_SIZE", "4"}}, {"RANK is ' 1'"}},
      {with(kOpenMpi, {{"RANK", "1"}, {"WORLD_SIZE", "4"}}),
       {"RANK=1", "WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=4"}},
      {with(kOpenMpi, {{"PMI_RANK", "2"}, {"PMI_SIZE", "5"}}),
       {"OMPI_COMM_WORLD_SIZE=4", "PMI_SIZE=5"}},
      {with(kOpenMpi, {{"ARGOSY_RANK", "0"}, {"ARGOSY_WORLD_SIZE", "1"}}),
       {"ARGOSY_RANK=0", "OMPI_COMM_WORLD_RANK=2"}},
      {with(kLaunched, {{"RANK", "0"}}), {"ARGOSY_RANK=5", "RANK=0"}},
      {with(kTorchrun, {{"LOCAL_WORLD_SIZE", ""}}), {"LOCAL_RANK is '1'", "LOCAL_WORLD_SIZE"}},
      {with(kTorchrun, {{"LOCAL_RANK", "2"}}), {"LOCAL_RANK is '2'", "LOCAL_WORLD_SIZE is 2"}},
  };
  for (const Refused& refused : table) {
    const Result<RankIdentity> seen = identity_in(refused.variables);
    ASSERT_FALSE(seen.has_value()) << refused.named[0];
    EXPECT_EQ(seen.error().code(), StatusCode::kInvalidArgument);
    for (const std::string& word : refused.named) {
      EXPECT_NE(seen.error().message().find(word), std::string::npos)
          << word << " in: " << seen.error().message();
    }
  }
}

TEST(Identity, ExplicitOptionsComeFirst) {
  const Result<RankIdentity> seen = identity_in(kOpenMpi, {1, 2, "mine"});
  ASSERT_TRUE(seen.has_value()) << seen.error().message();
  EXPECT_EQ(seen->source, "option");
  EXPECT_EQ(seen->rank, 1);
  EXPECT_EQ(seen->num_ranks, 2);
  EXPECT_EQ(seen->job, "mine");
  EXPECT_FALSE(identity_in({}, {1, std::nullopt, {}}).has_value());
  EXPECT_FALSE(identity_in({}, {std::nullopt, 2, {}}).has_value());
  EXPECT_FALSE(identity_in({}, {2, 2, {}}).has_value());
  EXPECT_FALSE(identity_in({}, {0, 1025, {}}).has_value());
}

TEST(Identity, JobNamesFitASocketsName) {
  const std::string uri = "1234.0;tcp://10.0.0.1:4321";
  const Result<RankIdentity> one =
      identity_in(with(kOpenMpi, {{"PMIX_NAMESPACE", ""}, {"OMPI_MCA_orte_hnp_uri", uri}}));
  const Result<RankIdentity> two =
      identity_in(with(kOpenMpi, {{"PMIX_NAMESPACE", ""}, {"OMPI_MCA_orte_hnp_uri", uri + "1"}}));
  EXPECT_EQ(one->job.size(), 32u);
  EXPECT_NE(one->job, two->job);
  EXPECT_EQ(identity_in({{"ARGOSY_JOB", std::string(1000, 'j')}})->job.size(), 32u);
}

}  // namespace
}  // namespace argosy::transport
