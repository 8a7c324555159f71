// The layer in latency mode: the naive layer's bits for any ranks, threads, way home and number of calls; payloads the same
// in both modes; the automatic choice the same on every rank.
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "argosy/moe.h"
#include "argosy/payload.h"
#include "moe/layer_cases.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::LayerCase;
using testing::Matrix;
using testing::naive_bytes;
using testing::NaiveLayer;
using testing::run_group;

struct RunSetup {
  int num_ranks = 1;
  int threads = 1;
  Level level = Level::kGeneric;
  MoeOptions options = {};
  int repeats = 1;
};

MoeOptions latency_mode(int64_t max_tokens = 64) {
  MoeOptions options;
  options.mode = MoeMode::kLatency;
  options.max_tokens = max_tokens;
  return options;
}

struct Outcome {
  std::vector<std::byte> bytes;
  std::set<std::string> errors;  // of all ranks
  std::vector<MoeReport> reports;
  std::vector<int64_t> latency_tokens;
};

Outcome run_layer(const NaiveLayer& layer, const Matrix& hidden, const uint8_t* mask,
                  const RunSetup& setup) {
  const Tensor input = testing::to_tensor(hidden, layer.dtype);
  Tensor output = std::move(Tensor::zeros(layer.dtype, {hidden.rows, layer.hidden})).value();
  Outcome outcome;
  outcome.reports.resize(static_cast<size_t>(setup.num_ranks));
  outcome.latency_tokens.resize(static_cast<size_t>(setup.num_ranks));
  std::mutex mutex;
  run_group(
      setup.num_ranks,
      [&](Group& group) {
        Result<MoeWeights> weights =
            testing::weights_for_rank(layer, group.rank(), group.num_ranks());
        ASSERT_TRUE(weights.has_value()) << weights.error().to_string();
        MoeOptions options = setup.options;
        options.hidden_dtype = layer.dtype;
        Result<std::unique_ptr<MoeLayer>> moe =
            MoeLayer::create(group, layer.router, std::move(*weights), options);
        ASSERT_TRUE(moe.has_value()) << moe.error().to_string();
        const auto at = static_cast<size_t>(group.rank());
        outcome.latency_tokens[at] = (*moe)->latency_tokens();
        const int64_t first = owned_begin(hidden.rows, group.num_ranks(), group.rank());
        const int64_t count = owned_begin(hidden.rows, group.num_ranks(), group.rank() + 1) - first;
        for (int repeat = 0; repeat < setup.repeats; ++repeat) {
          const Status status = (*moe)->forward(
              input.view().rows(first, count), mask == nullptr ? nullptr : mask + first,
              output.view().rows(first, count), &outcome.reports[at]);
          const std::lock_guard lock(mutex);
          if (!status.ok()) outcome.errors.insert(status.to_string());
        }
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) {
        options.dot_order = layer.order;
        options.level = setup.level;
        options.threads_per_rank = setup.threads;
      });
  outcome.bytes.assign(output.bytes().begin(), output.bytes().end());
  return outcome;
}

class LatencyLayer : public ::testing::TestWithParam<LayerCase> {
 protected:
  static NaiveLayer layer() { return testing::layer_of(GetParam()); }
  static Matrix hidden(const NaiveLayer& layer, int64_t rows) {
    std::mt19937_64 random(5);
    return testing::random_matrix(random, rows, layer.hidden, 1.0f, layer.dtype == DType::kBF16);
  }
};

TEST_P(LatencyLayer, EqualsTheNaiveLayerForAnySetup) {
  const NaiveLayer layer = LatencyLayer::layer();
  const Matrix rows = hidden(layer, 45);
  const std::vector<std::byte> want = naive_bytes(layer, rows, nullptr);
  for (const int ranks : {1, 2, 3, 4, 7, 8, 16}) {
    EXPECT_EQ(
        run_layer(layer, rows, nullptr, {.num_ranks = ranks, .options = latency_mode()}).bytes,
        want)
        << ranks;
  }
  MoeOptions push = latency_mode();
  push.return_path = ReturnPath::kPush;
  MoeOptions chunked = latency_mode(4);
  chunked.chunk = true;
  MoeOptions automatic = latency_mode();
  automatic.mode = MoeMode::kAuto;
  for (const RunSetup& setup :
       {RunSetup{.num_ranks = 3, .threads = 2, .options = latency_mode(), .repeats = 3},
        RunSetup{.num_ranks = 4, .level = Level::kReference, .options = push, .repeats = 2},
        RunSetup{.num_ranks = 4, .threads = 2, .options = chunked, .repeats = 2},
        RunSetup{.num_ranks = 1, .options = chunked},
        RunSetup{.num_ranks = 3, .options = automatic, .repeats = 2}}) {
    const Outcome outcome = run_layer(layer, rows, nullptr, setup);
    EXPECT_TRUE(outcome.errors.empty()) << *outcome.errors.begin();
    EXPECT_EQ(outcome.bytes, want);
  }
  std::vector<uint8_t> mask(45, 1);
  for (const size_t at : {0u, 7u, 8u, 44u}) mask[at] = 0;
  const std::vector<std::byte> masked = naive_bytes(layer, rows, mask.data());
  EXPECT_EQ(run_layer(layer, rows, mask.data(), {.num_ranks = 4, .options = chunked}).bytes,
            masked);
}

INSTANTIATE_TEST_SUITE_P(Cases, LatencyLayer,
                         ::testing::Values(LayerCase{DType::kBF16, DotOrder::kAmx, true, true},
                                           LayerCase{DType::kBF16, DotOrder::kVdpbf16, true, false},
                                           LayerCase{DType::kF32, DotOrder::kVdpbf16, false, false},
                                           LayerCase{DType::kBF16, DotOrder::kVdpbf16, false, false,
                                                     true}));

NaiveLayer plain_layer() {
  return testing::random_layer(43, DType::kBF16, DotOrder::kVdpbf16, 8, 2, 160, 24, false, false);
}

Matrix rows_of(const NaiveLayer& layer, int64_t count) {
  std::mt19937_64 random(6);
  return testing::random_matrix(random, count, layer.hidden, 1.0f, true);
}

// Contract 3: both modes give the same bits for the same payload, at any number of ranks; every routed row goes through
// it, also one that stays on its rank.
TEST(LatencyLayerPayload, IsTheSameInBothModesAndAppliedToEveryRow) {
  const NaiveLayer layer = plain_layer();
  const Matrix hidden = rows_of(layer, 30);
  const std::vector<std::byte> as_it_is = naive_bytes(layer, hidden, nullptr);
  for (const char* name : {"fp8_128", "fp8_128_e8m0", "mxfp8"}) {
    SCOPED_TRACE(name);
    MoeOptions throughput;
    throughput.payload = *parse_payload(name);
    MoeOptions latency = latency_mode();
    latency.payload = throughput.payload;
    MoeOptions small = throughput;  // several receive rounds
    small.receive_budget_bytes = 7 * layer.hidden * 2;
    const std::vector<std::byte> one =
        run_layer(layer, hidden, nullptr, {.options = throughput}).bytes;
    EXPECT_NE(one, as_it_is);
    for (const int ranks : {1, 2, 3, 8}) {
      for (const MoeOptions& options : {throughput, latency, small}) {
        const Outcome outcome =
            run_layer(layer, hidden, nullptr, {.num_ranks = ranks, .options = options});
        EXPECT_EQ(outcome.bytes, one) << ranks;
        EXPECT_TRUE(outcome.errors.empty());
      }
    }
    // The experts see the decoded rows, the router the original ones.
    const PayloadLayout payload = *payload_layout(DType::kBF16, throughput.payload, layer.hidden);
    const Tensor original = testing::to_tensor(hidden, DType::kBF16);
    Tensor decoded = std::move(*Tensor::zeros(DType::kBF16, {hidden.rows, layer.hidden}));
    AlignedBuffer encoded;
    ASSERT_TRUE(encoded.reserve(payload.num_bytes).ok());
    for (int64_t row = 0; row < hidden.rows; ++row) {
      encode_payload(payload, original.view().row(row), encoded.data());
      decode_payload(payload, encoded.data(), decoded.view().row(row));
    }
    Tensor output = std::move(*Tensor::zeros(DType::kBF16, {hidden.rows, layer.hidden}));
    run_group(
        1,
        [&](Group& group) {
          MoeOptions options;
          options.hidden_dtype = DType::kBF16;
          Result<MoeWeights> weights = testing::weights_for_rank(layer, 0, 1);
          Result<std::unique_ptr<MoeLayer>> moe =
              MoeLayer::create(group, layer.router, std::move(*weights), options);
          ASSERT_TRUE(moe.has_value());
          ASSERT_TRUE((*moe)->forward(original.view(), nullptr, output.view(), nullptr).ok());
          const Routing routing = (*moe)->routing();
          const ConstTensorView idx(routing.topk_idx.data(), DType::kI32,
                                    {routing.num_tokens, routing.top_k});
          const ConstTensorView topk(routing.topk_weights.values.data(), DType::kF32,
                                     {routing.num_tokens, routing.top_k});
          ASSERT_TRUE(
              (*moe)
                  ->forward_routed(std::as_const(decoded).view(), idx, topk, output.view(), nullptr)
                  .ok());
        },
        [&](GroupOptions& options) { options.dot_order = layer.order; });
    const std::vector<std::byte> want(output.bytes().begin(), output.bytes().end());
    EXPECT_EQ(one, want);
  }
}

// More than max_tokens on one rank: the same error on every rank, and the group goes on; with `chunk` it just runs.
TEST(LatencyLayerCapacity, IsANamedErrorOrSeveralCalls) {
  const NaiveLayer layer = plain_layer();
  const Matrix hidden = rows_of(layer, 31);
  Outcome outcome = run_layer(layer, hidden, nullptr,
                              {.num_ranks = 3, .options = latency_mode(10), .repeats = 2});
  ASSERT_EQ(outcome.errors.size(), 1u);
  EXPECT_EQ(*outcome.errors.begin(), "InvalidArgument: rank 2: 11 tokens, max_tokens is 10");
  MoeOptions options = latency_mode(10);
  options.chunk = true;
  outcome = run_layer(layer, hidden, nullptr, {.num_ranks = 3, .options = options});
  EXPECT_TRUE(outcome.errors.empty());
  EXPECT_EQ(outcome.reports[0].num_rounds, 2);
  EXPECT_EQ(outcome.bytes, naive_bytes(layer, hidden, nullptr));
  options.mode = MoeMode::kAuto;  // what does not fit goes by throughput mode
  options.chunk = false;
  outcome = run_layer(layer, hidden, nullptr, {.num_ranks = 3, .options = options});
  EXPECT_TRUE(outcome.errors.empty());
  EXPECT_EQ(outcome.bytes, naive_bytes(layer, hidden, nullptr));
  for (const MoeReport& report : outcome.reports) {
    EXPECT_EQ(report.mode, MoeMode::kThroughput);
    EXPECT_EQ(outcome.latency_tokens[0], outcome.latency_tokens[1]);
  }
}

TEST(LatencyLayerReport, CountsRowsAndBytesLikeThroughputMode) {
  const NaiveLayer layer = plain_layer();
  const Matrix hidden = rows_of(layer, 30);
  const Outcome throughput = run_layer(layer, hidden, nullptr, {.num_ranks = 3});
  MoeOptions chunked = latency_mode(4);
  chunked.chunk = true;
  for (const MoeOptions& options : {latency_mode(), chunked}) {
    const Outcome latency =
        run_layer(layer, hidden, nullptr, {.num_ranks = 3, .options = options, .repeats = 2});
    std::vector<int64_t> rows_per_expert(8), rows_per_rank(3);
    for (size_t rank = 0; rank < 3; ++rank) {
      const MoeReport& want = throughput.reports[rank];
      const MoeReport& got = latency.reports[rank];
      EXPECT_EQ(got.mode, MoeMode::kLatency);
      EXPECT_EQ(got.sent_rows, want.sent_rows);
      EXPECT_EQ(got.sent_rows_dedup, want.sent_rows_dedup);
      EXPECT_EQ(got.dispatch_bytes, want.dispatch_bytes);
      EXPECT_EQ(got.combine_bytes, want.combine_bytes);
      EXPECT_EQ(got.saved_by_dedup_bytes, want.saved_by_dedup_bytes);
      for (size_t i = 0; i < 8; ++i) rows_per_expert[i] += got.rows_per_expert[i];
      for (size_t i = 0; i < 3; ++i) rows_per_rank[i] += got.rows_per_rank[i];
      // Spans of a stage add up to its rows and bytes.
      int64_t rows = 0, bytes = 0, computed = 0;
      for (const StageSpan& span : got.spans) {
        if (span.stage == MoeStage::kDispatch) bytes += span.bytes;
        if (span.stage == MoeStage::kCombine) rows += span.rows;
        if (span.stage == MoeStage::kExperts) computed += span.rows;
      }
      EXPECT_EQ(bytes, got.dispatch_bytes);
      EXPECT_EQ(rows, want.sent_rows[0] + want.sent_rows[1] + want.sent_rows[2]);
      EXPECT_EQ(computed, got.rows_per_rank[rank]);
    }
    EXPECT_EQ(rows_per_expert, throughput.reports[0].rows_per_expert);
    EXPECT_EQ(rows_per_rank, throughput.reports[0].rows_per_rank);
  }
}

// Layers may share an exchange that was made with their options; another is refused by name.
TEST(LatencyLayerExchange, IsSharedWhereItFits) {
  const NaiveLayer layer = plain_layer();
  const Matrix hidden = rows_of(layer, 12);
  const Tensor input = testing::to_tensor(hidden, layer.dtype);
  run_group(
      2,
      [&](Group& group) {
        LatencyOptions wanted{layer.dtype, layer.hidden, 8, 2, 16};
        const auto make = [&](const LatencyOptions& options) {
          MoeOptions moe = latency_mode(16);
          moe.hidden_dtype = layer.dtype;
          moe.latency = std::move(*LatencyExchange::create(group, options));
          return MoeLayer::create(group, layer.router,
                                  std::move(*testing::weights_for_rank(layer, group.rank(), 2)),
                                  moe);
        };
        Result<std::unique_ptr<MoeLayer>> fits = make(wanted);
        ASSERT_TRUE(fits.has_value()) << fits.error().to_string();
        Tensor output = std::move(*Tensor::zeros(layer.dtype, {6, layer.hidden}));
        EXPECT_TRUE(
            (*fits)
                ->forward(input.view().rows(group.rank() * 6, 6), nullptr, output.view(), nullptr)
                .ok());
        const auto refusal = [&](const auto& change) {
          LatencyOptions other = wanted;
          change(other);
          return make(other).error().message();
        };
        EXPECT_EQ(refusal([](LatencyOptions& o) { o.max_tokens = 8; }),
                  "the given exchange has max_tokens 8, the layer needs 16");
        EXPECT_EQ(refusal([](LatencyOptions& o) { o.payload = BlockFormat::kMxfp8; }),
                  "the given exchange has payload mxfp8, the layer needs as it is");
        EXPECT_EQ(refusal([](LatencyOptions& o) { o.return_path = ReturnPath::kPush; }),
                  "the given exchange has return_path 1, the layer needs 0");
        ASSERT_TRUE(group.barrier().ok());
      },
      [&](GroupOptions& options) { options.dot_order = layer.order; });
}

TEST(LatencyLayerModes, HaveNames) {
  for (const MoeMode mode : {MoeMode::kThroughput, MoeMode::kLatency, MoeMode::kAuto}) {
    EXPECT_EQ(*parse_moe_mode(name_of(mode)), mode);
  }
  EXPECT_EQ(parse_moe_mode("fast").error().to_string(),
            "NotFound: no mode 'fast'; there are throughput, latency, auto");
}

}  // namespace
}  // namespace argosy
