// The last convolution, to one channel, and the samples.
//
//   sample[r] = bias + sum over taps and channels of weights[tap, c] * input[r - back, c]
//
// One channel would use an eighth of a matrix instruction, and a row would be read once for each
// tap. Here a row is read once, into registers. Products and sums are float32.
#pragma once

#include "activations.cuh"

namespace megakernel::codec {

// --- static asserts ---

constexpr int kSampleThreads = 128;
constexpr int kSampleLanes = 16;  // that share a row
constexpr int kSampleBlockRows = kSampleThreads / kSampleLanes * kSampleRows;
constexpr int kSampleHalo = kSampleTaps - 1;
static_assert(kSampleRows == kSampleLanes, "each lane receives the sum of one row");

// --- shared memory ---

struct alignas(16) SamplesSharedMemory {
  short samples[kSampleBlockRows];
};

// --- warp roles ---

// All warps do the same. Lane l of sixteen has channels 8 l to 8 l + 7 of every 128. The lanes have
// kSampleRows adjacent rows of a frame, and read each row that these need once.

// --- body ---

// The weights of a lane's channels, [taps, 8].
struct SampleWeights {
  float values[kSampleTaps][8];

  // Those of weights [taps, channels] from channel `channel` on.
  DEVICE SampleWeights(const float* weights, int channel, int num_channels) {
#pragma unroll
    for (int tap = 0; tap < kSampleTaps; ++tap) {
      const float4* from = reinterpret_cast<const float4*>(weights + tap * num_channels + channel);
      const float4 a = from[0], b = from[1];
      const float eight[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int c = 0; c < 8; ++c) values[tap][c] = eight[c];
    }
  }
};

// Adds up the sums of sixteen rows over sixteen lanes. Lane l receives the total of row l.
DEVICE float sum_rows_over_lanes(float (&sums)[kSampleRows]) {
#pragma unroll
  for (int half = kSampleRows / 2; half > 0; half /= 2) {
    const bool is_upper = lane_idx() & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = shuffle_xor(is_upper ? sums[i] : sums[i + half], half);
      sums[i] = (is_upper ? sums[i + half] : sums[i]) + other;
    }
  }
  return sums[0];
}

// The kernel of the samples. Reads input [rows, 1, channels] and its history; writes pcm [rows]. A
// sample that is not finite is written as 0, and sets non_finite [frames].
DEVICE void compute_samples(const SamplesParams& p, SamplesSharedMemory& shared) {
  trigger_dependent_grids();
  const int num_channels = p.input.num_channels;
  const int block_row = block_idx() * kSampleBlockRows, lane = lane_idx() % kSampleLanes;
  const int group_row = thread_idx() / kSampleLanes * kSampleRows;  // in the block
  const int first_row = min(block_row + group_row, p.num_rows - kSampleRows);
  const RowAddress input = row_address(p.input, p.frames, first_row);
  const f16* before = input.rows_since_start > 0 ? input.current : input.history;
  float sums[kSampleRows] = {};
  // Weights do not depend on the previous kernel.
  SampleWeights weights(p.weights, min(8 * lane, num_channels - 8), num_channels);
  wait_for_prerequisite_grids();
#pragma unroll 1
  for (int channel = 8 * lane; channel < num_channels; channel += 8 * kSampleLanes) {
    if (channel >= 8 * kSampleLanes) weights = SampleWeights(p.weights, channel, num_channels);
#pragma unroll
    for (int i = 0; i < kSampleRows + kSampleHalo; ++i) {
      const int row = i - kSampleHalo;  // from the first one
      const f16* from = (row < 0 ? before : input.current) + row * num_channels + channel;
      const uint4 rounded = *reinterpret_cast<const uint4*>(from);
      const uint32_t pairs[4] = {rounded.x, rounded.y, rounded.z, rounded.w};
      float values[8];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 pair = unpack_f16(pairs[c]);
        values[2 * c] = pair.x, values[2 * c + 1] = pair.y;
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
#pragma unroll
        for (int tap = 0; tap < kSampleTaps; ++tap) {
          if (i < tap || i - tap >= kSampleRows) continue;
          sums[i - tap] = fmaf(weights.values[tap][c], values[c], sums[i - tap]);
        }
      }
    }
  }
  float v = p.bias + sum_rows_over_lanes(sums);
  if (!isfinite(v)) {
    p.non_finite[(first_row + lane) / p.input.rows_per_frame] = 1;
    v = 0;
  }
  shared.samples[group_row + lane] = static_cast<short>(rintf(32767.0f * min(max(v, -1.0f), 1.0f)));
  sync_all_threads();
  // The host's memory is written sixteen bytes at a time.
  constexpr int kSamplesPerStore = sizeof(uint4) / sizeof(short);
  const int row = kSamplesPerStore * thread_idx();
  if (row < kSampleBlockRows && block_row + row < p.num_rows) {
    *reinterpret_cast<uint4*>(p.pcm + block_row + row) =
        *reinterpret_cast<const uint4*>(&shared.samples[row]);
  }
}

}  // namespace megakernel::codec
