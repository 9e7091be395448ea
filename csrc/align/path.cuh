// Expands durations to a path of zeros and ones.
//
//   path[item, i, j] = 1 if end[i] - duration[i] <= j < end[i],  end = inclusive sum of the
//   durations
//
// One block per kPathRows rows of an item.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

// --- static asserts ---

constexpr int kPathWarps = 8, kPathRows = 16;  // of a block
static_assert(kPathRows <= 32 * kPathWarps, "a thread computes the end of at most one row");

// --- shared memory ---

// The warps' sums of the durations before the block's rows, and the ends of the block's rows.
struct PathSharedMemory {
  int warp_sums[kPathWarps], row_ends[kPathRows];
};

// --- warp roles ---

// All warps add up the durations before the block's rows. Thread i computes the end of row i. Then
// warp w writes rows w, w + kPathWarps, ..

// --- body ---

// The sum over the lanes of a warp, in every lane.
DEVICE int warp_sum(int value) { return static_cast<int>(warp_add(static_cast<unsigned>(value))); }

// A warp writes a row [columns] that is 1 from `begin` to `end` - 1, with stores of 16 bytes where
// they are aligned.
template <class Element>
DEVICE void write_row(Element* row, int num_columns, int begin, int end, Element one) {
  constexpr int kVectorSize = 16 / sizeof(Element);
  union Vector {
    uint4 bits;
    Element elements[kVectorSize];
  };
  const auto element = [&](int j) { return begin <= j && j < end ? one : Element(0); };
  const int misalignment =
      static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(Element) % kVectorSize);
  const int head = min((kVectorSize - misalignment) % kVectorSize, num_columns);
  const int num_vectors = (num_columns - head) / kVectorSize;
  const int tail = head + num_vectors * kVectorSize;
  if (lane_idx() < head) row[lane_idx()] = element(lane_idx());
  for (int i = lane_idx(); i < num_vectors; i += 32) {
    const int j = head + i * kVectorSize;
    Vector vector{};
    if (j < end && begin < j + kVectorSize) {
#pragma unroll
      for (int c = 0; c < kVectorSize; ++c) vector.elements[c] = element(j + c);
    }
    store_streaming(reinterpret_cast<uint4*>(row + j), vector.bits);
  }
  if (tail + lane_idx() < num_columns) row[tail + lane_idx()] = element(tail + lane_idx());
}

// The path kernel. Reads durations [items, rows]; writes path [items, rows, columns]. Elements are
// unsigned integers of the size of the path's elements.
template <class Element>
DEVICE void write_path(const PathParams& p, PathSharedMemory& shared) {
  wait_for_prerequisite_grids();
  const int blocks_per_item = (p.num_rows + kPathRows - 1) / kPathRows;
  const int item = block_idx() / blocks_per_item;
  const int first = block_idx() % blocks_per_item * kPathRows;
  const int* durations = p.durations + static_cast<int64_t>(item) * p.num_rows;
  int sum = 0;
  for (int i = thread_idx(); i < first; i += 32 * kPathWarps) sum += durations[i];
  sum = warp_sum(sum);
  if (lane_idx() == 0) shared.warp_sums[warp_idx()] = sum;
  sync_all_threads();
  if (thread_idx() < kPathRows) {
    int end = 0;
    for (int w = 0; w < kPathWarps; ++w) end += shared.warp_sums[w];
    for (int i = first; i <= min(first + thread_idx(), p.num_rows - 1); ++i) end += durations[i];
    shared.row_ends[thread_idx()] = end;
  }
  sync_all_threads();
  Element* rows = static_cast<Element*>(p.path) +
                  (static_cast<int64_t>(item) * p.num_rows + first) * p.num_columns;
  for (int i = warp_idx(); i < kPathRows && first + i < p.num_rows; i += kPathWarps) {
    const int end = shared.row_ends[i];
    write_row(rows + static_cast<int64_t>(i) * p.num_columns, p.num_columns,
              end - durations[first + i], end, static_cast<Element>(p.one_bits));
  }
}

}  // namespace megakernel::align
