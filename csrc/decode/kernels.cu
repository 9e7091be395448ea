// The decode kernels, under the names by which the host launches them.
#include "kernels.cuh"

namespace megakernel {

#define MEGAKERNEL_DEFINE_KERNEL(name, run, MaxColumns)                       \
  extern "C" __global__ void __launch_bounds__(kNumLaunchedThreads, 1)        \
      name(const __grid_constant__ Params p) {                                \
    extern __shared__ __align__(16) unsigned char bytes[];                    \
    run<KernelModel, MaxColumns>(                                             \
        p, *reinterpret_cast<SharedMemory<KernelModel, MaxColumns>*>(bytes)); \
  }
MEGAKERNEL_DECODE_KERNELS(MEGAKERNEL_DEFINE_KERNEL)
#undef MEGAKERNEL_DEFINE_KERNEL

// The host reads it from the module.
extern "C" {
__device__ DecodeInfo decode_info = make_decode_info();
}

}  // namespace megakernel
