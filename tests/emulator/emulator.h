// The functions of warp.cuh, math.cuh and memory.cuh on a host; those of mbarrier.cuh are in
// copies.h.
//
// The emulator shows whether the phases compute the right results under many schedules. Memory is
// sequentially consistent, so it does not show whether the memory orders suffice. It is slow and
// meant for tiny models.
#pragma once

#include <stdio.h>

#include "copies.h"
#include "prerequisites.h"

#define DEVICE inline
#define DEVICE_NOINLINE inline

namespace megakernel {

// --- warp.cuh ---

// Compute threads are all but the last warp.
inline void sync_compute_threads() { wait_at(block_barrier(0), machine().num_threads - 32); }
inline void sync_all_threads() { wait_at(block_barrier(1), machine().num_threads); }
inline void sync_warp() { wait_at(own_warp_barrier(), 32); }
inline void warp_barrier() { sync_warp(); }
template <int kRegisters = 0>
inline void raise_register_limit() {}
template <int kRegisters = 0>
inline void lower_register_limit() {}

// The values of all lanes, valid until the warp's next call but one: a lane may still read while
// others share their next value, which goes to the other buffer.
template <class T>
inline const T* share_with_warp(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  std::vector<uint32_t>& values = machine().lane_values[own_warp_barrier().generation % 2];
  T* all = reinterpret_cast<T*>(&values[machine().fiber_idx / 32 * 64]);
  memcpy(all + lane_idx(), &value, sizeof value);
  sync_warp();
  return all;
}

template <class T>
inline T shuffle_xor(T value, int mask) {
  return share_with_warp(value)[lane_idx() ^ mask];
}
template <class T>
inline T shuffle_from(T value, int from) {
  return share_with_warp(value)[from];
}
inline float shuffle_up(float value) { return share_with_warp(value)[max(lane_idx() - 1, 0)]; }
// Every lane sets its bit when it arrives; the first one clears the others.
inline unsigned warp_ballot(bool value) {
  const Barrier& barrier = own_warp_barrier();
  uint32_t& bits = machine().lane_values[barrier.generation % 2][machine().fiber_idx / 32 * 64];
  if (barrier.num_arrived == 0) bits = 0;
  bits |= static_cast<uint32_t>(value) << lane_idx();
  sync_warp();
  return bits;
}
inline bool warp_all(bool value) { return warp_ballot(value) == ~0u; }
inline unsigned warp_add(unsigned value) {
  const unsigned* all = share_with_warp(value);
  unsigned sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += all[lane];
  return sum;
}
inline unsigned warp_max(unsigned value) {
  const unsigned* all = share_with_warp(value);
  unsigned largest = 0;
  for (int lane = 0; lane < 32; ++lane) largest = max(largest, all[lane]);
  return largest;
}
inline unsigned warp_min(unsigned value) { return ~warp_max(~value); }

// Aborts where the lanes differ; a GPU would continue with the value of lane 0.
inline int warp_uniform(int value) {
  if (share_with_warp(value)[0] != value) {
    fprintf(stderr, "warp_uniform: the lanes of a warp have different values.\n");
    abort();
  }
  return value;
}
inline int uniform_warp_idx() { return warp_idx(); }

template <class T>
T& opaque_reference(T& shared) {
  return shared;
}
inline int pin_register(int value) { return value; }
template <class T>
class PinnedAddress {
 public:
  explicit PinnedAddress(T& shared) : at_(&shared) {}
  T& operator*() const { return *at_; }
  T* operator->() const { return at_; }
  T* operator+(int offset) const { return at_ + offset; }

 private:
  T* at_;
};

// --- math.cuh: the matrix instruction ---

using Row = float __attribute__((vector_size(32)));
using DoubleRow = double __attribute__((vector_size(64)));

struct Bf16Numbers {
  using Sums = Row;
  static Row unpack(const uint16_t* numbers) {
    using Uint16x8 = uint16_t __attribute__((vector_size(16)));
    using Uint32x8 = uint32_t __attribute__((vector_size(32)));
    Uint16x8 packed;
    memcpy(&packed, numbers, sizeof packed);
    return reinterpret_cast<Row>(__builtin_convertvector(packed, Uint32x8) << 16);
  }
};
// As on sm_90, the order of the numbers of K within an instruction does not change its sums, except
// for rare roundings of the sum in double precision.
struct F16Numbers {
  using Sums = DoubleRow;
  static Row unpack(const uint16_t* numbers) {
    using Int16x8 = int16_t __attribute__((vector_size(16)));
    Int16x8 packed;
    memcpy(&packed, numbers, sizeof packed);
    return __builtin_ia32_vcvtph2ps256(packed);  // __builtin_convertvector takes them one by one
  }
};

// Lane 4 g + t has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of rows g and g + 8 of A, the same
// rows of column g of B, and columns 2 t and 2 t + 1 of rows g and g + 8 of the sums.
inline void set_a(MmaOperands& warp, int lane, uint4 a) {
  const int g = lane / 4, t = lane % 4;
  memcpy(&warp.a[g][2 * t], &a.x, 4), memcpy(&warp.a[g][2 * t + 8], &a.z, 4);
  memcpy(&warp.a[g + 8][2 * t], &a.y, 4), memcpy(&warp.a[g + 8][2 * t + 8], &a.w, 4);
}
inline void set_b(MmaOperands& warp, int lane, uint2 b) {
  const int g = lane / 4, t = lane % 4;
  warp.b[2 * t][g] = b.x, warp.b[2 * t + 1][g] = b.x >> 16;
  warp.b[2 * t + 8][g] = b.y, warp.b[2 * t + 9][g] = b.y >> 16;
}
inline void set_sums(MmaOperands& warp, int lane, const float* sums) {
  memcpy(&warp.sums[lane / 4][lane % 4 * 2], sums, 8);
  memcpy(&warp.sums[lane / 4 + 8][lane % 4 * 2], sums + 2, 8);
}
inline void get_sums(const MmaOperands& warp, int lane, float* sums) {
  memcpy(sums, &warp.sums[lane / 4][lane % 4 * 2], 8);
  memcpy(sums + 2, &warp.sums[lane / 4 + 8][lane % 4 * 2], 8);
}

template <class Numbers>
inline void multiply_warp(MmaOperands& warp) {
  using Sums = typename Numbers::Sums;
  Row a[16][2];
  Sums b[16];
  for (int k = 0; k < 16; ++k) b[k] = __builtin_convertvector(Numbers::unpack(warp.b[k]), Sums);
  for (int row = 0; row < 16; ++row) {
    for (int half = 0; half < 2; ++half) a[row][half] = Numbers::unpack(&warp.a[row][8 * half]);
  }
  for (int row = 0; row < 16; ++row) {
    const float* values = reinterpret_cast<const float*>(a[row]);
    Row& rounded = *reinterpret_cast<Row*>(warp.sums[row]);
    Sums sums = __builtin_convertvector(rounded, Sums);
    for (int k = 0; k < 16; ++k) sums += values[k] * b[k];
    rounded = __builtin_convertvector(sums, Row);
  }
}

template <class Numbers>
inline void emulate_mma(float (&acc)[4], uint4 a, uint2 b) {
  Machine& m = machine();
  MmaOperands& warp = m.operands[m.fiber_idx / 32];
  const int lane = lane_idx();
  set_a(warp, lane, a), set_b(warp, lane, b), set_sums(warp, lane, acc);
  wait_at(own_warp_barrier(), 32, [&] { multiply_warp<Numbers>(warp); });
  get_sums(warp, lane, acc);
}
inline void mma_m16n8k16(float (&acc)[4], uint4 a, uint2 b) { emulate_mma<Bf16Numbers>(acc, a, b); }
inline void mma_m16n8k16_f16(float (&acc)[4], uint4 a, uint2 b) {
  emulate_mma<F16Numbers>(acc, a, b);
}

// --- memory.cuh ---

inline uint4 load_relaxed(const uint4* at) { return *at; }
inline uint32_t load_relaxed(const uint32_t* at) { return *at; }
inline void store_relaxed(uint32_t* at, uint32_t value) { *at = value; }
inline void load_relaxed_if(bool wanted, const uint4* at, uint4& v) {
  if (wanted) v = *at;
}
inline void store_relaxed_if(bool wanted, uint32_t* at, uint32_t value) {
  if (wanted) *at = value;
}
inline void thread_fence() {}
inline uint4 load_l2(const uint4* at) { return *at; }
inline uint2 load_l2(const uint2* at) { return *at; }
template <class T>
inline T load_l2(const T* at, uint64_t) {
  return *at;
}
template <class T>
inline void store_l2(T* at, T value) {
  *at = value;
}
inline void store_streaming(uint4* at, uint4 value) { *at = value; }
inline uint4 load_read_only(const uint4* at) { return *at; }
inline int load_cached(const int* at) { return *at; }
inline void prefetch_l2(const void*) {}
inline void prefetch_l2_range(const void*, int, uint64_t) {}
inline unsigned atomic_increment(unsigned* counter) { return (*counter)++; }
inline void atomic_increment_release(unsigned* counter) { ++*counter; }
inline unsigned load_acquire(const unsigned* at) { return *at; }
inline void atomic_max(uint64_t* at, uint64_t value) { *at = max(*at, value); }

inline void store_shared_if(bool wanted, uint4& at, uint4 v) {
  if (wanted) at = v;
}
inline void load_shared_if(bool wanted, const uint4& at, uint4& v) {
  if (wanted) v = at;
}
inline uint4 load_shared_volatile(const uint4* shared) { return *shared; }
inline float4 load_in_order(const float* at) { return *reinterpret_cast<const float4*>(at); }
inline void store_host_flag(unsigned* to_host, unsigned value) { *to_host = value; }
inline unsigned load_host_flag(const unsigned* from_host) { return *from_host; }

// Polls that found a value of the next use, or of the last but one. They have the same tag.
inline long num_epoch_violations = 0;
inline void observe_tag(uint32_t found, uint32_t tag) {
  num_epoch_violations += found == (tag == 2 ? 0 : tag + 1);
}
template <class Values>
inline void observe_epoch(uint4 v, uint32_t tag) {
  for (uint32_t value : {v.x, v.y, v.z, v.w}) observe_tag(Values::tag_of(value), tag);
}
inline void spin_pause() { yield_poll(); }

// Time advances with every reading.
inline uint64_t global_time_ns() {
  static uint64_t now = 0;
  return ++now;
}
inline uint64_t clock_cycles() { return 0; }

}  // namespace megakernel
