// Ranks that make different calls: never other numbers, an error on every rank, by name; where nothing was taken for something
// else, the group goes on (contract 3.9).
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "argosy/moe.h"
#include "moe/layer_cases.h"
#include "moe/training_step.h"
#include "support/naive_layer.h"
#include "support/run_group.h"

namespace argosy {
namespace {

using testing::layer_of;
using testing::NaiveLayer;
using testing::run_group;

const NaiveLayer& naive() {
  static const NaiveLayer layer = layer_of({DType::kBF16, DotOrder::kVdpbf16, false, false});
  return layer;
}

MoeOptions options_of(MoeMode mode) {
  MoeOptions options;
  options.mode = mode;
  options.hidden_dtype = naive().dtype;
  options.max_tokens = 64;
  options.training = true;
  return options;
}

Result<std::unique_ptr<MoeLayer>> make(Group& group, const MoeOptions& options) {
  return MoeLayer::create(
      group, naive().router,
      std::move(*testing::weights_for_rank(naive(), group.rank(), group.num_ranks())), options);
}

// A rank's rows and what it may call.
struct Caller {
  explicit Caller(Group& group)
      : input(testing::to_tensor(testing::rows_of(naive(), 6, group.rank()), naive().dtype)),
        output(std::move(*Tensor::zeros(naive().dtype, {6, naive().hidden}))) {}
  Status forward(MoeLayer& layer) { return layer.forward(x(), nullptr, output.view(), nullptr); }
  Status train(MoeLayer& layer) {
    return layer.forward_train(x(), nullptr, output.view(), &tape, nullptr);
  }
  Status backward(MoeLayer& layer) { return layer.backward(tape, x(), x(), {}, {}); }
  ConstTensorView x() const { return input.view(); }

  Tensor input, output;
  MoeTape tape;
};

void run(int num_ranks, const std::function<void(Group&)>& body) {
  run_group(num_ranks, body, [](GroupOptions& options) { options.dot_order = naive().order; });
}

void expect_error(const Status& status, StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_NE(status.message().find(text), std::string::npos) << status.to_string();
}

// Without words on one side the others' end of a training step would be taken for a call of its own.
TEST(MixedCalls, ForwardAndForwardTrainInLatencyMode) {
  run(3, [](Group& group) {
    const auto layer = std::move(*make(group, options_of(MoeMode::kLatency)));
    Caller caller(group);
    for (int repeat = 0; repeat < 2; ++repeat) {
      if (group.rank() == 0) {
        EXPECT_TRUE(caller.forward(*layer).ok());  // rows of one step are like those of the other
        expect_error(caller.forward(*layer), StatusCode::kInvalidArgument,
                     "rank 1 has \"a tape with");
      } else {
        expect_error(caller.train(*layer), StatusCode::kInvalidArgument, "rank 0 \"\"");
      }
      EXPECT_TRUE(caller.train(*layer).ok());
      EXPECT_TRUE(caller.backward(*layer).ok());
    }
  });
}

TEST(MixedCalls, ForwardAndBackwardInLatencyMode) {
  run(3, [](Group& group) {
    const auto layer = std::move(*make(group, options_of(MoeMode::kLatency)));
    Caller caller(group);
    ASSERT_TRUE(caller.train(*layer).ok());
    const Status status = group.rank() == 1 ? caller.forward(*layer) : caller.backward(*layer);
    expect_error(status, StatusCode::kInvalidArgument, "\"backward of call 1 of layer 1");
    EXPECT_TRUE(caller.backward(*layer).ok());
    EXPECT_TRUE(caller.forward(*layer).ok());
  });
}

TEST(MixedCalls, ForwardAndForwardTrainInThroughputMode) {
  run(2, [](Group& group) {
    const auto layer = std::move(*make(group, options_of(MoeMode::kThroughput)));
    Caller caller(group);
    const Status status = group.rank() == 1 ? caller.train(*layer) : caller.forward(*layer);
    expect_error(status, StatusCode::kInvalidArgument,
                 "rank 1 has \"forward_train of layer 1\", rank 0 \"forward of layer 1\"");
    EXPECT_TRUE(caller.train(*layer).ok());
    EXPECT_TRUE(caller.backward(*layer).ok());
  });
}

// Two layers over one exchange.
TEST(MixedCalls, LayersOfOneExchangeInThroughputMode) {
  run(2, [](Group& group) {
    MoeOptions options = options_of(MoeMode::kThroughput);
    ExchangeOptions wanted{naive().dtype, naive().hidden, naive().router.num_experts,
                           naive().router.top_k};
    wanted.training = true;
    options.exchange = std::move(*Exchange::create(group, wanted));
    const auto first = std::move(*make(group, options)), second = std::move(*make(group, options));
    Caller caller(group);
    expect_error(caller.forward(group.rank() == 0 ? *first : *second), StatusCode::kInvalidArgument,
                 "rank 1 has \"forward of layer 2\", rank 0 \"forward of layer 1\"");
    EXPECT_TRUE(caller.forward(*second).ok());
  });
}

TEST(MixedCalls, LayersOfOneExchangeInLatencyMode) {
  run(2, [](Group& group) {
    MoeOptions options = options_of(MoeMode::kLatency);
    LatencyOptions wanted{naive().dtype, naive().hidden, naive().router.num_experts,
                          naive().router.top_k};
    wanted.max_tokens = 64;
    wanted.training = true;
    options.latency = std::move(*LatencyExchange::create(group, wanted));
    const auto first = std::move(*make(group, options)), second = std::move(*make(group, options));
    Caller caller(group);
    EXPECT_TRUE(caller.forward(*first).ok());
    EXPECT_TRUE(caller.forward(*second).ok());
    const Status status = caller.forward(group.rank() == 0 ? *first : *second);
    // The first to see it says what it saw; the other may hear that the group is gone.
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("sent rows of layer"), std::string::npos) << status.to_string();
  });
}

// After a wait that failed, every later call says that the group is gone: not that its arguments are wrong.
TEST(MixedCalls, AfterATimeoutTheGroupsReasonComesBack) {
  run_group(
      2,
      [](Group& group) {
        const auto layer = std::move(*make(group, options_of(MoeMode::kThroughput)));
        Caller caller(group);
        ASSERT_TRUE(caller.train(*layer).ok());
        if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
        EXPECT_FALSE(caller.forward(*layer).ok());
        EXPECT_EQ(caller.forward(*layer).code(), StatusCode::kAborted);
        EXPECT_EQ(caller.backward(*layer).code(), StatusCode::kAborted);
        LatencyOptions wanted{naive().dtype, naive().hidden, naive().router.num_experts,
                              naive().router.top_k};
        EXPECT_EQ(LatencyExchange::create(group, wanted).error().code(), StatusCode::kAborted);
      },
      [](GroupOptions& options) {
        options.dot_order = naive().order;
        options.step_deadline = std::chrono::milliseconds(100);
      });
}

// The same where layers are made: the comparison of settings stays open on the rank that gave up.
TEST(MixedCalls, AfterATimeoutOfCreationTheGroupsReasonComesBack) {
  run_group(
      2,
      [](Group& group) {
        if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
        EXPECT_FALSE(make(group, options_of(MoeMode::kThroughput)).has_value());
        EXPECT_EQ(make(group, options_of(MoeMode::kThroughput)).error().code(),
                  StatusCode::kAborted);
      },
      [](GroupOptions& options) {
        options.dot_order = naive().order;
        options.step_deadline = std::chrono::milliseconds(100);
      });
}

TEST(MixedCalls, AnExchangeOnOneRankOnlyIsNamedAtOnce) {
  run(2, [](Group& group) {
    LatencyOptions wanted{naive().dtype, naive().hidden, naive().router.num_experts,
                          naive().router.top_k};
    wanted.max_tokens = 64;
    wanted.training = true;
    const std::shared_ptr<LatencyExchange> given =
        std::move(*LatencyExchange::create(group, wanted));
    MoeOptions options = options_of(MoeMode::kLatency);
    if (group.rank() == 1) options.latency = given;
    expect_error(make(group, options).error(), StatusCode::kDisagree, "layer.latency");
    options.latency = given;
    EXPECT_TRUE(make(group, options).has_value());
  });
}

}  // namespace
}  // namespace argosy
