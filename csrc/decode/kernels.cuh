// The kernels that are launched, of a model.
#pragma once

#include "frame.cuh"
#include "prefill.cuh"

namespace megakernel {

template <class M, int MaxColumns>
__global__ void __launch_bounds__(kNumLaunchedThreads, 1)
    generate(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  generate_frames<M, MaxColumns>(p, *reinterpret_cast<SharedMemory<M, MaxColumns>*>(bytes));
}

template <class M, int MaxColumns>
__global__ void __launch_bounds__(kNumLaunchedThreads, 1)
    prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  prefill_prompts<M, MaxColumns>(p, *reinterpret_cast<SharedMemory<M, MaxColumns>*>(bytes));
}

template <class M>
Entry entry_of() {
  return {{reinterpret_cast<void*>(generate<M, 1>), sizeof(SharedMemory<M, 1>)},
          {reinterpret_cast<void*>(generate<M, kMaxStreams>), sizeof(SharedMemory<M, kMaxStreams>)},
          {{reinterpret_cast<void*>(prefill<M, 1>), sizeof(SharedMemory<M, 1>)},
           {reinterpret_cast<void*>(prefill<M, kMaxStreams>), sizeof(SharedMemory<M, kMaxStreams>)},
           {reinterpret_cast<void*>(prefill<M, kMaxPrefillColumns>),
            sizeof(SharedMemory<M, kMaxPrefillColumns>)}},
          shape_of<M>()};
}

}  // namespace megakernel
