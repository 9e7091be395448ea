// Kernels that start before the previous one ends. Until it waits, a thread may find memory without
// the writes of the previous kernel. The threads of one block of each launch do, so results are
// wrong if they read one of these writes too early. Writes of the kernels before are not taken
// back.
#pragma once

#include "fibers.h"

namespace megakernel {

class PrerequisiteWrites {
 public:
  // The previous kernel has written to `size` bytes, which were those at `before`. Both are used
  // until the next kernel has run.
  void add(char* at, char* before, size_t size) { ranges_.push_back({at, before, size}); }

  // Calls launch_block(i) for all thread blocks of a launch, of which one starts early.
  template <class LaunchBlock>
  void launch_blocks(int num_blocks, const LaunchBlock& launch_block) {
    const int early_block = static_cast<int>(random_.next() % max(num_blocks, 1));
    for (int i = 0; i < num_blocks; ++i) {
      if (i == early_block) hide();
      launch_block(i);
      reveal();
    }
    ranges_.clear();
  }
  // Of a thread: returns when all threads wait. Threads that others have to release never do, so
  // the number of turns is limited.
  void wait() {
    constexpr int kMaxTurns = 64;
    ++num_waiting_;
    const int num_threads = static_cast<int>(machine().fibers.size());
    for (int turn = 0; is_hidden_ && num_waiting_ < num_threads && turn < kMaxTurns; ++turn) {
      yield_poll();
    }
    reveal();
  }

 private:
  struct Range {
    char *at, *before;
    size_t size;

    void exchange() const {
      for (size_t i = 0; i < size; ++i) {
        const char byte = at[i];
        at[i] = before[i], before[i] = byte;
      }
    }
  };

  // Takes the writes back.
  void hide() {
    for (const Range& range : ranges_) range.exchange();
    is_hidden_ = true, num_waiting_ = 0;
  }
  // Writes them again.
  void reveal() {
    if (!is_hidden_) return;
    for (size_t i = ranges_.size(); i-- > 0;) ranges_[i].exchange();
    is_hidden_ = false;
  }

  std::vector<Range> ranges_;
  bool is_hidden_ = false;
  int num_waiting_ = 0;
  RandomNumbers random_{1};
};

inline __attribute__((visibility("hidden"))) PrerequisiteWrites prerequisite_writes;

inline void trigger_dependent_grids() {}
inline void wait_for_prerequisite_grids() { prerequisite_writes.wait(); }

// Called before a kernel that starts before the previous one ends, for each tensor that this one
// has written.
extern "C" inline __attribute__((used, visibility("default"))) void add_prerequisite_write(
    char* at, char* before, size_t size) {
  prerequisite_writes.add(at, before, size);
}

}  // namespace megakernel
