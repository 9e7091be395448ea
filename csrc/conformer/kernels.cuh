// All kernels of a Conformer block, as a list of names for macros: csrc/conformer/kernels.cu
// defines them for a GPU, the tests' emulator for a CPU.
#pragma once

#include "add_norm.cuh"
#include "attend.cuh"
#include "convolve.cuh"

// X(suffix of the names, Number) for each type of numbers.
#define MEGAKERNEL_CONFORMER_NUMBERS(X) \
  X(float32, float)                     \
  X(bfloat16, bf16)
