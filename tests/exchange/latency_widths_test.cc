// Latency mode: exchanges of several widths after one another on one group.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "argosy/latency.h"
#include "support/run_group.h"

namespace argosy {
namespace {

// C110: hidden 64, then 128, then 64 on one group; rows of another width than the exchange's are refused.
TEST(LatencyWidths, ExchangesOfSeveralWidthsOnOneGroup) {
  testing::run_group(2, [](Group& group) {
    Routing routing;
    routing.num_tokens = 3;
    routing.num_experts = 2;
    routing.top_k = 1;
    routing.topk_idx.assign(3, 1 - group.rank());  // everything crosses
    for (const int64_t hidden : {64, 128, 64}) {
      LatencyOptions options;
      options.dtype = DType::kF32;
      options.hidden = hidden;
      options.num_experts = 2;
      options.top_k = 1;
      options.max_tokens = 3;
      const std::unique_ptr<LatencyExchange> exchange =
          LatencyExchange::create(group, options).value();
      std::vector<float> values(static_cast<size_t>(3 * hidden));
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
      for (const int64_t width : {hidden, hidden / 2, hidden}) {
        const ConstTensorView rows(values.data(), DType::kF32, {3, width});
        const uint64_t call = exchange->issue_dispatch({}, routing, rows).value();
        LatencyRows received;
        const Status status = exchange->wait_dispatch(call, &received);
        if (width != hidden) {
          EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
          EXPECT_NE(status.message().find(fmt::format("[3, {}]", hidden)), std::string::npos);
          continue;
        }
        ASSERT_TRUE(status.ok()) << status.to_string();
        ASSERT_EQ(received.rows.size(), 3u);
        for (size_t row = 0; row < 3; ++row) {
          EXPECT_EQ(
              std::memcmp(received.rows[row], values.data() + row * static_cast<size_t>(hidden),
                          static_cast<size_t>(hidden) * sizeof(float)),
              0);
        }
        ASSERT_TRUE(exchange->issue_combine(call).ok());
        ASSERT_TRUE(group.barrier().ok());
        std::vector<float> sums(values.size()), weights(3, 0.0f);
        CombineInput input;
        input.topk_weights = ConstTensorView(weights.data(), DType::kF32, {3, 1});
        ASSERT_TRUE(
            exchange->wait_combine(call, input, {sums.data(), DType::kF32, {3, hidden}}).ok());
      }
      ASSERT_TRUE(group.barrier().ok());
    }
  });
}

}  // namespace
}  // namespace argosy
