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
#define DEVICE_CALL inline
#define SHARED_CODE inline

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

inline uint32_t pack(float low, float high) {
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

struct Fiber {
  void* stack_pointer;
  void* stack;
  bool done;
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

// A place where a number of fibers meet, again and again.
struct Gathering {
  int arrived = 0;
  unsigned generation = 0;
};

struct Machine {
  int blocks = 0, threads = 0, now = 0;
  int first_block = 0;
  std::vector<Fiber> fibers;
  std::vector<Gathering> block_meetings, warp_meetings;
  std::vector<uint32_t> lanes;  // [fibers][8]: what a lane shows its warp
  std::vector<float2> floats;   // [fibers][6], likewise
  void* scheduler = nullptr;
  std::function<void()> body;
};

inline Machine& machine() {
  static Machine one;
  return one;
}

inline void yield() {
  Machine& m = machine();
  megakernel_switch(&m.fibers[m.now].stack_pointer, m.scheduler);
}

inline void enter() {
  machine().body();
  machine().fibers[machine().now].done = true;
  yield();
}

inline int thread() { return machine().now % machine().threads; }
inline int block() { return machine().first_block + machine().now / machine().threads; }
inline int blocks() { return machine().blocks; }
inline int warp() { return thread() / 32; }
inline int lane() { return thread() % 32; }

inline void meet(Gathering& meeting, int count) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) yield();
}

inline Gathering& meeting(int which) {
  return machine().block_meetings[machine().now / machine().threads * 2 + which];
}
inline void block_sync() { meet(meeting(0), machine().threads - 32); }
inline void all_sync() { meet(meeting(1), machine().threads); }
inline void take_registers() {}
inline void give_registers() {}
inline void warp_sync() { meet(machine().warp_meetings[machine().now / 32], 32); }

inline uint32_t* shown(int index) {
  return &machine().lanes[(machine().now / 32 * 32 + index) * 8];
}

template <class T>
inline T shuffle_xor(T value, int mask) {
  memcpy(shown(lane()), &value, sizeof(T));
  warp_sync();
  T other;
  memcpy(&other, shown(lane() ^ mask), sizeof(T));
  warp_sync();
  return other;
}

template <class T>
inline T shuffle_from(T value, int from) {
  return shuffle_xor(value, lane() ^ from);
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
inline void fetch_line(const void*) {}

// Rows g and g + 8 of A are in the lanes 4g + t, and so is column g of B.
inline void multiply(float (&acc)[4], uint4 a, uint2 b) {
  const uint32_t mine[6] = {a.x, a.z, a.y, a.w, b.x, b.y};
  memcpy(shown(lane()), mine, sizeof mine);
  warp_sync();
  const uint32_t* lanes = shown(0);
  const int g = thread() % 32 / 4, t = thread() % 4;
  for (int i = 0; i < 8; ++i) {  // pairs of K
    const int lane = i % 4, half = i / 4;
    for (int o = 0; o < 4; ++o) {
      const uint32_t row = lanes[8 * (4 * g + lane) + o / 2 * 2 + half];
      const uint32_t column = lanes[8 * (4 * (2 * t + o % 2) + lane) + 4 + half];
      acc[o] += half_of(row, 0) * half_of(column, 0);
      acc[o] += half_of(row, 1) * half_of(column, 1);
    }
  }
  warp_sync();
}

// Each lane shows its values as floats: they are read sixteen times.
inline void multiply_f16(float (&acc)[4], uint4 a, uint2 b) {
  const uint32_t mine[6] = {a.x, a.z, a.y, a.w, b.x, b.y};
  float2* floats = &machine().floats[(machine().now / 32 * 32 + lane()) * 6];
  for (int i = 0; i < 6; ++i) floats[i] = unpack_f16(mine[i]);
  warp_sync();
  const float2* all = &machine().floats[machine().now / 32 * 32 * 6];
  const int g = lane() / 4, t = lane() % 4;
  for (int o = 0; o < 4; ++o) {
    for (int k = 0; k < 8; ++k) {
      const float2 row = all[(4 * g + k % 4) * 6 + o / 2 * 2 + k / 4];
      const float2 column = all[(4 * (2 * t + o % 2) + k % 4) * 6 + 4 + k / 4];
      acc[o] += row.x * column.x + row.y * column.y;
    }
  }
  warp_sync();
}

inline uint4 load_constant(const uint4* at) { return *at; }
inline void launch_next() {}
inline void wait_for_previous() {}

inline void copy_own(uint2* shared, const void* global) { memcpy(shared, global, 8); }
inline void wait_for_own() {}

struct Gate {
  int count, missing;
  uint32_t openings;
};
inline void gate_init(Gate& gate, int count) { gate = {count, count, 0}; }
inline void gates_ready() {}
inline void gate_arrive(Gate& gate) {
  if (--gate.missing == 0) gate.missing = gate.count, ++gate.openings;
}
inline bool gate_open(const Gate& gate, uint32_t parity) { return (gate.openings & 1) != parity; }
inline void copy_async(void* shared, const void* global, int bytes, Gate& gate) {
  if (thread() % 32 == 0) memcpy(shared, global, bytes);
  gate_arrive(gate);
}

inline float shuffle_up(float value) {
  memcpy(shown(lane()), &value, sizeof value);
  warp_sync();
  float other;
  memcpy(&other, shown(max(lane() - 1, 0)), sizeof other);
  warp_sync();
  return other;
}
inline bool in_all_lanes(bool value) {
  *shown(lane()) = value;
  warp_sync();
  bool all = true;
  for (int other = 0; other < 32; ++other) all &= *shown(other) != 0;
  warp_sync();
  return all;
}
// Here it is checked that it is so: the GPU would go on with the first lane's.
inline int uniform(int value) {
  *shown(lane()) = static_cast<uint32_t>(value);
  warp_sync();
  if (*shown(0) != static_cast<uint32_t>(value)) {
    fprintf(stderr, "uniform() was given different values by the lanes of a warp.\n");
    abort();
  }
  warp_sync();
  return value;
}
inline int warp_number() { return warp(); }
inline float to_float(float value) { return value; }
inline float larger(float a, float b) { return fmaxf(a, b); }
inline float larger_or_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
inline uint32_t push_less(uint32_t bits, float a, float b) { return bits << 1 | (a < b); }
inline int zeros_below(uint64_t bits) { return __builtin_ctzll(bits); }
inline uint32_t move_up(uint32_t high, uint32_t low, int bits) {
  return ((static_cast<uint64_t>(high) << 32 | low) << (bits & 31)) >> 32;
}
template <int kBytes>
inline void copy_or_zero(void* shared, const void* global, int bytes) {
  memset(shared, 0, kBytes);
  if (bytes > 0) memcpy(shared, global, bytes);
}
inline void arrive_with_copies(Gate& gate) { gate_arrive(gate); }
inline uint4 load_early(const uint4* shared) { return *shared; }
inline unsigned count_up(unsigned* counter) { return (*counter)++; }
inline void store_streaming(uint4* at, uint4 value) { *at = value; }

inline uint4 load_words(const uint4* at) { return *at; }
inline uint32_t load_word(const uint32_t* at) { return *at; }
inline void store_word(uint32_t* at, uint32_t word) { *at = word; }
inline void load_words_if(bool wanted, const uint4* at, uint4& v) {
  if (wanted) v = *at;
}
inline void store_word_if(bool wanted, uint32_t* at, uint32_t word) {
  if (wanted) *at = word;
}
inline void put_if(bool wanted, uint4& at, uint4 v) {
  if (wanted) at = v;
}
inline uint4 load_settled(const uint4* at) { return *at; }
inline uint2 load_settled(const uint2* at) { return *at; }
template <class T>
inline void store_settled(T* at, T value) {
  *at = value;
}
inline void fence() {}
inline void publish(unsigned* to_host, unsigned value) { *to_host = value; }
inline unsigned observe_host(const unsigned* from_host) { return *from_host; }
// Time goes on with every look at it.
inline uint64_t nanoseconds() {
  static uint64_t now = 0;
  return ++now;
}
inline uint64_t cycles() { return 0; }
inline void pause() { yield(); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
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
  m.lanes.resize(blocks * threads * 8);
  m.floats.resize(blocks * threads * 6);
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
  }
  for (bool left = true; left;) {
    left = false;
    for (size_t i = 0; i < m.fibers.size(); ++i) {
      if (m.fibers[i].done) continue;
      left = true;
      if (late > 0 && static_cast<int>(i) < threads) continue;
      m.now = static_cast<int>(i);
      megakernel_switch(&m.scheduler, m.fibers[i].stack_pointer);
    }
    --late;
  }
}

}  // namespace megakernel
