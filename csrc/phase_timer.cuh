// The profiling build (-DMEGAKERNEL_PROFILE): clock cycles of each thread block's first thread,
// phase by phase. In other builds the timer is empty.
#pragma once

#include "exchange.cuh"

namespace megakernel {

// Parts of a phase: waiting for other thread blocks, multiplying (which includes waiting for
// weights), and the rest.
enum PhasePart : int { kWait, kMultiply, kSum, kNumPhaseParts };

#ifdef MEGAKERNEL_PROFILE

struct PhaseTimes {
  uint64_t cycles[kNumPhases][kNumPhaseParts];
};

class PhaseTimer {
 public:
  DEVICE explicit PhaseTimer(PhaseTimes& times) : times_(times), last_(clock_cycles()) {
    if (thread_idx() == 0) times_ = {};
  }

  // Adds the time since the last lap to a part of a phase.
  DEVICE void lap(Phase phase, PhasePart part) {
    if (thread_idx() != 0) return;
    const uint64_t now = clock_cycles();
    times_.cycles[phase][part] += now - last_;
    last_ = now;
  }

  // Writes the thread block's row of `out`, [blocks, phases, parts].
  DEVICE void write(uint64_t* out) const {
    if (thread_idx() != 0) return;
    for (int i = 0; i < kNumPhases * kNumPhaseParts; ++i) {
      out[block_idx() * kNumPhases * kNumPhaseParts + i] =
          times_.cycles[i / kNumPhaseParts][i % kNumPhaseParts];
    }
  }

 private:
  PhaseTimes& times_;
  uint64_t last_;
};

#else

struct PhaseTimes {};

struct PhaseTimer {
  DEVICE explicit PhaseTimer(PhaseTimes&) {}
  DEVICE void lap(Phase, PhasePart) {}
  DEVICE void write(uint64_t*) const {}
};

#endif

}  // namespace megakernel
