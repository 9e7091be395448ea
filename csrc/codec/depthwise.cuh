// Depthwise convolution and layer norm: a block a row.
#pragma once

#include "projection.cuh"

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
  float2 weight[kMostPairs][kTaps], v[kMostPairs] = {}, scale[kMostPairs], shift[kMostPairs];
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int c = 2 * (thread() + i * kBlockThreads);
    if (c >= channels) break;
    v[i] = *reinterpret_cast<const float2*>(p.bias + c);
    scale[i] = *reinterpret_cast<const float2*>(p.norm + c);
    shift[i] = *reinterpret_cast<const float2*>(p.norm + channels + c);
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      weight[i][tap] = *reinterpret_cast<const float2*>(p.weights + tap * channels + c);
    }
  }
  wait_for_previous();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int c = 2 * (thread() + i * kBlockThreads);
    if (c >= channels) break;
    uint32_t x[kTaps], rest[kTaps];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const int back = kTaps - 1 - tap;
      const f16* at = (from.since >= back ? from.now : from.past) - back * width + c;
      x[tap] = *reinterpret_cast<const uint32_t*>(at);
      rest[tap] = *reinterpret_cast<const uint32_t*>(at + channels);
    }
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const float2 one = unpack_f16(x[tap]), two = unpack_f16(rest[tap]);
      v[i].x += weight[i][tap].x * (one.x + two.x);
      v[i].y += weight[i][tap].y * (one.y + two.y);
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
    put(p.out, row, c, v[i].x * factor * scale[i].x + shift[i].x,
        v[i].y * factor * scale[i].y + shift[i].y);
  }
}

}  // namespace megakernel::codec
