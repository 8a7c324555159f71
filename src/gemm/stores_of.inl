// The table of a level's stores, included after store_plain, store_gate_up and the activations, in the order
// of ActivationKind. Test: tests/gemm/kernels_test.cc.

template <typename Out, typename... Acts>
constexpr Stores stores_with() {
  static_assert(sizeof...(Acts) == kNumActivations);
  return {.plain = {store_plain<Out, false>, store_plain<Out, true>},
          .gate_up = {Stores::WithoutAndWithBias{store_gate_up<Out, Acts, false>,
                                                 store_gate_up<Out, Acts, true>}...}};
}

template <typename Out>
constexpr Stores stores_of() {
  return stores_with<Out, SwiGlu, ClampedSwiGlu, GeGlu, GeGluTanh, Relu2Glu>();
}
