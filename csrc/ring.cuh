// The weight ring: a copy warp (the producer) copies a thread block's weights into stages of shared
// memory; the compute warps (the consumers) multiply them. Weights do not depend on other thread
// blocks, so the copy warp copies ahead as far as the ring has empty stages.
#pragma once

#include "weights.cuh"

namespace megakernel {

// --- shared memory ---

// uint4 [NumStages, StageSteps, kNumThreads] and two mbarriers per stage. `full` completes when a
// copy has arrived, `empty` when all compute threads have released a stage.
template <int StageSteps, int NumStages>
struct Ring {
  static constexpr int stage_steps = StageSteps;
  static constexpr int stage_bytes = StageSteps * kNumThreads * 16;
  static constexpr int low_stages = NumStages > 2 ? 2 : 1;
  static_assert(NumStages > low_stages, "a nearly empty ring must have an empty stage");
  static_assert(stage_bytes < 1 << 20, "an mbarrier counts less than 1 MiB of a copy");
  uint4 stages[NumStages][StageSteps][kNumThreads];
  Mbarrier full[NumStages], empty[NumStages];
  int stop;  // 1 after the compute warps have left

  // Initialises the mbarriers. Called by all threads, which then synchronise.
  DEVICE void init() {
    for (int i = thread_idx(); i < NumStages; i += kNumThreads) {
      mbarrier_init(full[i], 32);
      mbarrier_init(empty[i], kNumThreads);
    }
    mbarrier_fence_init();
    if (thread_idx() == 0) stop = 0;
  }

  // A stage, and the parity of its use.
  struct Cursor {
    int stage = 0;
    uint32_t parity = 0;

    // Moves to the next stage.
    DEVICE void advance() {
      if (++stage == NumStages) stage = 0, parity ^= 1;
    }
  };

  // Whether at most `low_stages` stages before the cursor are full or being copied.
  DEVICE bool is_nearly_empty(Cursor cursor) const {
    const int stage = cursor.stage + NumStages - 1 - low_stages;
    const bool wrapped = stage >= NumStages;  // the use of this round, else of the one before
    const Mbarrier& barrier = empty[wrapped ? stage - NumStages : stage];
    return warp_all(mbarrier_test_wait(barrier, cursor.parity ^ 1 ^ wrapped));
  }

  // The number of full stages from the cursor on. Each lane tests the mbarrier of one stage.
  DEVICE int count_full_stages(Cursor cursor) const {
    constexpr int kNumTested = NumStages < 32 ? NumStages : 32;
    const int stage = cursor.stage + min(lane_idx(), kNumTested - 1);
    const bool wrapped = stage >= NumStages;
    const bool is_full =
        mbarrier_test_wait(full[wrapped ? stage - NumStages : stage], cursor.parity ^ wrapped);
    const unsigned full_lanes = warp_ballot(is_full && lane_idx() < kNumTested);
    warp_barrier();  // makes the stages that one lane has tested visible to all lanes
    return count_trailing_zeros(~static_cast<uint64_t>(full_lanes));
  }
};

// --- copy warp ---

// Copies the ranges get_range(i) for i from `first` to `num_ranges - 1`, until the compute warps
// have left. With `kAllowSecondCopy` two copies are in flight while the ring is nearly empty.
template <bool kAllowSecondCopy, class R, class GetRange>
DEVICE void copy_weights(R& ring, int first, int num_ranges, GetRange get_range) {
  typename R::Cursor cursor, oldest;  // the next copy, and the oldest one in flight
  int num_in_flight = 0;
  auto wait_for_copies = [&](int max_in_flight) {
    for (; num_in_flight > max_in_flight; --num_in_flight, oldest.advance()) {
      while (!warp_all(mbarrier_try_wait(ring.full[oldest.stage], oldest.parity))) spin_pause();
    }
  };
  bool running = true;
  const uint64_t policy = l2_evict_first_policy();
#pragma unroll 1
  for (int i = first; i < num_ranges && running; ++i) {
    WeightRange s = get_range(i);
#pragma unroll 1
    for (; s.num_steps > 0; s.num_steps -= R::stage_steps, s.next += R::stage_steps * kNumThreads) {
      while (running && !warp_all(mbarrier_try_wait(ring.empty[cursor.stage], cursor.parity ^ 1))) {
        spin_pause();
        running = warp_all(*static_cast<volatile int*>(&ring.stop) == 0);
      }
      if (!running) break;
      mbarrier_expect_copy(ring.full[cursor.stage], R::stage_bytes);
      const bool second_copy = kAllowSecondCopy && ring.is_nearly_empty(cursor);
      // The memory is idle from the end of this wait to the next copy.
      wait_for_copies((second_copy ? 2 : s.max_copies_in_flight) - 1);
      copy_async(ring.stages[cursor.stage], s.next, R::stage_bytes, ring.full[cursor.stage],
                 policy);
      cursor.advance();
      ++num_in_flight;
    }
  }
  wait_for_copies(0);  // the thread block must not exit before its copies have arrived
}

// --- compute warps ---

// A compute warp's position in the ring.
template <class R>
class RingConsumer {
 public:
  // `num_full` stages from `cursor` on are known to be full. Their mbarriers are not tested,
  // because a test has a long latency.
  DEVICE RingConsumer(R& ring, typename R::Cursor cursor, int num_full)
      : ring_(ring), cursor_(cursor), num_full_(num_full) {}

  DEVICE typename R::Cursor cursor() const { return cursor_; }

  // Waits until the next stage is full; returns its index.
  DEVICE int wait_for_stage(SpinTimeout timeout) {
    if (num_full_ == 0) {
      while (!warp_all(mbarrier_try_wait(ring_.full[cursor_.stage], cursor_.parity))) {
        if (!warp_all(timeout.keep_waiting())) break;
      }
      num_full_ = 1;
    }
    return cursor_.stage;
  }

  // Releases the stage for the next copy. The thread must have used the values that it loaded: an
  // asynchronous copy does not wait for loads in flight.
  DEVICE void release_stage() {
    mbarrier_arrive(ring_.empty[cursor_.stage]);
    cursor_.advance();
    --num_full_;
  }

 private:
  R& ring_;
  typename R::Cursor cursor_;
  int num_full_;
};

}  // namespace megakernel
