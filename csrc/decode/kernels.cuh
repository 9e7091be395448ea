// The kernels that are launched, of a model.
#pragma once

#include "frame.cuh"
#include "prefill.cuh"

namespace megakernel {

template <class M, int Most>
__global__ void __launch_bounds__(kLaunched, 1) generate(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  generate_frames<M, Most>(p, *reinterpret_cast<Shared<M, Most>*>(bytes));
}

template <class M, int Most>
__global__ void __launch_bounds__(kLaunched, 1) prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  run_prompts<M, Most>(p, *reinterpret_cast<Shared<M, Most>*>(bytes));
}

template <class M>
Entry entry_of() {
  return {{reinterpret_cast<void*>(generate<M, 1>), sizeof(Shared<M, 1>)},
          {reinterpret_cast<void*>(generate<M, kColumns>), sizeof(Shared<M, kColumns>)},
          {{reinterpret_cast<void*>(prefill<M, 1>), sizeof(Shared<M, 1>)},
           {reinterpret_cast<void*>(prefill<M, kColumns>), sizeof(Shared<M, kColumns>)},
           {reinterpret_cast<void*>(prefill<M, kWide>), sizeof(Shared<M, kWide>)}},
          shape_of<M>()};
}

}  // namespace megakernel
