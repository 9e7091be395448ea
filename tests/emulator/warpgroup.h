// The functions of warpgroup.cuh on a host. Products run as late as the kernel allows: when a wait
// requires them. Operands that were overwritten before, or sums that are read before, are wrong.
#pragma once

#include <deque>

#include "emulator.h"

#define MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

namespace megakernel {

struct MatrixDescriptor {
  const char* at = nullptr;
  int k_stride = 0, stride = 0;

  MatrixDescriptor() = default;
  MatrixDescriptor(const void* shared, int k_stride, int stride)
      : at(static_cast<const char*>(shared)), k_stride(k_stride), stride(stride) {}
  MatrixDescriptor operator+(int bytes) const { return {at + bytes, k_stride, stride}; }

  // The numbers 2 t, 2 t + 1, and 2 t + 8, 2 t + 9 of K of a row or column.
  uint2 pairs(int row, int t) const {
    const char* from = at + row / 8 * stride + row % 8 * 16 + t * 4;
    uint2 pairs;
    memcpy(&pairs.x, from, 4), memcpy(&pairs.y, from + k_stride, 4);
    return pairs;
  }
};

// A lane's part of an instruction that was issued.
struct PendingProduct {
  float* sums;
  int num_columns;
  uint4 a;  // if `shared_a` is empty
  MatrixDescriptor shared_a, b;
  bool adds;

  // The lane's operand: rows g and g + 8 of the 16 of `warp`.
  uint4 operand_a(int warp, int lane) const {
    if (shared_a.at == nullptr) return a;
    const int row = 16 * warp + lane / 4;
    const uint2 low = shared_a.pairs(row, lane % 4), high = shared_a.pairs(row + 8, lane % 4);
    return {low.x, high.x, low.y, high.y};
  }
};
using ProductGroup = std::vector<PendingProduct>;

// Of a lane: groups that were committed, and the group that is being issued.
struct ProductQueue {
  std::deque<ProductGroup> groups;
  ProductGroup issued;
  unsigned num_commits = 0;
};
inline ProductQueue& product_queue(int fiber) {
  static std::deque<ProductQueue> queues;
  while (queues.size() <= static_cast<size_t>(fiber)) queues.emplace_back();
  return queues[fiber];
}

// Multiplies 16 rows of a warp: for every eight columns the products and sums of mma_m16n8k16_f16.
inline void multiply_warp_rows(const PendingProduct* const (&lanes)[32], int warp_idx) {
  const MatrixDescriptor& b = lanes[0]->b;
  MmaOperands warp;
  for (int lane = 0; lane < 32; ++lane) set_a(warp, lane, lanes[lane]->operand_a(warp_idx, lane));
  for (int column = 0; column < lanes[0]->num_columns; column += 8) {
    for (int lane = 0; lane < 32; ++lane) {
      set_b(warp, lane, b.pairs(column + lane / 4, lane % 4));
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
        multiply_warp_rows(lanes, machine().thread / 32 % 4);
      }
      for (int lane = 0; lane < 32; ++lane) product_queue(first + lane).groups.pop_front();
    }
  });
}
inline void warpgroup_fence() {}
// One group of 29 is multiplied at once, so that operands which are not copied yet give wrong sums.
// Other warps continue before the other products, so that operands which they overwrite too early
// do.
inline void warpgroup_commit() {
  ProductQueue& queue = product_queue(machine().fiber_idx);
  queue.groups.push_back(std::move(queue.issued));
  queue.issued.clear();
  if (++queue.num_commits % 29 == 0) return warpgroup_wait<0>();
  yield_poll();
}
inline void fence_async_proxy() {}
inline void prefetch_l2_bulk(const void*, int) {}
template <int kSize>
inline void pin_sums(float (&)[kSize]) {}

template <int kSize>
inline void warpgroup_mma_f16(float (&sums)[kSize], uint4 a, MatrixDescriptor b, bool adds) {
  product_queue(machine().fiber_idx).issued.push_back({sums, 2 * kSize, a, {}, b, adds});
}
template <int kSize>
inline void warpgroup_mma_f16(float (&sums)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                              bool adds) {
  product_queue(machine().fiber_idx).issued.push_back({sums, 2 * kSize, {}, a, b, adds});
}

}  // namespace megakernel
