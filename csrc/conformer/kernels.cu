// The kernels of a Conformer block, under the names by which the host launches them.
#include "kernels.cuh"

namespace megakernel::conformer {

#define MEGAKERNEL_DEFINE_KERNELS(suffix, Number)                             \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)              \
      conformer_add_norm_##suffix(const __grid_constant__ AddNormParams p) {  \
    __shared__ AddNormSharedMemory shared;                                    \
    add_norm<Number>(p, shared);                                              \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)              \
      conformer_attend_##suffix(const __grid_constant__ AttendParams p) {     \
    extern __shared__ __align__(16) unsigned char bytes[];                    \
    attend<Number>(p, reinterpret_cast<float*>(bytes));                       \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)              \
      conformer_convolve_##suffix(const __grid_constant__ ConvolveParams p) { \
    __shared__ RowSums shared;                                                \
    convolve<Number>(p, shared);                                              \
  }
MEGAKERNEL_CONFORMER_NUMBERS(MEGAKERNEL_DEFINE_KERNELS)
#undef MEGAKERNEL_DEFINE_KERNELS

}  // namespace megakernel::conformer
