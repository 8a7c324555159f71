// Rows of one payload, one after the other: what encode_payload() looks up for every row is kept. Test:
// tests/quant/payload_test.cc.
#pragma once

#include "argosy/payload.h"
#include "quant/kernel.h"
#include "quant/scales.h"

namespace argosy::quant {

class PayloadEncoder {
 public:
  explicit PayloadEncoder(const PayloadLayout& layout);

  // The bytes of encode_payload(). Precondition: the payload is quantised, and the floating-point environment is that of
  // Denormals::kKeep, as a ThreadPool's task has it: setting it waits for all arithmetic before, which is dear beside a row.
  void encode(const std::byte* row, std::byte* out) const;

 private:
  const PayloadLayout& layout_;
  const Kernel& kernel_;
  const ScaleRule rule_;
};

}  // namespace argosy::quant
