// The kernel's instructions on a host: every CUDA thread is a fiber, and all run in turn on one
// thread of the host. It tells whether the phases compute the right thing, not whether memory
// orders hold. Slow: for the smallest models.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

#define DEVICE inline
#define DEVICE_CALL inline

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
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
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
};

struct Machine {
  int blocks = 0, threads = 0, now = 0;
  std::vector<Fiber> fibers;
  std::vector<Meeting> block_meetings, warp_meetings;
  std::vector<uint32_t> lanes;  // [fibers][8]: what a lane shows its warp
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
inline int block() { return machine().now / machine().threads; }
inline int blocks() { return machine().blocks; }

inline void meet(Meeting& meeting, int count) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) yield();
}

inline void block_sync() { meet(machine().block_meetings[block()], machine().threads); }
inline void warp_sync() { meet(machine().warp_meetings[machine().now / 32], 32); }

inline uint32_t* lane(int index) { return &machine().lanes[(machine().now / 32 * 32 + index) * 8]; }

template <class T>
inline T shuffle_xor(T value, int mask) {
  memcpy(lane(thread() % 32), &value, sizeof(T));
  warp_sync();
  T other;
  memcpy(&other, lane(thread() % 32 ^ mask), sizeof(T));
  warp_sync();
  return other;
}

inline float half_of(uint32_t pair, int which) {
  return to_float({static_cast<uint16_t>(which ? pair >> 16 : pair & 0xFFFF)});
}

inline void multiply(float (&acc)[4], uint4 a, uint2 b) {
  const uint32_t mine[6] = {a.x, a.y, a.z, a.w, b.x, b.y};
  memcpy(lane(thread() % 32), mine, sizeof mine);
  warp_sync();
  const int g = thread() % 32 / 4, t = thread() % 4;
  for (int o = 0; o < 4; ++o) {
    const int row = g, column = 2 * t + o % 2, low = o / 2;  // o / 2: the row eight further down
    for (int k = 0; k < 16; ++k) {
      const uint32_t* from_a = lane(4 * row + k % 8 / 2);
      const uint32_t* from_b = lane(4 * column + k % 8 / 2);
      acc[o] += half_of(from_a[k / 8 * 2 + low], k % 2) * half_of(from_b[4 + k / 8], k % 2);
    }
  }
  warp_sync();
}

inline uint4 load_weights(const uint4* at) { return *at; }
inline float load_shared_by_blocks(const float* at) { return *at; }
inline int load_shared_by_blocks(const int* at) { return *at; }
inline void signal(unsigned* counter) { ++*counter; }
inline unsigned observe(const unsigned* counter) {
  yield();
  return *counter;
}
inline void publish(unsigned* to_host, unsigned value) { *to_host = value; }
inline unsigned observe_host(const unsigned* from_host) { return *from_host; }
inline uint64_t nanoseconds() { return 0; }
inline int add_in_block(int* at, int value) {
  const int old = *at;
  *at += value;
  return old;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// Runs `body` for every thread of every block.
inline void launch(int blocks, int threads, std::function<void()> body) {
  Machine& m = machine();
  m = Machine();
  m.blocks = blocks;
  m.threads = threads;
  m.body = std::move(body);
  m.fibers.resize(blocks * threads);
  m.block_meetings.resize(blocks);
  m.warp_meetings.resize(blocks * threads / 32);
  m.lanes.resize(blocks * threads * 8);
  constexpr size_t kStack = 64 << 10;
  for (Fiber& f : m.fibers) {
    f.stack = malloc(kStack);
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
      m.now = static_cast<int>(i);
      megakernel_switch(&m.scheduler, m.fibers[i].stack_pointer);
    }
  }
  for (Fiber& f : m.fibers) free(f.stack);
}

}  // namespace megakernel
