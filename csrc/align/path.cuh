// Durations to a path of zeros and ones: a block writes a few rows of an item.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

constexpr int kPathWarps = 8, kPathRows = 16;  // of a block

struct PathShared {
  int sums[kPathWarps], ends[kPathRows];
};

// The same in all lanes.
DEVICE int warp_sum(int value) { return static_cast<int>(warp_add(static_cast<unsigned>(value))); }

// A row, ones from `start` to `end`, by the lanes of a warp; 16 bytes at a time where they begin on
// 16 bytes.
template <class W>
DEVICE void write_row(W* row, int columns, int start, int end, W one) {
  constexpr int kMany = 16 / sizeof(W);
  union Piece {
    uint4 all;
    W each[kMany];
  };
  const auto element = [&](int j) { return start <= j && j < end ? one : W(0); };
  const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(W) % kMany);
  const int head = min((kMany - odd) % kMany, columns);
  const int pieces = (columns - head) / kMany, tail = head + pieces * kMany;
  if (lane_idx() < head) row[lane_idx()] = element(lane_idx());
  for (int i = lane_idx(); i < pieces; i += 32) {
    const int j = head + i * kMany;
    Piece piece{};
    if (j < end && start < j + kMany) {
#pragma unroll
      for (int c = 0; c < kMany; ++c) piece.each[c] = element(j + c);
    }
    store_streaming(reinterpret_cast<uint4*>(row + j), piece.all);
  }
  if (tail + lane_idx() < columns) row[tail + lane_idx()] = element(tail + lane_idx());
}

// Unsigned integers W stand for the elements.
template <class W>
DEVICE void path(const Path& p, PathShared& shared) {
  wait_for_prerequisite_grids();
  const int blocks_an_item = (p.rows + kPathRows - 1) / kPathRows;
  const int item = block_idx() / blocks_an_item, first = block_idx() % blocks_an_item * kPathRows;
  const int* durations = p.durations + static_cast<int64_t>(item) * p.rows;
  int sum = 0;
  for (int i = thread_idx(); i < first; i += 32 * kPathWarps) sum += durations[i];
  sum = warp_sum(sum);
  if (lane_idx() == 0) shared.sums[warp_idx()] = sum;
  sync_all_threads();
  if (thread_idx() < kPathRows) {
    int end = 0;
    for (int w = 0; w < kPathWarps; ++w) end += shared.sums[w];
    for (int i = first; i <= min(first + thread_idx(), p.rows - 1); ++i) end += durations[i];
    shared.ends[thread_idx()] = end;
  }
  sync_all_threads();
  W* rows = static_cast<W*>(p.path) + (static_cast<int64_t>(item) * p.rows + first) * p.columns;
  for (int i = warp_idx(); i < kPathRows && first + i < p.rows; i += kPathWarps) {
    const int end = shared.ends[i];
    write_row(rows + static_cast<int64_t>(i) * p.columns, p.columns, end - durations[first + i],
              end, static_cast<W>(p.one));
  }
}

}  // namespace megakernel::align
