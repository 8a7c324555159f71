// Latency mode over ranks as threads: the rows and sums of throughput mode, bit for bit, for every payload and both ways
// home; calls in flight, declined and failed calls, buffers poisoned.
#include "argosy/latency.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <mutex>

#include "argosy/bfloat16.h"
#include "argosy/quantise.h"
#include "exchange/exchange_rows.h"
#include "exchange/latency_state.h"
#include "support/routing_cases.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int64_t kMaxTokens = 32;  // of any routing case

LatencyOptions options_for(int64_t num_experts, int64_t top_k, ReturnPath path) {
  LatencyOptions options;
  options.dtype = DType::kF32;
  options.hidden = kHidden;
  options.num_experts = num_experts;
  options.top_k = top_k;
  options.max_tokens = kMaxTokens;
  options.return_path = path;
  return options;
}

std::unique_ptr<LatencyExchange> make(Group& group, const LatencyOptions& options) {
  Result<std::unique_ptr<LatencyExchange>> made = LatencyExchange::create(group, options);
  EXPECT_TRUE(made.has_value()) << made.error().to_string();
  return made.has_value() ? std::move(*made) : nullptr;
}

// One rank's call, its halves apart.
class OneCall {
 public:
  OneCall(LatencyExchange& exchange, const RoutingCase& one, int rank)
      : exchange_(exchange),
        one_(one),
        rank_(rank),
        routing_(one.routings[static_cast<size_t>(rank)]),
        hidden_(hidden_of(rank, routing_.num_tokens)) {}

  void issue_dispatch() {
    const ConstTensorView view(hidden_.data(), DType::kF32, {routing_.num_tokens, kHidden});
    const Result<uint64_t> call = exchange_.issue_dispatch({}, routing_, view);
    ASSERT_TRUE(call.has_value()) << call.error().to_string();
    call_ = *call;
  }

  // Rows in the contract's order; every expert writes its results.
  void run_experts() {
    const Status status = exchange_.wait_dispatch(call_, &rows_);
    ASSERT_TRUE(status.ok()) << status.to_string();
    const std::vector<Expected> expected = expected_rows(one_, rank_);
    ASSERT_EQ(rows_.rows.size(), expected.size());
    const int64_t first = exchange_.placement().begin(rank_);
    size_t next = 0;
    for (size_t group = 0; group < rows_.group_sizes.size(); ++group) {
      ASSERT_EQ(rows_.group_offsets[group], static_cast<int64_t>(next));
      for (int64_t i = 0; i < rows_.group_sizes[group]; ++i, ++next) {
        const Expected& want = expected[next];
        ASSERT_EQ(want.expert, first + static_cast<int64_t>(group));
        ASSERT_EQ(rows_.source_rank[next], want.source);
        ASSERT_EQ(rows_.source_token[next], want.token);
        const auto* row = reinterpret_cast<const float*>(rows_.rows[next]);
        auto* result = reinterpret_cast<float*>(rows_.results[next]);
        for (int64_t column = 0; column < kHidden; ++column) {
          ASSERT_EQ(row[column], element(want.source, want.token, column)) << "row " << next;
          result[column] = expert_value(row[column], want.expert);
        }
      }
    }
    ASSERT_TRUE(exchange_.issue_combine(call_).ok());
  }

  void finish() {
    std::vector<float> output(hidden_.size(), -7.0f);
    CombineInput input;
    input.topk_weights = ConstTensorView(routing_.topk_weights.values.data(), DType::kF32,
                                         {routing_.num_tokens, routing_.top_k});
    const TensorView view(output.data(), DType::kF32, {routing_.num_tokens, kHidden});
    const Status status = exchange_.wait_combine(call_, input, view);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_NO_FATAL_FAILURE(expect_sums(routing_, rank_, output));
  }

  uint64_t call() const { return call_; }

 private:
  LatencyExchange& exchange_;
  const RoutingCase& one_;
  const int rank_;
  const Routing& routing_;
  std::vector<float> hidden_;
  LatencyRows rows_;
  uint64_t call_ = 0;
};

void run_call(LatencyExchange& exchange, const RoutingCase& one, int rank) {
  OneCall call(exchange, one, rank);
  ASSERT_NO_FATAL_FAILURE(call.issue_dispatch());
  ASSERT_NO_FATAL_FAILURE(call.run_experts());
  ASSERT_NO_FATAL_FAILURE(call.finish());
}

struct Shape {
  int num_ranks;
  int64_t num_experts;
  int64_t top_k;
};

class LatencyRanks : public ::testing::TestWithParam<Shape> {};

// K09, K12: empty ranks, experts and calls; sizes up and down; prime and large R; E < R.
TEST_P(LatencyRanks, RowsAndSumsAreExact) {
  const Shape shape = GetParam();
  const auto seed = static_cast<uint64_t>(shape.num_ranks * 100 + shape.num_experts);
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  const std::vector<RoutingCase> cases =
      routing_cases(shape.num_ranks, shape.num_experts, shape.top_k, seed);
  for (const int threads : {1, 3}) {
    run_group(
        shape.num_ranks,
        [&](Group& group) {
          for (const ReturnPath path : {ReturnPath::kPull, ReturnPath::kPush}) {
            const std::unique_ptr<LatencyExchange> exchange =
                make(group, options_for(shape.num_experts, shape.top_k, path));
            ASSERT_NE(exchange, nullptr);
            for (int repeat = 0; repeat < 3; ++repeat) {
              for (const RoutingCase& one : cases) {
                SCOPED_TRACE(one.name);
                ASSERT_NO_FATAL_FAILURE(run_call(*exchange, one, group.rank()));
              }
            }
            ASSERT_TRUE(group.barrier().ok());
          }
        },
        [&](GroupOptions& options) { options.threads_per_rank = threads; });
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LatencyRanks,
                         ::testing::Values(Shape{1, 4, 2}, Shape{2, 4, 2}, Shape{3, 7, 3},
                                           Shape{4, 16, 4}, Shape{5, 2, 1}, Shape{7, 9, 9},
                                           Shape{8, 3, 2}, Shape{16, 33, 4}),
                         [](const auto& shape) {
                           return "R" + std::to_string(shape.param.num_ranks) + "E" +
                                  std::to_string(shape.param.num_experts) + "K" +
                                  std::to_string(shape.param.top_k);
                         });

// K11: no order of arrival that the endpoint allows, and no slow rank, changes a bit or hangs.
TEST(Latency, LateAndReorderedMessagesChangeNothing) {
  for (const uint64_t seed : {1u, 2u, 3u, 4u}) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const std::vector<RoutingCase> cases = routing_cases(4, 7, 2, seed);
    run_group(
        4,
        [&](Group& group) {
          const std::unique_ptr<LatencyExchange> exchange =
              make(group, options_for(7, 2, seed % 2 == 0 ? ReturnPath::kPull : ReturnPath::kPush));
          ASSERT_NE(exchange, nullptr);
          for (const RoutingCase& one : cases) {
            SCOPED_TRACE(one.name);
            ASSERT_NO_FATAL_FAILURE(run_call(*exchange, one, group.rank()));
          }
          ASSERT_TRUE(group.barrier().ok());
        },
        [&](GroupOptions& options) {
          options.simulate = fmt::format("seed={},delay_us=120,pause_us=60", seed);
        });
  }
}

// C108: three threads of a rank post to the same peers; every row comes once.
TEST(Latency, ThreadsOfARankPostTogether) {
  const std::vector<RoutingCase> cases = routing_cases(3, 7, 2, 11);
  run_group(
      3,
      [&](Group& group) {
        const std::unique_ptr<LatencyExchange> exchange =
            make(group, options_for(7, 2, ReturnPath::kPush));
        ASSERT_NE(exchange, nullptr);
        for (int round = 0; round < 20; ++round) {
          for (const RoutingCase& one : cases) {
            SCOPED_TRACE(one.name);
            ASSERT_NO_FATAL_FAILURE(run_call(*exchange, one, group.rank()));
          }
        }
        ASSERT_TRUE(group.barrier().ok());
      },
      [](GroupOptions& options) { options.threads_per_rank = 3; });
}

// Two micro-batches and more overlap: all are dispatched before the experts of the first run.
TEST(Latency, SeveralInFlight) {
  const std::vector<RoutingCase> cases = routing_cases(3, 4, 2, 8);
  for (const int64_t in_flight : {1, 2, 3, 8}) {
    run_group(3, [&](Group& group) {
      LatencyOptions options = options_for(4, 2, ReturnPath::kPull);
      options.num_in_flight = in_flight;
      const std::unique_ptr<LatencyExchange> exchange = make(group, options);
      ASSERT_NE(exchange, nullptr);
      for (size_t first = 0; first < 30; first += static_cast<size_t>(in_flight)) {
        std::vector<std::unique_ptr<OneCall>> calls;
        for (size_t i = 0; i < static_cast<size_t>(in_flight); ++i) {
          calls.push_back(std::make_unique<OneCall>(*exchange, cases[(first + i) % cases.size()],
                                                    group.rank()));
          ASSERT_NO_FATAL_FAILURE(calls.back()->issue_dispatch());
        }
        Routing none;
        EXPECT_EQ(exchange->issue_dispatch({}, none, {}).error().code(),
                  StatusCode::kInvalidArgument);
        // The last one first: nothing ties the calls to each other.
        for (size_t i = calls.size(); i-- > 0;) ASSERT_NO_FATAL_FAILURE(calls[i]->run_experts());
        for (const auto& call : calls) ASSERT_NO_FATAL_FAILURE(call->finish());
      }
      ASSERT_TRUE(group.barrier().ok());
    });
  }
}

TEST(Latency, ArrivalIsSeenWithoutWaiting) {
  const RoutingCase one = routing_cases(2, 4, 2, 3)[0];
  run_group(2, [&](Group& group) {
    const std::unique_ptr<LatencyExchange> exchange =
        make(group, options_for(4, 2, ReturnPath::kPull));
    ASSERT_NE(exchange, nullptr);
    EXPECT_FALSE(exchange->dispatch_arrived(1));
    OneCall call(*exchange, one, group.rank());
    if (group.rank() == 1) {
      ASSERT_TRUE(group.barrier().ok());  // rank 0 has sent, and seen that nothing came
    }
    ASSERT_NO_FATAL_FAILURE(call.issue_dispatch());
    if (group.rank() == 0) {
      EXPECT_FALSE(exchange->dispatch_arrived(call.call()));
      ASSERT_TRUE(group.barrier().ok());
    }
    ASSERT_TRUE(group.barrier().ok());
    EXPECT_TRUE(exchange->dispatch_arrived(call.call()));
    ASSERT_NO_FATAL_FAILURE(call.run_experts());
    ASSERT_TRUE(group.barrier().ok());
    EXPECT_TRUE(exchange->results_arrived(call.call()));
    ASSERT_NO_FATAL_FAILURE(call.finish());
    ASSERT_TRUE(group.barrier().ok());
  });
}

// K19, C184 to C186: what comes is quantised here and decoded there, byte for byte, T = 0 and partial blocks included, also
// for rows that stay on their rank.
TEST(Latency, QuantisedPayloadEqualsLocalRoundTrip) {
  for (const char* name : {"bf16", "fp8_128", "fp8_128_e8m0", "mxfp8"}) {
    for (const int64_t hidden : {1, 96, 128, 256, 300}) {
      SCOPED_TRACE(fmt::format("{} of {}", name, hidden));
      const std::vector<RoutingCase> cases = routing_cases(3, 8, 3, 17);
      run_group(3, [&](Group& group) {
        LatencyOptions options = options_for(8, 3, ReturnPath::kPull);
        options.dtype = DType::kBF16;
        options.hidden = hidden;
        options.payload = *parse_payload(name);
        const std::unique_ptr<LatencyExchange> exchange = make(group, options);
        ASSERT_NE(exchange, nullptr);
        const PayloadLayout& payload = exchange->payload();
        const auto value_of = [&](int rank, int64_t token, int64_t column) {
          const float sign = column % 3 == 0 ? -1.0f : 1.0f;
          return BFloat16::from_float(sign * (0.37f + static_cast<float>(rank + 1)) *
                                      std::exp2(static_cast<float>(token % 9 - column % 5)));
        };
        const auto row_of = [&](int rank, int64_t token) {
          std::vector<BFloat16> row;
          for (int64_t i = 0; i < hidden; ++i) row.push_back(value_of(rank, token, i));
          return row;
        };
        for (const RoutingCase& one : cases) {
          const Routing& routing = one.routings[static_cast<size_t>(group.rank())];
          std::vector<BFloat16> hidden_rows;
          for (int64_t token = 0; token < routing.num_tokens; ++token) {
            const std::vector<BFloat16> row = row_of(group.rank(), token);
            hidden_rows.insert(hidden_rows.end(), row.begin(), row.end());
          }
          std::vector<BFloat16> output(hidden_rows.size());
          const Result<uint64_t> call = exchange->issue_dispatch(
              {}, routing,
              ConstTensorView(hidden_rows.data(), DType::kBF16, {routing.num_tokens, hidden}));
          ASSERT_TRUE(call.has_value()) << call.error().to_string();
          LatencyRows rows;
          ASSERT_TRUE(exchange->wait_dispatch(*call, &rows).ok());
          ASSERT_EQ(rows.rows.size(), expected_rows(one, group.rank()).size());
          for (size_t i = 0; i < rows.rows.size(); ++i) {
            std::vector<BFloat16> want = row_of(rows.source_rank[i], rows.source_token[i]);
            std::vector<BFloat16> got(want.size());
            if (payload.is_quantised()) {
              Result<QuantisedTensor> local =
                  QuantisedTensor::create(*quantised_layout(payload.format, 1, hidden));
              ASSERT_TRUE(quantise({}, ConstTensorView(want.data(), DType::kBF16, {1, hidden}),
                                   local->view())
                              .ok());
              ASSERT_TRUE(
                  dequantise({}, local->view(), TensorView(want.data(), DType::kBF16, {1, hidden}))
                      .ok());
            }
            decode_payload(payload, rows.rows[i], reinterpret_cast<std::byte*>(got.data()));
            ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size() * 2), 0) << "row " << i;
            std::memcpy(rows.results[i], got.data(), got.size() * 2);
          }
          ASSERT_TRUE(exchange->issue_combine(*call).ok());
          CombineInput input;
          input.topk_weights = ConstTensorView(routing.topk_weights.values.data(), DType::kF32,
                                               {routing.num_tokens, routing.top_k});
          ASSERT_TRUE(exchange
                          ->wait_combine(
                              *call, input,
                              TensorView(output.data(), DType::kBF16, {routing.num_tokens, hidden}))
                          .ok());
        }
        ASSERT_TRUE(group.barrier().ok());
      });
    }
  }
}

// What a rank gets wrong, every rank gets as the same error; the next call works.
TEST(Latency, BadInputOfOneRankIsEveryRanksErrorAndTheGroupGoesOn) {
  const RoutingCase one = routing_cases(3, 4, 2, 3)[0];
  std::mt19937_64 random(1);
  const Routing too_many =
      draw_routing(random, kMaxTokens + 1, 4, 2, 0.0, [](int64_t) { return int64_t{-1}; });
  Routing other_k = one.routings[1];
  other_k.top_k = 1;
  Routing twice = one.routings[1];
  twice.topk_idx[3] = twice.topk_idx[2];
  Routing outside = one.routings[1];
  outside.topk_idx[5] = 4;
  struct Bad {
    const Routing* routing;
    Status local;
    DType dtype;
    std::string text;
  };
  const std::vector<Bad> bads{
      {&too_many, {}, DType::kF32, "rank 1: 33 tokens, max_tokens is 32"},
      {&other_k,
       {},
       DType::kF32,
       "rank 1: routing has 4 experts and top_k 1, the exchange 4 and 2"},
      {&twice, {}, DType::kF32, "rank 1: "},
      {&outside, {}, DType::kF32, "rank 1: "},
      {&one.routings[1], {}, DType::kBF16, "rank 1: hidden is BF16 [16, 5]"},
      {&one.routings[1], Status(StatusCode::kNonFinite, "logit of token 3 is NaN"), DType::kF32,
       "rank 1: logit of token 3 is NaN"}};
  run_group(3, [&](Group& group) {
    const std::unique_ptr<LatencyExchange> exchange =
        make(group, options_for(4, 2, ReturnPath::kPull));
    ASSERT_NE(exchange, nullptr);
    std::mutex mutex;
    for (const Bad& bad : bads) {
      const bool is_bad = group.rank() == 1;
      const Routing& routing =
          is_bad ? *bad.routing : one.routings[static_cast<size_t>(group.rank())];
      const std::vector<float> hidden = hidden_of(group.rank(), routing.num_tokens);
      const Result<uint64_t> call =
          exchange->issue_dispatch(is_bad ? bad.local : Status(), routing,
                                   ConstTensorView(hidden.data(), is_bad ? bad.dtype : DType::kF32,
                                                   {routing.num_tokens, kHidden}));
      ASSERT_TRUE(call.has_value()) << call.error().to_string();
      LatencyRows rows;
      const Status status = exchange->wait_dispatch(*call, &rows);
      EXPECT_EQ(status.message().substr(0, bad.text.size()), bad.text);
      EXPECT_EQ(status.code(), bad.local.ok() ? StatusCode::kInvalidArgument : bad.local.code());
      EXPECT_FALSE(exchange->issue_combine(*call).ok());
      for (int i = 0; i < 3; ++i) {
        ASSERT_NO_FATAL_FAILURE(run_call(*exchange, one, group.rank()));
      }
    }
    ASSERT_TRUE(group.barrier().ok());
  });
}

TEST(Latency, DeclinedAndUnfinishedCallsAreEveryRanksKnowledge) {
  const RoutingCase one = routing_cases(3, 4, 2, 3)[0];
  run_group(3, [&](Group& group) {
    const std::unique_ptr<LatencyExchange> exchange =
        make(group, options_for(4, 2, ReturnPath::kPull));
    ASSERT_NE(exchange, nullptr);
    const Routing& routing = one.routings[static_cast<size_t>(group.rank())];
    const std::vector<float> hidden = hidden_of(group.rank(), routing.num_tokens);
    const ConstTensorView view(hidden.data(), DType::kF32, {routing.num_tokens, kHidden});
    for (int repeat = 0; repeat < 5; ++repeat) {
      LatencyRows rows;
      Result<uint64_t> call =
          exchange->issue_dispatch({}, routing, view, {.decline = group.rank() == 2});
      ASSERT_TRUE(call.has_value());
      ASSERT_TRUE(exchange->wait_dispatch(*call, &rows).ok());
      EXPECT_TRUE(rows.declined);
      EXPECT_TRUE(rows.rows.empty());
      call = exchange->issue_dispatch({}, routing, view, {.more = group.rank() == 1});
      ASSERT_TRUE(call.has_value());
      ASSERT_TRUE(exchange->wait_dispatch(*call, &rows).ok());
      EXPECT_FALSE(rows.declined);
      EXPECT_TRUE(rows.more);
      ASSERT_TRUE(exchange->issue_combine(*call).ok());
      std::vector<float> output(hidden.size());
      CombineInput input;
      input.topk_weights = ConstTensorView(routing.topk_weights.values.data(), DType::kF32,
                                           {routing.num_tokens, routing.top_k});
      ASSERT_TRUE(
          exchange
              ->wait_combine(*call, input,
                             TensorView(output.data(), DType::kF32, {routing.num_tokens, kHidden}))
              .ok());
    }
    ASSERT_TRUE(group.barrier().ok());
  });
}

// K12, C115: what the ranks must share is compared when the exchange is made.
TEST(Latency, DifferentOptionsAreNamed) {
  const auto expect_named = [](const std::string& field, const auto& change) {
    run_group(2, [&](Group& group) {
      LatencyOptions options = options_for(4, 2, ReturnPath::kPull);
      options.dtype = DType::kBF16;
      if (group.rank() == 1) change(options);
      const Status status = LatencyExchange::create(group, options).error();
      EXPECT_EQ(status.code(), StatusCode::kDisagree) << field;
      EXPECT_NE(status.message().find(field), std::string::npos) << status.to_string();
    });
  };
  expect_named("max_tokens", [](LatencyOptions& options) { options.max_tokens = 8; });
  expect_named("payload", [](LatencyOptions& options) { options.payload = BlockFormat::kMxfp8; });
  expect_named("hidden", [](LatencyOptions& options) { options.hidden = 6; });
  expect_named("top_k", [](LatencyOptions& options) { options.top_k = 1; });
  expect_named("num_in_flight", [](LatencyOptions& options) { options.num_in_flight = 3; });
  expect_named("training", [](LatencyOptions& options) { options.training = true; });
  expect_named("return_path",
               [](LatencyOptions& options) { options.return_path = ReturnPath::kPush; });
}

// A late peer is waited for; one beyond the deadline is named.
TEST(Latency, LatePeer) {
  const RoutingCase one = routing_cases(3, 4, 2, 3)[0];
  run_group(
      3,
      [&](Group& group) {
        const std::unique_ptr<LatencyExchange> exchange =
            make(group, options_for(4, 2, ReturnPath::kPull));
        ASSERT_NE(exchange, nullptr);
        if (group.rank() == 2) sleep_ms(60);
        ASSERT_NO_FATAL_FAILURE(run_call(*exchange, one, group.rank()));
        ASSERT_TRUE(group.barrier().ok());
        if (group.rank() == 2) {
          while (group.health().ok()) sleep_ms(5);
          return;
        }
        OneCall call(*exchange, one, group.rank());
        ASSERT_NO_FATAL_FAILURE(call.issue_dispatch());
        LatencyRows rows;
        const Status status = exchange->wait_dispatch(call.call(), &rows);
        EXPECT_TRUE(status.code() == StatusCode::kTimeout || status.code() == StatusCode::kAborted)
            << status.to_string();
        EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.to_string();
        EXPECT_EQ(exchange->stats().straggler(), 2);
      },
      [&](GroupOptions& options) {
        options.step_deadline = std::chrono::milliseconds(kUnderSanitizer ? 5000 : 1500);
      });
}

// Untrusted bytes: a slot, flag or tag that no rank writes ends the group by name and reads nothing beyond the window.
TEST(Latency, CorruptSlotsAreNamed) {
  struct Fault {
    int64_t offset;
    uint32_t value;
    std::string text;
  };
  const std::vector<Fault> faults{
      {0, 77, "it is of call 77"}, {8, 0, "payload tag is"},
      {16, 32, "token 32 with"},   {16, 0xFFFFFFFF, "token -1 with"},
      {20, 0, "with 0 experts"},   {20, 3, "with 3 experts, at most 31 and 2"},
      {24, 2, "expert 2 of 2"},    {26, 2, "and k 2 of 2"}};
  const RoutingCase one = routing_cases(2, 4, 2, 3)[0];
  for (const Fault& fault : faults) {
    run_group(2, [&](Group& group) {
      Result<std::unique_ptr<LatencyExchange::State>> state = LatencyExchange::State::create(
          group.endpoint(), group.pool(), options_for(4, 2, ReturnPath::kPull), group.id(),
          group.step_deadline());
      ASSERT_TRUE(state.has_value());
      LatencyExchange::State& inner = **state;
      const Routing& routing = one.routings[static_cast<size_t>(group.rank())];
      const std::vector<float> hidden = hidden_of(group.rank(), routing.num_tokens);
      const Result<uint64_t> call = inner.issue_dispatch(
          {}, routing, ConstTensorView(hidden.data(), DType::kF32, {routing.num_tokens, kHidden}),
          {});
      ASSERT_TRUE(call.has_value());
      const Status all_sent = group.barrier();
      LatencyRows rows;
      if (group.rank() == 1) return;  // whose barrier rank 0 may already have ended
      ASSERT_TRUE(all_sent.ok());
      std::byte* const slot = inner.own(inner.slots, inner.layout.slot(inner.set_of(1), 1, 3));
      std::memcpy(slot + fault.offset, &fault.value, fault.offset < 24 ? 4 : 2);
      const Status status = inner.wait_dispatch(*call, &rows);
      EXPECT_EQ(status.code(), StatusCode::kCorruptData) << fault.text;
      EXPECT_NE(status.message().find("slot 3 from rank 1"), std::string::npos);
      EXPECT_NE(status.message().find(fault.text), std::string::npos) << status.to_string();
    });
  }
}

TEST(Latency, SizesAreWhatIsAskedForAndBadOptionsAreNamed) {
  LatencyOptions options;
  options.dtype = DType::kBF16;
  options.hidden = 7168;
  options.num_experts = 256;
  options.top_k = 8;
  options.max_tokens = 128;
  options.num_in_flight = 1;
  Result<ExchangeSize> size = size_exchange(options, 8);
  ASSERT_TRUE(size.has_value()) << size.error().to_string();
  EXPECT_EQ(size->round_rows, 8 * 128);
  EXPECT_EQ(size->rows_bytes, int64_t{8} * 128 * (64 + 14336));  // R*M, not E*M
  EXPECT_EQ(size->results_bytes, int64_t{8} * 128 * 8 * 14336);
  options.return_path = ReturnPath::kPush;
  EXPECT_EQ(size_exchange(options, 8)->results_bytes, int64_t{128} * 8 * 14336);  // K*M
  options.payload = BlockFormat::kE4M3Row128;
  EXPECT_EQ(size_exchange(options, 8)->rows_bytes, int64_t{8} * 128 * (64 + 7168 + 256));
  LatencyOptions training = options;
  training.training = true;  // a number for each entry of a header, one behind each result
  EXPECT_EQ(size_exchange(training, 8)->rows_bytes, int64_t{8} * 128 * (128 + 7168 + 256));
  EXPECT_EQ(size_exchange(training, 8)->results_bytes, int64_t{128} * 8 * (14336 + 64));
  const auto message = [&](const auto& change) {
    LatencyOptions changed = options;
    change(changed);
    return size_exchange(changed, 8).error().to_string();
  };
  EXPECT_EQ(message([](LatencyOptions& o) { o.max_tokens = 0; }),
            "InvalidArgument: max_tokens is 0, must be in [1, 2^20]");
  EXPECT_EQ(message([](LatencyOptions& o) { o.num_in_flight = 9; }),
            "InvalidArgument: num_in_flight is 9, must be in [1, 8]");
  EXPECT_EQ(message([](LatencyOptions& o) { o.top_k = 257; }),
            "InvalidArgument: top_k is 257, must be in [1, num_experts = 256]");
  EXPECT_EQ(message([](LatencyOptions& o) { o.payload = BlockFormat::kNvfp4; }).substr(0, 11),
            "Unsupported");
  EXPECT_EQ(
      message([](LatencyOptions& o) { o.num_experts = (1 << 19) + 1; }),
      "InvalidArgument: top_k 8 and 524289 experts over 8 ranks: at most 65536 each fit a slot");
  const std::string overflow = message([](LatencyOptions& o) {
    o.max_tokens = 1 << 20;
    o.hidden = 2147483647;
    o.num_experts = 1 << 18;
    o.top_k = 1 << 15;
    o.payload = BlockFormat::kUnset;
  });
  EXPECT_NE(overflow.find("do not fit int64"), std::string::npos) << overflow;
}

}  // namespace
}  // namespace argosy
