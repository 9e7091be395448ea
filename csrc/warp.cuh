// Threads, warps and thread blocks: indices, barriers, warp collectives, register limits.
//
// The files warp.cuh, math.cuh, mbarrier.cuh, memory.cuh and warpgroup.cuh contain every PTX
// instruction and CUDA intrinsic of the kernels. The tests replace them by
// tests/emulator/emulator.h, which runs the same kernels on a CPU.
#pragma once

#include "shapes.cuh"
#include "types.cuh"

#ifndef MEGAKERNEL_EMULATOR

#define DEVICE __device__ __forceinline__
// For rare code, and for code that several callers share: the instructions of a layer have to fit
// into the instruction cache of 32 KiB.
#define DEVICE_NOINLINE __device__ __noinline__

namespace megakernel {

// --- indices ---

// The index is opaque to the compiler at every call, so that values derived from it are recomputed
// and do not occupy registers for a whole frame.
DEVICE int thread_idx() {
  unsigned index = threadIdx.x;
  asm volatile("" : "+r"(index));
  __builtin_assume(index < 1024);  // divisions then need no code for negative numbers
  return static_cast<int>(index);
}
DEVICE int block_idx() { return blockIdx.x; }
DEVICE int num_blocks() { return gridDim.x; }
DEVICE int warp_idx() { return thread_idx() / 32; }
DEVICE int lane_idx() { return thread_idx() % 32; }

// --- barriers ---

// All threads of the thread block. Warps may call it from different places of the code.
DEVICE void sync_all_threads() { asm volatile("bar.sync 0;" ::: "memory"); }
// The compute threads. Their writes to shared memory before it are visible after it.
DEVICE void sync_compute_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(kNumThreads) : "memory");
}
DEVICE void sync_warp() { __syncwarp(); }
// The same with a hardware barrier per warp. The compiler removes `__syncwarp` where the lanes have
// converged, and compute-sanitizer's racecheck then reports a hazard between them.
DEVICE void warp_barrier() {
  asm volatile("bar.sync %0, 32;" ::"r"(2 + static_cast<int>(threadIdx.x) / 32) : "memory");
}

// --- register limits ---

// setmaxnreg moves registers from the copy warps to the compute warps; multiples of 8 for a thread.
template <int kRegisters = 232>
DEVICE void raise_register_limit() {
#ifdef MEGAKERNEL_MOVES_REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters = 40>
DEVICE void lower_register_limit() {
#ifdef MEGAKERNEL_MOVES_REGISTERS
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// --- warp collectives ---

// The value of lane `lane ^ mask`, and of lane `lane`.
template <class T>
DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(~0u, value, mask);
}
template <class T>
DEVICE T shuffle_from(T value, int lane) {
  return __shfl_sync(~0u, value, lane);
}
// The value of lane `lane - 1`; lane 0 gets its own.
DEVICE float shuffle_up(float value) { return __shfl_up_sync(~0u, value, 1); }
// Declares a value to be equal in all lanes. The compiler then omits the reconvergence code of
// branches on it, about ten instructions per branch.
DEVICE int warp_uniform(int value) { return shuffle_from(value, 0); }
DEVICE int uniform_warp_idx() { return warp_uniform(warp_idx()); }
// Reductions over the lanes, with the result in every lane.
DEVICE bool warp_all(bool value) { return __all_sync(~0u, value); }
DEVICE unsigned warp_ballot(bool value) { return __ballot_sync(~0u, value); }
DEVICE unsigned warp_add(unsigned value) { return __reduce_add_sync(~0u, value); }
DEVICE unsigned warp_max(unsigned value) { return __reduce_max_sync(~0u, value); }
DEVICE unsigned warp_min(unsigned value) { return __reduce_min_sync(~0u, value); }

// --- values that are computed before a wait ---

// The address within shared memory, as PTX takes it.
DEVICE uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
// The same object, at an address whose origin is hidden from the compiler. The compiler keeps it in
// a register instead of recomputing it.
template <class T>
DEVICE T& opaque_reference(T& shared) {
  const size_t at = warp_uniform(shared_address(&shared));
  return *static_cast<T*>(__cvta_shared_to_generic(at));
}
// The same value, computed here. The shuffle keeps the compiler from moving the computation behind
// a wait.
DEVICE int pin_register(int value) { return shuffle_from(value, threadIdx.x % 32); }
// An address in shared memory that is computed once and stays in a register.
template <class T>
class PinnedAddress {
 public:
  DEVICE explicit PinnedAddress(T& shared)
      : at_(pin_register(static_cast<int>(shared_address(&shared)))) {}

  // The object, and objects of an array that it begins.
  DEVICE T& operator*() const { return *(*this + 0); }
  DEVICE T* operator->() const { return *this + 0; }
  DEVICE T* operator+(int further) const {
    return static_cast<T*>(__cvta_shared_to_generic(static_cast<uint32_t>(at_))) + further;
  }

 private:
  int at_;
};

}  // namespace megakernel

#endif
