// The random layers of the tests that run one in every setup, and the naive layer's bytes.
#pragma once

#include <cstddef>
#include <vector>

#include "support/naive_layer.h"

namespace argosy::testing {

struct LayerCase {
  DType dtype = DType::kBF16;
  DotOrder order = DotOrder::kVdpbf16;
  bool shared = false;
  bool shared_gate = false;
  bool gpt_oss = false;
};

// 9 experts, top-3, hidden 37, width 19.
inline NaiveLayer layer_of(const LayerCase& param) {
  return param.gpt_oss ? random_gpt_oss_layer(41, param.dtype, param.order, 9, 3, 37, 19)
                       : random_layer(41, param.dtype, param.order, 9, 3, 37, 19, param.shared,
                                      param.shared_gate);
}

// The output's bytes, in token order.
inline std::vector<std::byte> naive_bytes(const NaiveLayer& layer, const Matrix& hidden,
                                          const uint8_t* mask) {
  const Tensor output = to_tensor(naive_forward(layer, hidden, mask), layer.dtype);
  return {output.bytes().begin(), output.bytes().end()};
}

}  // namespace argosy::testing
