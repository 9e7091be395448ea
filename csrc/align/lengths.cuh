// A mask to lengths: a block counts an item's tokens or its frames.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

constexpr int kMaskWarps = 4;  // of a block

DEVICE bool is_nonzero(const Mask& p, int64_t at) {
  switch (p.bytes) {
    case 1:
      return static_cast<const uint8_t*>(p.mask)[at] & p.digits;
    case 2:
      return static_cast<const uint16_t*>(p.mask)[at] & p.digits;
    case 4:
      return static_cast<const uint32_t*>(p.mask)[at] & p.digits;
    default:
      return static_cast<const uint64_t*>(p.mask)[at] & p.digits;
  }
}

// The first column of every item, then the first row of every item.
DEVICE void measure(const Mask& p, unsigned (&counts)[kMaskWarps]) {
  const bool rows = block_idx() < p.items;
  const int64_t first = (rows ? block_idx() : block_idx() - p.items) * p.item_stride;
  const int64_t stride = rows ? p.row_stride : p.column_stride;
  const int many = rows ? p.rows : p.columns;
  unsigned count = 0;
  for (int i = thread_idx(); i < many; i += 32 * kMaskWarps) {
    count += is_nonzero(p, first + i * stride);
  }
  count = warp_add(count);
  if (lane_idx() == 0) counts[warp_idx()] = count;
  sync_all_threads();
  if (thread_idx() > 0) return;
  for (int w = 1; w < kMaskWarps; ++w) count += counts[w];
  p.lengths[block_idx()] = static_cast<int>(count);
}

}  // namespace megakernel::align
