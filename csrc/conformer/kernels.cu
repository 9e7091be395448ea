// The kernels of the encoder, under the names by which the host launches them.
#include "kernels.cuh"

namespace megakernel::conformer {

#define MEGAKERNEL_DEFINE_KERNELS(suffix, Number)                                    \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 2)                     \
      conformer_add_norm_##suffix(const __grid_constant__ AddNormParams p) {         \
    __shared__ AddNormSharedMemory shared;                                           \
    add_norm<Number>(p, shared);                                                     \
  }                                                                                  \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 2)                     \
      conformer_attend_##suffix(const __grid_constant__ AttendParams p) {            \
    extern __shared__ __align__(16) unsigned char bytes[];                           \
    attend<Number>(p, reinterpret_cast<float*>(bytes));                              \
  }                                                                                  \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 2)                     \
      conformer_convolve_##suffix(const __grid_constant__ ConvolveParams p) {        \
    __shared__ RowSums shared;                                                       \
    convolve<Number>(p, shared);                                                     \
  }                                                                                  \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 2)                     \
      conformer_log_mel_##suffix(const __grid_constant__ LogMelParams p) {           \
    __shared__ LogMelSharedMemory shared;                                            \
    log_mel<Number>(p, shared);                                                      \
  }                                                                                  \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 2)                     \
      conformer_subsample_mels_##suffix(const __grid_constant__ SubsampleParams p) { \
    subsample<Number, true>(p);                                                      \
  }                                                                                  \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 2)                     \
      conformer_subsample_##suffix(const __grid_constant__ SubsampleParams p) {      \
    subsample<Number, false>(p);                                                     \
  }                                                                                  \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 2)                     \
      conformer_flatten_##suffix(const __grid_constant__ FlattenParams p) {          \
    flatten<Number>(p);                                                              \
  }
MEGAKERNEL_CONFORMER_NUMBERS(MEGAKERNEL_DEFINE_KERNELS)
#undef MEGAKERNEL_DEFINE_KERNELS

#define MEGAKERNEL_DEFINE_PROJECTION(name, kLayer, kInputs, kOutputs, suffix, Number, kRows) \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)                             \
      conformer_##name##_##kRows##_##suffix(const __grid_constant__ ProjectParams p) {       \
    extern __shared__ __align__(16) unsigned char bytes[];                                   \
    project<Number, kLayer, kInputs, kOutputs, kRows>(p, reinterpret_cast<Number*>(bytes));  \
  }
#define MEGAKERNEL_DEFINE_PROJECTIONS(suffix, Number)                          \
  MEGAKERNEL_CONFORMER_LAYERS(MEGAKERNEL_DEFINE_PROJECTION, suffix, Number, 1) \
  MEGAKERNEL_CONFORMER_LAYERS(MEGAKERNEL_DEFINE_PROJECTION, suffix, Number, 4)
MEGAKERNEL_CONFORMER_NUMBERS(MEGAKERNEL_DEFINE_PROJECTIONS)
#undef MEGAKERNEL_DEFINE_PROJECTIONS
#undef MEGAKERNEL_DEFINE_PROJECTION

}  // namespace megakernel::conformer
