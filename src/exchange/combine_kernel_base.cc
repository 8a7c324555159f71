// The combine kernel for any x86-64.
#define ARGOSY_KERNEL_TABLE kCombineKernelBase
#define ARGOSY_KERNEL_LEVEL Level::kGeneric
#include "exchange/combine_kernel.inl"
