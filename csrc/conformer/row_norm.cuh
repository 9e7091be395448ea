// Sums over a thread block, and layer normalisation of a row that its threads hold.
#pragma once

#include "../numbers.cuh"
#include "params.cuh"

namespace megakernel::conformer {

constexpr int kBlockWarps = kBlockThreads / 32;
constexpr float kNormEps = 1e-5f;

// The warps' sums; two of them, so that a second sum needs no barrier before it.
struct RowSums {
  float warps[2][kBlockWarps];
};

// Sum over the thread block in a fixed order, in every thread.
DEVICE float block_sum(float value, float (&warps)[kBlockWarps]) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  if (lane_idx() == 0) warps[warp_idx()] = value;
  sync_all_threads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kBlockWarps; ++w) sum += warps[w];
  return sum;
}

// Mean and 1 / deviation of a row.
struct Moments {
  float mean, inverse_deviation;
};

// The moments of a row [kHidden]. for_each(act) calls act(value) for those that this
// thread holds. All threads take part; a barrier must separate two calls.
template <class ForEach>
DEVICE Moments row_moments(RowSums& sums, ForEach for_each) {
  float sum = 0;
  for_each([&](float value) { sum += value; });
  const float mean = block_sum(sum, sums.warps[0]) / kHidden;
  float squares = 0;
  for_each([&](float value) { squares += (value - mean) * (value - mean); });
  return {mean, rsqrtf(block_sum(squares, sums.warps[1]) / kHidden + kNormEps)};
}

// A normalised number, before it is rounded.
DEVICE float normalise(float value, const Moments& m, float weight, float bias) {
  return (value - m.mean) * m.inverse_deviation * weight + bias;
}

}  // namespace megakernel::conformer
