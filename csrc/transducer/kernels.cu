// The kernels of the transducer, under the names by which the host launches them.
#include "kernels.cuh"

namespace megakernel::transducer {

#define MEGAKERNEL_DEFINE_KERNEL(name, Number)                             \
  extern "C" __global__ void __launch_bounds__(kNumThreads, 1)             \
      name(const __grid_constant__ TransducerParams p) {                   \
    extern __shared__ __align__(16) unsigned char bytes[];                 \
    transduce<Number>(p, *reinterpret_cast<SharedMemory<Number>*>(bytes)); \
  }
MEGAKERNEL_TRANSDUCER_KERNELS(MEGAKERNEL_DEFINE_KERNEL)
#undef MEGAKERNEL_DEFINE_KERNEL

// The host reads it from the module.
extern "C" __device__ TransducerInfo transducer_info = make_transducer_info();

}  // namespace megakernel::transducer
