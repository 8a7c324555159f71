// Finds the files of a checkpoint folder and merges their headers into one list.
//
// The index is held against what the shards really hold, so a stale one is an error and never a
// wrong read. What grows with its text lies in maps and sets, one small block an entry.
// Test: tests/io/checkpoint_test.cc.
#include "io/tensor_directory.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "io/file.h"
#include "io/json.h"
#include "io/json_reader.h"
#include "io/safetensors_header.h"

namespace argosy::io {
namespace {

constexpr std::string_view kSingleName = "model.safetensors";
constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kRebuildHint =
    "CheckpointOptions::rebuild_index reads the shards that are there without an index";
constexpr size_t kMaxFileNameBytes = 255;             // of Linux
constexpr size_t kMaxListedBytes = size_t{16} << 10;  // some 400 usual names

// Tensor name -> shard file name.
using WeightMap = std::map<std::string, std::string>;

bool is_file_name(std::string_view word) {
  return !word.empty() && word.size() <= kMaxFileNameBytes && word.find('/') == word.npos &&
         word.find("..") == word.npos && word.find('\0') == word.npos;
}

// Keeps the member "weight_map" of the outermost object; of all else only the keys, while their
// object is open.
class IndexHandler : public JsonHandler {
 public:
  explicit IndexHandler(const std::string& path) : path_(path) {}

  Result<WeightMap> take_shards() {
    if (found_map_) return std::move(shards_);
    return base::error(StatusCode::kCorruptData, "{}: no object \"weight_map\"", path_);
  }

  Status null() override { return other_value(); }
  Status boolean(bool) override { return other_value(); }
  Status number_unsigned(uint64_t) override { return other_value(); }
  Status number_negative(int64_t) override { return other_value(); }
  Status number_float(double, std::string_view) override { return other_value(); }
  Status end_object() override { return leave(); }
  Status end_array() override { return leave(); }

  Status string(std::string_view value) override {
    if (!in_map()) return {};
    if (!is_file_name(value)) {
      return base::error(StatusCode::kCorruptData,
                         "{}: the shard of {} is {}, which is no file name in this folder", path_,
                         in_quotes(tensor_->first), in_quotes(value));
    }
    tensor_->second = value;
    return {};
  }

  Status start_object() override {
    ARGOSY_RETURN_IF_ERROR(other_value());
    keys_.emplace_back();
    found_map_ |= in_map();
    return {};
  }
  Status start_array() override {
    ARGOSY_RETURN_IF_ERROR(other_value());
    map_is_next_ = false;
    keys_.emplace_back();
    return {};
  }

  Status key(std::string_view word) override {
    bool is_new = false;
    if (in_map()) {
      std::tie(tensor_, is_new) = shards_.try_emplace(std::string(word));
    } else {
      is_new = keys_.back().emplace(word).second;
      if (keys_.size() == 1) map_is_next_ = word == "weight_map";
    }
    if (is_new) return {};
    return base::error(StatusCode::kCorruptData, "{}: key {} stands twice in one object", path_,
                       in_quotes(word));
  }

 private:
  bool in_map() const { return map_is_next_ && keys_.size() == 2; }
  Status other_value() const {
    if (!in_map()) return {};
    return base::error(StatusCode::kCorruptData, "{}: the shard of {} is no text", path_,
                       in_quotes(tensor_->first));
  }
  Status leave() {
    keys_.pop_back();
    return {};
  }

  const std::string& path_;
  WeightMap shards_;
  WeightMap::iterator tensor_;  // of the last key in the map
  bool map_is_next_ = false;    // the last key of the outermost object was "weight_map"
  bool found_map_ = false;
  std::vector<std::set<std::string>> keys_;  // of the open containers; empty for arrays
};

Result<WeightMap> parse_index(std::string_view text, const std::string& path) {
  IndexHandler handler(path);
  ARGOSY_RETURN_IF_ERROR(read_json(text, path + ":", handler));
  return handler.take_shards();
}

// The names for a message, as many as it may show.
std::string listed(const std::set<std::string>& names) {
  std::string list;
  size_t num_listed = 0;
  for (const std::string& name : names) {
    if (list.size() > kMaxListedBytes) break;
    if (num_listed++ > 0) list += ", ";
    list += in_quotes(name);
  }
  if (num_listed < names.size()) list += fmt::format(" and {} more", names.size() - num_listed);
  return list;
}

bool by_name(const TensorDirectory::Entry& a, const TensorDirectory::Entry& b) {
  return a.name() < b.name();
}

}  // namespace

Result<TensorDirectory> TensorDirectory::open(const std::string& dir,
                                              const CheckpointOptions& options) {
  TensorDirectory directory;
  if (options.rebuild_index) {
    ARGOSY_RETURN_IF_ERROR(directory.open_all(dir));
    return directory;
  }
  const std::string index_path = fmt::format("{}/{}", dir, kIndexName);
  const Result<std::string> index = read_text(index_path, kMaxHeaderBytes);
  if (!index && index.error().code() != StatusCode::kNotFound) return index.error();
  ARGOSY_RETURN_IF_ERROR(index ? directory.open_indexed(dir, index_path, *index)
                               : directory.open_single(dir));
  std::sort(directory.entries_.begin(), directory.entries_.end(), by_name);
  return directory;
}

Status TensorDirectory::open_single(const std::string& dir) {
  auto file = SafetensorsFile::open(fmt::format("{}/{}", dir, kSingleName));
  if (!file && file.error().code() == StatusCode::kNotFound) {
    return base::error(StatusCode::kNotFound, "{}: neither {} nor {}", dir, kSingleName,
                       kIndexName);
  }
  if (!file) return file.error();
  files_.push_back(std::move(*file));
  return add_all_entries();
}

Status TensorDirectory::open_shards(const std::string& dir, const std::set<std::string>& names) {
  std::set<std::string> missing;
  for (const std::string& name : names) {
    auto file = SafetensorsFile::open(fmt::format("{}/{}", dir, name));
    if (file) {
      files_.push_back(std::move(*file));
    } else if (file.error().code() == StatusCode::kNotFound) {
      missing.insert(name);
    } else {
      return file.error();
    }
  }
  if (missing.empty()) return {};
  return base::error(
      StatusCode::kNotFound,
      "{}: {} of {} shards are missing: {}. The download is not complete, or the index "
      "is stale ({})",
      dir, missing.size(), names.size(), listed(missing), kRebuildHint);
}

size_t TensorDirectory::num_tensors() const {
  size_t count = 0;
  for (const auto& file : files_) count += file->tensors().size();
  return count;
}

Status TensorDirectory::open_indexed(const std::string& dir, const std::string& index_path,
                                     std::string_view index) {
  ARGOSY_ASSIGN_OR_RETURN(const WeightMap shards, parse_index(index, index_path));
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shards) names.insert(shard);
  ARGOSY_RETURN_IF_ERROR(open_shards(dir, names));
  std::map<std::string_view, const SafetensorsFile*> by_shard;
  auto opened = files_.begin();
  for (const std::string& name : names) by_shard.emplace(name, (opened++)->get());
  // An index alone cannot make this long: each entry is a tensor of an opened file.
  entries_.reserve(std::min(shards.size(), num_tensors()));
  for (const auto& [tensor, shard] : shards) {
    const SafetensorsFile* file = by_shard.at(shard);
    const TensorInfo* info = file->find(tensor);
    if (info == nullptr) {
      return base::error(StatusCode::kCorruptData,
                         "{}: the index is stale: {} does not hold {}, which it names ({})",
                         index_path, in_quotes(shard), in_quotes(tensor), kRebuildHint);
    }
    entries_.push_back({info, file});
  }
  return {};
}

Status TensorDirectory::open_all(const std::string& dir) {
  std::set<std::string> names;
  std::error_code failure;
  std::filesystem::directory_iterator at(dir, failure);
  for (; !failure && at != std::filesystem::directory_iterator(); at.increment(failure)) {
    const std::string name = at->path().filename().string();
    if (name.starts_with("model") && name.ends_with(".safetensors")) names.insert(name);
  }
  if (failure) {
    return base::error(StatusCode::kNotFound, "{}: cannot list: {}", dir, failure.message());
  }
  if (names.empty()) {
    return base::error(StatusCode::kNotFound, "{}: no file model*.safetensors", dir);
  }
  ARGOSY_RETURN_IF_ERROR(open_shards(dir, names));
  return add_all_entries();
}

Status TensorDirectory::add_all_entries() {
  entries_.reserve(num_tensors());
  for (const auto& file : files_) {
    for (const TensorInfo& info : file->tensors()) entries_.push_back({&info, file.get()});
  }
  std::sort(entries_.begin(), entries_.end(), by_name);
  const auto twice =
      std::adjacent_find(entries_.begin(), entries_.end(),
                         [](const Entry& a, const Entry& b) { return a.name() == b.name(); });
  if (twice == entries_.end()) return {};
  return base::error(StatusCode::kCorruptData, "tensor {} is in both {} and {}",
                     in_quotes(twice->name()), twice->file->path(), (twice + 1)->file->path());
}

const TensorDirectory::Entry* TensorDirectory::find(std::string_view name) const {
  const std::span<const Entry> found = with_prefix(name);
  return !found.empty() && found.front().name() == name ? &found.front() : nullptr;
}

std::span<const TensorDirectory::Entry> TensorDirectory::with_prefix(
    std::string_view prefix) const {
  const auto first = std::partition_point(
      entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.name() < prefix; });
  const auto last = std::partition_point(
      first, entries_.end(), [&](const Entry& entry) { return entry.name().starts_with(prefix); });
  return {first, last};
}

int64_t TensorDirectory::bytes_read() const {
  int64_t bytes = 0;
  for (const auto& file : files_) bytes += file->bytes_read();
  return bytes;
}

}  // namespace argosy::io
