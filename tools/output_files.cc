// See output_files.h. Test: tests/cli/output_files_test.cc.
#include "tools/output_files.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "tools/console.h"

namespace argosy::tools {
namespace {

namespace fs = std::filesystem;

constexpr int kMostTries = 1000;

Status io_error(std::string_view action, const std::string& path, const std::error_code& reason) {
  return Status(StatusCode::kIo, fmt::format("cannot {} '{}': {}", action, path, reason.message()));
}

std::error_code last_error() { return {errno, std::generic_category()}; }

// Names that do not exist yet are compared by the folders they would lie in.
bool is_same_file(const fs::path& a, const fs::path& b) {
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  std::error_code error_a;
  std::error_code error_b;
  const fs::path whole_a = fs::weakly_canonical(fs::absolute(a, error_a), error_a);
  const fs::path whole_b = fs::weakly_canonical(fs::absolute(b, error_b), error_b);
  return !error_a && !error_b && whole_a == whole_b;
}

// A checkpoint's files are often links into a store: entries are compared, not their folder.
Status check_outside_model(const OptionFile& target, const std::string& model_dir) {
  if (model_dir.empty()) return Status();
  std::error_code error;
  for (fs::directory_iterator entry(model_dir, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code ignored;
    if (!entry->is_regular_file(ignored) || !is_same_file(target.path, entry->path())) continue;
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} '{}' would overwrite '{}' of the --model folder", target.option,
                              target.path, entry->path().string()));
  }
  return Status();
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using FileHandle = std::unique_ptr<std::FILE, CloseFile>;

}  // namespace

OptionFile file_of(std::string_view option, std::string_view file_and_name) {
  return {option, std::string(file_and_name.substr(0, file_and_name.rfind(':')))};
}

Status check_targets(std::span<const OptionFile> targets, std::span<const OptionFile> inputs,
                     const std::string& model_dir) {
  for (size_t i = 0; i < targets.size(); ++i) {
    const OptionFile& target = targets[i];
    if (target.path.empty()) continue;
    ARGOSY_RETURN_IF_ERROR(check_target(target.option, target.path));
    for (const OptionFile& other : targets.first(i)) {
      if (other.path.empty() || !is_same_file(target.path, other.path)) continue;
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} '{}' and {} '{}' are the same file", other.option, other.path,
                                target.option, target.path));
    }
    for (const OptionFile& input : inputs) {
      if (input.path.empty() || !is_same_file(target.path, input.path)) continue;
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} '{}' would overwrite '{}', which {} reads", target.option,
                                target.path, input.path, input.option));
    }
    ARGOSY_RETURN_IF_ERROR(check_outside_model(target, model_dir));
  }
  return Status();
}

OutputFiles::~OutputFiles() { undo(); }

// Exclusively created, so that no file of the user's is taken for a leftover.
Status OutputFiles::reserve(const std::string& target) {
  for (int i = 0; i < kMostTries; ++i) {
    std::string name = fmt::format("{}.partial{}", target, i);
    const FileHandle file(std::fopen(name.c_str(), "wbx"));
    if (file != nullptr) {
      files_.push_back({target, std::move(name), ""});
      return Status();
    }
    if (errno != EEXIST) break;
  }
  return io_error("create", target, last_error());
}

Status OutputFiles::add_text(const std::string& path, std::string_view text) {
  ARGOSY_RETURN_IF_ERROR(reserve(path));
  FileHandle file(std::fopen(files_.back().written.c_str(), "wb"));
  bool is_whole = file != nullptr &&
                  std::fwrite(text.data(), 1, text.size(), file.get()) == text.size() &&
                  std::fflush(file.get()) == 0;
  std::error_code reason = last_error();
  if (is_whole && std::fclose(file.release()) != 0) {
    reason = last_error();
    is_whole = false;
  }
  return is_whole ? Status()
                  : io_error(fmt::format("write {} bytes to", text.size()), path, reason);
}

Status OutputFiles::add_safetensors(const std::string& path, std::span<const NamedTensor> tensors) {
  ARGOSY_RETURN_IF_ERROR(reserve(path));
  Status status = write_safetensors(files_.back().written, tensors);
  if (status.ok()) return status;
  return Status(status.code(), fmt::format("cannot write '{}': {}", path, status.message()));
}

// A second name: unlike a rename, it leaves no moment without a target. A copy where the file
// system knows no links.
Status OutputFiles::keep_previous(File* file) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(file->target, error))) return Status();
  for (int i = 0; i < kMostTries; ++i) {
    const std::string name = fmt::format("{}.previous{}", file->target, i);
    fs::create_hard_link(file->target, name, error);
    if (error && error != std::errc::file_exists) fs::copy_file(file->target, name, error);
    if (!error) file->previous = name;
    if (error != std::errc::file_exists) break;
  }
  return error ? io_error("keep the old", file->target, error) : Status();
}

Status OutputFiles::replace(File* file) {
  // When the last one fails it has changed nothing.
  if (file != &files_.back()) ARGOSY_RETURN_IF_ERROR(keep_previous(file));
  std::error_code error;
  fs::rename(file->written, file->target, error);
  if (error) return io_error("rename to", file->target, error);
  file->written.clear();
  return Status();
}

Status OutputFiles::commit() {
  for (File& file : files_) ARGOSY_RETURN_IF_ERROR(replace(&file));
  for (const File& file : files_) {
    std::error_code ignored;
    if (!file.previous.empty()) fs::remove(file.previous, ignored);
  }
  files_.clear();
  return Status();
}

void OutputFiles::undo() {
  for (const File& file : files_) {
    std::error_code ignored;
    const bool is_replaced = file.written.empty();
    if (!is_replaced) fs::remove(file.written, ignored);
    if (is_replaced && file.previous.empty()) fs::remove(file.target, ignored);
    if (is_replaced && !file.previous.empty()) fs::rename(file.previous, file.target, ignored);
    if (!is_replaced && !file.previous.empty()) fs::remove(file.previous, ignored);
  }
}

}  // namespace argosy::tools
