// See copy.h. A line that is only streamed in part costs a read of the rest: heads and tails that do not fill a
// line go through the caches. Measured: docs/perf/exchange.md.
#include "platform/copy.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "platform/cpu_detect.h"

namespace argosy::platform {
namespace {

constexpr int64_t kLineBytes = 64;

void copy_cached(std::byte* target, const std::byte* source, int64_t bytes) {
  std::memcpy(target, source, static_cast<size_t>(bytes));
}

void stream_lines_sse(std::byte* target, const std::byte* source, int64_t num_lines) {
  for (int64_t line = 0; line < num_lines; ++line) {
    const auto* const from = reinterpret_cast<const __m128i*>(source + line * kLineBytes);
    auto* const to = reinterpret_cast<__m128i*>(target + line * kLineBytes);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
  }
}

__attribute__((target("avx2"))) void stream_lines_avx2(std::byte* target, const std::byte* source,
                                                       int64_t num_lines) {
  for (int64_t line = 0; line < num_lines; ++line) {
    const auto* const from = reinterpret_cast<const __m256i*>(source + line * kLineBytes);
    auto* const to = reinterpret_cast<__m256i*>(target + line * kLineBytes);
    for (int i = 0; i < 2; ++i) _mm256_stream_si256(to + i, _mm256_loadu_si256(from + i));
  }
}

__attribute__((target("avx512f"))) void stream_lines_avx512(std::byte* target,
                                                            const std::byte* source,
                                                            int64_t num_lines) {
  for (int64_t line = 0; line < num_lines; ++line) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + line * kLineBytes),
                        _mm512_loadu_si512(source + line * kLineBytes));
  }
}

template <void (*stream_lines)(std::byte*, const std::byte*, int64_t)>
void copy_streaming(std::byte* target, const std::byte* source, int64_t bytes) {
  const auto misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(target) % kLineBytes);
  const int64_t head = std::min(bytes, (kLineBytes - misalignment) % kLineBytes);
  const int64_t num_lines = (bytes - head) / kLineBytes;
  const int64_t tail = head + num_lines * kLineBytes;
  copy_cached(target, source, head);
  stream_lines(target + head, source + head, num_lines);
  copy_cached(target + tail, source + tail, bytes - tail);
}

CopyBlock choose() {
  const CpuFeatures features = cpu_features();
  if (features.avx512) return copy_streaming<stream_lines_avx512>;
  if (features.avx2_fma) return copy_streaming<stream_lines_avx2>;
  return copy_streaming<stream_lines_sse>;
}

}  // namespace

CopyBlock copy_block(bool past_caches) {
  static const CopyBlock streaming = choose();
  return past_caches ? streaming : copy_cached;
}

void finish_streaming() { _mm_sfence(); }

}  // namespace argosy::platform
