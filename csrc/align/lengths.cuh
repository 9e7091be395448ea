// Converts a mask to lengths.
//
//   lengths[0, item] = number of nonzero elements of mask[item, :, 0]   (tokens)
//   lengths[1, item] = number of nonzero elements of mask[item, 0, :]   (frames)
//
// Blocks 0 to num_items - 1 count tokens, the others count frames.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

// --- static asserts ---

constexpr int kMaskWarps = 4;  // of a block
static_assert(kMaskWarps <= 32, "a block has at most 1024 threads");
static_assert(sizeof(MaskParams::nonzero_bits) == 8, "the bits must cover the largest element");

// --- shared memory ---

// The warps' counts, [warps].

// --- warp roles ---

// All warps do the same. A thread counts every (32 kMaskWarps)-th element; thread 0 adds the warps'
// counts.

// --- body ---

// Whether element `at` of the mask is not zero.
DEVICE bool is_nonzero(const MaskParams& p, int64_t at) {
  switch (p.element_bytes) {
    case 1:
      return static_cast<const uint8_t*>(p.mask)[at] & p.nonzero_bits;
    case 2:
      return static_cast<const uint16_t*>(p.mask)[at] & p.nonzero_bits;
    case 4:
      return static_cast<const uint32_t*>(p.mask)[at] & p.nonzero_bits;
    default:
      return static_cast<const uint64_t*>(p.mask)[at] & p.nonzero_bits;
  }
}

// The kernel that counts lengths. Reads mask [items, rows, columns]; writes lengths [2, items].
DEVICE void count_lengths(const MaskParams& p, unsigned (&warp_counts)[kMaskWarps]) {
  const bool counts_tokens = block_idx() < p.num_items;
  const int64_t first = (counts_tokens ? block_idx() : block_idx() - p.num_items) * p.item_stride;
  const int64_t stride = counts_tokens ? p.row_stride : p.column_stride;
  const int num_elements = counts_tokens ? p.num_rows : p.num_columns;
  unsigned count = 0;
  for (int i = thread_idx(); i < num_elements; i += 32 * kMaskWarps) {
    count += is_nonzero(p, first + i * stride);
  }
  count = warp_add(count);
  if (lane_idx() == 0) warp_counts[warp_idx()] = count;
  sync_all_threads();
  if (thread_idx() > 0) return;
  for (int w = 1; w < kMaskWarps; ++w) count += warp_counts[w];
  p.lengths[block_idx()] = static_cast<int>(count);
}

}  // namespace megakernel::align
