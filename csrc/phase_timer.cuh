// Where a block's first thread spends its time, phase by phase, in the profiling build; nothing in
// the ordinary one.
#pragma once

#include "exchange.cuh"

namespace megakernel {

enum PhasePart : int {
  kWait,
  kMultiply,
  kSum,
  kNumPhaseParts
};  // for other blocks; for the block's weights; the rest

#ifdef MEGAKERNEL_PROFILE

struct PhaseTimes {
  uint64_t of[kNumPhases][kNumPhaseParts];
};

class PhaseTimer {
 public:
  DEVICE explicit PhaseTimer(PhaseTimes& multiply) : times_(multiply), last_(clock_cycles()) {
    if (thread_idx() == 0) times_ = {};
  }

  DEVICE void lap(Phase phase, PhasePart part) {
    if (thread_idx() != 0) return;
    const uint64_t now = clock_cycles();
    times_.of[phase][part] += now - last_;
    last_ = now;
  }

  DEVICE void write(uint64_t* out) const {
    if (thread_idx() != 0) return;
    for (int i = 0; i < kNumPhases * kNumPhaseParts; ++i) {
      out[block_idx() * kNumPhases * kNumPhaseParts + i] =
          times_.of[i / kNumPhaseParts][i % kNumPhaseParts];
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
