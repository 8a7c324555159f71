// The two bytes of the bf16 value of every code, for decoders that look them up. Test: tests/gemm/decode_test.cc.
#pragma once

#include <cstdint>

namespace argosy::gemm {

// By the magnitude of a code, without its sign.
struct E4M3Tables {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};
const E4M3Tables& e4m3_tables();

// By the code: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the same with a sign.
alignas(16) inline constexpr uint8_t kE2M1Low[16] = {
    0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0, 0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0};
alignas(16) inline constexpr uint8_t kE2M1High[16] = {
    0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};

}  // namespace argosy::gemm
