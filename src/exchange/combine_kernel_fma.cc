// The combine kernel compiled with AVX2 and FMA.
#define ARGOSY_KERNEL_TABLE kCombineKernelFma
#include "exchange/combine_kernel.inl"
