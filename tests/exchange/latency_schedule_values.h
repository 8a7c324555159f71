// What a schedule's rows hold, and how they lie in memory. Test: latency_schedule_test.cc.
#pragma once

#include <cstdint>
#include <cstring>

#include "argosy/bfloat16.h"
#include "argosy/tensor.h"
#include "exchange/scheduled_world.h"

namespace argosy::testing {

// Exact in fp32, and another one for each place. In bf16, where 8 bits cannot name it all, a mixture of it.
inline float element(DType dtype, int64_t exchange, int64_t call, int64_t rank, int64_t token,
                     int64_t column) {
  const int64_t name = (((exchange * 16 + call) * 4 + rank) * 4 + token) * 16 + column;
  if (dtype == DType::kF32) return static_cast<float>(name);
  const uint64_t mixed = SmallRandom(static_cast<uint64_t>(name)).next();
  const float value = static_cast<float>(128 + (mixed & 127)) * ((mixed & 128) != 0 ? 0.5f : 2.0f);
  return (mixed & 256) != 0 ? -value : value;
}

inline float expert_value(DType dtype, float value, int64_t expert) {
  const float result = value * 0.5f + static_cast<float>(expert);
  return dtype == DType::kF32 ? result : BFloat16::from_float(result).to_float();
}

// Beside the row of (token, k), and beside its result.
inline float number(int64_t exchange, int64_t call, int64_t rank, int64_t token, int64_t k) {
  return element(DType::kF32, exchange, call, rank, token, 12 + k);
}
inline float result_number(int64_t exchange, int64_t call, int64_t rank, int64_t token, int64_t k) {
  return -number(exchange, call, rank, token, k);
}

inline void store(DType dtype, std::byte* row, int64_t column, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(row + column * 4, &value, 4);
  } else {
    const BFloat16 rounded = BFloat16::from_float(value);
    std::memcpy(row + column * 2, &rounded, 2);
  }
}

inline float load(DType dtype, const std::byte* row, int64_t column) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, row + column * 4, 4);
    return value;
  }
  BFloat16 value;
  std::memcpy(&value, row + column * 2, 2);
  return value.to_float();
}

}  // namespace argosy::testing
