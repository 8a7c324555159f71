// Zip archives of arrays: numpy's files, our own bytes, and every lie of an archive.
#include "io/npz.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "io/npy.h"
#include "io/temp_folder.h"

namespace argosy::io {
namespace {

using test::expect_error;

constexpr int64_t kMost = 1 << 20;

std::string numpy_file(const char* name) {
  return test::read_bytes(std::string(ARGOSY_TESTDATA) + "/router/" + name);
}

TEST(Npz, ReadsTheSameArraysStoredAndDeflated) {
  const std::string stored = numpy_file("trace.npz");
  const std::string deflated = numpy_file("trace_deflated.npz");
  ASSERT_LT(deflated.size(), stored.size());
  const auto a = NpzReader::open(stored);
  const auto b = NpzReader::open(deflated);
  ASSERT_TRUE(a.has_value() && b.has_value());
  for (const char* const name : {"topk_idx", "domain", "code_share"}) {
    const auto x = a->read(name, kMost);
    const auto y = b->read(name, kMost);
    ASSERT_TRUE(x.has_value()) << x.error().message();
    ASSERT_TRUE(y.has_value()) << y.error().message();
    EXPECT_EQ(x->shape, y->shape);
    EXPECT_EQ(x->dtype, y->dtype);
    EXPECT_EQ(x->data, y->data);
  }
  EXPECT_EQ(a->read("topk_idx", kMost)->shape, std::vector<int64_t>({4, 3, 32, 8}));
  EXPECT_EQ(a->read("topk_idx", kMost)->dtype, DType::kI16);
  EXPECT_EQ(a->read("domain", kMost)->dtype, DType::kI8);
  expect_error(a->read("nobody", kMost), StatusCode::kNotFound, {"nobody", "topk_idx", "domain"});
  expect_error(b->read("topk_idx", 100), StatusCode::kUnsupported, {"topk_idx", "100"});
}

std::string one_array() {
  static const float values[] = {1, 2, 3};
  const auto npz =
      make_npz(std::vector<NpySource>{{"a", DType::kF32, {3}, std::as_bytes(std::span(values))}});
  return npz.has_value() ? *npz : "";
}

// numpy wants the header to end at a multiple of 64 and in a new line.
TEST(Npz, WritesWhatNumpyWrites) {
  const std::string npz = one_array();
  const size_t at = npz.find("\x93NUMPY");
  ASSERT_NE(at, std::string::npos);
  uint16_t length = 0;
  std::memcpy(&length, npz.data() + at + 8, 2);
  EXPECT_EQ((10 + length) % 64, 0);
  EXPECT_EQ(npz.substr(at + 10, 57), "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }");
  EXPECT_EQ(npz[at + 9 + length], '\n');
  EXPECT_EQ(npz.substr(30, 5), "a.npy");
  EXPECT_EQ(npz, one_array());
  const auto array = NpzReader::open(npz)->read("a", kMost);
  ASSERT_TRUE(array.has_value()) << array.error().message();
  EXPECT_EQ(array->shape, std::vector<int64_t>({3}));
  expect_error(make_npz(std::vector<NpySource>{{"a", DType::kBF16, {0}, {}}}),
               StatusCode::kUnsupported, {"BF16"});
}

// Directory entry of the only array: "PK\1\2".
size_t entry_of(const std::string& npz) { return npz.find("PK\x01\x02"); }
size_t end_of(const std::string& npz) { return npz.size() - 22; }

template <typename T>
void put(std::string* bytes, size_t at, T value) {
  std::memcpy(bytes->data() + at, &value, sizeof value);
}

void expect_lie(const std::function<void(std::string*)>& change, StatusCode code,
                std::initializer_list<std::string_view> words) {
  std::string npz = one_array();
  change(&npz);
  const auto reader = NpzReader::open(npz);
  if (!reader.has_value()) return expect_error(reader, code, words);
  expect_error(reader->read("a", kMost), code, words);
}

TEST(Npz, EveryLieIsNamed) {
  const StatusCode corrupt = StatusCode::kCorruptData;
  const StatusCode unsupported = StatusCode::kUnsupported;
  expect_lie([](std::string* z) { z->resize(10); }, corrupt, {"too short"});
  expect_lie([](std::string* z) { z->resize(z->size() - 1); }, corrupt, {"no end"});
  expect_lie([](std::string* z) { put<uint32_t>(z, end_of(*z) + 16, 1u << 30); }, corrupt,
             {"leaves"});
  expect_lie([](std::string* z) { put<uint32_t>(z, end_of(*z) + 16, ~0u); }, corrupt, {"zip64"});
  expect_lie([](std::string* z) { put<uint16_t>(z, end_of(*z) + 10, 2); }, corrupt, {"cut short"});
  expect_lie([](std::string* z) { put<uint16_t>(z, end_of(*z) + 10, 5000); }, corrupt,
             {"5000", "1024"});
  expect_lie([](std::string* z) { put<uint16_t>(z, entry_of(*z) + 28, 60000); }, corrupt,
             {"cut short"});
  expect_lie([](std::string* z) { put<uint16_t>(z, entry_of(*z) + 8, 1); }, unsupported,
             {"encrypted"});
  expect_lie([](std::string* z) { put<uint16_t>(z, entry_of(*z) + 10, 12); }, unsupported,
             {"method 12"});
  expect_lie([](std::string* z) { put<uint16_t>(z, entry_of(*z) + 10, 8); }, corrupt, {"inflate"});
  expect_lie([](std::string* z) { put<uint32_t>(z, entry_of(*z) + 16, 7); }, corrupt,
             {"CRC", "00000007"});
  expect_lie([](std::string* z) { put<uint32_t>(z, entry_of(*z) + 20, 5000); }, corrupt,
             {"5000", "leaves the file"});
  expect_lie([](std::string* z) { put<uint32_t>(z, entry_of(*z) + 24, 5); }, corrupt, {"claims 5"});
  expect_lie([](std::string* z) { put<uint32_t>(z, entry_of(*z) + 20, ~0u); }, corrupt, {"zip64"});
  expect_lie([](std::string* z) { put<uint32_t>(z, entry_of(*z) + 42, 3); }, corrupt, {"begin"});
}

Result<NpyArray> parsed(const std::string& header, size_t data_bytes) {
  std::string bytes("\x93NUMPY\x01\x00", 8);
  const auto length = static_cast<uint16_t>(header.size());
  bytes.append(reinterpret_cast<const char*>(&length), 2);
  return parse_npy("a", bytes + header + std::string(data_bytes, '\0'));
}

TEST(Npy, HeadersOfEveryKind) {
  EXPECT_TRUE(parsed("{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }  \n", 12));
  EXPECT_TRUE(parsed("{\"shape\":(),\"descr\":\"|b1\",\"fortran_order\":True}", 1));
  EXPECT_TRUE(parsed("{'descr': '<i8', 'fortran_order': True, 'shape': (2L,), }", 16));
  EXPECT_TRUE(parsed("{'descr': '<f8', 'fortran_order': False, 'shape': (7, 0), }", 0));
  const StatusCode corrupt = StatusCode::kCorruptData;
  const StatusCode unsupported = StatusCode::kUnsupported;
  const auto refused = [](const std::string& header, size_t bytes, StatusCode code,
                          std::initializer_list<std::string_view> words) {
    SCOPED_TRACE(header);
    expect_error(parsed(header, bytes), code, words);
  };
  const std::string order = "'fortran_order': False, ";
  refused("", 0, corrupt, {"header"});
  refused("{'descr': '<i2', " + order + "}", 0, corrupt, {"header"});
  refused("{'descr': '<i2', " + order + "'shape': (2), 'x': 1}", 4, corrupt, {"header"});
  refused("{'descr': '<i2', 'descr': '<i2', " + order + "'shape': ()}", 2, corrupt, {"header"});
  refused("{'descr': '<i2', " + order + "'shape': (-2,)}", 4, corrupt, {"header"});
  refused("{'descr': '<i2', " + order + "'shape': (2 3)}", 12, corrupt, {"header"});
  refused("{'descr': '<i2', " + order + "'shape': (2,)} x", 4, corrupt, {"header"});
  refused("{'descr': '<i2', " + order + "'shape': (2,)}", 5, corrupt, {"I16 [2]", "5 bytes"});
  refused("{'descr': '<i2', " + order + "'shape': (4611686018427387904, 4)}", 0, corrupt,
          {"0 bytes"});
  refused("{'descr': '<i2', 'fortran_order': True, 'shape': (2, 2)}", 8, unsupported, {"Fortran"});
  refused("{'descr': '>i2', " + order + "'shape': (2,)}", 4, unsupported, {">i2"});
  refused("{'descr': '|O', " + order + "'shape': (2,)}", 4, unsupported, {"|O"});
  expect_error(parse_npy("a", std::string("\x93NUMPY\x04\x00  ", 10)), unsupported, {"version 4"});
  expect_error(parse_npy("a", "no array"), corrupt, {"no npy"});
  expect_error(parse_npy("a", std::string("\x93NUMPY\x01\x00\xFF\xFF", 10)), corrupt,
               {"cut short"});
}

}  // namespace
}  // namespace argosy::io
