// The table of a level's stores, included after store_plain, store_gate_up and the activations, in the order
// of ActivationKind. Test: tests/gemm/kernels_test.cc.

template <typename Out>
constexpr Stores stores_of() {
  return {.plain = {store_plain<Out, false>, store_plain<Out, true>},
          .gate_up = {{{store_gate_up<Out, SwiGlu, false>, store_gate_up<Out, SwiGlu, true>},
                       {store_gate_up<Out, ClampedSwiGlu, false>,
                        store_gate_up<Out, ClampedSwiGlu, true>}}}};
}
