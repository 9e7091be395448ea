// The profiling build (-DMEGAKERNEL_PROFILE): clock cycles of each thread block's first thread,
// phase by phase. In other builds the timer is empty.
#pragma once

#include "exchange.cuh"

namespace megakernel {

// The intervals of a phase: waiting for other thread blocks, multiplying (including the wait for
// weights), and the rest. The table of bench.step has the same names.
enum PhaseInterval : int { kWait, kMultiply, kRest, kNumPhaseIntervals };

#ifdef MEGAKERNEL_PROFILE

struct PhaseTimes {
  uint64_t cycles[kNumPhases][kNumPhaseIntervals];
};

class PhaseTimer {
 public:
  // Starts the first lap.
  DEVICE explicit PhaseTimer(PhaseTimes& times) : times_(&times), last_(clock_cycles()) {
    if (thread_idx() == 0) *times_ = {};
  }

  // Adds the time since the last lap to an interval of a phase.
  DEVICE void lap(Phase phase, PhaseInterval interval) {
    if (thread_idx() != 0) return;
    const uint64_t now = clock_cycles();
    times_->cycles[phase][interval] += now - last_;
    last_ = now;
  }

  // Writes the thread block's row of `out`, [blocks, phases, intervals].
  DEVICE void write(uint64_t* out) const {
    if (thread_idx() != 0) return;
    for (int i = 0; i < kNumPhases * kNumPhaseIntervals; ++i) {
      out[block_idx() * kNumPhases * kNumPhaseIntervals + i] =
          times_->cycles[i / kNumPhaseIntervals][i % kNumPhaseIntervals];
    }
  }

 private:
  PhaseTimes* times_;
  uint64_t last_;
};

#else

struct PhaseTimes {};

struct PhaseTimer {
  DEVICE explicit PhaseTimer(PhaseTimes&) {}
  DEVICE void lap(Phase, PhaseInterval) {}
  DEVICE void write(uint64_t*) const {}
};

#endif

}  // namespace megakernel
