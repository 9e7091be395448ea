// The kernels of the encoder of recognition as a host library for the tests; blocks run one after
// another.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/conformer/kernels.cuh"

using namespace megakernel;
using namespace megakernel::conformer;

template <class Body>
static void run(int num_blocks, Body body) {
  prerequisite_writes.launch_blocks(
      num_blocks, [&](int block) { launch(1, kBlockThreads, 0, body, block, num_blocks); });
}

#define MEGAKERNEL_EMULATE_KERNELS(suffix, Number)                                              \
  extern "C" void conformer_add_norm_##suffix(const AddNormParams* p, int num_blocks, int) {    \
    static AddNormSharedMemory shared;                                                          \
    run(num_blocks, [&] { add_norm<Number>(*p, shared); });                                     \
  }                                                                                             \
  extern "C" void conformer_attend_##suffix(const AttendParams* p, int num_blocks, int bytes) { \
    std::vector<float> shared(bytes / sizeof(float), NAN);                                      \
    run(num_blocks, [&] { attend<Number>(*p, shared.data()); });                                \
  }                                                                                             \
  extern "C" void conformer_convolve_##suffix(const ConvolveParams* p, int num_blocks, int) {   \
    static RowSums shared;                                                                      \
    run(num_blocks, [&] { convolve<Number>(*p, shared); });                                     \
  }                                                                                             \
  extern "C" void conformer_log_mel_##suffix(const LogMelParams* p, int num_blocks, int) {      \
    static LogMelSharedMemory shared;                                                           \
    run(num_blocks, [&] { log_mel<Number>(*p, shared); });                                      \
  }                                                                                             \
  extern "C" void conformer_subsample_mels_##suffix(const SubsampleParams* p, int num_blocks,   \
                                                    int) {                                      \
    run(num_blocks, [&] { subsample<Number, true>(*p); });                                      \
  }                                                                                             \
  extern "C" void conformer_subsample_##suffix(const SubsampleParams* p, int num_blocks, int) { \
    run(num_blocks, [&] { subsample<Number, false>(*p); });                                     \
  }                                                                                             \
  extern "C" void conformer_flatten_##suffix(const FlattenParams* p, int num_blocks, int) {     \
    run(num_blocks, [&] { flatten<Number>(*p); });                                              \
  }
MEGAKERNEL_CONFORMER_NUMBERS(MEGAKERNEL_EMULATE_KERNELS)

#define MEGAKERNEL_EMULATE_PROJECTION(name, kLayer, kInputs, kOutputs, suffix, Number, kRows)      \
  extern "C" void conformer_##name##_##kRows##_##suffix(const ProjectParams* p, int num_blocks,    \
                                                        int bytes) {                               \
    std::vector<uint4> shared(bytes / sizeof(uint4));                                              \
    run(num_blocks, [&] {                                                                          \
      project<Number, kLayer, kInputs, kOutputs, kRows>(*p,                                        \
                                                        reinterpret_cast<Number*>(shared.data())); \
    });                                                                                            \
  }
#define MEGAKERNEL_EMULATE_PROJECTIONS(suffix, Number)                          \
  MEGAKERNEL_CONFORMER_LAYERS(MEGAKERNEL_EMULATE_PROJECTION, suffix, Number, 1) \
  MEGAKERNEL_CONFORMER_LAYERS(MEGAKERNEL_EMULATE_PROJECTION, suffix, Number, 4)
MEGAKERNEL_CONFORMER_NUMBERS(MEGAKERNEL_EMULATE_PROJECTIONS)
