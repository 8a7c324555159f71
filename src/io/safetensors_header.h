// The JSON header of a safetensors file, checked whole before anything is believed.
//
// No request for memory exceeds the header plus a constant.
// Test: tests/io/safetensors_header_test.cc.
#pragma once

#include <cstdint>
#include <deque>
#include <string_view>

#include "argosy/checkpoint.h"
#include "argosy/status.h"

namespace argosy::io {

inline constexpr int64_t kMaxHeaderBytes = 100'000'000;
inline constexpr size_t kMaxHeaderDims = 64;

// The tensors of `json`, by rising name, ranges counted from `data_begin`. `data_bytes` is what the
// file holds after the header. Errors: kCorruptData naming the tensor; kUnsupported for an unknown
// dtype.
Result<std::deque<TensorInfo>> parse_safetensors_header(std::string_view json, int64_t data_begin,
                                                        int64_t data_bytes);

}  // namespace argosy::io
