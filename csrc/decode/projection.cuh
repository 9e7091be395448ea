// A projection y = W a, the only operation that reads weights:
//
//   y[r, c] = sum_w sum_{k in K tiles of warp w} W[r, k] a[k, c]
//
// A thread block computes its row groups of y. The order of additions depends neither on the number
// of columns nor on that of thread blocks, so a column's results are the same bits in every batch.
#pragma once

#include "phase_context.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kRowGroupSize == 8, "the matrix instruction has a row group twice, in 16 rows");
static_assert(kTileK == 32, "a lane's 16 bytes are the operands of two halves of 16 of a K tile");

// --- shared memory ---

// `ActivationFragments` and two sets of `PartialSums` of phase_context.cuh; `Ring` of ring.cuh.

// --- warp roles ---

// Compute warp w has K tiles w, w + 8, ..:
//   load      it loads the activations of its K tiles into the fragments, in operand order;
//   multiply  it multiplies them by the row groups' weights, from one ring stage after the other;
//   store     after a block barrier, all warps add up the warps' partial sums, in the order of the
//             warps. A thread has one element of the result.

// Multiplies `num_steps` steps of activations [steps, warps, columns, 4 x 16 bytes] by
// `num_row_groups` row groups, from the ring's cursor on, where `num_full` stages are known to be
// full. Writes a set of partial sums [row groups, warps, rows, columns], or adds to it. Returns the
// next cursor. Rows 0 to 7 and 8 to 15 of the matrix instruction are the same row group, with the
// lower and the upper half of the K tile.
template <int MaxColumns, class R>
DEVICE_NOINLINE typename R::Cursor multiply_weight_tiles(
    const Params& p, Phase phase, PinnedAddress<R> ring, typename R::Cursor cursor, int num_full,
    ProjectionAddresses<R, MaxColumns> addresses, int sums_idx, int& timed_out, int num_row_groups,
    int num_steps, bool accumulate) {
  num_row_groups = warp_uniform(num_row_groups), num_steps = warp_uniform(num_steps);
  RingConsumer<R> weights(*ring, cursor, warp_uniform(num_full));
  const SpinTimeout timeout(p, phase, timed_out);
  int step = 0;
  do {
    constexpr int kNumColumnTiles = ProjectionAddresses<R, MaxColumns>::num_column_tiles;
    uint4 a[R::stage_steps][kNumColumnTiles];
#pragma unroll
    for (int s = 0; s < R::stage_steps; ++s) {
#pragma unroll
      for (int t = 0; t < kNumColumnTiles; ++t) a[s][t] = addresses.activations(step + s, t);
    }
    int row_group = 0;
    do {
      float low[kNumColumnTiles][2][4] = {}, high[kNumColumnTiles][2][4] = {};
      const int stage = weights.wait_for_stage(timeout);
#pragma unroll
      for (int s = 0; s < R::stage_steps; ++s) {
        const uint4 w = addresses.weights(stage, s);
#pragma unroll
        for (int t = 0; t < kNumColumnTiles; ++t) {
          mma_m16n8k16(low[t][s % 2], w, {a[s][t].x, a[s][t].y});
          mma_m16n8k16(high[t][s % 2], w, {a[s][t].z, a[s][t].w});
        }
      }
#pragma unroll
      for (int t = 0; t < kNumColumnTiles; ++t) {
        float2& sum = addresses.sum(sums_idx, row_group, t);
        float2 total = (step > 0 || accumulate) && addresses.has_sums() ? sum : float2{0, 0};
        total.x += low[t][0][0] + low[t][1][0] + (high[t][0][2] + high[t][1][2]);
        total.y += low[t][0][1] + low[t][1][1] + (high[t][0][3] + high[t][1][3]);
        if (addresses.has_sums()) sum = total;
      }
      weights.release_stage();  // after the sums, which depend on all loads of the stage
    } while (++row_group < num_row_groups);
    step += R::stage_steps;
  } while (step < num_steps);
  return weights.cursor();
}

// Clears the activations beyond the width of a matrix that does not fill its last step.
template <class Shape, int MaxColumns>
DEVICE void clear_padding(ActivationFragments<MaxColumns> (&fragments)[kNumSplits]) {
  static_assert(Shape::template num_chunks<MaxColumns> == 1,
                "only matrices whose activations fit into one chunk may have a partial step");
  constexpr int kLastStep = Shape::num_steps - 1;
  if (kLastStep * kStepK + warp_idx() * kTileK < Shape::k) return;
#pragma unroll
  for (auto& split : fragments) {
    for (int i = lane_idx(); i < 4 * kColumnCapacity<MaxColumns>; i += 32) {
      split.steps[kLastStep][warp_idx()][i] = {0, 0, 0, 0};
    }
  }
}

// --- body ---

// One element of the result y.
struct ProjectionResult {
  int row_group, column, row;  // `row` is within the row group
  int sum_idx;                 // of the first warp's partial sum
  float preloaded;             // the result of `preload`
};

// The i-th result of `count` row groups from `first` on, each of 2^log2_columns columns.
template <int SumColumns>
DEVICE ProjectionResult result_of(int i, int first, int count, int log2_columns) {
  const int row = i % kRowGroupSize, column = i / kRowGroupSize & ((1 << log2_columns) - 1);
  const int row_group = min(i / kRowGroupSize >> log2_columns, count - 1);
  return {first + row_group, column, row,
          row_group * kNumWarps * kRowGroupSize * SumColumns + row * SumColumns + column, 0};
}

struct NoPreload {
  DEVICE float operator()(const RowGroupRange&, const ProjectionResult&) const { return 0; }
};

// Computes this thread block's rows of y [rows, columns]. A pass has at most `NumColumns` columns.
//   load(first step, sums) loads a chunk of activations into `fragments`;
//   preload(row groups, result) returns an operand of `store`, and is called before the wait;
//   store(result, sum, sums, valid) receives y[r, c]; all lanes call it, some without a valid sum.
// Returns false after a timeout.
template <class Shape, int NumColumns, class Context, class Load, class Store,
          class Preload = NoPreload>
DEVICE bool project(Context& context, Phase phase, Load load, Store store, Preload preload = {}) {
  constexpr int kMaxColumns = Context::max_columns;
  constexpr int kSumColumns = PartialSums<kMaxColumns>::num_columns;
  constexpr int kChunkSteps = Shape::template chunk_steps<kMaxColumns>,
                kNumChunks = Shape::template num_chunks<kMaxColumns>;
  const RowGroupRange row_groups = context.row_groups[phase];
  const int num_row_groups = warp_uniform(row_groups.count);
#pragma unroll 1
  for (int done = 0; done < num_row_groups; done += kMaxRowGroups) {
    const int count = min(kMaxRowGroups, num_row_groups - done), sums_idx = context.sums_idx;
    auto& sums = opaque_reference(context.sums[sums_idx]);
    context.sums_idx ^= 1;
    if (done > 0) {
      const int column = min(lane_idx(), kColumnCapacity<kMaxColumns> - 1);
      sums.squares[column][warp_idx()] = context.sums[context.sums_idx].squares[column][warp_idx()];
    }
    // The lane's first result is located here, before the wait for activations.
    const int log2_columns = context.template log2_columns<NumColumns>(),
              num_columns = context.template columns<NumColumns>();
    const int num_results = count * kRowGroupSize << log2_columns, begin = 32 * uniform_warp_idx();
    auto locate = [&](int i) {
      ProjectionResult r = result_of<kSumColumns>(i, row_groups.first + done, count, log2_columns);
      r.preloaded = preload(row_groups, r);
      return r;
    };
    ProjectionResult r = locate(begin + lane_idx());
    r = {pin_register(r.row_group), pin_register(r.column), pin_register(r.row),
         pin_register(r.sum_idx), r.preloaded};
#pragma unroll 1
    for (int chunk = 0; chunk < kNumChunks; ++chunk) {
      // Counted before the wait, because the test of an mbarrier has a long latency.
      const int num_full =
          kManyRegisters ? warp_uniform(context.ring->count_full_stages(context.cursor)) : 0;
      if (done == 0 || kNumChunks > 1) {
        sync_warp();
        load(chunk * kChunkSteps, sums);
        if constexpr (Shape::k % kStepK != 0) clear_padding<Shape>(context.fragments);
        sync_warp();
        context.timer.lap(phase, kWait);
      }
      context.cursor = multiply_weight_tiles(context.p, phase, context.ring, context.cursor,
                                             num_full, context.addresses, sums_idx, sums.timed_out,
                                             count, kChunkSteps, chunk > 0);
    }
    context.timer.lap(phase, kMultiply);
    sync_compute_threads();
    const bool ok = sums.timed_out == 0;
#pragma unroll 1
    for (int first = begin; first < num_results;) {  // by whole warps
      const float* partial = &sums.sums[0][0][0] + r.sum_idx;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kNumSplits * kNumWarps; ++i) {
        sum += partial[i / kNumWarps * kColumnCapacity<kMaxColumns> +
                       i % kNumWarps * kRowGroupSize * kSumColumns];
      }
      const bool valid = ok && first + lane_idx() < num_results && r.column < num_columns;
      store(r, sum, sums, valid);
      first += kNumThreads;
      if (first < num_results) r = locate(first + lane_idx());
    }
    if (!warp_all(ok)) return false;
    context.timer.lap(phase, kRest);
  }
  return true;
}

// Calls act(row group, column, row) for the elements of `num_row_groups` row groups, each in the
// lane that receives it as a result of a projection.
template <int NumColumns, class Context, class Act>
DEVICE void for_each_result(Context& context, int num_row_groups, Act act) {
  const int log2_columns = context.template log2_columns<NumColumns>();
#pragma unroll 1
  for (int done = 0; done < num_row_groups; done += kMaxRowGroups) {
    const int count = min(kMaxRowGroups, num_row_groups - done),
              num_results = count * kRowGroupSize << log2_columns;
#pragma unroll 1
    for (int first = 32 * uniform_warp_idx(); first < num_results; first += kNumThreads) {
      const ProjectionResult r = result_of<0>(first + lane_idx(), done, count, log2_columns);
      if (first + lane_idx() < num_results) act(r.row_group, r.column, r.row);
    }
  }
  sync_warp();
}

}  // namespace megakernel
