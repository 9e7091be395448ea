// Depthwise convolution and layer norm: a block a row.
#pragma once

#include "product.cuh"

namespace megakernel::codec {

struct DepthwiseShared {
  float sums[2][kBlockThreads / 32];
};

// Of the whole block, to every thread, in one order.
DEVICE float block_add(float value, float* sums) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  if (lane() == 0) sums[warp()] = value;
  all_sync();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kBlockThreads / 32; ++w) sum += sums[w];
  return sum;
}

DEVICE void depthwise(const Depthwise& p, DepthwiseShared& shared) {
  launch_next();
  const int row = block(), channels = p.in.channels, width = 2 * channels;
  const Place from = place(p.in, p.frames, row);
  wait_for_previous();
  float2 v[kMostPairs] = {};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int c = 2 * (thread() + i * kBlockThreads);
    if (c >= channels) break;
    v[i] = *reinterpret_cast<const float2*>(p.bias + c);
#pragma unroll 7
    for (int tap = 0; tap < p.taps; ++tap) {
      const int back = p.taps - 1 - tap;
      const f16* at = (from.since >= back ? from.now : from.past) - back * width + c;
      const float2 x = unpack_f16(*reinterpret_cast<const uint32_t*>(at));
      const float2 rest = unpack_f16(*reinterpret_cast<const uint32_t*>(at + channels));
      const float2 w = *reinterpret_cast<const float2*>(p.weights + tap * channels + c);
      v[i].x += w.x * (x.x + rest.x);
      v[i].y += w.y * (x.y + rest.y);
    }
    sum += v[i].x + v[i].y;
  }
  const float mean = block_add(sum, shared.sums[0]) / channels;
  float square = 0;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    if (2 * (thread() + i * kBlockThreads) >= channels) break;
    v[i].x -= mean;
    v[i].y -= mean;
    square += v[i].x * v[i].x + v[i].y * v[i].y;
  }
  const float factor = rsqrtf(block_add(square, shared.sums[1]) / channels + p.eps);
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int c = 2 * (thread() + i * kBlockThreads);
    if (c >= channels) break;
    const float2 scale = *reinterpret_cast<const float2*>(p.norm + c);
    const float2 shift = *reinterpret_cast<const float2*>(p.norm + channels + c);
    put(p.out, row, c, v[i].x * factor * scale.x + shift.x, v[i].y * factor * scale.y + shift.y);
  }
}

}  // namespace megakernel::codec
