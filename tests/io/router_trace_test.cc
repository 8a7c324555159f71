// Router traces: round trips of drawn traces in both formats, numpy's own files, every rule and
// every refusal, and the replay against a naive count.
#include "argosy/router_trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "argosy/checkpoint.h"
#include "argosy/plan.h"
#include "io/npz.h"
#include "io/temp_folder.h"

namespace argosy::test {
namespace {

std::string testdata(const std::string& name) { return std::string(ARGOSY_TESTDATA) + "/" + name; }

void expect_same(const RouterTrace& a, const RouterTrace& b) {
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.top_k, b.top_k);
  EXPECT_EQ(a.topk_idx, b.topk_idx);
  ASSERT_EQ(a.topk_weights.size(), b.topk_weights.size());
  EXPECT_TRUE(a.topk_weights.empty() || std::memcmp(a.topk_weights.data(), b.topk_weights.data(),
                                                    a.topk_weights.size() * sizeof(float)) == 0);
  ASSERT_EQ(a.records.size(), b.records.size());
  for (size_t i = 0; i < a.records.size(); ++i) {
    const TraceRecord& x = a.records[i];
    const TraceRecord& y = b.records[i];
    EXPECT_EQ(std::tie(x.step, x.layer, x.rank, x.first_token, x.num_tokens),
              std::tie(y.step, y.layer, y.rank, y.first_token, y.num_tokens));
  }
}

// Any bits of a finite float, often the zero that JSON easily loses.
float drawn_weight(std::mt19937_64& random) {
  if (random() % 8 == 0) return -0.0f;
  for (;;) {
    const auto bits = static_cast<uint32_t>(random());
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    if (std::isfinite(value)) return value;
  }
}

Routing drawn_routing(std::mt19937_64& random, int64_t num_tokens, int64_t num_experts,
                      int64_t top_k) {
  Routing routing;
  routing.num_tokens = num_tokens;
  routing.num_experts = num_experts;
  routing.top_k = top_k;
  std::vector<int32_t> ids(static_cast<size_t>(num_experts));
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    for (int64_t k = 0; k < top_k; ++k) {
      routing.topk_idx.push_back(random() % 8 == 0 ? -1 : ids[static_cast<size_t>(k)]);
      routing.topk_weights.values.push_back(drawn_weight(random));
    }
  }
  return routing;
}

RouterTrace drawn_trace(std::mt19937_64& random) {
  const auto num_experts = static_cast<int64_t>(1 + random() % 12);
  const int64_t top_k = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(num_experts));
  RouterTrace trace;
  for (int64_t step = 0; step < static_cast<int64_t>(random() % 4); ++step) {
    for (int64_t layer = 0; layer < 3; layer += 2) {
      for (int64_t rank = 0; rank < 2; ++rank) {
        const Routing routing =
            drawn_routing(random, static_cast<int64_t>(random() % 5), num_experts, top_k);
        EXPECT_TRUE(append_routing(step, layer, rank, routing, &trace).ok());
      }
    }
  }
  if (random() % 4 == 0) trace.topk_weights.clear();
  return trace;
}

TEST(RouterTrace, DrawnTracesComeBackBitForBit) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int run = 0; run < 200; ++run) {
    const RouterTrace trace = drawn_trace(random);
    ASSERT_TRUE(validate(trace).ok()) << validate(trace).message();
    for (const auto& bytes : {to_npz(trace), to_jsonl(trace)}) {
      ASSERT_TRUE(bytes.has_value()) << bytes.error().message();
      const Result<RouterTrace> again = parse_router_trace(*bytes);
      // A text without lines says nothing of the sizes.
      if (trace.records.empty() && bytes->empty()) continue;
      ASSERT_TRUE(again.has_value()) << again.error().message();
      expect_same(*again, trace);
    }
  }
}

// A line is as long as its tokens make it: the limit on the values of a config is not for it.
TEST(RouterTrace, ALineHoldsAnyNumberOfTokens) {
  std::mt19937_64 random(5);
  RouterTrace trace;
  trace.num_experts = 8;
  trace.top_k = 8;
  ASSERT_TRUE(append_routing(0, 0, 0, drawn_routing(random, 4096, 8, 8), &trace).ok());
  const Result<std::string> lines = to_jsonl(trace);
  ASSERT_TRUE(lines) << lines.error().message();
  const Result<RouterTrace> read = parse_router_trace(*lines);
  ASSERT_TRUE(read) << read.error().message();
  expect_same(*read, trace);
}

TEST(RouterTrace, FilesByTheEndOfTheName) {
  std::mt19937_64 random(3);
  RouterTrace trace;
  ASSERT_TRUE(append_routing(7, 1, 0, drawn_routing(random, 5, 6, 2), &trace).ok());
  const TempFolder folder;
  for (const char* const name : {"a.npz", "a.jsonl"}) {
    ASSERT_TRUE(write_router_trace(folder / name, trace).ok());
    const Result<RouterTrace> again = read_router_trace(folder / name);
    ASSERT_TRUE(again.has_value()) << again.error().message();
    expect_same(*again, trace);
  }
  EXPECT_EQ(read_bytes(folder / "a.npz").substr(0, 2), "PK");
  EXPECT_EQ(read_bytes(folder / "a.jsonl").substr(0, 42),
            R"({"step":7,"layer":1,"rank":0,"num_experts")");
  expect_error(write_router_trace(folder / "a.csv", trace), StatusCode::kInvalidArgument,
               {".npz", ".jsonl", "a.csv"});
  EXPECT_EQ(folder.num_files(), 2u);
  expect_error(read_router_trace(folder / "none.npz"), StatusCode::kNotFound, {"none.npz"});
  TraceLimits limits;
  limits.max_file_bytes = 10;
  expect_error(read_router_trace(folder / "a.npz", limits), StatusCode::kCorruptData, {"10"});
}

// Four steps of a trained model's trace, as numpy.savez and savez_compressed write it; the loads are
// numpy's.
TEST(RouterTrace, ReadsNumpysFilesStoredAndDeflated) {
  for (const char* const name : {"router/trace.npz", "router/trace_deflated.npz"}) {
    SCOPED_TRACE(name);
    const Result<RouterTrace> trace = read_router_trace(testdata(name));
    ASSERT_TRUE(trace.has_value()) << trace.error().message();
    EXPECT_EQ(trace->records.size(), 12u);
    EXPECT_EQ(trace->top_k, 8);
    EXPECT_EQ(trace->num_experts, 0);
    const auto layers = replay_router_trace(*trace, 64, 8);
    ASSERT_TRUE(layers.has_value()) << layers.error().message();
    ASSERT_EQ(layers->size(), 3u);
    const TraceLayerLoad& last = (*layers)[2];
    EXPECT_EQ(last.num_steps, 4);
    EXPECT_EQ(last.num_tokens, 128);
    EXPECT_EQ(last.rank_loads, std::vector<int64_t>({107, 83, 137, 46, 88, 177, 92, 294}));
    EXPECT_NEAR(last.expert_peak, 6.4375, 1e-12);
    EXPECT_NEAR(last.rank_peak, 2.296875, 1e-12);
    EXPECT_EQ(std::vector<int64_t>((*layers)[0].counts.begin(), (*layers)[0].counts.begin() + 6),
              std::vector<int64_t>({30, 0, 17, 10, 8, 8}));
  }
}

TEST(RouterTrace, ReplayIsTheNaiveCount) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int run = 0; run < 50; ++run) {
    const RouterTrace trace = drawn_trace(random);
    const int num_ranks = 1 + static_cast<int>(random() % 5);
    const auto layers = replay_router_trace(trace, 0, num_ranks);
    ASSERT_TRUE(layers.has_value()) << layers.error().message();
    std::map<int64_t, std::map<int64_t, std::vector<int64_t>>> naive;  // layer, step, expert
    for (const TraceRecord& record : trace.records) {
      auto& counts = naive[record.layer][record.step];
      counts.resize(static_cast<size_t>(trace.num_experts));
      for (int64_t i = record.first_token * trace.top_k;
           i < (record.first_token + record.num_tokens) * trace.top_k; ++i) {
        const int32_t id = trace.topk_idx[static_cast<size_t>(i)];
        if (id >= 0) ++counts[static_cast<size_t>(id)];
      }
    }
    ASSERT_EQ(layers->size(), naive.size());
    for (const TraceLayerLoad& layer : *layers) {
      const auto& steps = naive.at(layer.layer);
      std::vector<int64_t> sum(static_cast<size_t>(trace.num_experts));
      double peaks = 0;
      int loaded = 0;
      for (const auto& [step, counts] : steps) {
        int64_t all = 0;
        for (size_t e = 0; e < sum.size(); ++e) sum[e] += counts[e];
        for (const int64_t count : counts) all += count;
        if (all == 0) continue;
        ++loaded;
        peaks += static_cast<double>(*std::max_element(counts.begin(), counts.end())) *
                 static_cast<double>(counts.size()) / static_cast<double>(all);
      }
      EXPECT_EQ(layer.counts, sum);
      EXPECT_EQ(layer.num_steps, static_cast<int64_t>(steps.size()));
      EXPECT_NEAR(layer.expert_peak, loaded == 0 ? 1 : peaks / loaded, 1e-12);
      const Placement placement{trace.num_experts, num_ranks, 0};
      for (int rank = 0; rank < num_ranks; ++rank) {
        int64_t load = 0;
        for (int64_t e = placement.begin(rank); e < placement.begin(rank + 1); ++e) {
          load += sum[static_cast<size_t>(e)];
        }
        EXPECT_EQ(layer.rank_loads[static_cast<size_t>(rank)], load);
      }
    }
  }
}

// Case C069: of three layers, dense, MoE, MoE, two rows are reported, with their true numbers; so for any pattern.
TEST(RouterTrace, ReportsMoeLayersByTheirNumbersInTheModel) {
  std::mt19937_64 random(69);
  const auto checkpoint = Checkpoint::open(testdata("models/deepseek_v3_tiny"));
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().to_string();
  ASSERT_EQ(checkpoint->config().moe_layers(), std::vector<int64_t>({1, 2}));
  for (int run = 0; run < 50; ++run) {
    ModelConfig config = checkpoint->config();
    if (run > 0) {
      config.is_moe_layer.clear();
      for (uint64_t i = 0, end = 1 + random() % 8; i < end; ++i) {
        config.is_moe_layer.push_back(random() % 2 == 0);
      }
    }
    Routing routing;
    routing.num_experts = 4;
    routing.top_k = 2;
    RouterTrace trace;
    for (const int64_t layer : config.moe_layers()) {
      for (int64_t rank = 0; rank < 2; ++rank) {
        routing.num_tokens = layer + 1;  // tells the layers apart
        routing.topk_idx.clear();
        for (int64_t t = 0; t <= layer; ++t)
          routing.topk_idx.insert(routing.topk_idx.end(), {3, 0});
        routing.topk_weights.values.assign(routing.topk_idx.size(), 0.5f);
        ASSERT_TRUE(append_routing(0, layer, rank, routing, &trace).ok());
      }
    }
    const auto rows = replay_router_trace(trace, 4, 2);
    ASSERT_TRUE(rows.has_value()) << rows.error().to_string();
    std::vector<int64_t> reported;
    for (const TraceLayerLoad& row : *rows) {
      reported.push_back(row.layer);
      EXPECT_EQ(row.num_tokens, 2 * (row.layer + 1));
      EXPECT_EQ(row.counts, std::vector<int64_t>({row.num_tokens, 0, 0, row.num_tokens}));
    }
    EXPECT_EQ(reported, config.moe_layers());
  }
}

RouterTrace small() {
  RouterTrace trace;
  trace.num_experts = 4;
  trace.top_k = 2;
  trace.records = {{0, 0, 0, 0, 1}, {0, 0, 1, 1, 1}};
  trace.topk_idx = {0, 1, 3, -1};
  trace.topk_weights = {0.5f, 0.5f, 1.0f, 0.0f};
  return trace;
}

TEST(RouterTrace, EveryRuleIsNamed) {
  const auto broken = [](auto change, std::initializer_list<std::string_view> words) {
    RouterTrace trace = small();
    change(trace);
    expect_error(validate(trace), StatusCode::kInvalidArgument, words);
    expect_error(to_npz(trace), StatusCode::kInvalidArgument, words);
    expect_error(to_jsonl(trace), StatusCode::kInvalidArgument, words);
    expect_error(replay_router_trace(trace, 0, 1), StatusCode::kInvalidArgument, words);
  };
  ASSERT_TRUE(validate(small()).ok());
  broken([](RouterTrace& t) { t.topk_idx[1] = 4; }, {"row 0", "expert 4"});
  broken([](RouterTrace& t) { t.topk_idx[2] = -2; }, {"row 1", "-2"});
  broken([](RouterTrace& t) { t.topk_idx[1] = 0; }, {"row 0", "twice"});
  broken([](RouterTrace& t) { t.topk_weights[3] = INFINITY; }, {"row 1", "position 1", "inf"});
  broken([](RouterTrace& t) { t.topk_weights.pop_back(); }, {"3 weights", "4"});
  broken([](RouterTrace& t) { t.topk_idx.pop_back(); }, {"3", "top_k 2"});
  broken([](RouterTrace& t) { t.top_k = 0; }, {"top_k is 0"});
  broken([](RouterTrace& t) { t.num_experts = -1; }, {"num_experts is -1"});
  broken([](RouterTrace& t) { t.records[1].rank = 0; }, {"rank 0", "twice"});
  broken([](RouterTrace& t) { t.records[1].layer = -1; }, {"record 1", "layer -1"});
  broken([](RouterTrace& t) { t.records[1].num_tokens = 2; }, {"record 1", "2 rows"});
  broken([](RouterTrace& t) { t.records.pop_back(); }, {"1 rows", "2"});

  expect_error(replay_router_trace(small(), 5, 1), StatusCode::kInvalidArgument, {"5", "4"});
  expect_error(replay_router_trace(small(), 0, 0), StatusCode::kInvalidArgument,
               {"num_ranks is 0"});
  RouterTrace vast = small();
  vast.num_experts = std::numeric_limits<int32_t>::max();
  expect_error(replay_router_trace(vast, 0, 1), StatusCode::kUnsupported, {"2147483647"});
}

// A claimed id costs memory: a file of 50 bytes may not ask for half a gigabyte.
TEST(RouterTrace, ReplayRefusesMoreExpertsThanAFileMayClaim) {
  const Result<RouterTrace> trace =
      parse_router_trace(R"({"step":0,"layer":0,"rank":0,"topk_idx":[[0,65536]]})");
  ASSERT_TRUE(trace.has_value()) << trace.error().message();
  const Result<std::vector<TraceLayerLoad>> loads = replay_router_trace(*trace, 0, 1);
  ASSERT_FALSE(loads.has_value());
  EXPECT_EQ(loads.error().code(), StatusCode::kUnsupported);
  EXPECT_NE(loads.error().message().find("65537"), std::string::npos) << loads.error().message();
}

TEST(RouterTrace, RecorderRefusesOtherSizes) {
  std::mt19937_64 random(1);
  RouterTrace trace;
  ASSERT_TRUE(append_routing(0, 0, 0, drawn_routing(random, 2, 6, 2), &trace).ok());
  expect_error(append_routing(0, 0, 1, drawn_routing(random, 2, 6, 3), &trace),
               StatusCode::kInvalidArgument, {"top-3", "top-2"});
  expect_error(append_routing(0, -1, 1, drawn_routing(random, 2, 6, 2), &trace),
               StatusCode::kInvalidArgument, {"layer -1"});
  Routing cut = drawn_routing(random, 2, 6, 2);
  cut.topk_idx.pop_back();
  expect_error(append_routing(0, 0, 1, cut, &trace), StatusCode::kInvalidArgument, {"3 ids"});
  EXPECT_EQ(trace.records.size(), 1u);
}

TEST(RouterTrace, BadLinesAreNamed) {
  const auto refused = [](const char* text, std::initializer_list<std::string_view> words) {
    SCOPED_TRACE(text);
    expect_error(parse_router_trace(text), StatusCode::kCorruptData, words);
  };
  refused("{", {"line 1"});
  refused("\n\n[]", {"line 3", "no JSON object"});
  refused(R"({"step":0,"layer":0})", {"line 1", "topk_idx is missing"});
  refused(R"({"step":0,"topk_idx":[[1]]})", {"layer is missing"});
  refused(R"({"step":-1,"layer":0,"topk_idx":[[1]]})", {"step is -1"});
  refused(R"({"step":0,"layer":0,"topk_idx":[[1]],"extra":1})", {"\"extra\"", "topk_weights"});
  refused(R"({"step":0,"layer":0,"topk_idx":[[1],[1,2]]})", {"row of 2", "1"});
  refused(R"({"step":0,"layer":0,"topk_idx":[[]]})", {"a list"});
  refused(R"({"step":0,"layer":0,"topk_idx":[[1.5]]})", {"1.5"});
  refused(R"({"step":0,"layer":0,"topk_idx":[[9999999999]]})", {"9999999999"});
  refused(R"({"step":0,"layer":0,"topk_idx":[[1]],"topk_weights":[[1e99]]})", {"1e+99"});
  refused(R"({"step":0,"layer":0,"topk_idx":[[1]],"topk_weights":[]})", {"0 weights for 1"});
  refused(
      "{\"step\":0,\"layer\":0,\"topk_idx\":[[1]]}\n"
      R"({"step":1,"layer":0,"topk_idx":[[1]],"topk_weights":[[1]]})",
      {"line 2", "1 weights for 2"});
  refused(
      "{\"step\":0,\"layer\":0,\"num_experts\":2,\"topk_idx\":[[1]]}\n"
      R"({"step":1,"layer":0,"num_experts":3,"topk_idx":[[1]]})",
      {"line 2", "3", "2"});
}

io::NpySource source(const char* name, DType dtype, std::vector<int64_t> shape,
                     std::span<const std::byte> data) {
  return {name, dtype, std::move(shape), data};
}

TEST(RouterTrace, BadArraysAreNamed) {
  const std::vector<int32_t> ids = {0, 1, 2, 3};
  const std::vector<int64_t> two = {1, 1};
  const std::vector<float> weights = {1, 2, 3, NAN};
  const auto bytes = [](const auto& values) { return std::as_bytes(std::span(values)); };
  const auto refused = [&](std::vector<io::NpySource> arrays, StatusCode code,
                           std::initializer_list<std::string_view> words) {
    const Result<std::string> npz = io::make_npz(arrays);
    ASSERT_TRUE(npz.has_value());
    expect_error(parse_router_trace(*npz), code, words);
  };
  const auto rows = source("topk_idx", DType::kI32, {2, 2}, bytes(ids));
  refused({}, StatusCode::kNotFound, {"topk_idx"});
  refused({rows}, StatusCode::kNotFound, {"step", "topk_idx"});
  refused({source("topk_idx", DType::kI32, {4}, bytes(ids))}, StatusCode::kCorruptData, {"[4]"});
  refused({source("topk_idx", DType::kF32, {2, 2}, bytes(ids))}, StatusCode::kCorruptData,
          {"F32", "integers"});
  refused({source("topk_idx", DType::kI32, {1, 1 << 20, 0, 2}, {})}, StatusCode::kCorruptData,
          {"without elements"});
  refused({rows, source("topk_weights", DType::kF32, {4, 1}, bytes(weights))},
          StatusCode::kCorruptData, {"[4, 1]", "[2, 2]"});
  refused(
      {rows, source("step", DType::kI64, {2}, bytes(two)),
       source("layer", DType::kI64, {2}, bytes(two)), source("rank", DType::kI64, {2}, bytes(two)),
       source("num_tokens", DType::kI64, {2}, bytes(two))},
      StatusCode::kInvalidArgument, {"step 1, layer 1, rank 1", "twice"});
  refused({rows, source("step", DType::kI64, {2}, bytes(two)),
           source("layer", DType::kI64, {1}, bytes(two).first(8))},
          StatusCode::kCorruptData, {"layer has 1", "2"});
  TraceLimits limits;
  limits.max_array_bytes = 100;
  const Result<std::string> npz = io::make_npz(std::vector<io::NpySource>{rows});
  expect_error(parse_router_trace(*npz, limits), StatusCode::kUnsupported, {"at most 100"});
}

}  // namespace
}  // namespace argosy::test
