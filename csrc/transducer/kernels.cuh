// All kernels of the transducer, as a list of names for macros: csrc/transducer/kernels.cu defines
// them for a GPU, the tests' emulator for a CPU.
#pragma once

#include "transduce.cuh"

// X(name, Number) for each kernel.
#define MEGAKERNEL_TRANSDUCER_KERNELS(X) \
  X(transduce_float32, float)            \
  X(transduce_bfloat16, bf16)

namespace megakernel::transducer {

// What the host reads of a build.
struct TransducerInfo {
  int num_threads;
  int float32_shared_bytes;
  int bfloat16_shared_bytes;
};

constexpr TransducerInfo make_transducer_info() {
  return {kNumThreads, sizeof(SharedMemory<float>), sizeof(SharedMemory<bf16>)};
}

}  // namespace megakernel::transducer
