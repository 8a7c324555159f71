// Messages keep their borders and bring descriptors; names are taken once and vanish; waits end.
#include "platform/local_socket.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "platform/shared_memory.h"

namespace argosy::platform {
namespace {

using std::chrono::milliseconds;

std::string name_of_test(const char* what) {
  return "argosy-test-" + std::to_string(own_pid()) + "-" + what;
}

struct Pair {
  LocalSocket client;
  LocalSocket server;
};

Pair connect_pair(const char* what) {
  LocalListener listener = std::move(LocalListener::listen(name_of_test(what))).value();
  Pair pair;
  pair.client = std::move(LocalSocket::connect(name_of_test(what))).value();
  pair.server = std::move(listener.accept()).value();
  return pair;
}

TEST(LocalSocket, CarriesBytesAndDescriptors) {
  Pair pair = connect_pair("carry");
  EXPECT_EQ(pair.server.peer().pid, own_pid());
  EXPECT_EQ(pair.server.peer().uid, own_uid());
  const Descriptor memory = std::move(create_shared_memory("test", 4096)).value();
  const std::array<std::byte, 3> bytes = {std::byte{1}, std::byte{2}, std::byte{3}};
  const std::array<int, 1> descriptors = {memory.get()};
  ASSERT_TRUE(pair.client.send(bytes, descriptors).ok());
  ASSERT_TRUE(pair.client.send(std::span(bytes).first(1), {}).ok());
  const Result<SocketMessage> first = pair.server.receive(64, Deadline::after(milliseconds(5000)));
  ASSERT_TRUE(first.has_value()) << first.error().to_string();
  EXPECT_EQ(first->bytes.size(), 3u);
  ASSERT_EQ(first->descriptors.size(), 1u);
  const SharedMapping a = std::move(SharedMapping::map(memory, 4096)).value();
  const SharedMapping b = std::move(SharedMapping::map(first->descriptors[0], 4096)).value();
  a.data()[5] = std::byte{9};
  EXPECT_EQ(b.data()[5], std::byte{9});
  const Result<SocketMessage> second = pair.server.receive(64, Deadline::after(milliseconds(5000)));
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->bytes.size(), 1u);
  EXPECT_TRUE(second->descriptors.empty());
}

TEST(LocalSocket, WaitsEnd) {
  Pair pair = connect_pair("end");
  EXPECT_EQ(pair.server.receive(8, Deadline::after(milliseconds(20))).error().code(),
            StatusCode::kTimeout);
  const std::array<std::byte, 16> long_message{};
  ASSERT_TRUE(pair.client.send(long_message, {}).ok());
  EXPECT_EQ(pair.server.receive(8, Deadline::after(milliseconds(5000))).error().code(),
            StatusCode::kCorruptData);
  pair.client = LocalSocket();
  EXPECT_EQ(pair.server.receive(8, Deadline::after(milliseconds(5000))).error().code(),
            StatusCode::kPeerLost);
  EXPECT_EQ(pair.server.send(long_message, {}).code(), StatusCode::kPeerLost);
}

TEST(LocalSocket, NamesAreTakenOnceAndVanish) {
  const std::string name = name_of_test("once");
  EXPECT_EQ(LocalSocket::connect(name).error().code(), StatusCode::kNotFound);
  {
    const LocalListener listener = std::move(LocalListener::listen(name)).value();
    EXPECT_EQ(LocalListener::listen(name).error().code(), StatusCode::kDisagree);
  }
  EXPECT_TRUE(LocalListener::listen(name).has_value());
  EXPECT_EQ(LocalListener::listen(std::string(200, 'x')).error().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace argosy::platform
