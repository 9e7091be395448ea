// The kernels that are launched, of every model.
#include "frame.cuh"

namespace megakernel {

template <class M, int Most>
__global__ void __launch_bounds__(kLaunched, 1) generate(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  generate_frames<M, Most>(p, *reinterpret_cast<Shared<M>*>(bytes));
}

template <class M>
__global__ void __launch_bounds__(kLaunched, 1) prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  run_prompts<M>(p, *reinterpret_cast<Shared<M>*>(bytes));
}

#define MEGAKERNEL_ENTRY(name)                                                                     \
  Entry {                                                                                          \
    reinterpret_cast<void*>(generate<name, 1>), reinterpret_cast<void*>(generate<name, kColumns>), \
        reinterpret_cast<void*>(prefill<name>), sizeof(Shared<name>), shape_of<name>()             \
  }

// The kernels of a model, in the order of `MEGAKERNEL_MODELS`.
Entry entry(int model) {
  static const Entry entries[] = {MEGAKERNEL_MODELS(MEGAKERNEL_ENTRY)};
  return entries[model];
}

}  // namespace megakernel
