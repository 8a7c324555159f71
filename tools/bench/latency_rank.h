// One rank of `argosy bench latency` as a process of its own, and what it hands back. Internal: started by the bench.
//
// Test: tests/bench/latency_work_test.cc.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "argosy/status.h"
#include "tools/bench/latency_work.h"

namespace argosy::tools::bench {

struct LatencyJob {
  LatencyShape shape;
  int64_t iterations = 0;
  std::string region;  // as for time_latency
  std::string output;  // file that rank 0 writes
};
// One word for the command line, and back. Errors: kInvalidArgument.
std::string to_text(const LatencyJob& job);
Result<LatencyJob> job_from(const std::string& text);

// Joins the group that the environment names, measures, writes the times.
Status run_latency_rank(const LatencyJob& job);

// {"floor": {"dispatch": [...], "combine": [...]}, "latency": ..., "throughput": ...}, seconds. Subjects that are not
// there are empty. Errors: kIo naming what is missing.
nlohmann::ordered_json to_json(const LatencyTimes& times);
Result<LatencyTimes> times_from(const nlohmann::ordered_json& json);

}  // namespace argosy::tools::bench
