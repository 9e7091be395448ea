// Mbarriers and asynchronous copies: mbarrier.cuh and the copies of memory.cuh on a host.
//
// A copy is done when its thread waits for it or, at random, while a thread polls an mbarrier.
// Until then its target has other values, so a read that does not wait for it, or a source that is
// overwritten too early, gives wrong results.
#pragma once

#include <stdio.h>

#include "fibers.h"

namespace megakernel {

struct Mbarrier {
  int count, num_missing;  // arrivals
  int num_bytes;           // being copied
  uint32_t completions;

  void arrive() {
    if (--num_missing < 0) {
      fprintf(stderr, "mbarrier: more arrivals than its count of %d.\n", count);
      abort();
    }
    complete_if_due();
  }
  void complete_if_due() {
    if (num_missing == 0 && num_bytes == 0) num_missing = count, ++completions;
  }
};

// --- copies that are not done ---

constexpr uint8_t kUncopied = 0x7F;  // of half precision, two such bytes are not a number

struct Copy {
  void* to;
  const void* from;
  int num_bytes, num_zeros;  // zeros follow the bytes

  void begin() const { memset(to, kUncopied, num_bytes + num_zeros); }
  void finish() const {
    if (num_bytes > 0) memcpy(to, from, num_bytes);
    memset(static_cast<char*>(to) + num_bytes, 0, num_zeros);
  }
};
using CopyGroup = std::vector<Copy>;

// Of a thread: groups that were committed, and the group that is being issued.
struct ThreadCopies {
  std::vector<CopyGroup> groups;
  CopyGroup issued;

  void commit() {
    groups.push_back(std::move(issued));
    issued.clear();
  }
  // Finishes groups until `num_pending` are left.
  void finish(size_t num_pending) {
    while (groups.size() > num_pending) {
      for (const Copy& copy : groups.front()) copy.finish();
      groups.erase(groups.begin());
    }
  }
};

// Copies whose end an mbarrier counts: as the arrival of a thread, or as bytes.
struct CountedCopies {
  std::vector<CopyGroup> groups;
  Mbarrier* barrier;
  int fiber;  // the thread; -1: bytes

  void finish() const {
    for (const CopyGroup& group : groups) {
      for (const Copy& copy : group) {
        copy.finish();
        if (fiber < 0) barrier->num_bytes -= copy.num_bytes;
      }
    }
    if (fiber >= 0) {
      barrier->arrive();
    } else {
      barrier->complete_if_due();
    }
  }
};

class Copies {
 public:
  // Of the running thread.
  ThreadCopies& own() {
    const size_t fiber = machine().fiber_idx;
    if (of_threads_.size() <= fiber) of_threads_.resize(fiber + 1);
    return of_threads_[fiber];
  }
  void count(CountedCopies copies) { counted_.push_back(std::move(copies)); }

  // Now and then finishes some copies that an mbarrier counts.
  void advance() {
    if (!counted_.empty() && random_.next() % 4 == 0) finish(random_.next() % counted_.size());
  }
  // Finishes those of the running thread except for the last `num_pending` groups.
  void finish_own(size_t num_pending) {
    for (size_t i = counted_.size(); i-- > 0;) {
      if (counted_[i].fiber == machine().fiber_idx) finish(i);
    }
    own().finish(num_pending);
  }
  // Finishes all, at the end of a launch.
  void finish_all() {
    while (!counted_.empty()) finish(0);
    for (ThreadCopies& copies : of_threads_) {
      copies.commit();
      copies.finish(0);
    }
  }

 private:
  void finish(size_t counted) {
    const CountedCopies copies = std::move(counted_[counted]);
    counted_[counted] = std::move(counted_.back());
    counted_.pop_back();
    copies.finish();
  }

  std::vector<ThreadCopies> of_threads_;
  std::vector<CountedCopies> counted_;
  RandomNumbers random_{1};
};

inline __attribute__((visibility("hidden"))) Copies the_copies;

// Runs `body` for every thread, see `run_fibers`. Its copies are done at the end.
template <class Body>
void launch(int num_blocks, int num_threads, int late, const Body& body, int first_block = 0,
            int num_grid_blocks = 0) {
  run_fibers(
      num_blocks, num_threads, late, first_block, num_grid_blocks,
      [](const void* captures) { (*static_cast<const Body*>(captures))(); }, &body);
  the_copies.finish_all();
}

inline void check_alignment(const void* shared, const void* global, int bytes, int alignment) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) |
                        static_cast<uintptr_t>(bytes);
  if (all % alignment == 0 && bytes > 0) return;
  fprintf(stderr, "A copy of %d bytes takes multiples of %d as addresses and size.\n", bytes,
          alignment);
  abort();
}

// --- mbarrier.cuh ---

inline void mbarrier_init(Mbarrier& barrier, int count) { barrier = {count, count, 0, 0}; }
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(Mbarrier& barrier) { barrier.arrive(); }
inline void mbarrier_arrive_if(bool wanted, Mbarrier& barrier) {
  if (wanted) barrier.arrive();
}
inline void mbarrier_arrive_on_copies(Mbarrier& barrier) {
  ThreadCopies& own = the_copies.own();
  own.commit();
  the_copies.count({std::move(own.groups), &barrier, machine().fiber_idx});
  own.groups.clear();
}
inline bool mbarrier_test_wait(const Mbarrier& barrier, uint32_t parity) {
  the_copies.advance();
  return (barrier.completions & 1) != parity;
}
inline bool mbarrier_try_wait(const Mbarrier& barrier, uint32_t parity) {
  return mbarrier_test_wait(barrier, parity);
}
inline void mbarrier_expect_copy(Mbarrier& barrier, int bytes) {
  if (lane_idx() > 0) return;
  barrier.num_bytes += bytes;
  barrier.arrive();
}
inline uint64_t l2_evict_first_policy() { return 0; }
inline uint64_t l2_evict_last_policy() { return 1; }
inline void copy_async_bulk(void* shared, const void* global, int bytes, Mbarrier& barrier,
                            uint64_t) {
  if (lane_idx() > 0) return;
  check_alignment(shared, global, bytes, 16);
  const Copy copy = {shared, global, bytes, 0};
  copy.begin();
  the_copies.count({{{copy}}, &barrier, -1});
}
inline void copy_async(void* shared, const void* global, int bytes, Mbarrier& barrier,
                       uint64_t policy) {
  mbarrier_arrive_if(lane_idx() > 0, barrier);
  copy_async_bulk(shared, global, bytes, barrier, policy);
}

// --- memory.cuh ---

template <int kBytes>
inline void copy_async_zero_fill(void* shared, const void* global, int bytes) {
  check_alignment(shared, bytes > 0 ? global : shared, kBytes, kBytes);
  const Copy copy = {shared, global, bytes, kBytes - bytes};
  copy.begin();
  the_copies.own().issued.push_back(copy);
}
inline void copy_async_8_bytes(uint2* shared, const void* global) {
  copy_async_zero_fill<8>(shared, global, 8);
}
inline void copy_async_8_bytes_if(bool wanted, uint2* shared, const void* global) {
  if (wanted) copy_async_8_bytes(shared, global);
}
inline void copy_async_16_bytes(uint4* shared, const void* global) {
  copy_async_zero_fill<16>(shared, global, 16);
}
inline void copy_async_commit() { the_copies.own().commit(); }
template <int kPending>
inline void copy_async_wait() {
  the_copies.finish_own(kPending);
}
inline void copy_async_wait_all() {
  copy_async_commit();
  copy_async_wait<0>();
}

}  // namespace megakernel
