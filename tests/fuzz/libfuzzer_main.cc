// libFuzzer's entry points over one FuzzTarget; the target is named by ARGOSY_FUZZ_TARGET.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "fuzz/fuzz_target.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed);

namespace {

using argosy::testing::Random;

const argosy::testing::FuzzTarget& target() { return argosy::testing::ARGOSY_FUZZ_TARGET(); }

void libfuzzer_bytes(std::string* bytes, Random& /*random*/) {
  const size_t size = bytes->size();
  bytes->resize(size + 64);
  bytes->resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(bytes->data()), size, bytes->size()));
}

std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string problem = target().check(text_of(data, size));
  if (!problem.empty()) {
    std::fprintf(stderr, "%s: %s\n", std::string(target().name).c_str(), problem.c_str());
    std::abort();
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  Random random(seed);
  const std::string changed = target().mutate(text_of(data, size), random, libfuzzer_bytes);
  const size_t kept = std::min(changed.size(), max_size);
  std::memcpy(data, changed.data(), kept);
  return kept;
}
