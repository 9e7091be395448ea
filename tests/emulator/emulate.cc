// The decode kernels on emulated instructions, as a library of the host.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/decode/kernels.cuh"

using namespace megakernel;

// The host reads it as it reads the variable of a CUDA module.
extern "C" const DecodeInfo decode_info = make_decode_info();

template <int MaxColumns, class Body>
static void emulate(const Params& p, int num_blocks, int late, Body body) {
  std::vector<SharedMemory<KernelModel, MaxColumns>> shared(num_blocks);
  launch(num_blocks, kNumThreads + 32, late, [&] { body(p, shared[block_idx()]); });
}

// Whether the library has a kernel: whether MEGAKERNEL_EMULATED_KERNELS lists its name.
constexpr bool is_emulated(const char* name) {
  for (const char* kernel : {MEGAKERNEL_EMULATED_KERNELS}) {
    if (__builtin_strcmp(kernel, name) == 0) return true;
  }
  return false;
}

// Runs a kernel with some thread blocks; block 0 begins after `late` turns of the others.
#define MEGAKERNEL_EMULATE_KERNEL(name, run, MaxColumns)                     \
  extern "C" void name(const Params* p, int num_blocks, int late) {          \
    emulate<MaxColumns>(*p, num_blocks, late, [](const Params& p, auto& s) { \
      if constexpr (is_emulated(#name)) run<KernelModel, MaxColumns>(p, s);  \
    });                                                                      \
  }
MEGAKERNEL_DECODE_KERNELS(MEGAKERNEL_EMULATE_KERNEL)

// The schedule of later launches: 0 is round robin, other seeds pause thread blocks at random.
extern "C" void set_schedule_seed(unsigned seed) { schedule_seed = seed; }

// Polls of exchange buffers that found a value of another use than the last or the current one.
extern "C" long epoch_violations() { return num_epoch_violations; }

// values[i] /= divisor, as sampling divides.
extern "C" void divide(float* values, int count, float divisor) {
  const ExactDivisor by(divisor);
  for (int i = 0; i < count; ++i) values[i] = by.divide(values[i]);
}
