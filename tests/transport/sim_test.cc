// Trouble on purpose: its words, its order, its steps. The endpoint's promises under it: endpoint_test.cc.
#include "transport/sim/sim.h"

#include <gtest/gtest.h>

#include <mutex>
#include <stdexcept>

#include "transport/backends.h"
#include "transport/sim/courier.h"

namespace argosy::transport::sim {
namespace {

TEST(Trouble, WordsComeBackAsTheyWere) {
  for (const char* const text :
       {"seed=7,delay_us=200,pause_us=50,kill=1@12", "seed=0,stop=0@0", "seed=1,throw=1023@5",
        "seed=18446744073709551615,pause=2@3:250", "seed=3,delay_us=1"}) {
    const Result<Trouble> trouble = parse(text);
    ASSERT_TRUE(trouble.has_value()) << trouble.error().to_string();
    EXPECT_EQ(to_string(*trouble), text);
  }
  EXPECT_EQ(to_string(parse("").value()), "seed=0");
}

TEST(Trouble, WrongWordsAreNamed) {
  for (const char* const word :
       {"speed=7", "seed", "seed=", "seed=-1", "seed=18446744073709551616", "delay_us=1e3",
        "delay_us=10000001", "kill=1", "kill=1@", "kill=@1", "kill=1024@1", "kill=1@2:3",
        "kill=1@x", "pause=1@2", "pause=1@2:", "pause=1@2:3600001", "stop=1@9223372036854775808",
        " seed=1"}) {
    const Status status = parse(std::string("pause_us=1,") + word).error();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << word;
    EXPECT_NE(status.message().find("'" + std::string(word) + "'"), std::string::npos)
        << status.message();
  }
  EXPECT_FALSE(parse("seed=1,,kill=1@2").has_value());
}

TEST(Trouble, NothingIsSaidTwice) {
  for (const auto& [text, told] :
       {std::pair{"kill=1@2,stop=1@3", "'stop=1@3' is a second fault"},
        {"seed=1,seed=1", "'seed=1' is a second seed"},
        {"delay_us=1,seed=1,delay_us=2", "'delay_us=2' is a second delay_us"}}) {
    const Status status = parse(text).error();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(told), std::string::npos) << status.message();
  }
}

TEST(Trouble, FitsTheGroup) {
  EXPECT_TRUE(check(parse("kill=3@1").value(), 4, true).ok());
  EXPECT_TRUE(check(parse("throw=3@1").value(), 4, false).ok());
  EXPECT_TRUE(check(parse("seed=1,delay_us=5").value(), 1, false).ok());
  EXPECT_FALSE(check(parse("kill=4@1").value(), 4, true).ok());
  EXPECT_FALSE(check(parse("kill=3@1").value(), 4, false).ok());
  EXPECT_FALSE(check(parse("stop=0@1").value(), 4, false).ok());
}

TEST(Courier, KeepsTheOrderOfAPeerAndOvertakesBetweenPeers) {
  std::mutex mutex;
  std::vector<int> order;
  const auto note = [&](int what) {
    return [&order, &mutex, what] {
      const std::lock_guard lock(mutex);
      order.push_back(what);
    };
  };
  Courier courier(2);
  courier.send(0, std::chrono::seconds(3600), note(0));
  courier.send(0, std::chrono::seconds(0), note(1));
  courier.send(1, std::chrono::seconds(0), note(2));
  const auto count = [&] {
    const std::lock_guard lock(mutex);
    return order.size();
  };
  while (count() < 1) std::this_thread::yield();
  courier.drain();
  EXPECT_EQ(order, (std::vector<int>{2, 0, 1}));
}

TEST(Courier, DeliversAllBeforeItGoes) {
  int num_delivered = 0;  // the courier's thread has ended when it is read
  {
    Courier courier(3);
    for (int i = 0; i < 30; ++i) {
      courier.send(i % 3, std::chrono::seconds(3600), [&] { ++num_delivered; });
    }
  }
  EXPECT_EQ(num_delivered, 30);
}

// The step counts every call but free, from 0, and hits the one rank alone.
TEST(SimEndpoint, ThrowsAtItsStep) {
  for (const int64_t step : {0, 1, 2, 3}) {
    Trouble trouble;
    trouble.fault = Fault::kThrow;
    trouble.rank = 1;
    trouble.step = step;
    const std::shared_ptr<InprocWorld> world = InprocWorld::create(2).value();
    testing::run_ranks(2, [&](int rank) {
      const std::unique_ptr<Endpoint> endpoint =
          wrap(inproc::attach(world, rank, 2, ample()).value(), trouble);
      int64_t num_calls = 0;
      try {
        const Result<Window> window = endpoint->alloc(64, ample());
        if (window.has_value()) {
          ++num_calls;
          const uint64_t value = 1;
          endpoint->put(0, *window, 8 + 8 * rank, &value, sizeof(value));  // a place of its own
          ++num_calls;
          endpoint->signal(0, *window, 0, 1);
          ++num_calls;
          (void)endpoint->barrier(ample());
          ++num_calls;
        }
      } catch (const std::runtime_error& error) {
        EXPECT_EQ(rank, 1);
        EXPECT_TRUE(contains(error.what(), "throw=1@" + std::to_string(step))) << error.what();
      }
      if (rank == 1) {
        EXPECT_EQ(num_calls, step);
      }
    });
  }
}

TEST(SimEndpoint, APauseDelaysAndErrorsNameTheTrouble) {
  const Trouble trouble = parse("seed=5,pause=1@0:400").value();
  const std::shared_ptr<InprocWorld> world = InprocWorld::create(2).value();
  testing::run_ranks(2, [&](int rank) {
    const std::unique_ptr<Endpoint> endpoint =
        wrap(inproc::attach(world, rank, 2, ample()).value(), trouble);
    if (rank == 1) {
      EXPECT_FALSE(endpoint->barrier(ample()).ok());
      return;
    }
    const Status status = endpoint->barrier(Deadline::after(milliseconds(100)));
    EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
    EXPECT_TRUE(contains(status.message(), "(simulated: seed=5,pause=1@0:400; step 0 of rank 0)"))
        << status.to_string();
  });
}

// Every decision follows from seed, rank and step: the order of arrival at a third rank differs by seed.
TEST(SimEndpoint, SeedsGiveDifferentOrders) {
  std::set<std::string> orders;
  for (int seed = 0; seed < 8; ++seed) {
    Trouble trouble;
    trouble.seed = static_cast<uint64_t>(seed);
    trouble.max_delay = std::chrono::milliseconds(40);
    const std::shared_ptr<InprocWorld> world = InprocWorld::create(4).value();
    std::mutex mutex;
    std::string order;
    testing::run_ranks(4, [&](int rank) {
      const std::unique_ptr<Endpoint> endpoint =
          wrap(inproc::attach(world, rank, 4, ample()).value(), trouble);
      const Window window = endpoint->alloc(64, ample()).value();
      if (rank == 0) {
        for (int peer = 1; peer < 4; ++peer) endpoint->signal(peer, window, 0, 1);
        // A barrier hurries what is on its way: only when all have been seen.
        const WaitItem seen[] = {{1, 8, 1}, {2, 16, 1}, {3, 24, 1}};
        ASSERT_TRUE(endpoint->wait_all(window, seen, ample(), "seen").ok());
      } else {
        const WaitItem item{0, 0, 1};
        ASSERT_TRUE(endpoint->wait_all(window, {&item, 1}, ample(), "signal").ok());
        const std::lock_guard lock(mutex);
        order += std::to_string(rank);
        endpoint->signal(0, window, 8 * rank, 1);
      }
      ASSERT_TRUE(endpoint->barrier(ample()).ok());
    });
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 1u);
}

}  // namespace
}  // namespace argosy::transport::sim
