// All kernels of the encoder, as a list of names for macros: csrc/conformer/kernels.cu
// defines them for a GPU, the tests' emulator for a CPU.
#pragma once

#include "add_norm.cuh"
#include "attend.cuh"
#include "convolve.cuh"
#include "log_mel.cuh"
#include "project.cuh"
#include "subsample.cuh"

// X(suffix of the names, Number) for each type of numbers.
#define MEGAKERNEL_CONFORMER_NUMBERS(X) \
  X(float32, float)                     \
  X(bfloat16, bf16)

// X(name, kLayer, kInputs, kOutputs) for each linear layer of a block.
#define MEGAKERNEL_CONFORMER_LAYERS(X, ...)                      \
  X(up, Layer::kUp, kHidden, kIntermediate, __VA_ARGS__)         \
  X(down, Layer::kResidual, kIntermediate, kHidden, __VA_ARGS__) \
  X(qkv, Layer::kProject, kHidden, 3 * kHidden, __VA_ARGS__)     \
  X(gate, Layer::kProject, kHidden, 2 * kHidden, __VA_ARGS__)    \
  X(add, Layer::kResidual, kHidden, kHidden, __VA_ARGS__)
