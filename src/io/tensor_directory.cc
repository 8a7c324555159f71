// Finds the files of a checkpoint folder and merges their headers into one list.
//
// The index is held against what the shards really hold, so a stale one is an error and never a
// wrong read. Test: tests/io/checkpoint_test.cc.
#include "io/tensor_directory.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "io/file.h"
#include "io/json.h"
#include "io/safetensors_header.h"

namespace argosy::io {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kSingleName = "model.safetensors";
constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kRebuildHint =
    "CheckpointOptions::rebuild_index reads the shards that are there without an index";

// Tensor name -> shard file name.
using WeightMap = std::map<std::string, std::string>;

Result<WeightMap> parse_index(std::string_view text, const std::string& path) {
  ARGOSY_ASSIGN_OR_RETURN(const Json root, parse_json(text, path));
  const auto map = root.is_object() ? root.find("weight_map") : root.end();
  if (!root.is_object() || map == root.end() || !map->is_object()) {
    return base::error(StatusCode::kCorruptData, "{}: no object \"weight_map\"", path);
  }
  WeightMap shards;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) {
      return base::error(StatusCode::kCorruptData, "{}: the shard of {} is no text", path,
                         in_quotes(tensor));
    }
    const auto& file = shard.get_ref<const std::string&>();
    const bool leaves = file.empty() || file.find('/') != std::string::npos ||
                        file.find("..") != std::string::npos ||
                        file.find('\0') != std::string::npos;
    if (leaves) {
      return base::error(StatusCode::kCorruptData,
                         "{}: the shard of {} is {}, which is no file name "
                         "in this folder",
                         path, in_quotes(tensor), in_quotes(file));
    }
    shards.emplace(tensor, file);
  }
  return shards;
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

Status TensorDirectory::open_shards(const std::string& dir, std::span<const std::string> names) {
  std::vector<std::string> missing;
  for (const std::string& name : names) {
    auto file = SafetensorsFile::open(fmt::format("{}/{}", dir, name));
    if (file) {
      files_.push_back(std::move(*file));
    } else if (file.error().code() == StatusCode::kNotFound) {
      missing.push_back(in_quotes(name));
    } else {
      return file.error();
    }
  }
  if (missing.empty()) return {};
  return base::error(
      StatusCode::kNotFound,
      "{}: {} of {} shards are missing: {}. The download is not complete, or the index "
      "is stale ({})",
      dir, missing.size(), names.size(), fmt::join(missing, ", "), kRebuildHint);
}

Status TensorDirectory::open_indexed(const std::string& dir, const std::string& index_path,
                                     std::string_view index) {
  ARGOSY_ASSIGN_OR_RETURN(const WeightMap shards, parse_index(index, index_path));
  std::set<std::string> distinct;
  for (const auto& [tensor, shard] : shards) distinct.insert(shard);
  const std::vector<std::string> names(distinct.begin(), distinct.end());
  ARGOSY_RETURN_IF_ERROR(open_shards(dir, names));
  std::map<std::string_view, const SafetensorsFile*> by_shard;
  for (size_t i = 0; i < names.size(); ++i) by_shard.emplace(names[i], files_[i].get());
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
  std::vector<std::string> names;
  std::error_code failure;
  std::filesystem::directory_iterator at(dir, failure);
  for (; !failure && at != std::filesystem::directory_iterator(); at.increment(failure)) {
    const std::string name = at->path().filename().string();
    if (name.starts_with("model") && name.ends_with(".safetensors")) names.push_back(name);
  }
  if (failure) {
    return base::error(StatusCode::kNotFound, "{}: cannot list: {}", dir, failure.message());
  }
  if (names.empty()) {
    return base::error(StatusCode::kNotFound, "{}: no file model*.safetensors", dir);
  }
  std::sort(names.begin(), names.end());
  ARGOSY_RETURN_IF_ERROR(open_shards(dir, names));
  return add_all_entries();
}

Status TensorDirectory::add_all_entries() {
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
