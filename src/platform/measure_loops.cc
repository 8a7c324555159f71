// See measure_loops.h. Test: tests/platform/measure_test.cc.
#include "platform/measure_loops.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "platform/cpu_detect.h"

namespace argosy::platform {
namespace {

// Operands near one half with full-width significands: nothing is zero, denormal or infinite, and
// sums stay finite for any number of passes.
struct Operands {
  alignas(64) std::array<uint32_t, 16> words[4];
};

Operands make_operands(bool bf16) {
  Operands operands;
  uint32_t state = 0x9E3779B9u;
  for (auto& line : operands.words) {
    for (uint32_t& word : line) {
      state ^= state << 13;
      state ^= state >> 17;
      state ^= state << 5;
      word = bf16 ? (state & 0x807F807Fu) | 0x3F003F00u : (state & 0x807FFFFFu) | 0x3F000000u;
    }
  }
  return operands;
}

const Operands& f32_operands() {
  static const Operands operands = make_operands(false);
  return operands;
}

const Operands& bf16_operands() {
  static const Operands operands = make_operands(true);
  return operands;
}

// Enough independent chains to hide any latency: the most that the registers hold.
// clang-format off
#define ARGOSY_CHAINS_12(STEP) \
  STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11)
#define ARGOSY_CHAINS_20(STEP) \
  ARGOSY_CHAINS_12(STEP) \
  STEP(12) STEP(13) STEP(14) STEP(15) STEP(16) STEP(17) STEP(18) STEP(19)
// clang-format on
#define ARGOSY_XMM_0_15                                                                    \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"
#define ARGOSY_XMM_16_31                                                                    \
  "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", \
      "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31"

void multiply_add_xmm(int64_t passes) {
#define ARGOSY_ZERO(i) "xorps %%xmm" #i ", %%xmm" #i "\n\t"
#define ARGOSY_STEP(i)          \
  "movaps %%xmm12, %%xmm15\n\t" \
  "mulps %%xmm13, %%xmm15\n\t"  \
  "addps %%xmm15, %%xmm" #i "\n\t"
  __asm__ volatile(
      "movaps (%[data]), %%xmm12\n\t"
      "movaps 64(%[data]), %%xmm13\n\t" ARGOSY_CHAINS_12(ARGOSY_ZERO)
      "1:\n\t" ARGOSY_CHAINS_12(ARGOSY_STEP)
      "dec %[passes]\n\t"
      "jnz 1b"
      : [passes] "+r"(passes)
      : [data] "r"(&f32_operands())
      : "cc", "memory", ARGOSY_XMM_0_15);
#undef ARGOSY_ZERO
#undef ARGOSY_STEP
}

__attribute__((target("avx2,fma"))) void fma_ymm(int64_t passes) {
#define ARGOSY_ZERO(i) "vxorps %%ymm" #i ", %%ymm" #i ", %%ymm" #i "\n\t"
#define ARGOSY_STEP(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #i "\n\t"
  __asm__ volatile(
      "vmovaps (%[data]), %%ymm12\n\t"
      "vmovaps 64(%[data]), %%ymm13\n\t" ARGOSY_CHAINS_12(ARGOSY_ZERO)
      "1:\n\t" ARGOSY_CHAINS_12(ARGOSY_STEP)
      "dec %[passes]\n\t"
      "jnz 1b\n\t"
      "vzeroupper"
      : [passes] "+r"(passes)
      : [data] "r"(&f32_operands())
      : "cc", "memory", ARGOSY_XMM_0_15);
#undef ARGOSY_ZERO
#undef ARGOSY_STEP
}

// The two 512-bit loops differ in the instruction and the data only.
#define ARGOSY_ZERO(i) "vxorps %%zmm" #i ", %%zmm" #i ", %%zmm" #i "\n\t"
#define ARGOSY_LOOP_512(STEP, operands) \
  __asm__ volatile(                                                    \
      "vmovaps (%[data]), %%zmm28\n\t"                                 \
      "vmovaps 64(%[data]), %%zmm29\n\t"                               \
      "vmovaps 128(%[data]), %%zmm30\n\t" ARGOSY_CHAINS_20(ARGOSY_ZERO) \
      "1:\n\t" ARGOSY_CHAINS_20(STEP)                                  \
      "dec %[passes]\n\t"                                              \
      "jnz 1b\n\t"                                                     \
      "vzeroupper"                                                     \
      : [passes] "+r"(passes)                                          \
      : [data] "r"(&(operands))                                        \
      : "cc", "memory", ARGOSY_XMM_0_15, ARGOSY_XMM_16_31)

__attribute__((target("avx512f,avx512dq"))) void fma_zmm(int64_t passes) {
#define ARGOSY_STEP(i) "vfmadd231ps %%zmm28, %%zmm29, %%zmm" #i "\n\t"
  ARGOSY_LOOP_512(ARGOSY_STEP, f32_operands());
#undef ARGOSY_STEP
}

__attribute__((target("avx512f,avx512dq"))) void vdpbf16ps_zmm(int64_t passes) {
#define ARGOSY_STEP(i) "vdpbf16ps %%zmm28, %%zmm29, %%zmm" #i "\n\t"
  ARGOSY_LOOP_512(ARGOSY_STEP, bf16_operands());
#undef ARGOSY_STEP
}
#undef ARGOSY_ZERO

// The 64-byte operand of LDTILECFG, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Four accumulators over two and two operand tiles, as a real kernel holds them.
void tdpbf16ps(int64_t passes) {
  const TileConfig config;
  alignas(64) std::byte tile[1024];
  for (size_t row = 0; row < 16; ++row) {
    std::memcpy(tile + 64 * row, &bf16_operands().words[row % 4], 64);
  }
  const int64_t stride = 64;
  __asm__ volatile(
      "ldtilecfg (%[config])\n\t"
      "tilezero %%tmm0\n\t"
      "tilezero %%tmm1\n\t"
      "tilezero %%tmm2\n\t"
      "tilezero %%tmm3\n\t"
      "tileloadd (%[tile], %[stride], 1), %%tmm4\n\t"
      "tileloadd (%[tile], %[stride], 1), %%tmm5\n\t"
      "tileloadd (%[tile], %[stride], 1), %%tmm6\n\t"
      "tileloadd (%[tile], %[stride], 1), %%tmm7\n\t"
      "1:\n\t"
      "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
      "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
      "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t"
      "tdpbf16ps %%tmm7, %%tmm5, %%tmm3\n\t"
      "dec %[passes]\n\t"
      "jnz 1b\n\t"
      "tilerelease"
      : [passes] "+r"(passes)
      : [config] "r"(&config), [tile] "r"(tile), [stride] "r"(stride)
      : "cc", "memory");
}

constexpr RegisterLoop kRegisterLoops[] = {
    {{Level::kGeneric, "mulps + addps xmm", DType::kF32}, 12.0 * 4 * 2, multiply_add_xmm},
    {{Level::kAvx2, "vfmadd231ps ymm", DType::kF32}, 12.0 * 8 * 2, fma_ymm},
    {{Level::kAvx512, "vfmadd231ps zmm", DType::kF32}, 20.0 * 16 * 2, fma_zmm},
    {{Level::kAvx512Bf16, "vdpbf16ps zmm", DType::kBF16}, 20.0 * 32 * 2, vdpbf16ps_zmm},
    {{Level::kAmx, "tdpbf16ps", DType::kBF16}, 4.0 * 16 * 16 * 32 * 2, tdpbf16ps},
};

// A sink that the optimiser must fill.
template <typename Register>
void keep(Register value) {
  __asm__ volatile("" : : "m"(value) : "memory");
}

void read_128(const std::byte* from, int64_t bytes) {
  __m128i mixed = _mm_setzero_si128();
  for (int64_t at = 0; at < bytes; at += 64) {
    const auto* line = reinterpret_cast<const __m128i*>(from + at);
    mixed = _mm_xor_si128(mixed, _mm_xor_si128(_mm_load_si128(line), _mm_load_si128(line + 1)));
    mixed = _mm_xor_si128(mixed, _mm_xor_si128(_mm_load_si128(line + 2), _mm_load_si128(line + 3)));
  }
  keep(mixed);
}

void copy_128(std::byte* to, const std::byte* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 16) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
    // Without the barrier the loop may become a call of memcpy, which streams what is large.
    __asm__ volatile("movdqu %1, %0" : "=m"(*reinterpret_cast<__m128i*>(to + at)) : "x"(value));
  }
}

void streaming_copy_128(std::byte* to, const std::byte* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
  _mm_sfence();
}

__attribute__((target("avx512f"))) void read_512(const std::byte* from, int64_t bytes) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t at = 0; at < bytes; at += 256) {
    a = _mm512_xor_si512(a, _mm512_load_si512(from + at));
    b = _mm512_xor_si512(b, _mm512_load_si512(from + at + 64));
    c = _mm512_xor_si512(c, _mm512_load_si512(from + at + 128));
    d = _mm512_xor_si512(d, _mm512_load_si512(from + at + 192));
  }
  a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
  __asm__ volatile("" : : "m"(a) : "memory");
}

__attribute__((target("avx512f"))) void copy_512(std::byte* to, const std::byte* from,
                                                 int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    const __m512i value = _mm512_loadu_si512(from + at);
    __asm__ volatile("vmovdqu64 %1, %0" : "=m"(*reinterpret_cast<__m512i*>(to + at)) : "v"(value));
  }
}

__attribute__((target("avx512f"))) void streaming_copy_512(std::byte* to, const std::byte* from,
                                                           int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_load_si512(from + at));
  }
  _mm_sfence();
}

constexpr MemoryLoops kLoops128 = {read_128, copy_128, streaming_copy_128};
constexpr MemoryLoops kLoops512 = {read_512, copy_512, streaming_copy_512};

}  // namespace

std::span<const RegisterLoop> register_loops() { return kRegisterLoops; }

const MemoryLoops& memory_loops() {
  static const bool wide = cpu_features().avx512;
  return wide ? kLoops512 : kLoops128;
}

}  // namespace argosy::platform
