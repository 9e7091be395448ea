// The kernel's instructions on a host: every CUDA thread is a fiber, and all run in turn on one
// thread of the host. It tells whether the phases compute the right thing, not whether memory
// orders hold. Slow: for the smallest models.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

#define DEVICE inline
#define DEVICE_NOINLINE inline
#define DEVICE_NOINLINE inline

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace megakernel {

using std::isfinite;
using std::max;
using std::min;

struct bf16 {
  uint16_t bits;
};

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

inline bf16 to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

inline uint32_t pack_bf16(float low, float high) {
  return to_bf16(low).bits | static_cast<uint32_t>(to_bf16(high).bits) << 16;
}

using f16 = _Float16;

inline float to_float(f16 value) { return value; }
inline f16 to_f16(float value) {
  return static_cast<f16>(value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value);
}
inline uint32_t pack_f16(float low, float high) {
  const f16 pair[2] = {to_f16(low), to_f16(high)};
  uint32_t bits;
  memcpy(&bits, pair, 4);
  return bits;
}
inline float2 unpack_f16(uint32_t bits) {
  f16 pair[2];
  memcpy(pair, &bits, 4);
  return {static_cast<float>(pair[0]), static_cast<float>(pair[1])};
}

// --- fibers ---

// A place where a number of fibers meet, again and again.
struct Gathering {
  int arrived = 0;
  unsigned generation = 0;
};

struct Fiber {
  void* stack_pointer;
  void* stack;
  bool done;
  const Gathering* awaited;  // it sleeps until the generation is another than this
  unsigned generation;
};

extern "C" void megakernel_switch(void** from, void* to);
asm(R"(
.text
.globl megakernel_switch
megakernel_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

// What a lane shows its warp of a product: its parts of A and B as floats, and its sums. Rows g and
// g + 8 of A are in the lanes 4g + t, and so is column g of B.
struct Factors {
  float2 parts[6];
  float sums[4];
};

struct Machine {
  int blocks = 0, threads = 0, first_block = 0;
  int now = 0, block = 0, thread = 0;  // the fiber that runs, its block and its number there
  std::vector<Fiber> fibers;
  std::vector<Gathering> block_meetings, warp_meetings;
  std::vector<uint32_t> lanes[2];  // [fibers][2]: what a lane shows its warp, in turns
  std::vector<Factors> factors;    // of every fiber
  void* scheduler = nullptr;
  std::function<void()> body;
};

inline Machine the_machine;
inline Machine& machine() { return the_machine; }

inline void yield() {
  Machine& m = machine();
  megakernel_switch(&m.fibers[m.now].stack_pointer, m.scheduler);
}

inline void enter() {
  machine().body();
  machine().fibers[machine().now].done = true;
  yield();
}

inline int thread_idx() { return machine().thread; }
inline int block_idx() { return machine().first_block + machine().block; }
inline int num_blocks() { return machine().blocks; }
inline int warp_idx() { return thread_idx() / 32; }
inline int lane_idx() { return thread_idx() % 32; }

// The last to come acts for all before they go on.
template <class Act>
inline void meet(Gathering& meeting, int count, Act act) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == count) {
    act();
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  Fiber& me = machine().fibers[machine().now];
  me.awaited = &meeting, me.generation = generation;
  yield();
}

inline Gathering& meeting(int which) {
  return machine().block_meetings[machine().block * 2 + which];
}
inline void meet(Gathering& meeting, int count) {
  meet(meeting, count, [] {});
}
inline void sync_compute_threads() { meet(meeting(0), machine().threads - 32); }
inline void sync_all_threads() { meet(meeting(1), machine().threads); }
inline void raise_register_limit() {}
inline void lower_register_limit() {}
inline Gathering& warp_meeting() { return machine().warp_meetings[machine().now / 32]; }
inline void sync_warp() { meet(warp_meeting(), 32); }
inline void warp_barrier() { sync_warp(); }

// Shows the warp a value; gives those of all lanes, to be read before the warp meets again. Who is
// late to read may still do so while others show the next value, which goes to another place.
template <class T>
inline const T* show(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  std::vector<uint32_t>& lanes = machine().lanes[warp_meeting().generation % 2];
  T* all = reinterpret_cast<T*>(&lanes[machine().now / 32 * 64]);
  memcpy(all + lane_idx(), &value, sizeof value);
  sync_warp();
  return all;
}

template <class T>
inline T shuffle_xor(T value, int mask) {
  return show(value)[lane_idx() ^ mask];
}

template <class T>
inline T shuffle_from(T value, int from) {
  return shuffle_xor(value, lane_idx() ^ from);
}

inline float half_of(uint32_t pair, int which) {
  return to_float(bf16{static_cast<uint16_t>(which ? pair >> 16 : pair & 0xFFFF)});
}

inline unsigned warp_add(unsigned value) {
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

inline unsigned warp_max(unsigned value) {
  for (int mask = 16; mask > 0; mask /= 2) value = max(value, shuffle_xor(value, mask));
  return value;
}
inline unsigned warp_min(unsigned value) { return ~warp_max(~value); }
inline void prefetch_l2(const void*) {}
inline void prefetch_l2_range(const void*, int, uint64_t) {}

// The last lane to come multiplies for all.
using Row = float __attribute__((vector_size(32)));

template <class Add>
inline void multiply_all(Factors* lanes, Add add) {
  Row b[16];
  for (int k = 0; k < 8; ++k) {  // pairs of K
    for (int column = 0; column < 8; ++column) {
      const float2 pair = lanes[4 * column + k % 4].parts[4 + k / 4];
      b[2 * k][column] = pair.x, b[2 * k + 1][column] = pair.y;
    }
  }
  for (int row = 0; row < 16; ++row) {
    Factors* of_row = lanes + row % 8 * 4;
    const int half = row / 8 * 2;
    Row sums;
    for (int column = 0; column < 8; ++column) {
      sums[column] = of_row[column / 2].sums[half + column % 2];
    }
    for (int k = 0; k < 8; ++k) {
      const float2 pair = of_row[k % 4].parts[half + k / 4];
      add(sums, pair, b[2 * k], b[2 * k + 1]);
    }
    for (int column = 0; column < 8; ++column) {
      of_row[column / 2].sums[half + column % 2] = sums[column];
    }
  }
}

template <class Unpack, class Add>
inline void mma_m16n8k16(float (&acc)[4], uint4 a, uint2 b, Unpack unpack, Add add) {
  Machine& m = machine();
  Factors& mine = m.factors[m.now];
  const uint32_t pairs[6] = {a.x, a.z, a.y, a.w, b.x, b.y};
  for (int i = 0; i < 6; ++i) mine.parts[i] = unpack(pairs[i]);
  memcpy(mine.sums, acc, sizeof acc);
  meet(m.warp_meetings[m.now / 32], 32, [&] { multiply_all(&m.factors[m.now / 32 * 32], add); });
  memcpy(acc, mine.sums, sizeof acc);
}
inline void mma_m16n8k16(float (&acc)[4], uint4 a, uint2 b) {
  const auto unpack = [](uint32_t pair) { return float2{half_of(pair, 0), half_of(pair, 1)}; };
  mma_m16n8k16(acc, a, b, unpack, [](Row& sums, float2 pair, const Row& even, const Row& odd) {
    sums += pair.x * even;
    sums += pair.y * odd;
  });
}
inline void mma_m16n8k16_f16(float (&acc)[4], uint4 a, uint2 b) {
  mma_m16n8k16(acc, a, b, unpack_f16, [](Row& sums, float2 pair, const Row& even, const Row& odd) {
    sums += pair.x * even + pair.y * odd;
  });
}

inline uint4 load_read_only(const uint4* at) { return *at; }
inline void trigger_dependent_grids() {}
inline void wait_for_prerequisite_grids() {}

inline void copy_async_8_bytes(uint2* shared, const void* global) { memcpy(shared, global, 8); }
inline void copy_async_wait_all() {}

struct Mbarrier {
  int count, missing;  // arrivals
  int bytes;           // on their way
  uint32_t openings;

  void open_if_due() {
    if (missing == 0 && bytes == 0) missing = count, ++openings;
  }
};
inline void mbarrier_init(Mbarrier& gate, int count) { gate = {count, count, 0, 0}; }
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(Mbarrier& gate) {
  --gate.missing;
  gate.open_if_due();
}
inline void mbarrier_arrive_if(bool wanted, Mbarrier& gate) {
  if (wanted) mbarrier_arrive(gate);
}
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
  T* operator+(int further) const { return at_ + further; }

 private:
  T* at_;
};
inline bool mbarrier_try_wait(const Mbarrier& gate, uint32_t parity) {
  return (gate.openings & 1) != parity;
}
inline bool mbarrier_test_wait(const Mbarrier& gate, uint32_t parity) {
  return mbarrier_try_wait(gate, parity);
}
inline uint64_t l2_evict_first_policy() { return 0; }
inline uint64_t l2_evict_last_policy() { return 1; }
inline void mbarrier_expect_copy(Mbarrier& gate, int bytes) {
  if (thread_idx() % 32 > 0) return;
  gate.bytes += bytes;
  mbarrier_arrive(gate);
}
inline void copy_async(void* shared, const void* global, int bytes, Mbarrier& gate, uint64_t) {
#ifdef MEGAKERNEL_MOVES_REGISTERS  // there full slots are counted: some come late, to be missed
  const bool late = reinterpret_cast<uintptr_t>(global) / bytes % 5 == 0;
  for (int turn = 0; late && turn < 40; ++turn) yield();
#endif
  mbarrier_arrive_if(thread_idx() % 32 > 0, gate);
  if (thread_idx() % 32 > 0) return;
  memcpy(shared, global, bytes);
  gate.bytes -= bytes;
  gate.open_if_due();
}

inline float shuffle_up(float value) { return show(value)[max(lane_idx() - 1, 0)]; }
inline bool warp_all(bool value) {
  const int* all = show<int>(value);
  return std::all_of(all, all + 32, [](int one) { return one != 0; });
}
inline unsigned warp_ballot(bool value) {
  const int* all = show<int>(value);
  unsigned bits = 0;
  for (int l = 0; l < 32; ++l) bits |= static_cast<unsigned>(all[l] != 0) << l;
  return bits;
}
// Here it is checked that it is so: the GPU would go on with the first lane's.
inline int warp_uniform(int value) {
  if (show(value)[0] != value) {
    fprintf(stderr, "uniform() was given different values by the lanes of a warp.\n");
    abort();
  }
  return value;
}
inline int uniform_warp_idx() { return warp_idx(); }
inline float to_float(float value) { return value; }
inline float max_ignore_nan(float a, float b) { return fmaxf(a, b); }
inline float max_propagate_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
inline uint32_t shift_in_less_than(uint32_t bits, float a, float b) { return bits << 1 | (a < b); }
inline int count_trailing_zeros(uint64_t bits) { return __builtin_ctzll(bits); }
inline uint32_t funnel_shift_left(uint32_t high, uint32_t low, int bits) {
  return ((static_cast<uint64_t>(high) << 32 | low) << (bits & 31)) >> 32;
}
template <int kBytes>
inline void copy_async_zero_fill(void* shared, const void* global, int bytes) {
  memset(shared, 0, kBytes);
  if (bytes > 0) memcpy(shared, global, bytes);
}
inline void mbarrier_arrive_on_copies(Mbarrier& gate) { mbarrier_arrive(gate); }
inline uint4 load_shared_volatile(const uint4* shared) { return *shared; }
inline unsigned atomic_increment(unsigned* counter) { return (*counter)++; }
inline void store_streaming(uint4* at, uint4 value) { *at = value; }

inline uint4 load_relaxed(const uint4* at) { return *at; }
inline uint32_t load_relaxed(const uint32_t* at) { return *at; }
inline void store_relaxed(uint32_t* at, uint32_t word) { *at = word; }
inline void load_relaxed_if(bool wanted, const uint4* at, uint4& v) {
  if (wanted) v = *at;
}
inline void store_relaxed_if(bool wanted, uint32_t* at, uint32_t word) {
  if (wanted) *at = word;
}
inline void store_shared_if(bool wanted, uint4& at, uint4 v) {
  if (wanted) at = v;
}
inline void load_shared_if(bool wanted, const uint4& at, uint4& v) {
  if (wanted) v = at;
}
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
inline void thread_fence() {}
inline void store_host_flag(unsigned* to_host, unsigned value) { *to_host = value; }
inline unsigned load_host_flag(const unsigned* from_host) { return *from_host; }
// Time goes on with every look at it.
inline uint64_t global_time_ns() {
  static uint64_t now = 0;
  return ++now;
}
inline uint64_t clock_cycles() { return 0; }
inline void spin_pause() { yield(); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float approx_reciprocal(float x) { return 1.0f / x; }
inline float divide(float a, float b) { return a / b; }
inline float as_float(uint32_t bits) {
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
inline uint32_t as_bits(float value) {
  uint32_t out;
  memcpy(&out, &value, 4);
  return out;
}

// Runs `body` for every thread of the blocks, which run at the same time; the first is late by so
// many turns of the others.
inline void launch(int blocks, int threads, int late, std::function<void()> body,
                   int first_block = 0) {
  Machine& m = machine();
  m = Machine();
  m.first_block = first_block;
  m.blocks = blocks;
  m.threads = threads;
  m.body = std::move(body);
  m.fibers.resize(blocks * threads);
  m.block_meetings.resize(2 * blocks);
  m.warp_meetings.resize(blocks * threads / 32);
  for (auto& lanes : m.lanes) lanes.resize(blocks * threads * 2);
  m.factors.resize(blocks * threads);
  constexpr size_t kStack = 64 << 10;
  static std::vector<void*> stacks;  // of the last launch
  while (stacks.size() < m.fibers.size()) stacks.push_back(malloc(kStack));
  for (size_t i = 0; i < m.fibers.size(); ++i) {
    Fiber& f = m.fibers[i];
    f.stack = stacks[i];
    void** top = reinterpret_cast<void**>(static_cast<char*>(f.stack) + kStack - 64);
    *--top = reinterpret_cast<void*>(0);
    *--top = reinterpret_cast<void*>(&enter);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    f.stack_pointer = top;
    f.done = false;
    f.awaited = nullptr;
  }
  for (bool left = true; left;) {
    left = false;
    for (int i = 0; i < blocks * threads; ++i) {
      Fiber& f = m.fibers[i];
      if (f.done) continue;
      left = true;
      if (late > 0 && i < threads) continue;
      if (f.awaited && f.awaited->generation == f.generation) continue;
      f.awaited = nullptr;
      m.now = i, m.block = i / threads, m.thread = i % threads;
      megakernel_switch(&m.scheduler, f.stack_pointer);
    }
    --late;
  }
}

}  // namespace megakernel
