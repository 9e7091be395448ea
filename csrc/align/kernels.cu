// The alignment kernels, under the names that the host launches.
#include "kernels.cuh"

namespace megakernel::align {

#define MEGAKERNEL_DEFINE_SEARCH(name, Score, kAligned, kSharedDirections)               \
  extern "C" __global__ void __launch_bounds__(64 * kMaxStripsPerBlock, kMaxBlocksPerSm) \
      name(const __grid_constant__ SearchParams p) {                                     \
    extern __shared__ __align__(kLineBytes) unsigned char dynamic_shared[];              \
    __shared__ SearchSharedMemory shared;                                                \
    search<Score, kAligned, kSharedDirections>(p, shared, dynamic_shared);               \
  }
MEGAKERNEL_ALIGN_SEARCHES(MEGAKERNEL_DEFINE_SEARCH)
#undef MEGAKERNEL_DEFINE_SEARCH

#define MEGAKERNEL_DEFINE_PATH(name, Element)                   \
  extern "C" __global__ void __launch_bounds__(32 * kPathWarps) \
      name(const __grid_constant__ PathParams p) {              \
    __shared__ PathSharedMemory shared;                         \
    write_path<Element>(p, shared);                             \
  }
MEGAKERNEL_ALIGN_PATHS(MEGAKERNEL_DEFINE_PATH)
#undef MEGAKERNEL_DEFINE_PATH

extern "C" __global__ void __launch_bounds__(32 * kMaskWarps)
    align_count_lengths(const __grid_constant__ MaskParams p) {
  __shared__ unsigned warp_counts[kMaskWarps];
  count_lengths(p, warp_counts);
}

// The host reads it from the module.
extern "C" __device__ AlignInfo align_info = make_align_info();

}  // namespace megakernel::align
