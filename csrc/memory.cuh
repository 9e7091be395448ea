// Every instruction below C++, behind a name that says the intent. Nothing else in the kernel
// knows PTX or a CUDA intrinsic, so that the same phases also compile for a host emulator.
#pragma once

#include "types.cuh"

#ifndef MEGAKERNEL_EMULATOR

#define DEVICE __device__ __forceinline__
#define DEVICE_CALL __device__ __noinline__  // its registers are its own

namespace megakernel {

DEVICE int thread() { return threadIdx.x; }
DEVICE int block() { return blockIdx.x; }
DEVICE int blocks() { return gridDim.x; }

// All threads of the block have arrived; what they wrote to shared and global memory is seen.
DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }

template <class T>
DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(~0u, value, mask);
}

DEVICE float to_float(bf16 value) { return __bfloat162float(value); }
DEVICE bf16 to_bf16(float value) { return __float2bfloat16_rn(value); }

// Two bf16 as one register of a matrix operand; `low` is the one of the smaller index.
DEVICE uint32_t pack(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

// Weights are read once a step: they pass the first-level cache by.
DEVICE uint4 load_weights(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

// What another block wrote before the last grid barrier: never from a stale first-level line.
DEVICE float load_shared_by_blocks(const float* at) { return __ldcg(at); }
DEVICE int load_shared_by_blocks(const int* at) { return __ldcg(at); }

// acc[4] += A (16 x 16 weights) B (16 x 8 activations); rows g and g + 8, columns 2t and 2t + 1
// belong to lane 4g + t.
DEVICE void multiply(float (&acc)[4], uint4 a, uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// A signal that other blocks wait for, after everything that this thread has seen or done.
DEVICE void signal(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

DEVICE unsigned observe(const unsigned* counter) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}

// The same between this device and the host, through pinned memory.
DEVICE void publish(unsigned* to_host, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to_host), "r"(value) : "memory");
}

DEVICE unsigned observe_host(const unsigned* from_host) {
  unsigned v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from_host) : "memory");
  return v;
}

DEVICE uint64_t nanoseconds() {
  uint64_t v;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
  return v;
}

DEVICE int add_in_block(int* at, int value) { return atomicAdd(at, value); }

}  // namespace megakernel

#endif
