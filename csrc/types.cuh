// The number types that host and device code share.
#pragma once

#ifdef MEGAKERNEL_EMULATOR
#include "emulator.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace megakernel {

using bf16 = __nv_bfloat16;
using f16 = __half;

}  // namespace megakernel

#endif
