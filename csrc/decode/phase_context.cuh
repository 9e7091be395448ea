// The state that a compute thread keeps from phase to phase, and the shared memory of a projection.
#pragma once

#include "../exchange.cuh"
#include "../phase_timer.cuh"
#include "../ring.cuh"

namespace megakernel {

// --- shared memory ---

// Partial sums of the warps, [row groups, warps, rows, columns]. A thread block has two sets and
// uses them alternately, so that one barrier per projection suffices: a fast warp writes the other
// set. The columns of the lo split follow those of the hi split.
template <int MaxColumns>
struct alignas(16) PartialSums {
  static constexpr int num_columns = kColumnCapacity<MaxColumns> * kNumSplits;
  static constexpr int num_column_tiles = (num_columns + 7) / 8;  // tiles of 8 columns
  float sums[kMaxRowGroups][kNumWarps][kRowGroupSize * num_columns];
  float squares[kColumnCapacity<MaxColumns>][kNumWarps];  // sums of squares, for an RMS norm
  int timed_out;
};

// A chunk of activations in operand order, [steps, warps, columns, 4 x 16 bytes]: lane 4 column + t
// of a warp has elements 8 t to 8 t + 7 of the column's K tile.
template <int MaxColumns>
struct alignas(16) ActivationFragments {
  uint4 steps[kMaxChunkSteps<MaxColumns>][kNumWarps][4 * kColumnCapacity<MaxColumns>];
};

// --- addresses and state of a thread ---

template <int MaxColumns, int Capacity>
struct AttentionSharedMemory;       // kv_tile.cuh
struct ShortAttentionSharedMemory;  // short_attention.cuh

// The shared-memory addresses of a lane in a projection, computed once per launch.
template <class R, int MaxColumns>
class ProjectionAddresses {
 public:
  static constexpr int num_column_tiles = PartialSums<MaxColumns>::num_column_tiles;

  // The addresses in a ring, in fragments [splits] and in two sets of sums.
  DEVICE ProjectionAddresses(const R& ring,
                             const ActivationFragments<MaxColumns> (&fragments)[kNumSplits],
                             PartialSums<MaxColumns> (&sums)[2])
      : weights_(ring.stages[0][0][thread_idx()]),
        first_column_tile_(
            fragments[lane_idx() / kLanes % kNumSplits].steps[0][warp_idx()][lane_idx() % kLanes]),
        last_column_tile_(fragments[(kLastColumnTile + lane_idx()) / kLanes]
                              .steps[0][warp_idx()][(kLastColumnTile + lane_idx()) % kLanes]),
        sums_(reinterpret_cast<float2&>(
            sums[0].sums[0][warp_idx()][lane_idx() / 4 * kSumColumns + 2 * column_pair()])),
        has_sums_(pin_register(lane_idx() % 4 < kSumColumns / 2)) {}

  // Eight weights of the lane, of a step of a ring stage.
  DEVICE uint4 weights(int stage, int step) const {
    return *(weights_ + (stage * R::stage_steps + step) * kNumThreads);
  }
  // Eight activations of the lane, of a step of the fragments and a column tile.
  DEVICE uint4 activations(int step, int column_tile) const {
    return *((column_tile == 0 ? first_column_tile_ : last_column_tile_) +
             step * kNumWarps * kLanes);
  }
  // The lane's partial sums of two adjacent columns, in a set of sums.
  DEVICE float2& sum(int sums_idx, int row_group, int column_tile) const {
    constexpr int kSetStride = sizeof(PartialSums<MaxColumns>) / sizeof(float2),
                  kRowGroupStride = kNumWarps * kRowGroupSize * kSumColumns / 2;
    return *(sums_ + (sums_idx * kSetStride + row_group * kRowGroupStride + column_tile * 4));
  }
  // Whether the lane's columns exist.
  DEVICE bool has_sums() const { return num_column_tiles > 1 || has_sums_ != 0; }

 private:
  static constexpr int kSumColumns = PartialSums<MaxColumns>::num_columns;
  static constexpr int kLanes = 4 * kColumnCapacity<MaxColumns>;       // lanes with own activations
  static constexpr int kLastColumnTile = 32 * (num_column_tiles - 1);  // its first lane
  static_assert(num_column_tiles <= 2 && (num_column_tiles == 1 || kSumColumns == 16),
                "a projection multiplies one column tile, or two full ones");

  // Lanes beyond the last column read its activations; their sums are not stored.
  DEVICE static int column_pair() { return min(lane_idx() % 4, kSumColumns / 2 - 1); }

  PinnedAddress<const uint4> weights_, first_column_tile_, last_column_tile_;
  PinnedAddress<float2> sums_;
  int has_sums_;
};

// What a compute thread passes from phase to phase. `R` is the ring's type.
template <class R, int MaxColumns>
struct PhaseContext {
  static constexpr int max_columns = MaxColumns;
  static constexpr int query_columns = MaxColumns;  // for which `fragments` is compiled
  const Params& p;
  ProjectionAddresses<R, MaxColumns> addresses;
  PartialSums<MaxColumns> (&sums)[2];
  ActivationFragments<MaxColumns> (&fragments)[kNumSplits];
  AttentionSharedMemory<MaxColumns, kNewPositions<MaxColumns>>& attention;  // overlaps `fragments`
  ShortAttentionSharedMemory* short_attention;  // one per warp that attends
  PinnedAddress<R> ring;
  PhaseTimer timer;
  const RowGroupRange* row_groups;                  // this thread block's, by phase
  typename R::Cursor cursor;                        // the next stage of the ring
  EpochTags epoch_tags;                             // of the layer's exchange buffers
  int num_pass_columns = 0, log2_pass_columns = 0;  // the latter rounded up
  int sums_idx = 0;                                 // the next set of `sums`

  // Columns of a pass of at most `NumColumns`. With one stream the number is a constant.
  template <int NumColumns>
  DEVICE int columns() const {
    return MaxColumns == 1 ? NumColumns : num_pass_columns;
  }
  // The same as a power of two, rounded up.
  template <int NumColumns>
  DEVICE int log2_columns() const {
    static_assert(MaxColumns > 1 || NumColumns <= 2,
                  "with one stream, a pass has one or two columns");
    return MaxColumns == 1 ? NumColumns - 1 : log2_pass_columns;
  }

  // Set to 1 by a wait that times out; in the next set of `sums`.
  DEVICE int& timed_out() { return sums[sums_idx].timed_out; }
  // Called by all compute threads, which then synchronise.
  DEVICE void reset_timeouts() {
    if (thread_idx() < 2) sums[thread_idx()].timed_out = 0;
  }
};

}  // namespace megakernel
