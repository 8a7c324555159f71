// See output_forwarder.h. Test: tests/platform/launch_test.cc.
#include "platform/output_forwarder.h"

#include <fmt/format.h>
#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace argosy::platform {
namespace {

constexpr size_t kReadBytes = size_t{64} * 1024;
// Above it, ranks that write to this target are not read.
constexpr size_t kMaxPendingBytes = size_t{256} * 1024;

}  // namespace

void OutputForwarder::add(int rank, int target, Descriptor source) {
  sources_.push_back({fmt::format("[rank {}] ", rank), target, std::move(source), {}});
}

void OutputForwarder::add_polls(std::vector<pollfd>* polls) {
  for (const Target& target : targets_) {
    if (!target.pending.empty()) polls->push_back({target.fd, POLLOUT, 0});
  }
  for (const Source& source : sources_) {
    if (source.fd.is_open() && target_of(source).pending.size() < kMaxPendingBytes) {
      polls->push_back({source.fd.get(), POLLIN, 0});
    }
  }
}

void OutputForwarder::handle(const std::vector<pollfd>& polls, size_t first) {
  for (size_t i = first; i < polls.size(); ++i) {
    if (polls[i].revents == 0) continue;
    // Descriptors of sources are never 1 or 2.
    const int fd = polls[i].fd;
    if (fd == 1 || fd == 2) {
      write_to(targets_[fd - 1]);
      continue;
    }
    const auto source = std::find_if(sources_.begin(), sources_.end(),
                                     [&](const Source& one) { return one.fd.get() == fd; });
    if (source != sources_.end()) read_from(*source);
  }
}

void OutputForwarder::close_sources() {
  for (Source& source : sources_) {
    if (source.fd.is_open()) finish(source);
  }
}

bool OutputForwarder::has_sources() const {
  return std::any_of(sources_.begin(), sources_.end(),
                     [](const Source& source) { return source.fd.is_open(); });
}

bool OutputForwarder::has_pending() const {
  return !targets_[0].pending.empty() || !targets_[1].pending.empty();
}

void OutputForwarder::read_from(Source& source) {
  char buffer[kReadBytes];
  const ssize_t got = read(source.fd.get(), buffer, sizeof(buffer));
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got <= 0) {
    finish(source);
    return;
  }
  take(source, {buffer, static_cast<size_t>(got)});
}

void OutputForwarder::take(Source& source, std::string_view bytes) {
  while (!bytes.empty()) {
    const size_t room = kMaxLineBytes - source.partial.size();
    const size_t end = bytes.find('\n');
    const size_t part = std::min({end, bytes.size(), room});
    source.partial.append(bytes.substr(0, part));
    const bool is_line = part == end;
    bytes.remove_prefix(part + (is_line ? 1 : 0));
    if (is_line || part == room) {
      emit(source, source.partial);
      source.partial.clear();
    }
  }
}

void OutputForwarder::emit(Source& source, std::string_view line) {
  Target& target = target_of(source);
  if (target.is_broken) return;
  target.pending += source.label;
  target.pending += line;
  target.pending += '\n';
}

void OutputForwarder::finish(Source& source) {
  if (!source.partial.empty()) emit(source, source.partial);
  source.partial.clear();
  source.fd.reset();
}

void OutputForwarder::write_to(Target& target) {
  // What a pipe takes for sure once poll says that it takes anything.
  const size_t size = std::min<size_t>(target.pending.size(), PIPE_BUF);
  const ssize_t written = write(target.fd, target.pending.data(), size);
  if (written >= 0) {
    target.pending.erase(0, static_cast<size_t>(written));
    return;
  }
  if (errno == EINTR || errno == EAGAIN) return;
  // Nobody reads any more. Ranks notice by the end of their pipes, as they would without labels.
  target.is_broken = true;
  target.pending.clear();
  for (Source& source : sources_) {
    if (source.target == target.fd && source.fd.is_open()) finish(source);
  }
}

}  // namespace argosy::platform
