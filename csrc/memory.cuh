// Loads, stores and copies.
#pragma once

#include "math.cuh"
#include "mbarrier.cuh"

#ifndef MEGAKERNEL_EMULATOR

namespace megakernel {

// --- values that other thread blocks write while this one reads ---

// Relaxed accesses at GPU scope; they never read a stale line of the L1 cache. Functions with the
// suffix `_if` are one predicated instruction, which costs less than a branch (`warp_uniform`). A
// load that is not executed leaves its result unchanged.
DEVICE uint4 load_relaxed(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
DEVICE uint32_t load_relaxed(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void load_relaxed_if(bool wanted, const uint4* at, uint4& v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, "
      "[%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(at), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}
DEVICE void store_relaxed(uint32_t* at, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
DEVICE void store_relaxed_if(bool wanted, uint32_t* at, uint32_t value) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.relaxed.gpu.global.u32 [%0], %1; }" ::"l"(at),
      "r"(value), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}
// Orders this thread's earlier writes before its later ones, for all threads of the GPU.
DEVICE void thread_fence() { __threadfence(); }

// --- values of earlier phases ---

// For data that another thread block wrote in a phase whose end this thread block has observed.
// They bypass the L1 cache.
DEVICE uint4 load_l2(const uint4* at) { return __ldcg(at); }
DEVICE uint2 load_l2(const uint2* at) { return __ldcg(at); }
DEVICE uint4 load_l2(const uint4* at, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at), "l"(policy));
  return v;
}
DEVICE uint2 load_l2(const uint2* at, uint64_t policy) {
  uint2 v;
  asm volatile("ld.global.cg.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y)
               : "l"(at), "l"(policy));
  return v;
}
// A store for a later phase, to an address that the compiler knows to be global. A generic store
// could alias shared memory, and the compiler would have to assume that the lanes diverge.
template <class T>
DEVICE void store_l2(T* at, T value) {
  __stcg(at, value);
}
// 16 bytes that no thread reads soon.
DEVICE void store_streaming(uint4* at, uint4 value) { __stcs(at, value); }
// Data that no kernel writes. Bypasses the L1 cache.
DEVICE uint4 load_read_only(const uint4* at) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(at));
  return v;
}
// Data that no kernel writes, and that this thread block reads again soon: through the L1 cache.
DEVICE int load_cached(const int* at) { return __ldg(at); }
// Fetches a cache line into L2.
DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// Fetches `bytes` into L2. Called by all compute threads; does not wait.
DEVICE void prefetch_l2_range(const void* at, int bytes, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, %3, 0; "
      "@p cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2; }" ::"l"(at),
      "r"(bytes), "l"(policy), "r"(threadIdx.x));
#else
  const char* from = static_cast<const char*>(at);
  for (int i = 128 * threadIdx.x; i < bytes; i += 128 * kNumThreads) prefetch_l2(from + i);
#endif
}
// Adds 1; returns the previous value.
DEVICE unsigned atomic_increment(unsigned* counter) { return atomicAdd(counter, 1u); }
// Adds 1 after the earlier writes of the thread, and of those that it has synchronised with.
DEVICE void atomic_increment_release(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// Later loads of the thread see what the writers of the value have released.
DEVICE unsigned load_acquire(const unsigned* at) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void atomic_max(uint64_t* at, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// --- shared memory ---

// One predicated instruction each, as above.
DEVICE void store_shared_if(bool wanted, uint4& at, uint4 v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.shared.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"r"(
          shared_address(&at)),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}
DEVICE void load_shared_if(bool wanted, const uint4& at, uint4& v) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "r"(shared_address(&at)), "r"(static_cast<uint32_t>(wanted))
               : "memory");
}
// Loads here, although the value is used much later.
DEVICE uint4 load_shared_volatile(const uint4* shared) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(shared)));
  return v;
}
// Loads four numbers from global memory here: the compiler does not move the loads of an unrolled
// loop to its beginning.
DEVICE float4 load_in_order(const float* at) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
// Copies eight bytes from global to shared memory, for the calling thread only. They are visible to
// it after `copy_async_wait_all`.
DEVICE void copy_async_8_bytes(uint2* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}
// The same if `wanted`.
DEVICE void copy_async_8_bytes_if(bool wanted, uint2* shared, const void* global) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 8; }" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}
// Waits for the thread's earlier copies by cp.async.
DEVICE void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Copies 16 bytes from global to shared memory, not through the L1 cache, for the calling thread.
DEVICE void copy_async_16_bytes(uint4* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}
// Ends a group of the thread's copies by cp.async, which may be empty.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of the thread's groups of copies are incomplete.
template <int kPending>
DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Copies the first `bytes` of kBytes from global to shared memory and fills the rest with zeros;
// reads nothing if `bytes` is 0. Copies of sixteen bytes fetch their line of 128 bytes into L2.
template <int kBytes>
DEVICE void copy_async_zero_fill(void* shared, const void* global, int bytes) {
  if constexpr (kBytes == 16) {
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes)
        : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

// --- memory of the host ---

// Flags in pinned memory. A store releases the thread's earlier writes to the host.
DEVICE void store_host_flag(unsigned* to_host, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to_host), "r"(value) : "memory");
}
DEVICE unsigned load_host_flag(const unsigned* from_host) {
  unsigned v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from_host) : "memory");
  return v;
}

// --- polls ---

// The emulator counts polls that find a value of another use than the last one or the current one:
// values of an encoding, or a tag.
template <class Values>
DEVICE void observe_epoch(uint4, uint32_t) {}
DEVICE void observe_tag(uint32_t, uint32_t) {}
// One iteration of a polling loop. The emulator switches to another thread here.
DEVICE void spin_pause() {}

// --- time ---

// The GPU's clock, and the multiprocessor's cycle counter.
DEVICE uint64_t global_time_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
  return v;
}
DEVICE uint64_t clock_cycles() { return clock64(); }

// --- dependent grids ---

// Allows the next kernel of the stream to start before this one ends.
DEVICE void trigger_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the previous kernels of the stream have completed and their writes are visible.
DEVICE void wait_for_prerequisite_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace megakernel

#endif
