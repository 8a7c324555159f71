// Result files of a command: where they may lie, and that they appear together or not at all.
//
// Invariant: until commit() has renamed every file, the files that were there before are whole; on
// any failure they stay and nothing else does. Test: tests/cli/output_files_test.cc.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/checkpoint.h"
#include "argosy/status.h"

namespace argosy::tools {

// A file and the option that names it. An empty path: the option was not given.
struct OptionFile {
  std::string_view option;
  std::string path;
};

// The file of a FILE:NAME argument.
OptionFile file_of(std::string_view option, std::string_view file_and_name);

// Called before long work, so that a typing error costs nothing. Errors: those of check_target()
// for every target; kInvalidArgument, naming both options, for a target that is another target, an
// input (by whatever name: links, relative paths) or a file in `model_dir` (empty: there is none).
Status check_targets(std::span<const OptionFile> targets, std::span<const OptionFile> inputs,
                     const std::string& model_dir);

class OutputFiles {
 public:
  OutputFiles() = default;
  OutputFiles(const OutputFiles&) = delete;
  OutputFiles& operator=(const OutputFiles&) = delete;
  ~OutputFiles();

  // Written beside the target at once, under a free name. Errors: kIo with the system's reason.
  Status add_text(const std::string& path, std::string_view text);
  Status add_safetensors(const std::string& path, std::span<const NamedTensor> tensors);

  // Renames every file to its target. Errors: kIo; targets already replaced get their old file
  // back.
  Status commit();

 private:
  struct File {
    std::string target;
    std::string written;   // what add wrote, until it is renamed
    std::string previous;  // second name of the target's old file, if there is one
  };

  Status reserve(const std::string& target);
  static Status keep_previous(File* file);
  Status replace(File* file);
  void undo();

  std::vector<File> files_;
};

}  // namespace argosy::tools
