// Codes to vectors: the sum of a frame's codebook rows, and the angles that its position turns by.
#pragma once

#include "projection.cuh"

namespace megakernel::codec {

// A block a frame.
DEVICE void embed(const Embed& p, Frame& shared) {
  const int row = block(), width = p.out.channels;
  if (thread() < kFrameInts) {
    const int value = reinterpret_cast<const int*>(p.asked + row)[thread()];
    reinterpret_cast<int*>(p.frames + row)[thread()] = value;
    reinterpret_cast<int*>(&shared)[thread()] = value;
  }
  all_sync();
  if (thread() < kCodes) {
    const int* codes = shared.coming == nullptr ? shared.codes : shared.coming;
    shared.codes[thread()] = min(max(codes[thread()], 0), p.codes - 1);
  }
  all_sync();
  for (int c = 2 * thread(); c < width; c += 2 * kBlockThreads) {
    float low = 0, high = 0;
#pragma unroll
    for (int g = 0; g < kCodes; ++g) {
      const long long entry = static_cast<long long>(g) * p.codes + shared.codes[g];
      const float2 part = *reinterpret_cast<const float2*>(p.tables + entry * width + c);
      low += part.x;
      high += part.y;
    }
    put(p.out, row, c, low, high);
  }
  for (int i = thread(); i < p.half; i += kBlockThreads) {
    const float angle = static_cast<float>(shared.position) * p.inverse[i];
    p.turns[row * p.half + i] = {cosf(angle), sinf(angle)};
  }
}

}  // namespace megakernel::codec
