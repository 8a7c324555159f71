// Lines of many ranks into one stdout and one stderr, each with its rank's label.
//
// Never blocks: a target is written only when poll says that it takes bytes, and ranks are read
// only while little is waiting, so that a slow reader slows the ranks and nothing piles up. Test:
// tests/platform/launch_test.cc.
#pragma once

#include <poll.h>

#include <string>
#include <string_view>
#include <vector>

#include "platform/process.h"

namespace argosy::platform {

class OutputForwarder {
 public:
  // Longer lines come out in pieces.
  static constexpr size_t kMaxLineBytes = size_t{64} * 1024;

  // `target` is 1 or 2.
  void add(int rank, int target, Descriptor source);

  // Appends what to poll for.
  void add_polls(std::vector<pollfd>* polls);
  // Takes the entries that add_polls appended, from `first` on, after poll.
  void handle(const std::vector<pollfd>& polls, size_t first);

  // Gives up on sources that are still open.
  void close_sources();
  bool has_sources() const;
  bool has_pending() const;

 private:
  struct Source {
    std::string label;
    int target = 1;
    Descriptor fd;
    std::string partial;  // bytes after the last end of line
  };
  struct Target {
    int fd = 1;
    std::string pending;
    bool is_broken = false;
  };

  Target& target_of(const Source& source) { return targets_[source.target - 1]; }
  void read_from(Source& source);
  void take(Source& source, std::string_view bytes);
  void emit(Source& source, std::string_view line);
  void finish(Source& source);
  void write_to(Target& target);

  std::vector<Source> sources_;
  Target targets_[2] = {{1, {}, false}, {2, {}, false}};
};

}  // namespace argosy::platform
