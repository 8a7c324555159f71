// Every tensor of a checkpoint folder by name, whatever file it lies in.
//
// Only files that the index names are opened. Test: tests/io/checkpoint_test.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/status.h"

namespace argosy::io {

class TensorDirectory {
 public:
  struct Entry {
    const TensorInfo* info = nullptr;
    const SafetensorsFile* file = nullptr;

    const std::string& name() const { return info->name; }
  };

  // Errors: those of Checkpoint::open that concern files.
  static Result<TensorDirectory> open(const std::string& dir, const CheckpointOptions& options);

  const Entry* find(std::string_view name) const;
  // All whose name begins with `prefix`, by rising name.
  std::span<const Entry> with_prefix(std::string_view prefix) const;
  int64_t bytes_read() const;

 private:
  Status open_single(const std::string& dir);
  Status open_indexed(const std::string& dir, const std::string& index_path,
                      std::string_view index);
  Status open_all(const std::string& dir);
  Status open_shards(const std::string& dir, const std::set<std::string>& names);
  Status add_all_entries();
  size_t num_tensors() const;  // of all files, whether the index names them or not

  std::vector<std::shared_ptr<SafetensorsFile>> files_;
  std::vector<Entry> entries_;  // by rising name
};

}  // namespace argosy::io
