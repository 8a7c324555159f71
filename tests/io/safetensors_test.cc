// Files: round trips through the writer, partial reads, counters, and files that lie about their
// length.
//
// Mutations tried, each makes a test fail: read_rows without the row offset, bytes_read without the
// add, no limit on the header's length, the temporary file left behind, descriptors in another
// order.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "argosy/checkpoint.h"
#include "io/temp_folder.h"

namespace argosy {
namespace {

using test::expect_error;
using test::TempFolder;

constexpr DType kAllTypes[] = {DType::kF64,  DType::kF32,  DType::kF16,  DType::kBF16,
                               DType::kE4M3, DType::kE5M2, DType::kE8M0, DType::kI64,
                               DType::kI32,  DType::kI16,  DType::kI8,   DType::kU64,
                               DType::kU32,  DType::kU16,  DType::kU8,   DType::kBool};

std::string length_word(uint64_t length) {
  std::string word(8, '\0');
  std::memcpy(word.data(), &length, 8);
  return word;
}

std::string file_of(const std::string& json, std::string_view data) {
  return length_word(json.size()) + json + std::string(data);
}

// fp32 0, 1, 2, ... of the given shape.
Tensor counting(std::initializer_list<int64_t> shape) {
  Tensor tensor = Tensor::zeros(DType::kF32, shape).value();
  std::iota(tensor.view().as<float>(), tensor.view().as<float>() + tensor.view().num_elements(),
            0.0f);
  return tensor;
}

TEST(Safetensors, RandomFilesComeBackByteForByte) {
  constexpr uint64_t kSeed = 7;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  const TempFolder folder;
  for (int round = 0; round < 60; ++round) {
    std::vector<Tensor> tensors;
    std::vector<NamedTensor> named;
    const size_t count = random() % 20;
    for (size_t i = 0; i < count; ++i) {
      std::vector<int64_t> shape(random() % 6);
      for (int64_t& dim : shape) dim = static_cast<int64_t>(random() % 4);
      const DType dtype = kAllTypes[random() % std::size(kAllTypes)];
      tensors.push_back(Tensor::zeros(dtype, shape).value());
      for (int64_t b = 0; b < tensors.back().num_bytes(); ++b) {
        tensors.back().view().data[b] = static_cast<std::byte>(random());
      }
    }
    for (size_t i = 0; i < count; ++i) {
      named.push_back(
          {"t\"\\\n\xC3\xA9" + std::to_string(i * 7 % 20), std::as_const(tensors[i]).view()});
    }
    const std::string path = folder / "x.safetensors";
    const Status written = write_safetensors(path, named);
    ASSERT_TRUE(written.ok()) << written.message();
    const auto file = SafetensorsFile::open(path);
    ASSERT_TRUE(file.has_value()) << file.error().message();
    ASSERT_EQ((*file)->tensors().size(), count);
    int64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      const TensorInfo* info = (*file)->find(named[i].name);
      ASSERT_NE(info, nullptr);
      EXPECT_EQ(info->begin % size_of(info->dtype), 0);
      const auto back = (*file)->read(named[i].name);
      ASSERT_TRUE(back.has_value()) << back.error().message();
      EXPECT_EQ(describe(back->view()), describe(named[i].tensor));
      EXPECT_TRUE(
          std::equal(back->bytes().begin(), back->bytes().end(), tensors[i].bytes().begin()));
      bytes += back->num_bytes();
      EXPECT_EQ((*file)->bytes_read(), bytes);
    }
  }
  EXPECT_EQ(folder.num_files(), 1u);
}

TEST(Safetensors, DataBeginsAligned) {
  const TempFolder folder;
  const Tensor tensor = counting({3});
  for (const std::string& name :
       {std::string("a"), std::string("abcdefg"), std::string(100, 'x')}) {
    const NamedTensor named[] = {{name, tensor.view()}};
    ASSERT_TRUE(write_safetensors(folder / "x", named).ok());
    EXPECT_EQ((*SafetensorsFile::open(folder / "x"))->tensors()[0].begin % 64, 0);
  }
}

TEST(Safetensors, RowsAndElements) {
  const TempFolder folder;
  const Tensor tensor = counting({4, 2, 3});
  const NamedTensor named[] = {{"before", tensor.view()}, {"t", tensor.view()}};
  ASSERT_TRUE(write_safetensors(folder / "x", named).ok());
  const auto file = *SafetensorsFile::open(folder / "x");
  const auto rows = file->read_rows("t", 1, 2);
  ASSERT_TRUE(rows.has_value());
  EXPECT_EQ(describe(rows->view()), "F32 [2, 2, 3]");
  EXPECT_EQ(rows->view().as<float>()[0], 6.0f);
  EXPECT_EQ(rows->view().as<float>()[11], 17.0f);
  EXPECT_EQ(file->bytes_read(), 48);
  EXPECT_EQ(describe(file->read_rows("t", 4, 0)->view()), "F32 [0, 2, 3]");
  const int64_t shape[] = {3, 1};
  const auto elements = file->read_elements("t", 21, shape);
  ASSERT_TRUE(elements.has_value());
  EXPECT_EQ(elements->view().as<float>()[2], 23.0f);
  EXPECT_EQ(file->bytes_read(), 60);

  constexpr int64_t kMax = INT64_MAX;
  for (const auto& [first, count] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 1}, {0, 5}, {4, 1}, {0, -1}, {kMax, 1}, {1, kMax}, {-1, -1}}) {
    expect_error(file->read_rows("t", first, count), StatusCode::kInvalidArgument,
                 {"\"t\"", "4, 2, 3"});
  }
  for (const int64_t first : {int64_t{-1}, int64_t{22}, kMax}) {
    expect_error(file->read_elements("t", first, shape), StatusCode::kInvalidArgument,
                 {"\"t\"", "24"});
  }
  const int64_t huge[] = {kMax, kMax};
  EXPECT_FALSE(file->read_elements("t", 0, huge).has_value());
  EXPECT_EQ(file->bytes_read(), 60);
}

TEST(Safetensors, ScalarHasNoRows) {
  const TempFolder folder;
  const Tensor tensor = counting({});
  const NamedTensor named[] = {{"s", tensor.view()}};
  ASSERT_TRUE(write_safetensors(folder / "x", named).ok());
  const auto file = *SafetensorsFile::open(folder / "x");
  EXPECT_EQ(file->read("s")->num_bytes(), 4);
  expect_error(file->read_rows("s", 0, 1), StatusCode::kInvalidArgument, {"\"s\""});
}

TEST(Safetensors, MoreThanFiveDimsAreInfoOnly) {
  const TempFolder folder;
  const std::string path = folder.write(
      "x", file_of(R"({"six":{"dtype":"U8","shape":[1,1,1,1,1,2],"data_offsets":[0,2]}})", "ab"));
  const auto file = *SafetensorsFile::open(path);
  EXPECT_EQ(file->tensors()[0].shape.size(), 6u);
  expect_error(file->read("six"), StatusCode::kUnsupported, {"\"six\"", "6", "5"});
}

TEST(Safetensors, UnknownTensorListsNearNames) {
  const TempFolder folder;
  const Tensor tensor = counting({1});
  const NamedTensor named[] = {{"model.layers.0.mlp.gate.weight", tensor.view()},
                               {"model.layers.1.mlp.gate.weight", tensor.view()},
                               {"z", tensor.view()},
                               {"y", tensor.view()},
                               {"model.norm.weight", tensor.view()}};
  ASSERT_TRUE(write_safetensors(folder / "x", named).ok());
  const auto file = *SafetensorsFile::open(folder / "x");
  const auto absent = file->read("model.layers.2.mlp.gate.weight");
  expect_error(absent, StatusCode::kNotFound, {"layers.2", "layers.0", "layers.1", "model.norm"});
  EXPECT_EQ(absent.error().message().find("\"z\""), std::string::npos);
  expect_error(file->read_rows("q", 0, 1), StatusCode::kNotFound, {"\"q\""});
}

TEST(Safetensors, LengthsThatLieAreRefused) {
  const TempFolder folder;
  const std::string good =
      file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "ab");
  ASSERT_TRUE(SafetensorsFile::open(folder.write("x", good)).has_value());
  for (size_t length = 0; length < good.size(); ++length) {
    expect_error(SafetensorsFile::open(folder.write("x", good.substr(0, length))),
                 StatusCode::kCorruptData, {folder / "x"});
  }
  expect_error(SafetensorsFile::open(folder.write("x", good + "c")), StatusCode::kCorruptData,
               {"\"a\""});
  for (const uint64_t lie : {uint64_t{0}, uint64_t{1}, good.size() - 7, uint64_t{1} << 32,
                             uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{7}}) {
    expect_error(SafetensorsFile::open(folder.write("x", length_word(lie) + good.substr(8))),
                 StatusCode::kCorruptData, {folder / "x"});
  }
}

TEST(Safetensors, HeadersBeyondTheLimitAreRefusedUnread) {
  const TempFolder folder;
  const std::string path = folder.write("x", length_word(100'000'001));
  std::filesystem::resize_file(path, 200'000'000);  // sparse
  expect_error(SafetensorsFile::open(path), StatusCode::kCorruptData, {"100000001", "100000000"});
}

TEST(Safetensors, MutatedFilesNeverCrash) {
  constexpr uint64_t kSeed = 11;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  const TempFolder folder;
  const Tensor tensor = counting({2, 3});
  const NamedTensor named[] = {{"a", tensor.view()}, {"b", tensor.view()}};
  ASSERT_TRUE(write_safetensors(folder / "good", named).ok());
  const std::string good = test::read_bytes(folder / "good");
  for (int i = 0; i < 1000; ++i) {
    std::string bytes = good;
    for (uint64_t edit = 0; edit <= random() % 3; ++edit) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    const auto file = SafetensorsFile::open(folder.write("bad", bytes));
    if (!file) continue;
    for (const TensorInfo& info : (*file)->tensors()) {
      EXPECT_TRUE((*file)->read(info.name).has_value());
    }
  }
}

TEST(Safetensors, WhatIsNoFileIsATypedError) {
  const TempFolder folder;
  expect_error(SafetensorsFile::open(folder / "absent"), StatusCode::kNotFound,
               {folder / "absent"});
  expect_error(SafetensorsFile::open(folder.path()), StatusCode::kIo, {folder.path()});
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  expect_error(SafetensorsFile::open(folder / "pipe"), StatusCode::kIo, {"pipe"});
}

TEST(Safetensors, AFileThatShrinksAfterOpenIsAnError) {
  const TempFolder folder;
  const Tensor tensor = counting({1000});
  const NamedTensor named[] = {{"a", tensor.view()}};
  ASSERT_TRUE(write_safetensors(folder / "x", named).ok());
  const auto file = *SafetensorsFile::open(folder / "x");
  std::filesystem::resize_file(folder / "x", 200);
  expect_error(file->read("a"), StatusCode::kIo, {folder / "x", "4000"});
  EXPECT_EQ(file->bytes_read(), 0);
}

TEST(Safetensors, ThreadsReadAtOnce) {
  const TempFolder folder;
  const Tensor tensor = counting({64, 16});
  const NamedTensor named[] = {{"a", tensor.view()}};
  ASSERT_TRUE(write_safetensors(folder / "x", named).ok());
  const auto file = *SafetensorsFile::open(folder / "x");
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t row = t; row < 64; row += 4) {
        const auto read = file->read_rows("a", row, 1);
        if (!read || read->view().as<float>()[0] != static_cast<float>(row * 16)) ++num_wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, 0);
  EXPECT_EQ(file->bytes_read(), 64 * 16 * 4);
}

TEST(SafetensorsWriter, RefusesWhatItCannotWrite) {
  const TempFolder folder;
  const Tensor tensor = counting({2, 3});
  const ConstTensorView view = tensor.view();
  ConstTensorView strided = view;
  strided.strides = {1, 2};
  const auto write = [&](std::initializer_list<NamedTensor> tensors) {
    return write_safetensors(folder / "x", std::span(tensors.begin(), tensors.size()));
  };
  expect_error(write({{"a", view}, {"b", view}, {"a", view}}), StatusCode::kInvalidArgument,
               {"\"a\""});
  expect_error(write({{"odd", strided}}), StatusCode::kInvalidArgument, {"\"odd\"", "strides"});
  expect_error(write({{"none", ConstTensorView()}}), StatusCode::kInvalidArgument, {"\"none\""});
  expect_error(write({{"", view}}), StatusCode::kInvalidArgument, {"name"});
  expect_error(write({{"__metadata__", view}}), StatusCode::kInvalidArgument, {"__metadata__"});
  expect_error(write({{"\xFF", view}}), StatusCode::kInvalidArgument, {"UTF-8"});
  EXPECT_EQ(folder.num_files(), 0u);
}

TEST(SafetensorsWriter, AFailureLeavesNothingBehind) {
  const TempFolder folder;
  const Tensor tensor = counting({2});
  const NamedTensor named[] = {{"a", tensor.view()}};
  expect_error(write_safetensors(folder / "absent/x", named), StatusCode::kIo, {"absent/x"});
  ASSERT_TRUE(std::filesystem::create_directory(folder / "taken"));
  expect_error(write_safetensors(folder / "taken", named), StatusCode::kIo, {"taken"});
  EXPECT_EQ(folder.num_files(), 1u);
}

TEST(SafetensorsWriter, ReplacesAnOldFile) {
  const TempFolder folder;
  folder.write("x", "old");
  const Tensor tensor = counting({2});
  const NamedTensor named[] = {{"a", tensor.view()}};
  ASSERT_TRUE(write_safetensors(folder / "x", named).ok());
  EXPECT_TRUE((*SafetensorsFile::open(folder / "x"))->read("a").has_value());
  EXPECT_EQ(folder.num_files(), 1u);
}

TEST(ReadTensorArgument, TheLastColonSplits) {
  const TempFolder folder;
  const Tensor tensor = counting({2});
  const NamedTensor named[] = {{"t", tensor.view()}};
  ASSERT_TRUE(write_safetensors(folder / "a:b", named).ok());
  EXPECT_EQ(read_tensor_argument(folder / "a:b:t")->num_bytes(), 8);
  for (const char* text : {"", "file", "file:", ":t", ":"}) {
    expect_error(read_tensor_argument(text), StatusCode::kInvalidArgument, {"FILE:TENSOR"});
  }
  expect_error(read_tensor_argument(folder / "no:t"), StatusCode::kNotFound, {folder / "no"});
  expect_error(read_tensor_argument(folder / "a:b:u"), StatusCode::kNotFound, {"\"u\"", "\"t\""});
}

}  // namespace
}  // namespace argosy
