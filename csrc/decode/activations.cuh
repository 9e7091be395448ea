// Inputs of projections: exchanged or computed activations [columns, width] are loaded into the
// fragments that a projection multiplies. After a norm they are multiplied by its weight.
//
// An RMS norm is  norm(x) = x w / rms(x).  The weight w is applied before the projection. The
// factor 1 / rms(x) is applied to its results (`rms_norm_scale`), so that no warp waits for the
// sums of squares of the others.
#pragma once

#include "bf16_split.cuh"
#include "phase_context.cuh"

namespace megakernel {

// --- the division of a column of `Width` elements among lanes ---

// Vectors of four elements. Lane l has vectors of the steps l / 8, l / 8 + 4, ...: of the warp's
// K tile of 32 elements, those from 4 (l % 8) on.
template <int Width>
struct LaneVectors {
  static constexpr int count = (Matrix<kRowGroupSize, Width>::num_steps + 3) / 4;
  static constexpr bool all_valid = Width % (4 * kStepK) == 0;

  // The step of the lane's i-th vector, its first element, and whether it is within the width.
  DEVICE static int step(int i) { return 4 * i + lane_idx() / 8; }
  DEVICE static int k(int i) { return step(i) * kStepK + warp_idx() * kTileK + lane_idx() % 8 * 4; }
  DEVICE static bool valid(int i) { return all_valid || k(i) < Width; }
};

// Input vectors that a lane loads at a time. With more, registers are spilled.
#if __CUDA_ARCH__ == 900
constexpr int kInputVectorsAtOnce = 4;
#elif __CUDA_ARCH__ >= 1000
constexpr int kInputVectorsAtOnce = 1;
#else
constexpr int kInputVectorsAtOnce = 2;
#endif
template <int NumColumns>
constexpr int kInputBatch = min_of(kInputVectorsAtOnce, NumColumns);

// Writes a lane's vectors to the fragments, [splits, steps, warps, columns, 4 x 16 bytes].
template <int MaxColumns>
class ActivationWriter {
 public:
  DEVICE explicit ActivationWriter(ActivationFragments<MaxColumns> (&fragments)[kNumSplits])
      : first_(reinterpret_cast<uint2*>(
            &fragments[0].steps[lane_idx() / 8][warp_idx()][lane_idx() % 8 / 2])[lane_idx() % 2]) {}

  // Stores the lane's i-th vector of a column, in all splits.
  DEVICE void store(int column, int i, float4 v) const {
    constexpr int kColumnStride = 4 * sizeof(uint4) / sizeof(uint2),
                  kStepStride = kNumWarps * kColumnCapacity<MaxColumns> * kColumnStride;
    const SplitBf16x4 splits = split_bf16x4(v);
    for_each_split([&](int split) {
      const int step = split * kMaxChunkSteps<MaxColumns> + 4 * i;  // relative to the lane's first
      *(first_ + (step * kStepStride + column * kColumnStride)) = splits.pairs[split];
    });
  }

 private:
  PinnedAddress<uint2> first_;
};

// --- norms ---

// 1 / rms(x) of a column, from the warps' sums of squares [columns, warps].
template <int Width, int MaxColumns>
DEVICE float rms_norm_scale(const PartialSums<MaxColumns>& sums, int column, float eps) {
  float squares = 0;
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) squares += sums.squares[column][w];
  return rsqrtf(squares / Width + eps);
}

// The weight of the next norm, [Width] in the order of the threads' vectors. A copy to shared
// memory starts a phase before the weight is needed. A load to registers would stall the warp at
// the next branch.
template <int Hidden>
struct NormWeight {
  uint2 vectors[LaneVectors<Hidden>::count][kNumThreads];

  // Starts to copy this thread's vectors of `norm` [Width]; LaneNormWeight waits for them.
  template <int Width>
  DEVICE void load_async(const bf16* norm) {
#pragma unroll
    for (int i = 0; i < LaneVectors<Width>::count; ++i) {
      if (!LaneVectors<Width>::valid(i)) continue;
      copy_async_8_bytes(&vectors[i][thread_idx()], norm + LaneVectors<Width>::k(i));
    }
  }
};

// The lane's vectors of a norm's weight, in registers.
template <int Width>
struct LaneNormWeight {
  uint2 vectors[LaneVectors<Width>::count];

  // Waits for the copies of `load_async`.
  template <int Hidden>
  DEVICE explicit LaneNormWeight(const NormWeight<Hidden>& weight) {
    copy_async_wait_all();
#pragma unroll
    for (int i = 0; i < LaneVectors<Width>::count; ++i) {
      vectors[i] = weight.vectors[i][thread_idx()];
    }
  }
};

// Sums values [N] over the lanes of a warp; lane l receives the sum of values[l / (32 / N)]. The
// order of additions is that of `warp_sum`, with fewer shuffles.
template <int Mask = 16, int N>
DEVICE float warp_reduce_scatter(const float (&values)[N]) {
  static_assert(32 % N == 0, "the lanes must divide evenly among the values");
  if constexpr (Mask == 0) {
    return values[0];
  } else if constexpr (N == 1) {
    const float sum[] = {values[0] + shuffle_xor(values[0], Mask)};
    return warp_reduce_scatter<Mask / 2>(sum);
  } else {
    const bool upper = lane_idx() & Mask;
    float sums[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float sent = upper ? values[i] : values[i + N / 2];
      sums[i] = (upper ? values[i + N / 2] : values[i]) + shuffle_xor(sent, Mask);
    }
    return warp_reduce_scatter<Mask / 2>(sums);
  }
}

// Writes the warp's sums of squares of the pass's columns from `first` on. squares [NumValues] are
// those of the lane.
template <int NumValues, int MaxColumns>
DEVICE void store_squares(PartialSums<MaxColumns>& sums, const float (&squares)[NumValues],
                          int first, int num_columns) {
  const float total = warp_reduce_scatter(squares);
  constexpr int kLanes = 32 / NumValues;
  const int column = first + lane_idx() / kLanes;
  if (lane_idx() % kLanes == 0 && column < num_columns) sums.squares[column][warp_idx()] = total;
}

// --- the residual, exchanged as float values ---

// Waits for x, float layout [columns, Width], of a pass of at most NumColumns columns. Calls
// use(c, i, vector, x) for column c + i, then done(c) for the batch of columns from c on. A batch
// may contain columns beyond the pass.
template <int Width, int NumColumns, int MaxColumns, class Use, class Done>
DEVICE void wait_for_residual(const Params& p, const uint32_t* values, int num_columns,
                              const EpochTags& epoch_tags, Phase phase, int& timed_out, Use use,
                              Done done) {
  if (MaxColumns == 1) num_columns = NumColumns;
  constexpr int kPerColumn = LaneVectors<Width>::count,
                kBatch = kColumnsPerLoad<NumColumns, kPerColumn>;
  constexpr int kNumVectors = kBatch * kPerColumn;
  constexpr int kSkipColumns = 4;  // columns per branch: a branch per column costs more
  static_assert(NumColumns % kBatch == 0, "batches must divide the columns evenly");
  using Layout = FloatExchangeLayout<Width, MaxColumns>;
#pragma unroll 1
  for (int c = 0; c < num_columns; c += kBatch) {
    uint4 v[kNumVectors] = {};
    const uint32_t* from = values + Layout::index(c, LaneVectors<Width>::k(0));
    uint32_t missing = 0;
#pragma unroll
    for (int i = 0; i < kNumVectors; ++i) {
      const bool wanted =
          c + i / kPerColumn < num_columns && LaneVectors<Width>::valid(i % kPerColumn);
      missing |= static_cast<uint32_t>(wanted) << i;
    }
    wait_for_vectors<FloatValues>(
        v, missing,
        [&](int i) { return from + Layout::distance(i / kPerColumn, i % kPerColumn * 4 * kStepK); },
        [&](int i) { return epoch_tags.of(c + i / kPerColumn); }, SpinTimeout(p, phase, timed_out));
#pragma unroll
    for (int i = 0; i < kNumVectors; ++i) {
      if (i % (kSkipColumns * kPerColumn) == 0 && c + i / kPerColumn >= num_columns) break;
      const int vector = i % kPerColumn;
      if (LaneVectors<Width>::valid(vector)) use(c, i / kPerColumn, vector, untag(v[i]));
    }
    done(c);
  }
  sync_warp();
}

// Loads x w into the fragments, and the sums of squares of x into `sums`. x is exchanged, float
// layout [columns, Width].
template <int Width, int NumColumns, int Hidden, int MaxColumns>
DEVICE_NOINLINE void load_normed_residual(const Params& p, const uint32_t* values,
                                          const NormWeight<Hidden>& weight, int num_columns,
                                          EpochTags epoch_tags, Phase phase,
                                          ActivationFragments<MaxColumns> (&fragments)[kNumSplits],
                                          PartialSums<MaxColumns>& sums) {
  if (MaxColumns == 1) num_columns = NumColumns;
  constexpr int kBatch = kColumnsPerLoad<NumColumns, LaneVectors<Width>::count>;
  const LaneNormWeight<Width> norm(weight);
  float squares[kBatch] = {};
  const ActivationWriter<MaxColumns> activations(fragments);
  wait_for_residual<Width, NumColumns, MaxColumns>(
      p, values, num_columns, epoch_tags, phase, sums.timed_out,
      [&](int c, int i, int vector, float4 v) {
        squares[i] += square(v);
        activations.store(c + i, vector, multiply(v, unpack_bf16x4(norm.vectors[vector])));
      },
      [&](int c) {
        store_squares(sums, squares, c, num_columns);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) squares[i] = 0;
      });
}

// --- the input of a pass, computed by every thread block ---

// Calls use(c, i, vector, x) for the columns `first` to `last` - 1, `Batch` at a time, where
// x = input(column, k) are four elements; then done(c) for the batch from c on.
template <int Width, int Batch, class Input, class Use, class Done>
DEVICE void for_each_input(int first, int last, Input input, Use use, Done done) {
#pragma unroll 1
  for (int c = first; c < last; c += Batch) {
#pragma unroll
    for (int vector = 0; vector < LaneVectors<Width>::count; ++vector) {
      if (!LaneVectors<Width>::valid(vector)) continue;
      float4 v[Batch];
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        v[i] = input(min(c + i, last - 1), LaneVectors<Width>::k(vector));
      }
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        if (c + i < last) use(c, i, vector, v[i]);
      }
    }
    done(c);
  }
  sync_warp();
}

// Loads x w into the fragments, and the sums of squares of x [columns, Width] into `sums`, where
// x = input(column, k).
template <int Width, int Batch, class Context, int Hidden, class Input>
DEVICE void load_normed_input(Context& context, PartialSums<Context::max_columns>& sums,
                              const NormWeight<Hidden>& weight, int first, int last, Input input) {
  const LaneNormWeight<Width> norm(weight);
  float squares[Batch] = {};
  const ActivationWriter<Context::max_columns> activations(context.fragments);
  for_each_input<Width, Batch>(
      first, last, input,
      [&](int c, int i, int vector, float4 v) {
        squares[i] += square(v);
        activations.store(c + i, vector, multiply(v, unpack_bf16x4(norm.vectors[vector])));
      },
      [&](int c) {
        store_squares(sums, squares, c, last);
#pragma unroll
        for (int i = 0; i < Batch; ++i) squares[i] = 0;
      });
}

// --- attention output and MLP hidden, exchanged as bf16 pairs ---

// The division of `Steps` steps of at most NumColumns columns among the lanes of a warp. Vectors
// have eight elements; a warp loads eight steps of a column, or four steps of two columns, at once.
// A lane's first vector is at `column` and `step`, the i-th is `column_offset(i)` and
// `step_offset(i)` further.
template <int Steps, int NumColumns>
struct PairVectors {
  static constexpr int columns_at_once = NumColumns > 1 && Steps % 8 == 4 ? 2 : 1;
  static constexpr int steps_at_once = 8 / columns_at_once;
  static constexpr int per_column = (Steps + steps_at_once - 1) / steps_at_once;
  static constexpr int count =
      kColumnsPerLoad<NumColumns / columns_at_once, per_column> * per_column;
  static constexpr int num_columns = count / per_column * columns_at_once;

  DEVICE static int column() { return lane_idx() / 16 % columns_at_once; }
  DEVICE static int step() { return lane_idx() / 4 % steps_at_once; }
  DEVICE static constexpr int column_offset(int i) { return i / per_column * columns_at_once; }
  DEVICE static constexpr int step_offset(int i) { return i % per_column * steps_at_once; }
};

// Loads `Steps` steps from `first_step` on of one split, pair layout [columns, splits, Width], into
// the fragments.
template <int Width, int Steps, int NumColumns, int MaxColumns>
DEVICE_NOINLINE void load_pairs(const Params& p, const uint32_t* values, int split, int first_step,
                                int num_columns, EpochTags epoch_tags, Phase phase, int& timed_out,
                                ActivationFragments<MaxColumns>& fragments) {
  using V = PairVectors<Steps, NumColumns>;
  using Layout = PairExchangeLayout<Width, MaxColumns>;
  if (MaxColumns == 1) num_columns = NumColumns;
  constexpr bool kAllValid = Steps % V::steps_at_once == 0 && Width % kStepK == 0;
  const int step = V::step(),
            k = (first_step + step) * kStepK + warp_idx() * kTileK + lane_idx() % 4 * 8;
  const PinnedAddress<uint4> to(
      fragments.steps[step][warp_idx()][4 * V::column() + lane_idx() % 4]);
#pragma unroll 1
  for (int c = 0; c < num_columns; c += V::num_columns) {
    const int column = c + V::column();
    uint4 v[V::count] = {};
    uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < V::count; ++i) {
      const int offset = V::step_offset(i);
      const bool valid = kAllValid || (step + offset < Steps && k + offset * kStepK < Width);
      const bool in_pass = valid && column + V::column_offset(i) < num_columns;
      wanted |= static_cast<uint32_t>(in_pass) << i;
    }
    const uint32_t* from = values + Layout::index(column, (split * Width + k) / 2);
    wait_for_vectors<PairValues>(
        v, wanted,
        [&](int i) {
          return from + Layout::distance(V::column_offset(i), V::step_offset(i) * (kStepK / 2));
        },
        [&](int i) { return epoch_tags.of(column + V::column_offset(i)); },
        SpinTimeout(p, phase, timed_out));
#pragma unroll
    for (int i = 0; i < V::count; ++i) {
      const int offset = V::step_offset(i) * kNumWarps * 4 * kColumnCapacity<MaxColumns> +
                         4 * (c + V::column_offset(i));
      store_shared_if(wanted >> i & 1, *(to + offset), untag_pairs(v[i]));
    }
  }
}

}  // namespace megakernel
