// Every instruction below C++, behind a name that says the intent. Nothing else in the kernel
// knows PTX or a CUDA intrinsic, so that the same phases also compile for a host emulator.
#pragma once

#include "shapes.cuh"
#include "types.cuh"

#ifndef MEGAKERNEL_EMULATOR

#define DEVICE __device__ __forceinline__
#define DEVICE_NOINLINE __device__ __noinline__  // seldom needed
// Called from several places, so that a layer's instructions stay in the cache: 32 KiB of them.
#define DEVICE_NOINLINE __device__ __noinline__

namespace megakernel {

// Made opaque each time, so that what follows from it is not kept in registers over a whole frame.
DEVICE int thread_idx() {
  unsigned index = threadIdx.x;
  asm volatile("" : "+r"(index));
  __builtin_assume(index < 1024);  // or each division would mind the sign
  return static_cast<int>(index);
}
DEVICE int block_idx() { return blockIdx.x; }
DEVICE int num_blocks() { return gridDim.x; }
DEVICE int warp_idx() { return thread_idx() / 32; }
DEVICE int lane_idx() { return thread_idx() % 32; }

// All threads of the block; its warps may come from different places of the code.
DEVICE void sync_all_threads() { asm volatile("bar.sync 0;" ::: "memory"); }
// All threads that multiply have arrived; what they wrote to shared memory is seen.
DEVICE void sync_compute_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(kNumThreads) : "memory");
}
DEVICE void sync_warp() { __syncwarp(); }
// The same by a barrier of the warp's own. Where lanes are together the compiler leaves the other
// out, and racecheck does not hear that they have met.
DEVICE void warp_barrier() {
  asm volatile("bar.sync %0, 32;" ::"r"(2 + static_cast<int>(threadIdx.x) / 32) : "memory");
}

// Where warps can move registers, those who multiply get some of the copying ones', all at once.
DEVICE void raise_register_limit() {
#ifdef MEGAKERNEL_MOVES_REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
}
DEVICE void lower_register_limit() {
#ifdef MEGAKERNEL_MOVES_REGISTERS
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
}

template <class T>
DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(~0u, value, mask);
}

template <class T>
DEVICE T shuffle_from(T value, int lane) {
  return __shfl_sync(~0u, value, lane);
}

// What is the same in all lanes, so that the compiler knows it: a branch that might part them costs
// the time of some ten instructions, and so does what comes after it.
DEVICE int warp_uniform(int value) { return shuffle_from(value, 0); }
DEVICE int uniform_warp_idx() { return warp_uniform(warp_idx()); }
DEVICE bool warp_all(bool value) { return __all_sync(~0u, value); }
// A bit each, and how many are below the lowest one.
DEVICE unsigned warp_ballot(bool value) { return __ballot_sync(~0u, value); }
DEVICE int count_trailing_zeros(uint64_t bits) { return __ffsll(bits) - 1; }
DEVICE unsigned warp_add(unsigned value) { return __reduce_add_sync(~0u, value); }
DEVICE unsigned warp_max(unsigned value) { return __reduce_max_sync(~0u, value); }
DEVICE unsigned warp_min(unsigned value) { return __reduce_min_sync(~0u, value); }

DEVICE float to_float(bf16 value) { return __bfloat162float(value); }
DEVICE bf16 to_bf16(float value) { return __float2bfloat16_rn(value); }

DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }

// Two bf16 as one register of a matrix operand; `low` is the one of the smaller index.
DEVICE uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

// A gate opens each time that all whom it counts have arrived, and all bytes that it was told of.
// Who waits says which opening: its number's lowest bit.
using Mbarrier = uint64_t;

DEVICE uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
// The same, of which the compiler does not know where it comes from: so it keeps the address, and
// does not make it again and again.
template <class T>
DEVICE T& opaque_reference(T& shared) {
  const size_t at = warp_uniform(shared_address(&shared));
  return *static_cast<T*>(__cvta_shared_to_generic(at));
}

// A lane's number that was made before it is wanted: as the compiler does not know what a shuffle
// gives, it cannot make it later, where others would wait for that.
DEVICE int pin_register(int value) { return shuffle_from(value, threadIdx.x % 32); }
// A lane's place in shared memory, likewise.
template <class T>
class PinnedAddress {
 public:
  DEVICE explicit PinnedAddress(T& shared)
      : at_(pin_register(static_cast<int>(shared_address(&shared)))) {}

  DEVICE T& operator*() const { return *(*this + 0); }
  DEVICE T* operator->() const { return *this + 0; }
  DEVICE T* operator+(int further) const {
    return static_cast<T*>(__cvta_shared_to_generic(static_cast<uint32_t>(at_))) + further;
  }

 private:
  int at_;
};

DEVICE void mbarrier_init(Mbarrier& gate, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&gate)), "r"(count));
}
// After all gates were made, before anybody uses them.
DEVICE void mbarrier_fence_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEVICE void mbarrier_arrive(Mbarrier& gate) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&gate))
      : "memory");
}
DEVICE void mbarrier_arrive_if(bool wanted, Mbarrier& gate) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 state; setp.ne.u32 p, %1, 0; "
      "@p mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&gate)),
      "r"(static_cast<uint32_t>(wanted))
      : "memory");
}
DEVICE bool mbarrier_test_wait(const Mbarrier& gate, uint32_t parity) {
  uint32_t open;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(open)
      : "r"(shared_address(&gate)), "r"(parity)
      : "memory");
  return open;
}
// The same, for who has nothing else to do: it may sleep for a while.
DEVICE bool mbarrier_try_wait(const Mbarrier& gate, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t open;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(open)
      : "r"(shared_address(&gate)), "r"(parity)
      : "memory");
  return open;
#else
  return mbarrier_test_wait(gate, parity);
#endif
}

// Where copies go. If a cluster's is named, sm_120 makes them calls, and moves no registers.
#if __CUDA_ARCH__ >= 1000
#define MEGAKERNEL_SHARED_SPACE "shared::cta"
#else
#define MEGAKERNEL_SHARED_SPACE "shared::cluster"
#endif

// How what is read once goes through the second-level cache, where it would drive out what is
// wanted soon, and what is read again.
DEVICE uint64_t l2_evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE uint64_t l2_evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// From global to shared memory by the 32 lanes of a warp, which do not wait for it: the gate, which
// counts one arrival of each lane, opens once the bytes are there. One lane tells it of them
// beforehand, the others arrive after the copy.
DEVICE void mbarrier_expect_copy(Mbarrier& gate, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p; .reg .b64 state; setp.eq.u32 p, %2, 0; "
      "@p mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(shared_address(&gate)),
      "r"(bytes), "r"(threadIdx.x % 32)
      : "memory");
#endif
}
DEVICE void copy_async(void* shared, const void* global, int bytes, Mbarrier& gate,
                       uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred one; elect.sync _|one, 0xFFFFFFFF; "
      "@one cp.async.bulk." MEGAKERNEL_SHARED_SPACE
      ".global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4; }" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&gate)), "l"(policy)
      : "memory");
  mbarrier_arrive_if(threadIdx.x % 32 > 0, gate);
#else
  const uint32_t to = shared_address(shared);
  const char* from = static_cast<const char*>(global);
  for (int at = 16 * (threadIdx.x % 32); at < bytes; at += 16 * 32) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at)
                 : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&gate))
               : "memory");
#endif
}

// What other blocks write while this one runs: never from a stale first-level line.
DEVICE uint4 load_relaxed(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
// What ends in `_if` is one instruction under a predicate: a branch around it would be dear, see
// `uniform`. What is not loaded stays what it was.
DEVICE void load_relaxed_if(bool wanted, const uint4* at, uint4& v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, "
      "[%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(at), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}
DEVICE uint32_t load_relaxed(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void store_relaxed(uint32_t* at, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}
DEVICE void store_relaxed_if(bool wanted, uint32_t* at, uint32_t word) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.relaxed.gpu.global.u32 [%0], %1; }" ::"l"(at),
      "r"(word), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}
// What another block wrote long ago, in a phase that this one has heard of since.
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
// For a later phase. Of a store that might as well go to shared memory, the compiler would think
// that it may part the lanes of a warp.
template <class T>
DEVICE void store_l2(T* at, T value) {
  __stcg(at, value);
}

// To and from shared memory.
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

// Nearly 1 / value, without the branch that an exact division has.
DEVICE float approx_reciprocal(float value) {
  float v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(value));
  return v;
}

// a / b, without the branch for what over- or underflows.
DEVICE float divide(float a, float b) {
  const float first = approx_reciprocal(b), inverted = fmaf(first, fmaf(-b, first, 1), first);
  const float nearly = a * inverted;
  return fmaf(inverted, fmaf(-b, nearly, a), nearly);
}

// A line that somebody will soon want comes to the second-level cache.
DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// As many lines, by all threads that multiply; nobody waits.
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

// What this thread wrote is seen before anything that it writes from now on.
DEVICE void thread_fence() { __threadfence(); }

// acc[4] += A (16 x 16) B (16 x 8). Lane 4g + t has of A row g, elements 2t and 2t + 1, in a.x, and
// 2t + 8 and 2t + 9 in a.z; row g + 8 likewise in a.y and a.w; of B column g, the same elements. Of
// the result it has row g, columns 2t and 2t + 1, then row g + 8.
DEVICE void mma_m16n8k16(float (&acc)[4], uint4 a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// Eight bytes from global to shared memory, for this thread alone, which goes on; it sees all that
// it asked for once it has waited.
DEVICE void copy_async_8_bytes(uint2* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}
DEVICE void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Between this device and the host, through pinned memory.
DEVICE void store_host_flag(unsigned* to_host, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to_host), "r"(value) : "memory");
}
DEVICE unsigned load_host_flag(const unsigned* from_host) {
  unsigned v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from_host) : "memory");
  return v;
}

DEVICE uint64_t global_time_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
  return v;
}

DEVICE uint64_t clock_cycles() { return clock64(); }

// While a thread waits for another block.
DEVICE void spin_pause() {}

// --- the codec's ---

// Half precision ends at 65,504: what is larger stays there, what is no number stays none.
DEVICE float clamp_to_f16(float value) {
  return value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
}
DEVICE float to_float(f16 value) { return __half2float(value); }
DEVICE f16 to_f16(float value) { return __float2half_rn(clamp_to_f16(value)); }
DEVICE uint32_t pack_f16(float low, float high) {
  __half2 pair = __floats2half2_rn(clamp_to_f16(low), clamp_to_f16(high));
  return *reinterpret_cast<uint32_t*>(&pair);
}
DEVICE float2 unpack_f16(uint32_t pair) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

// As `multiply`, of half-precision operands.
DEVICE void mma_m16n8k16_f16(float (&acc)[4], uint4 a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// What no kernel writes; it passes the first-level cache by.
DEVICE uint4 load_read_only(const uint4* at) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(at));
  return v;
}

// The next kernel may begin; it waits for this one where it needs what this one writes.
DEVICE void trigger_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// The kernels before are done, and what they wrote is seen.
DEVICE void wait_for_prerequisite_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- the alignment's ---

// Of the lane before; lane 0 gets its own.
DEVICE float shuffle_up(float value) { return __shfl_up_sync(~0u, value, 1); }

DEVICE float to_float(float value) { return value; }
DEVICE float max_ignore_nan(float a, float b) {
  return fmaxf(a, b);
}  // of one and no number: the one
// Of one and no number: none.
DEVICE float max_propagate_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
// Moved up by a bit, whose place whether a < b takes. Neither is a NaN, nor is a -0 where b is 0: a
// difference has its sign then, and one of infinities, which is NaN, has none.
DEVICE uint32_t shift_in_less_than(uint32_t bits, float a, float b) {
  return __funnelshift_l(as_bits(a - b), bits, 1);
}
// The upper word of both, moved up by `bits` modulo 32.
DEVICE uint32_t funnel_shift_left(uint32_t high, uint32_t low, int bits) {
  return __funnelshift_l(low, high, bits);
}

// The first `bytes` of so many from global to shared memory, and zeros after them; this thread goes
// on. Nothing is read for no bytes. Of sixteen, their line of 128 comes to the second-level cache.
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
// The gate counts this thread once all that it copies has come.
DEVICE void mbarrier_arrive_on_copies(Mbarrier& gate) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&gate))
               : "memory");
}

// From shared memory, asked for here, though it is not used soon.
DEVICE uint4 load_shared_volatile(const uint4* shared) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(shared)));
  return v;
}

// Counts up; returns what was there before.
DEVICE unsigned atomic_increment(unsigned* counter) { return atomicAdd(counter, 1u); }

// 16 bytes that nobody reads soon.
DEVICE void store_streaming(uint4* at, uint4 value) { __stcs(at, value); }

}  // namespace megakernel

#endif
