// After all have read: the last rows of every layer's input that count become its stream's history.
#pragma once

#include "projection.cuh"

namespace megakernel::codec {

constexpr int kTogether = 6;  // rows that are moved at once; few histories are not a multiple

// A block a frame and layer; those of a stream's first frame work. A thread has columns of its own,
// so that rows may move within the history, oldest first.
DEVICE void remember(const Remember& p) {
  const int first = block() % p.count;
  if (p.frames[first].first != first) return;
  const Rows& rows = p.rows[block() / p.count];
  const int width = rows.planes * rows.channels / 8, made = p.kept[first] * rows.rate;
  if (made == 0) return;
  const uint4* now =
      reinterpret_cast<const uint4*>(rows.now) + static_cast<long long>(first) * rows.rate * width;
  uint4* past = reinterpret_cast<uint4*>(rows.past + p.frames[first].slot * rows.stride);
  for (int c = thread(); c < width; c += kBlockThreads) {
#pragma unroll 1
    for (int row = 0; row < rows.depth; row += kTogether) {
      uint4 moved[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int from = min(row + i, rows.depth - 1) + made - rows.depth;
        moved[i] = from >= 0 ? now[static_cast<long long>(from) * width + c]
                             : past[(from + rows.depth) * width + c];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (row + i < rows.depth) past[(row + i) * width + c] = moved[i];
      }
    }
  }
}

}  // namespace megakernel::codec
