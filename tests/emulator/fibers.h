// A grid of thread blocks on one host thread: every CUDA thread is a fiber. Fibers run in turns; a
// fiber yields where it polls and where it waits at a barrier.
//
// Headers of the emulator include few others: each is compiled with every library.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "numbers.h"

namespace megakernel {

// A reusable barrier.
struct Barrier {
  int num_arrived = 0;
  unsigned generation = 0;
};

struct Fiber {
  void* stack_pointer;
  void* stack;
  bool done;
  const Barrier* barrier;  // the fiber sleeps until the barrier has another generation than this
  unsigned generation;
};

extern "C" void megakernel_switch(void** from, void* to);
asm(R"(
.text
.globl megakernel_switch
.hidden megakernel_switch
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

// The operands of a warp's matrix instruction, of 16-bit numbers, and its sums.
struct alignas(32) MmaOperands {
  uint16_t a[16][16], b[16][8];
  float sums[16][8];
};

struct Machine {
  int num_blocks = 0, num_threads = 0, first_block = 0;
  int fiber_idx = 0, block = 0, thread = 0;  // the running fiber
  int end_lane = 0;                          // behind the last fiber of its warp
  int num_running = 0;                       // fibers that are not done
  std::vector<Fiber> fibers;
  std::vector<Barrier> block_barriers, warp_barriers;
  std::vector<uint32_t> lane_values[2];  // [fibers, 2]: values shared within a warp, alternately
  std::vector<MmaOperands> operands;     // [warps]
  void* scheduler = nullptr;
  bool polled = false;  // the running warp polls: it ends its turn
  void (*body)(const void*) = nullptr;
  const void* body_captures = nullptr;
};

inline __attribute__((visibility("hidden"))) Machine the_machine;
inline Machine& machine() { return the_machine; }

// With a seed that is not 0, thread blocks and warps pause at random for random times.
inline unsigned schedule_seed = 0;

// Continues the next lane of the running warp that does not wait, or else the scheduler. Lanes
// continue each other because the scheduler in between would double the number of switches.
inline void continue_next_lane(void** from) {
  Machine& m = machine();
  while (++m.fiber_idx < m.end_lane) {
    Fiber& fiber = m.fibers[m.fiber_idx];
    ++m.thread;
    if (fiber.done) continue;
    if (fiber.barrier && fiber.barrier->generation == fiber.generation) continue;
    fiber.barrier = nullptr;
    return megakernel_switch(from, fiber.stack_pointer);
  }
  megakernel_switch(from, m.scheduler);
}

inline void yield() {
  Machine& m = machine();
  continue_next_lane(&m.fibers[m.fiber_idx].stack_pointer);
}

// Where a thread polls: what it waits for is up to other warps.
inline void yield_poll() {
  machine().polled = true;
  yield();
}

inline void run_fiber() {
  Machine& m = machine();
  m.body(m.body_captures);
  m.fibers[m.fiber_idx].done = true;
  --m.num_running;
  yield();
}

inline int thread_idx() { return machine().thread; }
inline int block_idx() { return machine().first_block + machine().block; }
inline int num_blocks() { return machine().num_blocks; }
inline int warp_idx() { return thread_idx() / 32; }
inline int lane_idx() { return thread_idx() % 32; }

// Waits until `count` fibers have arrived. The last one calls act() before the others continue.
template <class Act>
inline void wait_at(Barrier& barrier, int count, Act act) {
  const unsigned generation = barrier.generation;
  if (++barrier.num_arrived == count) {
    act();
    barrier.num_arrived = 0;
    ++barrier.generation;
    return;
  }
  Fiber& fiber = machine().fibers[machine().fiber_idx];
  fiber.barrier = &barrier, fiber.generation = generation;
  yield();
}
inline void wait_at(Barrier& barrier, int count) {
  wait_at(barrier, count, [] {});
}

inline Barrier& block_barrier(int which) {
  return machine().block_barriers[machine().block * 2 + which];
}
inline Barrier& own_warp_barrier() { return machine().warp_barriers[machine().fiber_idx / 32]; }

// A linear congruential generator (std::minstd_rand, of a large header).
class RandomNumbers {
 public:
  explicit RandomNumbers(unsigned seed) : state_(seed) {}
  unsigned next() { return state_ = state_ * 48271 % 0x7FFFFFFF; }

 private:
  uint64_t state_;
};

// Pauses of thread blocks and warps, counted in turns of the scheduler.
class Schedule {
 public:
  Schedule(unsigned seed, int num_blocks, int num_warps)
      : enabled_(seed != 0), random_(seed), block_pauses_(num_blocks), warp_pauses_(num_warps) {}

  void next_turn() {
    if (!enabled_) return;
    for (int& pause : block_pauses_) advance(pause, 64, 200);
    for (int& pause : warp_pauses_) advance(pause, 256, 20);
  }
  bool paused(int block, int warp) const {
    return block_pauses_[block] > 0 || warp_pauses_[warp] > 0;
  }

 private:
  // A pause begins at one of `period` turns and lasts for at most `max_turns`.
  void advance(int& pause, unsigned period, unsigned max_turns) {
    if (pause > 0) {
      --pause;
    } else if (random_.next() % period == 0) {
      pause = static_cast<int>(random_.next() % max_turns);
    }
  }

  bool enabled_;
  RandomNumbers random_;
  std::vector<int> block_pauses_, warp_pauses_;
};

// Runs a warp until it polls or waits for others, or, in a random schedule, until its lanes have
// waited for each other once.
inline void run_warp(int warp) {
  Machine& m = machine();
  m.block = warp * 32 / m.num_threads;
  const Barrier& barrier = m.warp_barriers[warp];
  unsigned generation;
  do {
    generation = barrier.generation;
    m.polled = false;
    m.fiber_idx = warp * 32 - 1, m.end_lane = warp * 32 + 32;
    m.thread = m.fiber_idx - m.block * m.num_threads;
    continue_next_lane(&m.scheduler);
  } while (schedule_seed == 0 && !m.polled && barrier.generation != generation);
}

// Runs body(captures) for every thread of thread blocks that are resident together. Block 0 begins
// after `late` turns. The blocks may be some of a larger grid.
inline void run_fibers(int num_blocks, int num_threads, int late, int first_block,
                       int num_grid_blocks, void (*body)(const void*), const void* captures) {
  Machine& m = machine();
  m = Machine();
  m.first_block = first_block;
  m.num_blocks = max(num_blocks, num_grid_blocks);
  m.num_threads = num_threads;
  m.body = body, m.body_captures = captures;
  const int num_fibers = num_blocks * num_threads;
  m.fibers.resize(num_fibers);
  m.block_barriers.resize(2 * num_blocks);
  m.warp_barriers.resize(num_fibers / 32);
  for (auto& values : m.lane_values) values.resize(num_fibers * 2);
  m.operands.resize(num_fibers / 32);
  // No multiple of a page: the tops of all stacks would have the same lines of the cache.
  constexpr size_t kStackBytes = (64 << 10) + 17 * 64;
  static std::vector<void*> stacks;  // kept from launch to launch
  while (stacks.size() < m.fibers.size()) stacks.push_back(malloc(kStackBytes));
  for (size_t i = 0; i < m.fibers.size(); ++i) {
    Fiber& fiber = m.fibers[i];
    fiber.stack = stacks[i];
    void** top = reinterpret_cast<void**>(static_cast<char*>(fiber.stack) + kStackBytes - 64);
    *--top = reinterpret_cast<void*>(0);
    *--top = reinterpret_cast<void*>(&run_fiber);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.stack_pointer = top;
    fiber.done = false;
    fiber.barrier = nullptr;
  }
  Schedule schedule(schedule_seed, num_blocks, num_fibers / 32);
  for (m.num_running = num_fibers; m.num_running > 0; --late) {
    schedule.next_turn();
    for (int warp = late > 0 ? num_threads / 32 : 0; warp < num_fibers / 32; ++warp) {
      if (!schedule.paused(warp * 32 / num_threads, warp)) run_warp(warp);
    }
  }
}

}  // namespace megakernel
