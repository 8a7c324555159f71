// The combine kernel compiled with AVX2 and FMA.
#define ARGOSY_KERNEL_TABLE kCombineKernelFma
#define ARGOSY_KERNEL_LEVEL Level::kAvx2
#include "exchange/combine_kernel.inl"
