// A barrier of all thread blocks. The blocks of a cooperative launch are resident together, so that
// it needs no timeout.
#pragma once

#include "../memory.cuh"

namespace megakernel::transducer {

// Counts the arrivals of all thread blocks. The counter begins at -1 and counts on.
class GridBarrier {
 public:
  DEVICE explicit GridBarrier(unsigned* counter) : counter_(counter) {}

  // Waits for all threads of the grid. Their writes before it are visible after it, to loads that
  // bypass the L1 cache.
  DEVICE void wait() {
    sync_all_threads();
    if (thread_idx() == 0) {
      expected_ += num_blocks();
      atomic_increment_release(counter_);
      while (static_cast<int>(load_acquire(counter_) - expected_) < 0) spin_pause();
    }
    sync_all_threads();
  }

 private:
  unsigned* counter_;
  unsigned expected_ = ~0u;
};

}  // namespace megakernel::transducer
