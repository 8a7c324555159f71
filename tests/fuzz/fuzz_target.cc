// See fuzz_target.h.
#include "fuzz/fuzz_target.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

namespace argosy::testing {

uint64_t Random::next() {
  uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

void random_bytes(std::string* bytes, Random& random) {
  const size_t at = random.below(bytes->size() + 1);
  const size_t count = std::min(random.below(8) + 1, bytes->size() - at);
  switch (random.below(5)) {
    case 0:
      bytes->erase(at, count);
      break;
    case 1:
      bytes->insert(at, bytes->substr(at, count));
      break;
    case 2:
      bytes->insert(at, 1, static_cast<char>(random.next()));
      break;
    case 3: {
      constexpr uint64_t kEdges[] = {0, 1, ~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 31};
      const uint64_t edge = kEdges[random.below(std::size(kEdges))];
      std::memcpy(bytes->data() + at, &edge, count);
      break;
    }
    default:
      for (size_t i = at; i < at + count; ++i) {
        (*bytes)[i] = static_cast<char>((*bytes)[i] ^ (1 << random.below(8)));
      }
  }
}

const std::vector<const FuzzTarget*>& all_targets() {
  static const std::vector<const FuzzTarget*> targets = {
      &safetensors_target(), &config_target(),      &index_target(),
      &plan_target(),        &router_file_target(), &router_trace_target()};
  return targets;
}

std::string over_bound(const HeapUse& use, const HeapBound& bound, size_t input_bytes) {
  const size_t largest = std::min(bound.largest * input_bytes + bound.constant,
                                  bound.small_largest * input_bytes + bound.small_constant);
  const size_t peak = bound.peak * input_bytes + bound.constant;
  if (use.largest > largest) {
    return fmt::format("one request of {} bytes for {} of input, at most {} are allowed",
                       use.largest, input_bytes, largest);
  }
  if (use.peak > peak) {
    return fmt::format("{} bytes held at once for {} of input, at most {} are allowed", use.peak,
                       input_bytes, peak);
  }
  return {};
}

std::string refusal_problem(const Status& status, std::initializer_list<StatusCode> codes) {
  const std::string& message = status.message();
  if (std::find(codes.begin(), codes.end(), status.code()) == codes.end()) {
    return fmt::format("refused as {}: {}", name_of(status.code()), message);
  }
  if (message.empty()) return "refused without a message";
  const bool clean = std::none_of(message.begin(), message.end(),
                                  [](unsigned char c) { return c < 0x20 || c == 0x7F; });
  if (!clean) return fmt::format("control characters in a message: {}", message);
  const auto as_text = nlohmann::json(message).dump(
      -1, ' ', false, nlohmann::json::error_handler_t::ignore);  // drops what is no UTF-8
  if (nlohmann::json::parse(as_text).get_ref<const std::string&>() != message) {
    return fmt::format("a message that is no UTF-8: {}", message);
  }
  return {};
}

MemoryFile::MemoryFile() : descriptor_(::memfd_create("argosy_fuzz", MFD_CLOEXEC)) {
  if (descriptor_ < 0) std::abort();
}

void MemoryFile::fill(std::string_view bytes) const {
  const bool done =
      ::ftruncate(descriptor_, 0) == 0 &&
      ::pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
  if (!done) std::abort();
}

std::string MemoryFile::path() const { return fmt::format("/proc/self/fd/{}", descriptor_); }

}  // namespace argosy::testing
