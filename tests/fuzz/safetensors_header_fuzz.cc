// A whole safetensors file, from the length of its header to the last byte of its last tensor.
//
// Accepted: names rise, ranges tile the data, every tensor reads back as the bytes of its range.
// Refused: typed, with a message. Guards src/io/safetensors*.cc.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "argosy/checkpoint.h"
#include "fuzz/fuzz_target.h"
#include "fuzz/json_mutator.h"
#include "fuzz/large_json.h"

namespace argosy::testing {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr HeapBound kBound = {.peak = 16, .constant = 8192};

constexpr std::string_view kWords[] = {
    "dtype",   "shape", "data_offsets", "__metadata__", "F64",  "F32", "F16", "BF16",
    "F8_E4M3", "I64",   "I32",          "U8",           "BOOL", "F4",  "a",   "model.layers.0.w"};

std::string file_of(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string file(kLengthBytes, '\0');
  std::memcpy(file.data(), &length, kLengthBytes);
  return file.append(header).append(data);
}

std::string data_of(size_t bytes) {
  std::string data(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>('A' + i % 61);
  return data;
}

// What read() and read_rows() give, held against the bytes of the file.
std::string check_tensor(const SafetensorsFile& file, const TensorInfo& info,
                         std::string_view input) {
  const Result<Tensor> tensor = file.read(info.name);
  if (info.shape.size() > kMaxTensorDims) {
    if (tensor) return "a tensor of too many dimensions was read";
    return refusal_problem(tensor.error(), {StatusCode::kUnsupported});
  }
  if (!tensor) return "an accepted tensor was not read: " + tensor.error().to_string();
  const auto want =
      input.substr(static_cast<size_t>(info.begin), static_cast<size_t>(info.end - info.begin));
  const auto got = tensor->bytes();
  if (got.size() != want.size() ||
      (!want.empty() && std::memcmp(got.data(), want.data(), want.size()) != 0)) {
    return fmt::format("{} bytes read, wanted {} of the file from {} on", got.size(), want.size(),
                       info.begin);
  }
  if (info.shape.empty()) return {};
  const Result<Tensor> rows = file.read_rows(info.name, info.shape[0], 0);
  if (!rows) return "no rows at the end: " + rows.error().to_string();
  if (rows->num_bytes() != 0) return "no rows have bytes";
  const Result<Tensor> past = file.read_rows(info.name, info.shape[0], 1);
  if (past) return "a row past the end was read";
  return refusal_problem(past.error(), {StatusCode::kInvalidArgument});
}

std::string check_ranges(const SafetensorsFile& file, std::string_view input) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  const TensorInfo* before = nullptr;
  for (const TensorInfo& info : file.tensors()) {
    if (before != nullptr && before->name >= info.name) return "names do not rise";
    before = &info;
    ranges.emplace_back(info.begin, info.end);
  }
  uint64_t length = 0;
  std::memcpy(&length, input.data(), kLengthBytes);
  std::sort(ranges.begin(), ranges.end());
  auto covered = static_cast<int64_t>(kLengthBytes + length);
  for (const auto& [begin, end] : ranges) {
    if (begin != covered || end < begin) return "ranges overlap or leave a hole";
    covered = end;
  }
  return covered == static_cast<int64_t>(input.size()) ? "" : "ranges do not end with the file";
}

std::string check_file(const std::string& path, std::string_view input) {
  const auto file = SafetensorsFile::open(path);
  if (!file) {
    return refusal_problem(file.error(), {StatusCode::kCorruptData, StatusCode::kUnsupported});
  }
  std::string problem = check_ranges(**file, input);
  for (const TensorInfo& info : (*file)->tensors()) {
    if (problem.empty()) problem = check_tensor(**file, info, input);
  }
  if (!problem.empty()) return problem;
  const Result<Tensor> none = (*file)->read("no such tensor\x01");
  if (none) return "a tensor that is not there was read";
  return refusal_problem(none.error(), {StatusCode::kNotFound});
}

std::string check(std::string_view input) {
  static const MemoryFile memory;
  static const std::string path = memory.path();
  memory.fill(input);
  return within(kBound, input.size(), [&] { return check_file(path, input); });
}

// Elements of a well-formed small shape, or -1.
int64_t small_product(const Tree& shape) {
  int64_t product = 1;
  if (!shape.is_array()) return -1;
  for (const Tree& dim : shape) {
    if (!dim.is_number_unsigned() || dim.get<uint64_t>() > 64) return -1;
    product *= dim.get<int64_t>();
    if (product > 4096) return -1;
  }
  return product;
}

// Lays the tensors one after the other, so that what follows the range checks is reached too.
size_t repair_ranges(Tree* header) {
  int64_t at = 0;
  for (auto& [name, tensor] : header->items()) {
    if (name == "__metadata__" || !tensor.is_object() || !tensor.contains("shape")) continue;
    const auto dtype = tensor.find("dtype");
    if (dtype == tensor.end() || !dtype->is_string()) continue;
    const Result<DType> known = parse_dtype(dtype->get_ref<const std::string&>());
    const int64_t elements = small_product(tensor["shape"]);
    if (!known || elements < 0) continue;
    const int64_t end = at + elements * size_of(*known);
    tensor["data_offsets"] = {static_cast<uint64_t>(at), static_cast<uint64_t>(end)};
    at = end;
  }
  return static_cast<size_t>(at);
}

void swap_ranges(Tree* header, Random& random) {
  std::vector<Tree*> ranges;
  for (Tree& tensor : *header) {
    if (tensor.is_object() && tensor.contains("data_offsets"))
      ranges.push_back(&tensor["data_offsets"]);
  }
  if (ranges.size() < 2) return;
  std::swap(*ranges[random.below(ranges.size())], *ranges[random.below(ranges.size())]);
}

std::string mutate(std::string_view input, Random& random, ByteMutator bytes) {
  uint64_t length = 0;
  if (input.size() >= kLengthBytes) std::memcpy(&length, input.data(), kLengthBytes);
  if (input.size() < kLengthBytes || length > input.size() - kLengthBytes || random.one_in(16)) {
    if (random.one_in(4)) return file_of("{}", "");
    std::string changed(input);
    bytes(&changed, random);
    return changed;
  }
  std::string header = mutate_json(input.substr(kLengthBytes, length), kWords, random, bytes);
  std::string data(input.substr(kLengthBytes + length));
  Tree tree = Tree::parse(header, nullptr, /*allow_exceptions=*/false);
  if (tree.is_object() && random.one_in(2)) {
    data = data_of(repair_ranges(&tree));
    if (random.one_in(8)) swap_ranges(&tree, random);
    header = dump(tree);
    if (random.one_in(16)) header = with_duplicate_key(header, tree, random);
  }
  if (random.one_in(32)) data.resize(data.size() + random.below(3));
  if (random.one_in(32)) data.resize(data.size() - random.below(data.size() + 1));
  std::string changed = file_of(header, data);
  if (random.one_in(32)) changed[random.below(kLengthBytes)] = static_cast<char>(random.next());
  return changed;
}

std::string tensor(std::string_view name, std::string_view dtype, std::string_view shape,
                   std::string_view offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

std::map<std::string, std::string> seeds() {
  const std::string one = tensor("a", "F32", "[2,3]", "[0,24]");
  const std::string two = tensor("b", "BF16", "[4]", "[24,32]");
  std::map<std::string, std::string> files;
  const auto add = [&](std::string_view name, std::string_view header, size_t bytes) {
    files.emplace(name, file_of(header, data_of(bytes)));
  };
  add("empty", "{}", 0);
  add("one", "{" + one + "}", 24);
  add("two_unsorted", "{" + two + "," + one + "}", 32);
  add("metadata", R"({"__metadata__":{"format":"pt"},)" + one + "}  ", 24);
  add("scalar_and_empty",
      "{" + tensor("s", "I64", "[]", "[0,8]") + "," + tensor("e", "U8", "[3,0]", "[8,8]") + "}", 8);
  add("six_dims", "{" + tensor("x", "U8", "[1,2,1,2,1,2]", "[0,8]") + "}", 8);
  add("overlap", "{" + one + "," + tensor("b", "BF16", "[4]", "[20,28]") + "}", 28);
  add("hole", "{" + one + "," + tensor("b", "BF16", "[4]", "[26,34]") + "}", 34);
  add("twice", "{" + one + "," + one + "}", 24);
  add("overflow", "{" + tensor("a", "F32", "[4611686018427387904,4]", "[0,0]") + "}", 0);
  add("empty_with_overflow",
      "{" + tensor("a", "F32", "[1099511627776,1099511627776,0]", "[0,0]") + "}", 0);
  add("escapes", "{" + tensor("\\u00e9\\ud83d\\ude00\\n", "\\u0055\\u0038", "[1]", "[0,1]") + "}",
      1);
  add("unknown_dtype", "{" + tensor("a", "F4", "[2]", "[0,1]") + "}", 1);
  add("negative", "{" + tensor("a", "U8", "[-1]", "[0,1]") + "}", 1);
  files.emplace("truncated", files.at("one").substr(0, 40));
  files.emplace("lying_length", std::string(7, '\xff') + "\x7f{}");
  // Found by reading: a dtype and a name that would have reached the terminal raw.
  add("control_in_dtype", "{" + tensor("a", "\\u001b[2J", "[2]", "[0,1]") + "}", 1);
  add("cut_inside_a_letter",
      "{" + tensor(std::string(199, 'n') + "\xc3\xa9 and more", "U8", "[2]", "[0,1]") + "}", 1);
  return files;
}

std::map<std::string, std::string> large() {
  std::map<std::string, std::string> files;
  const auto add = [&](const std::string& name, const std::string& header, size_t bytes) {
    files.emplace(name, file_of(header, data_of(bytes)));
  };
  for (const auto& [name, text] : large_json()) {
    add(name, text, 0);
    add("tensor_" + name, "{\"a\":" + text + "}", 0);
    add("metadata_" + name, "{\"__metadata__\":" + text + "}", 0);
    add("metadata_value_" + name, "{\"__metadata__\":{\"a\":" + text + "}}", 0);
    add("dtype_" + name, "{\"a\":{\"dtype\":" + text + "}}", 0);
    add("shape_" + name, "{\"a\":{\"shape\":" + text + "}}", 0);
    add("dim_" + name, "{\"a\":{\"shape\":[" + text + "]}}", 0);
    add("offsets_" + name, "{\"a\":{\"data_offsets\":" + text + "}}", 0);
  }
  std::string dims = "[1";
  for (int i = 1; i < 65536; ++i) dims += ",1";
  add("shape_of_65536", "{" + tensor("a", "U8", dims + "]", "[0,1]") + "}", 1);
  add("metadata", "{\"__metadata__\":" + one_letter_members(100'000, "\"\"") + "}", 0);
  add("giant_name", "{" + tensor(repeated("n"), "U8", "[1]", "[0,1]") + "}", 1);
  std::string accepted;
  std::string overlapping;
  for (size_t i = 0; i < 20'000; ++i) {
    const char* between = i == 0 ? "{" : ",";
    accepted += between + tensor(one_letter(i), "U8", "[]", fmt::format("[{},{}]", i, i + 1));
    overlapping += between + tensor(one_letter(i), "U8", "[]", "[0,1]");
  }
  add("many_tensors", accepted + "}", 20'000);
  add("overlapping_tensors", overlapping + "}", 1);
  return files;
}

}  // namespace

const FuzzTarget& safetensors_target() {
  static const FuzzTarget target = {"safetensors_header", check, mutate, seeds, large};
  return target;
}

}  // namespace argosy::testing
