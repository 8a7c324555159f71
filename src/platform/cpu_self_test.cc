// Does each instruction give the bits that the contract expects of it? Run once per process, on
// data that reaches rounding and (where the instruction defines it) denormals, against scalar
// emulations. An emulator or a hypervisor that differs must cost speed, never bits. Test:
// tests/platform/cpu_test.cc.
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "argosy/bfloat16.h"
#include "platform/cpu_detect.h"
#include "platform/float_env.h"

namespace argosy::platform {
namespace {

// xorshift32: self-test data needs no quality, only bits everywhere.
struct Bits {
  uint32_t state = 0x9E3779B9u;
  uint32_t next() {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
  }
};

constexpr int kRounds = 64;

// Full-width significands with exponents so close that the product plus the addend is exact in
// fp64; one rounding of it to fp32 is then the FMA.
float near_one(Bits& bits) {
  return std::bit_cast<float>((bits.next() & 0x80FFFFFFu) | 0x3F000000u);
}

float fma_by_double(float a, float b, float c) {
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) +
                            static_cast<double>(c));
}

template <int kLanes>
bool fma_agrees(void (*instruction)(const float*, const float*, const float*, float*)) {
  const ScopedFloatEnv env(Denormals::kKeep);
  Bits bits;
  for (int round = 0; round < kRounds; ++round) {
    float a[kLanes], b[kLanes], c[kLanes], got[kLanes], want[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      a[i] = near_one(bits);
      b[i] = near_one(bits);
      c[i] = near_one(bits);
      want[i] = fma_by_double(a[i], b[i], c[i]);
    }
    instruction(a, b, c, got);
    if (std::memcmp(got, want, sizeof(got)) != 0) return false;
  }
  return true;
}

__attribute__((target("avx2,fma"))) void fma_avx2(const float* a, const float* b, const float* c,
                                                  float* out) {
  _mm256_storeu_ps(out,
                   _mm256_fmadd_ps(_mm256_loadu_ps(a), _mm256_loadu_ps(b), _mm256_loadu_ps(c)));
}

__attribute__((target("avx512f"))) void fma_avx512(const float* a, const float* b, const float* c,
                                                   float* out) {
  _mm512_storeu_ps(out,
                   _mm512_fmadd_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(b), _mm512_loadu_ps(c)));
}

// bf16 from any exponent but the top ones: sums stay finite, small ones are denormal and must be
// flushed.
uint16_t any_bf16(Bits& bits, int round) {
  const uint32_t word = bits.next();
  const uint32_t exponent = round % 2 == 0 ? 120 + word % 16 : word % 70;
  return static_cast<uint16_t>((word >> 16 & 0x807Fu) | exponent << 7);
}

float widen(uint16_t bits) { return BFloat16{bits}.to_float(); }

// VDPBF16PS as the contract has it (4.2), one lane. Precondition: denormals are flushed.
__attribute__((noinline)) float vdpbf16_lane(const uint16_t* x, const uint16_t* w, float acc) {
  acc = std::fma(widen(x[1]), widen(w[1]), acc);
  return std::fma(widen(x[0]), widen(w[0]), acc);
}

__attribute__((target("avx512f,avx512bf16"))) void vdpbf16(const uint16_t* x, const uint16_t* w,
                                                           float* acc) {
  const __m512i x_bits = _mm512_loadu_si512(x);
  const __m512i w_bits = _mm512_loadu_si512(w);
  __m512bh x_pairs, w_pairs;
  std::memcpy(&x_pairs, &x_bits, sizeof(x_pairs));
  std::memcpy(&w_pairs, &w_bits, sizeof(w_pairs));
  _mm512_storeu_ps(acc, _mm512_dpbf16_ps(_mm512_loadu_ps(acc), x_pairs, w_pairs));
}

bool vdpbf16_agrees() {
  const ScopedFloatEnv env(Denormals::kFlush);
  Bits bits;
  float got[16] = {}, want[16] = {};
  for (int round = 0; round < kRounds; ++round) {
    uint16_t x[32], w[32];
    for (int i = 0; i < 32; ++i) {
      x[i] = any_bf16(bits, round / 8);
      w[i] = any_bf16(bits, round / 8);
    }
    if (round % 8 == 0) {
      std::memset(got, 0, sizeof(got));
      std::memset(want, 0, sizeof(want));
    }
    for (size_t i = 0; i < 16; ++i) want[i] = vdpbf16_lane(x + 2 * i, w + 2 * i, want[i]);
    vdpbf16(x, w, got);
    if (std::memcmp(got, want, sizeof(got)) != 0) return false;
  }
  return true;
}

// The 64-byte operand of LDTILECFG, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// acc[16][16] += x[16 rows][32 k] . w[16 k-pairs][16 columns][2]
__attribute__((target("amx-tile,amx-bf16"))) void tdpbf16(const uint16_t* x, const uint16_t* w,
                                                          float* acc) {
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  // Compilers do not see that LDTILECFG reads the structure and would drop the stores above.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_loadd(0, acc, 64);
  _tile_loadd(1, x, 64);
  _tile_loadd(2, w, 64);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, acc, 64);
  _tile_release();
  __asm__ volatile("" : : "r"(acc) : "memory");
}

// TDPBF16PS as the contract has it (4.2), one element. Precondition: denormals are flushed.
__attribute__((noinline)) float tdpbf16_element(const uint16_t* x_row, const uint16_t* w_column,
                                                float acc) {
  float even = 0.0f, odd = 0.0f;
  for (size_t pair = 0; pair < 16; ++pair) {
    even = std::fma(widen(x_row[2 * pair]), widen(w_column[32 * pair]), even);
    odd = std::fma(widen(x_row[2 * pair + 1]), widen(w_column[32 * pair + 1]), odd);
  }
  return acc + (even + odd);
}

bool tdpbf16_agrees() {
  const ScopedFloatEnv env(Denormals::kFlush);
  Bits bits;
  float got[256], want[256];
  for (int round = 0; round < kRounds; ++round) {
    uint16_t x[512], w[512];
    for (int i = 0; i < 512; ++i) {
      x[i] = any_bf16(bits, round / 8);
      w[i] = any_bf16(bits, round / 8);
    }
    if (round % 8 == 0) {
      std::memset(got, 0, sizeof(got));
      std::memset(want, 0, sizeof(want));
    }
    for (size_t i = 0; i < 256; ++i) {
      want[i] = tdpbf16_element(x + i / 16 * 32, w + i % 16 * 2, want[i]);
    }
    tdpbf16(x, w, got);
    if (std::memcmp(got, want, sizeof(got)) != 0) return false;
  }
  return true;
}

}  // namespace

bool passes_self_test(Level level) {
  switch (level) {
    case Level::kReference:
    case Level::kGeneric:
      return true;
    case Level::kAvx2:
      return fma_agrees<8>(fma_avx2);
    case Level::kAvx512:
      return fma_agrees<16>(fma_avx512);
    case Level::kAvx512Bf16:
      return vdpbf16_agrees();
    case Level::kAmx:
      return tdpbf16_agrees();
  }
  return false;
}

}  // namespace argosy::platform
