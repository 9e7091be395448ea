// Rows of the encoder, their sums and layer normalisations, for the threads that hold them.
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

// Sum over the lanes, in every lane.
DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// Sum over the thread block in a fixed order, in every thread.
DEVICE float block_sum(float value, float (&warps)[kBlockWarps]) {
  value = warp_sum(value);
  if (lane_idx() == 0) warps[warp_idx()] = value;
  sync_all_threads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kBlockWarps; ++w) sum += warps[w];
  return sum;
}

// The sums of a row over the threads that hold it: a thread block, or a warp. `use` is 0, then 1.
struct BlockSum {
  RowSums& sums;  // of one row; a barrier must separate two rows

  DEVICE float operator()(float value, int use) const { return block_sum(value, sums.warps[use]); }
};
struct WarpSum {
  DEVICE float operator()(float value, int) const { return warp_sum(value); }
};

// Mean and 1 / deviation of a row.
struct Moments {
  float mean, inverse_deviation;
};

// The moments of a row [kHidden]. for_each(act) calls act(value) for those that this thread holds.
// All threads that hold the row take part.
template <class Sum, class ForEach>
DEVICE Moments row_moments(Sum sum, ForEach for_each) {
  float values = 0, squares = 0;
  for_each([&](float value) { values += value; });
  const float mean = sum(values, 0) / kHidden;
  for_each([&](float value) { squares += (value - mean) * (value - mean); });
  return {mean, rsqrtf(sum(squares, 1) / kHidden + kNormEps)};
}

// A normalised number, before it is rounded.
DEVICE float normalise(float value, const Moments& m, float weight, float bias) {
  return (value - m.mean) * m.inverse_deviation * weight + bias;
}

// The numbers of a row [kHidden] that one of its kThreads threads holds: every kThreads-th vector
// of sixteen bytes.
template <class Number, int kThreads>
class RowPart {
 public:
  static constexpr int kSize = kVectorSize<Number>;
  static constexpr int kNumVectors = kHidden / kSize;
  static constexpr int kThreadVectors = (kNumVectors + kThreads - 1) / kThreads;

  // Reads a row for thread `thread` of its threads.
  DEVICE RowPart(const void* row, int thread) : thread_(thread) {
    for_each_vector(
        [&](int i, int vector) { unpack(static_cast<const uint4*>(row)[vector], values_[i]); });
  }
  // Adds scale * y, y [kHidden], rounded as torch rounds.
  DEVICE void add(const void* y, float scale) {
    for_each_vector([&](int i, int vector) {
      float added[kSize];
      unpack(static_cast<const uint4*>(y)[vector], added);
#pragma unroll
      for (int c = 0; c < kSize; ++c) {
        values_[i][c] = round_to<Number>(values_[i][c] + round_to<Number>(scale * added[c]));
      }
    });
  }
  // Replaces the row by its layer normalisation. `sum` is BlockSum or WarpSum.
  template <class Sum>
  DEVICE void normalise_row(const Norm& norm, Sum sum) {
    const Moments moments = row_moments(sum, [&](auto act) {
      for_each_vector([&](int i, int) {
#pragma unroll
        for (int c = 0; c < kSize; ++c) act(values_[i][c]);
      });
    });
    for_each_vector([&](int i, int vector) {
      float weight[kSize], bias[kSize];
      unpack(static_cast<const uint4*>(norm.weight)[vector], weight);
      unpack(static_cast<const uint4*>(norm.bias)[vector], bias);
#pragma unroll
      for (int c = 0; c < kSize; ++c) {
        values_[i][c] = round_to<Number>(normalise(values_[i][c], moments, weight[c], bias[c]));
      }
    });
  }
  // Writes the row.
  DEVICE void store(void* row) {
    for_each_vector(
        [&](int i, int vector) { static_cast<uint4*>(row)[vector] = pack(values_[i]); });
  }

 private:
  // Calls act(i, vector): the thread's i-th vector is `vector` of the row.
  template <class Act>
  DEVICE void for_each_vector(Act act) {
#pragma unroll
    for (int i = 0; i < kThreadVectors; ++i) {
      const int vector = thread_ + i * kThreads;
      if (vector < kNumVectors) act(i, vector);
    }
  }

  const int thread_;
  float values_[kThreadVectors][kSize];
};

}  // namespace megakernel::conformer
