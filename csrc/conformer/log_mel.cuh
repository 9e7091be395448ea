// Log-mel features of the samples of a chunk.
//
//   y_n = x_n - preemphasis * x_(n - 1);  Y = FFT(window * y);  mel_m = log(filter_m . |Y|^2 +
//   floor)
//
// One thread block per mel frame, in float32.
#pragma once

#include "row_norm.cuh"

namespace megakernel::conformer {

// --- static asserts ---

constexpr int kFftBins = kFftSize / 2 + 1;
static_assert(kFftSize == 2 * kBlockThreads, "a thread has one butterfly of each stage");
static_assert(kWindowSize <= kFftSize, "the window is within the transform");

// --- shared memory ---

// The transform before and after a stage, and the power of its bins.
struct LogMelSharedMemory {
  float2 transform[2][kFftSize];
  float power[kFftBins];
};

// --- warp roles ---

// All warps do the same: a thread has a butterfly of every stage, then a bin of the power. A warp
// has every 8th filter; a lane has every 32nd of its bins.

// --- body ---

// The windowed samples; those behind the window are zero.
DEVICE void load_window(const LogMelParams& p, int stream, int frame, float2* windowed) {
  const float* const samples =
      p.samples + static_cast<int64_t>(stream) * p.num_samples + frame * kHopSize;
  const int64_t num_left = p.counts[stream] - frame * kHopSize;
  for (int i = thread_idx(); i < kFftSize; i += kBlockThreads) {
    float y = 0;
    if (i < kWindowSize && i + 1 < num_left) {
      y = p.window[i] * (samples[i + 1] - p.preemphasis * samples[i]);
    }
    windowed[i] = {y, 0.0f};
  }
}

// Transforms by stages of radix 2, each of which sorts its results (Stockham); returns the bins.
DEVICE const float2* transform(const LogMelParams& p, LogMelSharedMemory& shared) {
  const int t = thread_idx();
  int source = 0;
  for (int stride = 1; stride < kFftSize; stride *= 2, source ^= 1) {
    sync_all_threads();
    const int position = t & -stride;  // times 2 pi / kFftSize: the angle
    const float2 a = shared.transform[source][t];
    const float2 b = shared.transform[source][t + kFftSize / 2];
    const float2 difference = {a.x - b.x, a.y - b.y}, w = p.twiddles[position];
    float2* const sums = shared.transform[source ^ 1] + t + position;
    sums[0] = {a.x + b.x, a.y + b.y};
    sums[stride] = {difference.x * w.x - difference.y * w.y,
                    difference.x * w.y + difference.y * w.x};
  }
  sync_all_threads();
  return shared.transform[source];
}

// The kernel. Reads samples [streams, num_samples]; writes output [streams, num_mels, num_bins].
template <class Number>
DEVICE void log_mel(const LogMelParams& p, LogMelSharedMemory& shared) {
  trigger_dependent_grids();
  wait_for_prerequisite_grids();
  load_window(p, block_idx() / p.num_mels, block_idx() % p.num_mels, shared.transform[0]);
  const float2* const bins = transform(p, shared);
  for (int k = thread_idx(); k < kFftBins; k += kBlockThreads) {
    shared.power[k] = bins[k].x * bins[k].x + bins[k].y * bins[k].y;
  }
  sync_all_threads();
  Number* const output =
      static_cast<Number*>(p.output) + static_cast<int64_t>(block_idx()) * p.num_bins;
  for (int m = warp_idx(); m < p.num_bins; m += kBlockWarps) {
    float sum = 0;
    for (int k = p.ranges[2 * m] + lane_idx(); k < p.ranges[2 * m + 1]; k += 32) {
      sum += p.filters[m * kFftBins + k] * shared.power[k];
    }
    sum = warp_sum(sum);
    if (lane_idx() == 0) output[m] = to_number<Number>(logf(sum + p.log_floor));
  }
}

}  // namespace megakernel::conformer
