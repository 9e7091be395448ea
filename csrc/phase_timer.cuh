// Where a block's first thread spends its time, phase by phase, in the profiling build; nothing in
// the ordinary one.
#pragma once

#include "exchange.cuh"

namespace megakernel {

enum Part : int {
  kWait,
  kMultiply,
  kSum,
  kParts
};  // for other blocks; for the block's weights; the rest

#ifdef MEGAKERNEL_PROFILE

struct Times {
  uint64_t of[kPhases][kParts];
};

class PhaseTimer {
 public:
  DEVICE explicit PhaseTimer(Times& times) : times_(times), last_(cycles()) {
    if (thread() == 0) times_ = {};
  }

  DEVICE void lap(Phase phase, Part part) {
    if (thread() != 0) return;
    const uint64_t now = cycles();
    times_.of[phase][part] += now - last_;
    last_ = now;
  }

  DEVICE void close(uint64_t* out) const {
    if (thread() != 0) return;
    for (int i = 0; i < kPhases * kParts; ++i) {
      out[block() * kPhases * kParts + i] = times_.of[i / kParts][i % kParts];
    }
  }

 private:
  Times& times_;
  uint64_t last_;
};

#else

struct Times {};

struct PhaseTimer {
  DEVICE explicit PhaseTimer(Times&) {}
  DEVICE void lap(Phase, Part) {}
  DEVICE void close(uint64_t*) const {}
};

#endif

}  // namespace megakernel
