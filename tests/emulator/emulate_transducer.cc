// The kernels of the transducer as a host library for the tests.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/transducer/kernels.cuh"

using namespace megakernel;
using namespace megakernel::transducer;

// The host reads it as it reads the variable of a CUDA module.
extern "C" const TransducerInfo transducer_info = make_transducer_info();

// Runs a kernel; block 0 starts after `late` turns of the other blocks. Shared memory begins with
// arbitrary values.
template <class Number>
static void run(const TransducerParams& p, int num_blocks, int late) {
  std::vector<SharedMemory<Number>> shared(num_blocks);
  memset(shared.data(), 0xFF, num_blocks * sizeof(SharedMemory<Number>));
  launch(num_blocks, kNumThreads, late, [&] { transduce<Number>(p, shared[block_idx()]); });
}

#define MEGAKERNEL_EMULATE_KERNEL(name, Number)                               \
  extern "C" void name(const TransducerParams* p, int num_blocks, int late) { \
    run<Number>(*p, num_blocks, late);                                        \
  }
MEGAKERNEL_TRANSDUCER_KERNELS(MEGAKERNEL_EMULATE_KERNEL)

// The schedule of later launches: 0 is round robin, other seeds pause thread blocks at random.
extern "C" void set_schedule_seed(unsigned seed) { schedule_seed = seed; }
