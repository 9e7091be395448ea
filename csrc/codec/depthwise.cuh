// Depthwise causal convolution followed by layer norm.
//
//   v[c]      = bias[c] + sum over taps of weights[tap, c] * input[row - back, c]
//   output[c] = (v[c] - mean(v)) / sqrt(var(v) + eps) * norm[0, c] + norm[1, c]
//
// One block per row.
#pragma once

#include "activations.cuh"

namespace megakernel::codec {

// --- static asserts ---

static_assert(kBlockThreads % 32 == 0, "a block sum adds whole warps");

// --- shared memory ---

// The warps' sums of v and of its squares, [2, warps].
struct DepthwiseSharedMemory {
  float sums[2][kBlockThreads / 32];
};

// --- warp roles ---

// All warps do the same. A thread has up to kMaxChannelPairs pairs of adjacent channels.

// --- body ---

// Sum over the block in a fixed order, in every thread. Uses warp_sums [warps].
DEVICE float block_sum(float value, float* warp_sums) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  if (lane_idx() == 0) warp_sums[warp_idx()] = value;
  sync_all_threads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kBlockThreads / 32; ++w) sum += warp_sums[w];
  return sum;
}

// The depthwise kernel. Reads input [rows, 2, channels] and its history, weights [taps, channels],
// bias [channels], norm [2, channels]; writes output [rows, planes, channels].
DEVICE void depthwise(const DepthwiseParams& p, DepthwiseSharedMemory& shared) {
  trigger_dependent_grids();
  const int row = block_idx(), num_channels = p.input.num_channels, width = 2 * num_channels;
  const RowAddress input = row_address(p.input, p.frames, row);
  float2 weight[kMaxChannelPairs][kDepthwiseTaps], v[kMaxChannelPairs] = {};
  float2 scale[kMaxChannelPairs], shift[kMaxChannelPairs];
#pragma unroll
  for (int i = 0; i < kMaxChannelPairs; ++i) {
    const int c = 2 * (thread_idx() + i * kBlockThreads);
    if (c >= num_channels) break;
    v[i] = *reinterpret_cast<const float2*>(p.bias + c);
    scale[i] = *reinterpret_cast<const float2*>(p.norm + c);
    shift[i] = *reinterpret_cast<const float2*>(p.norm + num_channels + c);
#pragma unroll
    for (int tap = 0; tap < kDepthwiseTaps; ++tap) {
      weight[i][tap] = *reinterpret_cast<const float2*>(p.weights + tap * num_channels + c);
    }
  }
  wait_for_prerequisite_grids();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxChannelPairs; ++i) {
    const int c = 2 * (thread_idx() + i * kBlockThreads);
    if (c >= num_channels) break;
    uint32_t rounded[kDepthwiseTaps], error[kDepthwiseTaps];
#pragma unroll
    for (int tap = 0; tap < kDepthwiseTaps; ++tap) {
      const int back = kDepthwiseTaps - 1 - tap;
      const f16* at =
          (input.rows_since_start >= back ? input.current : input.history) - back * width + c;
      rounded[tap] = *reinterpret_cast<const uint32_t*>(at);
      error[tap] = *reinterpret_cast<const uint32_t*>(at + num_channels);
    }
#pragma unroll
    for (int tap = 0; tap < kDepthwiseTaps; ++tap) {
      const float2 plane0 = unpack_f16(rounded[tap]), plane1 = unpack_f16(error[tap]);
      v[i].x += weight[i][tap].x * (plane0.x + plane1.x);
      v[i].y += weight[i][tap].y * (plane0.y + plane1.y);
    }
    sum += v[i].x + v[i].y;
  }
  const float mean = block_sum(sum, shared.sums[0]) / num_channels;
  float square_sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxChannelPairs; ++i) {
    if (2 * (thread_idx() + i * kBlockThreads) >= num_channels) break;
    v[i].x -= mean;
    v[i].y -= mean;
    square_sum += v[i].x * v[i].x + v[i].y * v[i].y;
  }
  const float factor = rsqrtf(block_sum(square_sum, shared.sums[1]) / num_channels + p.eps);
#pragma unroll
  for (int i = 0; i < kMaxChannelPairs; ++i) {
    const int c = 2 * (thread_idx() + i * kBlockThreads);
    if (c >= num_channels) break;
    store_maybe_tiled_activations(p.output, row, c, v[i].x * factor * scale[i].x + shift[i].x,
                                  v[i].y * factor * scale[i].y + shift[i].y);
  }
}

}  // namespace megakernel::codec
