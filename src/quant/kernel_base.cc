// The quantiser's loops for any x86-64. See kernel.inl.
#include "quant/kernel.inl"

namespace argosy::quant {

const Kernel kKernelBase = {Level::kGeneric,
                            false,
                            amax_rows<uint16_t>,
                            amax_rows<uint32_t>,
                            scales_f32,
                            scales_e8m0,
                            values_e8m0,
                            encode_rows<uint16_t>,
                            encode_rows<uint32_t>,
                            decode_rows<uint16_t>,
                            decode_rows<uint32_t>};

}  // namespace argosy::quant
