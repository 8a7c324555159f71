// See latency_rank.h.
#include "tools/bench/latency_rank.h"

#include <fmt/format.h>

#include <fstream>
#include <memory>

#include "argosy/group.h"
#include "argosy/identity.h"

namespace argosy::tools::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kSubjects[kNumSubjects] = {"floor", "latency", "throughput"};
constexpr const char* kPhases[kNumPhases] = {"dispatch", "combine"};

}  // namespace

std::string to_text(const LatencyJob& job) {
  const LatencyShape& shape = job.shape;
  return Json{{"tokens", shape.num_tokens},
              {"experts", shape.num_experts},
              {"top_k", shape.top_k},
              {"hidden", shape.hidden},
              {"payload", static_cast<int>(shape.payload)},
              {"push", shape.push},
              {"iterations", job.iterations},
              {"region", job.region},
              {"output", job.output}}
      .dump();
}

Result<LatencyJob> job_from(const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  LatencyJob job;
  try {
    job.shape.num_tokens = json.at("tokens").get<int64_t>();
    job.shape.num_experts = json.at("experts").get<int64_t>();
    job.shape.top_k = json.at("top_k").get<int64_t>();
    job.shape.hidden = json.at("hidden").get<int64_t>();
    job.shape.payload = static_cast<BlockFormat>(json.at("payload").get<int>());
    job.shape.push = json.at("push").get<bool>();
    job.iterations = json.at("iterations").get<int64_t>();
    job.region = json.at("region").get<std::string>();
    job.output = json.at("output").get<std::string>();
  } catch (const nlohmann::json::exception& error) {
    return Status(StatusCode::kInvalidArgument, fmt::format("--as-rank: {}", error.what()));
  }
  return job;
}

Status run_latency_rank(const LatencyJob& job) {
  ARGOSY_ASSIGN_OR_RETURN(const RankIdentity identity, rank_identity());
  GroupOptions options;
  options.rank = identity.rank;
  options.num_ranks = identity.num_ranks;
  options.transport = TransportKind::kShm;
  options.job = identity.job;
  options.pin_first_core = identity.rank;
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<Group> group, Group::join(options));
  LatencyShape shape = job.shape;
  shape.num_ranks = identity.num_ranks;
  const Result<LatencyTimes> times = time_latency(*group, shape, job.iterations, job.region);
  if (!times.has_value()) {
    group->abort(times.error());
    return times.error();
  }
  if (group->rank() != 0) return {};
  std::ofstream file(job.output);
  file << to_json(*times).dump();
  if (!file.flush()) return Status(StatusCode::kIo, "cannot write " + job.output);
  return {};
}

Json to_json(const LatencyTimes& times) {
  Json json;
  for (size_t subject = 0; subject < kNumSubjects; ++subject) {
    for (size_t phase = 0; phase < kNumPhases; ++phase) {
      json[kSubjects[subject]][kPhases[phase]] = times.seconds[subject][phase];
    }
  }
  return json;
}

Result<LatencyTimes> times_from(const Json& json) {
  LatencyTimes times;
  try {
    for (size_t subject = 0; subject < kNumSubjects; ++subject) {
      if (!json.contains(kSubjects[subject])) continue;
      for (size_t phase = 0; phase < kNumPhases; ++phase) {
        times.seconds[subject][phase] =
            json.at(kSubjects[subject]).at(kPhases[phase]).get<std::vector<double>>();
      }
    }
  } catch (const nlohmann::json::exception& error) {
    return Status(StatusCode::kIo, fmt::format("times of a latency run: {}", error.what()));
  }
  return times;
}

}  // namespace argosy::tools::bench
