// The functions of warpgroup.cuh on a host. Products run as late as the kernel allows: when a wait
// requires them. Weights that were overwritten before, or sums that are read before, are wrong.
#pragma once

#include <deque>

#include "emulator.h"

#define MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

namespace megakernel {

struct MatrixDescriptor {
  const char* at;
  int k_stride, column_stride;

  MatrixDescriptor(const void* shared, int k_stride, int column_stride)
      : at(static_cast<const char*>(shared)), k_stride(k_stride), column_stride(column_stride) {}
  MatrixDescriptor operator+(int bytes) const { return {at + bytes, k_stride, column_stride}; }
};

// A lane's part of an instruction that was issued.
struct PendingProduct {
  float* sums;
  int num_columns;
  uint4 a;
  MatrixDescriptor b;
  bool adds;
};
using ProductGroup = std::vector<PendingProduct>;

// Of a lane: groups that were committed, and the group that is being issued.
struct ProductQueue {
  std::deque<ProductGroup> groups;
  ProductGroup issued;
};
inline ProductQueue& product_queue(int fiber) {
  static std::deque<ProductQueue> queues;
  while (queues.size() <= static_cast<size_t>(fiber)) queues.emplace_back();
  return queues[fiber];
}

inline void warpgroup_fence() {}
inline void warpgroup_commit() {
  ProductQueue& queue = product_queue(machine().fiber_idx);
  queue.groups.push_back(std::move(queue.issued));
  queue.issued.clear();
}

// Multiplies 16 rows of a warp: for every eight columns the products and sums of mma_m16n8k16_f16.
inline void multiply_warp_rows(const PendingProduct* const (&lanes)[32]) {
  const MatrixDescriptor& b = lanes[0]->b;
  MmaOperands warp;
  for (int lane = 0; lane < 32; ++lane) set_a(warp, lane, lanes[lane]->a);
  for (int column = 0; column < lanes[0]->num_columns; column += 8) {
    for (int lane = 0; lane < 32; ++lane) {
      const char* from = b.at + column / 8 * b.column_stride + lane / 4 * 16 + lane % 4 * 4;
      uint2 pairs;
      memcpy(&pairs.x, from, 4), memcpy(&pairs.y, from + b.k_stride, 4);
      set_b(warp, lane, pairs);
      const float zeros[4] = {};
      set_sums(warp, lane, lanes[lane]->adds ? &lanes[lane]->sums[column / 2] : zeros);
    }
    multiply_warp<F16Numbers>(warp);
    for (int lane = 0; lane < 32; ++lane) get_sums(warp, lane, &lanes[lane]->sums[column / 2]);
  }
}

template <int kPending>
inline void warpgroup_wait() {
  const int first = machine().fiber_idx / 32 * 32;
  wait_at(own_warp_barrier(), 32, [&] {
    while (product_queue(first).groups.size() > kPending) {
      const size_t num_products = product_queue(first).groups.front().size();
      for (size_t i = 0; i < num_products; ++i) {
        const PendingProduct* lanes[32];
        for (int lane = 0; lane < 32; ++lane) {
          lanes[lane] = &product_queue(first + lane).groups.front().at(i);
        }
        multiply_warp_rows(lanes);
      }
      for (int lane = 0; lane < 32; ++lane) product_queue(first + lane).groups.pop_front();
    }
  });
}
inline void prefetch_l2_bulk(const void*, int) {}
template <int kSize>
inline void pin_sums(float (&)[kSize]) {}

template <int kSize>
inline void warpgroup_mma_f16(float (&sums)[kSize], uint4 a, MatrixDescriptor b, bool adds) {
  product_queue(machine().fiber_idx).issued.push_back({sums, 2 * kSize, a, b, adds});
}

}  // namespace megakernel
