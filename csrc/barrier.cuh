// The grid barrier: every block adds one to a counter that is never reset, and waits until all
// have. A wait that lasts too long ends the launch with a sentence instead of hanging it.
#pragma once

#include "memory.cuh"
#include "params.cuh"

namespace megakernel {

class Barrier {
 public:
  // `alive` lies in shared memory.
  DEVICE Barrier(const Params& p, bool& alive) : p_(p), alive_(alive), target_(*p.epoch) {}

  // Leaves the counter's value to the next launch; every block would write the same.
  DEVICE void close() {
    if (block() == 0 && thread() == 0) *p_.epoch = target_;
  }

  // Whether all blocks arrived; false once any block has given up: the caller leaves.
  DEVICE bool wait(int phase) {
    target_ += blocks();
    block_sync();
    if (thread() == 0) {
      signal(p_.barrier);
      alive_ = arrived(phase);
    }
    block_sync();
    return alive_;
  }

 private:
  DEVICE bool arrived(int phase) {
    const uint64_t start = nanoseconds();
    // The difference is right also where the counter has wrapped around.
    while (static_cast<int>(observe(p_.barrier) - target_) < 0) {
      if (nanoseconds() - start > p_.patience) {
        p_.failure[1] = block();
        p_.failure[2] = phase;
        publish(p_.failure, 1);
        signal(p_.given_up);
        return false;
      }
      if (observe(p_.given_up)) return false;
    }
    return true;
  }

  const Params& p_;
  bool& alive_;
  unsigned target_;
};

}  // namespace megakernel
