// Mbarriers and the asynchronous copies that complete on them.
//
// An mbarrier completes once the expected threads have arrived and the expected bytes have been
// copied; then it begins again. Completions are counted from 0. A wait names the completion by its
// parity, the lowest bit of its number.
#pragma once

#include "warp.cuh"

#ifndef MEGAKERNEL_EMULATOR

namespace megakernel {

using Mbarrier = uint64_t;

// A completion takes `count` arrivals.
DEVICE void mbarrier_init(Mbarrier& barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count));
}
// Makes initialised mbarriers visible to asynchronous copies.
DEVICE void mbarrier_fence_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// The thread arrives. Its earlier accesses precede the completion.
DEVICE void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier))
      : "memory");
}
DEVICE void mbarrier_arrive_if(bool wanted, Mbarrier& barrier) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 state; setp.ne.u32 p, %1, 0; "
      "@p mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier)),
      "r"(static_cast<uint32_t>(wanted))
      : "memory");
}
// Returns whether the completion of this parity has occurred; does not block.
DEVICE bool mbarrier_test_wait(const Mbarrier& barrier, uint32_t parity) {
  uint32_t open;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(open)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return open;
}
// The same; may suspend the thread for a short time. For threads without other work.
DEVICE bool mbarrier_try_wait(const Mbarrier& barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t open;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(open)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return open;
#else
  return mbarrier_test_wait(barrier, parity);
#endif
}

// --- copies from global to shared memory ---

// L2 policies of copies and loads. Evict first: data that is read once. Evict last: data that is
// read again soon.
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

// The address space of a copy's target. With the cluster's, ptxas for sm_120 compiles calls and
// ignores setmaxnreg.
#if __CUDA_ARCH__ >= 1000
#define MEGAKERNEL_SHARED_SPACE "shared::cta"
#else
#define MEGAKERNEL_SHARED_SPACE "shared::cluster"
#endif

// One warp copies `bytes` with `copy_async`. The mbarrier counts one arrival per lane: lane 0
// arrives here, with the number of bytes; the other lanes arrive in `copy_async`.
DEVICE void mbarrier_expect_copy(Mbarrier& barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p; .reg .b64 state; setp.eq.u32 p, %2, 0; "
      "@p mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(shared_address(&barrier)),
      "r"(bytes), "r"(threadIdx.x % 32)
      : "memory");
#endif
}
// One lane begins a copy of `bytes` from global to shared memory; all lanes call it together. The
// mbarrier completes after the copy, without an arrival. Empty before sm_90.
DEVICE void copy_async_bulk(void* shared, const void* global, int bytes, Mbarrier& barrier,
                            uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred one; elect.sync _|one, 0xFFFFFFFF; "
      "@one cp.async.bulk." MEGAKERNEL_SHARED_SPACE
      ".global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4; }" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
#endif
}
// Copies `bytes` from global to shared memory; the mbarrier completes after the copy.
DEVICE void copy_async(void* shared, const void* global, int bytes, Mbarrier& barrier,
                       uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  copy_async_bulk(shared, global, bytes, barrier, policy);
  mbarrier_arrive_if(threadIdx.x % 32 > 0, barrier);
#else
  const uint32_t to = shared_address(shared);
  const char* from = static_cast<const char*>(global);
  for (int at = 16 * (threadIdx.x % 32); at < bytes; at += 16 * 32) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at)
                 : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier))
               : "memory");
#endif
}
// Arrives once the thread's earlier cp.async copies have completed.
DEVICE void mbarrier_arrive_on_copies(Mbarrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

}  // namespace megakernel

#endif
