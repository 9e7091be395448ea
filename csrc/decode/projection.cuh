// Matrix times activations: the one operation that the weights stream through.
//
// A warp takes every eighth tile of K. It brings its activations into shared memory in the matrix
// instruction's order, its weights pass by, and the block adds its warps' sums in their order: so a
// column's sums are the same bits for any number of columns and blocks.
#pragma once

#include "../exchange.cuh"
#include "../phase_timer.cuh"
#include "../weights.cuh"

namespace megakernel {

// Sums of the warps side by side, [unit][warp][row][column]. There are two sets, used in turn, so
// that one meeting of the block is enough: who is fast fills the other set.
template <int MaxColumns>
struct alignas(16) PartialSums {
  static constexpr int num_columns =
      kColumnCapacity<MaxColumns> * kNumSplits;        // columns, of all halves
  static constexpr int tiles = (num_columns + 7) / 8;  // as wide as the matrix instruction
  float sums[kMaxRowGroups][kNumWarps][kRowGroupSize * num_columns];
  float squares[kColumnCapacity<MaxColumns>]
               [kNumWarps];  // of the activations, where a norm wants them
  int timed_out;
};

// Activations of a column for a step: lane 4 column + t of a warp has elements 8t to 8t + 7. Second
// halves are columns of their own, behind the others.
template <int MaxColumns>
struct alignas(16) ActivationFragments {
  uint4 num_steps[kMaxChunkSteps<MaxColumns>][kNumWarps][4 * kColumnCapacity<MaxColumns>];
};

template <int MaxColumns>
struct AttentionSharedMemory;       // see attend.cuh
struct ShortAttentionSharedMemory;  // see near.cuh

// What a lane of a product reads and writes, found out once.
template <class R, int MaxColumns>
class ProjectionAddresses {
 public:
  static constexpr int tiles = PartialSums<MaxColumns>::tiles;

  DEVICE ProjectionAddresses(const R& ring,
                             const ActivationFragments<MaxColumns> (&fragments)[kNumSplits],
                             PartialSums<MaxColumns> (&sums)[2])
      : weights_(ring.stages[0][0][thread_idx()]),
        activations_(fragments[lane_idx() / kLanes % kNumSplits]
                         .num_steps[0][warp_idx()][lane_idx() % kLanes]),
        others_(fragments[(kOther + lane_idx()) / kLanes]
                    .num_steps[0][warp_idx()][(kOther + lane_idx()) % kLanes]),
        sums_(reinterpret_cast<float2&>(
            sums[0].sums[0][warp_idx()][lane_idx() / 4 * kSumColumns + 2 * pair()])),
        keeps_(pin_register(lane_idx() % 4 < kSumColumns / 2)) {}

  // Of a step of a slot, and of a step and a tile.
  DEVICE uint4 weights(int stage, int step) const {
    return *(weights_ + (stage * R::stage_steps + step) * kNumThreads);
  }
  DEVICE uint4 activations(int step, int tile) const {
    return *((tile == 0 ? activations_ : others_) + step * kNumWarps * kLanes);
  }
  // Of a unit and a tile, in one set of sums or the other; whether the lane is one of those that
  // have any.
  DEVICE float2& sum(int sums_idx, int row_group, int tile) const {
    constexpr int kSet = sizeof(PartialSums<MaxColumns>) / sizeof(float2),
                  kOfUnit = kNumWarps * kRowGroupSize * kSumColumns / 2;
    return *(sums_ + (sums_idx * kSet + row_group * kOfUnit + tile * 4));
  }
  DEVICE bool keeps() const { return tiles > 1 || keeps_ != 0; }

 private:
  static constexpr int kSumColumns = PartialSums<MaxColumns>::num_columns;
  static constexpr int kLanes =
      4 * kColumnCapacity<MaxColumns>;             // that have activations of their own
  static constexpr int kOther = 32 * (tiles - 1);  // the first of the last tile
  static_assert(tiles <= 2 && (tiles == 1 || kSumColumns == 16));

  // Of columns; lanes beyond the last read that, for nothing.
  DEVICE static int pair() { return min(lane_idx() % 4, kSumColumns / 2 - 1); }

  PinnedAddress<const uint4> weights_, activations_, others_;
  PinnedAddress<float2> sums_;
  int keeps_;
};

// Everything that a thread carries from phase to phase, of at most `Most` streams.
template <class R, int MaxColumns>
struct PhaseContext {
  static constexpr int max_columns = MaxColumns;
  const Params& p;
  ProjectionAddresses<R, MaxColumns> addresses;
  PartialSums<MaxColumns> (&sums)[2];
  ActivationFragments<MaxColumns> (&fragments)[kNumSplits];
  AttentionSharedMemory<MaxColumns>& attention;  // where the fragments are
  ShortAttentionSharedMemory* short_attention;   // of each warp that attends
  PinnedAddress<R> ring;
  PhaseTimer timer;
  const RowGroupRange* row_groups;  // of the network's matrices, by phase
  typename R::Cursor cursor;        // in the ring
  EpochTags tags;                   // of what a layer makes
  int num_pass_columns = 0,
      log2_pass_columns = 0;  // columns of a pass of several streams: at most 2^widened
  int sums_idx = 0;           // which of `sums` comes next

  // Of a pass of at most N columns; of one stream it has as many.
  template <int N>
  DEVICE int columns() const {
    return MaxColumns == 1 ? N : num_pass_columns;
  }
  template <int N>
  DEVICE int log2_columns() const {
    static_assert(MaxColumns > 1 || N <= 2);
    return MaxColumns == 1 ? N - 1 : log2_pass_columns;
  }

  DEVICE int& timed_out() { return sums[sums_idx].timed_out; }
};

// The activations' steps times the slots from `place` on, of which some are known to be full, into
// a set of sums, or added to what is there; returns the next place. The matrix instruction's rows
// are a unit's rows twice, with the lower and the upper half of their tile's K.
template <int MaxColumns, class R>
DEVICE_NOINLINE typename R::Cursor multiply_weight_tiles(
    const Params& p, Phase phase, PinnedAddress<R> ring, typename R::Cursor cursor, int full,
    ProjectionAddresses<R, MaxColumns> addresses, int sums_idx, int& timed_out, int num_row_groups,
    int num_steps, bool project_and_add) {
  num_row_groups = warp_uniform(num_row_groups), num_steps = warp_uniform(num_steps);
  RingConsumer<R> weights(*ring, cursor, warp_uniform(full));
  const SpinTimeout timeout(p, phase, timed_out);
  int step = 0;
  do {
    constexpr int kTiles = ProjectionAddresses<R, MaxColumns>::tiles;
    uint4 a[R::stage_steps][kTiles];
#pragma unroll
    for (int s = 0; s < R::stage_steps; ++s) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) a[s][t] = addresses.activations(step + s, t);
    }
    int row_group = 0;
    do {
      float low[kTiles][2][4] = {}, high[kTiles][2][4] = {};
      const int stage = weights.wait_for_stage(timeout);
#pragma unroll
      for (int s = 0; s < R::stage_steps; ++s) {
        const uint4 w = addresses.weights(stage, s);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          mma_m16n8k16(low[t][s % 2], w, {a[s][t].x, a[s][t].y});
          mma_m16n8k16(high[t][s % 2], w, {a[s][t].z, a[s][t].w});
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        float2& sum = addresses.sum(sums_idx, row_group, t);
        float2 total = (step > 0 || project_and_add) && addresses.keeps() ? sum : float2{0, 0};
        total.x += low[t][0][0] + low[t][1][0] + (high[t][0][2] + high[t][1][2]);
        total.y += low[t][0][1] + low[t][1][1] + (high[t][0][3] + high[t][1][3]);
        if (addresses.keeps()) sum = total;
      }
      weights.release_stage();  // not sooner: the sum has needed all of the slot
    } while (++row_group < num_row_groups);
    step += R::stage_steps;
  } while (step < num_steps);
  return weights.cursor();
}

// Small models do not fill the last step.
template <class Matrix, int MaxColumns>
DEVICE void clear_padding(ActivationFragments<MaxColumns> (&fragments)[kNumSplits]) {
  static_assert(Matrix::template num_chunks<MaxColumns> == 1);
  constexpr int kLast = Matrix::num_steps - 1;
  if (kLast * kStepK + warp_idx() * kTileK < Matrix::k) return;
#pragma unroll
  for (auto& split : fragments) {
    for (int i = lane_idx(); i < 4 * kColumnCapacity<MaxColumns>; i += 32)
      split.num_steps[kLast][warp_idx()][i] = {0, 0, 0, 0};
  }
}

// One of a product's results: a unit's row of a column, the sum of the warps' sums at `at`.
struct ProjectionResult {
  int row_group, column, row, at;
  float preloaded;  // what was seen before the sum was there
};

// The i-th of a unit's count: so many units, each of 2^wide columns.
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

// For each unit of the block, and each of 2^wide columns of at most N and row of it, `take(result,
// sum, sums, there)`, by all lanes: where it is not `there`, the sum is none. `fetch(first step,
// sums)` brings the activations; `look(share, result)` is asked before. False once anybody has
// given up.
template <class Matrix, int N, class F, class Fetch, class Store, class Preload = NoPreload>
DEVICE bool project(F& context, Phase phase, Fetch fetch, Store store, Preload preload = {}) {
  const RowGroupRange share = context.row_groups[phase];
  const int num_row_groups = warp_uniform(share.count);
#pragma unroll 1
  for (int done = 0; done < num_row_groups; done += kMaxRowGroups) {
    const int count = min(kMaxRowGroups, num_row_groups - done), sums_idx = context.sums_idx;
    auto& sums = opaque_reference(context.sums[sums_idx]);
    context.sums_idx ^= 1;
    if (done > 0) {
      const int column = min(lane_idx(), kColumnCapacity<F::max_columns> - 1);
      sums.squares[column][warp_idx()] = context.sums[context.sums_idx].squares[column][warp_idx()];
    }
    // What a lane will take is found out while it waits for words, and not once all wait for it.
    constexpr int kSumColumns = std::remove_reference_t<decltype(sums)>::num_columns;
    const int log2_columns = context.template log2_columns<N>(),
              columns = context.template columns<N>();
    const int items = count * kRowGroupSize << log2_columns, begin = 32 * uniform_warp_idx();
    auto result = [&](int i) {
      ProjectionResult r = result_of<kSumColumns>(i, share.first + done, count, log2_columns);
      r.preloaded = preload(share, r);
      return r;
    };
    ProjectionResult r = result(begin + lane_idx());
    r = {pin_register(r.row_group), pin_register(r.column), pin_register(r.row), pin_register(r.at),
         r.preloaded};
    constexpr int kChunk = Matrix::template chunk_steps<F::max_columns>,
                  kChunks = Matrix::template num_chunks<F::max_columns>;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      // Now, and not once the words are there.
      const int full =
          kManyRegisters ? warp_uniform(context.ring->count_full_stages(context.cursor)) : 0;
      if (done == 0 || kChunks > 1) {
        sync_warp();
        fetch(chunk * kChunk, sums);
        if constexpr (Matrix::k % kStepK != 0) clear_padding<Matrix>(context.fragments);
        sync_warp();
        context.timer.lap(phase, kWait);
      }
      context.cursor = multiply_weight_tiles(context.p, phase, context.ring, context.cursor, full,
                                             context.addresses, sums_idx, sums.timed_out, count,
                                             kChunk, chunk > 0);
    }
    context.timer.lap(phase, kMultiply);
    sync_compute_threads();
    const bool ok = sums.timed_out == 0;
#pragma unroll 1
    for (int first = begin; first < items;) {  // whole warps
      const float* at = &sums.sums[0][0][0] + r.at;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kNumSplits * kNumWarps; ++i) {
        sum += at[i / kNumWarps * kColumnCapacity<F::max_columns> +
                  i % kNumWarps * kRowGroupSize * kSumColumns];
      }
      const bool valid = ok && first + lane_idx() < items && r.column < columns;
      store(r, sum, sums, valid);
      first += kNumThreads;
      if (first < items) r = result(first + lane_idx());
    }
    if (!warp_all(ok)) return false;
    context.timer.lap(phase, kSum);
  }
  return true;
}

// act(unit, column, row) of the block's units, by the lanes that take them as a product's results.
template <int N, class F, class Act>
DEVICE void for_each_result(F& context, int num_row_groups, Act act) {
  const int log2_columns = context.template log2_columns<N>();
#pragma unroll 1
  for (int done = 0; done < num_row_groups; done += kMaxRowGroups) {
    const int count = min(kMaxRowGroups, num_row_groups - done),
              items = count * kRowGroupSize << log2_columns;
#pragma unroll 1
    for (int first = 32 * uniform_warp_idx(); first < items; first += kNumThreads) {  // whole warps
      const ProjectionResult r = result_of<0>(first + lane_idx(), done, count, log2_columns);
      if (first + lane_idx() < items) act(r.row_group, r.column, r.row);
    }
  }
  sync_warp();
}

}  // namespace megakernel
