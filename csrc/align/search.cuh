// Monotonic alignment search by dynamic programming (Kim et al., Glow-TTS, NeurIPS 2020,
// algorithm 1):
//
//   sum[i, j] = max(sum[i, j - 1], sum[i - 1, j - 1]) + score[i, j]
//
// One direction bit per cell is stored, and the traceback (trace.cuh) follows it. Only columns from
// which the end can be reached are processed.
#pragma once

#include "edge.cuh"
#include "lattice.cuh"
#include "scores.cuh"
#include "trace.cuh"

namespace megakernel::align {

// --- static asserts ---

static_assert(kRowsPerLane == 2, "a lane stores the directions of two rows at once");
static_assert(kStepColumns == 4, "a lane stores the sums of a step with 16 bytes");

// --- shared memory ---

// Barriers between the copying and the summing warp of a strip.
struct ScoreBarriers {
  Mbarrier full[kMaxScoreStages], empty[kMaxScoreStages];
  Mbarrier first_tile_done;  // completes once, when the first tile is summed up
};

// Of a block. The edge above strip i of the block has index i, the edge below it i + 1.
struct alignas(kLineBytes) SearchSharedMemory {
  EdgeRing edge_rings[kMaxStripsPerBlock + 1];
  EdgeBarriers edge_barriers[kMaxStripsPerBlock + 1];
  ScoreBarriers score_barriers[kMaxStripsPerBlock];
  alignas(16) float minus_infinity[kTileColumns];  // the row above where it is not read
  unsigned block_number;
};

// Each summing warp initialises the barriers of its strip's scores and of the edge above it. One
// thread does so, because threads with different addresses would be serialised.
DEVICE void init_shared(const SearchParams& p, int strip_in_block, SearchSharedMemory& shared) {
  for (int i = thread_idx(); i < kTileColumns; i += 32 * p.strips_per_block) {
    shared.minus_infinity[i] = -INFINITY;
  }
  if (lane_idx() > 0) return;
  ScoreBarriers& scores = shared.score_barriers[strip_in_block];
  EdgeBarriers& edge = shared.edge_barriers[strip_in_block];
  mbarrier_init(scores.first_tile_done, 1);
  for (int stage = 0; stage < p.num_score_stages; ++stage) {
    mbarrier_init(scores.full[stage], 32);
    mbarrier_init(scores.empty[stage], 32);
  }
  for (int stage = 0; stage < kEdgeStages; ++stage) {
    mbarrier_init(edge.full[stage], 1);
    mbarrier_init(edge.empty[stage], 1);
  }
  mbarrier_fence_init();
}

// --- warp roles ---

// A strip has two warps. The first half of a block's warps sum up a strip each; the second half
// copy its scores. A lane of a summing warp has two rows and their sums in registers. It is one
// step of four columns behind the previous lane, whose last row it receives by a shuffle.

// --- warp roles: copying warp ---

// Copies a strip's scores [rows, columns] to `stages` [stages], and refills a stage when it is
// empty. The first copies start before the barriers are initialised and before the item's lengths
// are loaded, except where they would delay the scores of the strip above.
template <bool kAligned, bool kSharedDirections, class Score>
DEVICE void copy_scores(const SearchParams& p, int item, const ItemLengths& lengths, int strip,
                        SearchSharedMemory& shared, ScoreTile<Score>* stages) {
  const ScoreCopier<Score> copier = make_score_copier<Score>(p, item, strip);
  const int strip_in_block = strip % p.strips_per_block;
  ScoreBarriers& barriers = shared.score_barriers[strip_in_block];
  const bool starts_early = !kSharedDirections || strip_in_block == 0;
  if (!starts_early) {
    sync_all_threads();
    if (strip >= make_lattice(p, item, lengths).num_strips) return;
    wait_for_all(BarrierWait{shared.score_barriers[strip_in_block - 1].first_tile_done, 0});
  }
  int stage = 0, num_tiles = p.num_score_stages;
  unsigned round = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    if (round > 0) wait_for_all(BarrierWait{barriers.empty[stage], round - 1});
    copier.template copy<kAligned>(stages[stage], tile);
    if (starts_early && tile == 0) sync_all_threads();
    mbarrier_arrive_on_copies(barriers.full[stage]);
    if (++stage == p.num_score_stages) {
      const Lattice lattice = make_lattice(p, item, lengths);
      if (strip < lattice.num_strips) num_tiles = num_tiles_of(lattice, strip) + kTileLag;
      stage = 0, ++round;
    }
  }
  copy_async_wait_all();
}

// --- warp roles: summing warp ---

// The sums of one lane's rows.
struct RowSums {
  float sum[kRowsPerLane] = {-INFINITY, -INFINITY};
  // The row above's sums of the next step, except in the first lane.
  float above[kStepColumns] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  float above_previous;                    // the row above's sum one column earlier
  uint32_t directions[kRowsPerLane] = {};  // of the last columns, the latest in the lowest bit

  // Processes a step. `entering` is the row above the first lane. Returns the sums of the lane's
  // last row, [kStepColumns]. A NaN counts as minus infinity. `kAssumeNumbers` omits that rule: a
  // NaN then persists to the end of its row, where `has_numbers` finds it.
  template <bool kAssumeNumbers>
  DEVICE float4 advance(const float (&entering)[kStepColumns],
                        const float (&scores)[kRowsPerLane][kStepColumns]) {
    float below[kStepColumns], above_now[kStepColumns];
#pragma unroll
    for (int c = 0; c < kStepColumns; ++c) above_now[c] = lane_idx() == 0 ? entering[c] : above[c];
#pragma unroll
    for (int c = 0; c < kStepColumns; ++c) {
      const float from_above[kRowsPerLane] = {c == 0 ? above_previous : above_now[c - 1], sum[0]};
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        directions[r] = shift_in_less_than(directions[r], sum[r], from_above[r]);
        sum[r] =
            kAssumeNumbers
                ? max_propagate_nan(sum[r], from_above[r]) + scores[r][c]
                : max_ignore_nan(max_ignore_nan(sum[r], from_above[r]) + scores[r][c], -INFINITY);
      }
      below[c] = sum[kRowsPerLane - 1];
      above[c] = shuffle_up(below[c]);  // as early as possible: a shuffle has a long latency
    }
    above_previous = above_now[kStepColumns - 1];
    return {below[0], below[1], below[2], below[3]};
  }
  // Whether no sum is NaN.
  DEVICE bool has_numbers() const { return sum[0] == sum[0] && sum[1] == sum[1]; }
};

// Operands of a lane's step: scores, and the row above the strip.
struct StepOperands {
  float scores[kRowsPerLane][kStepColumns], entering[kStepColumns];

  // Loads the operands of a step of the tile; `edge` is the row above, [kTileColumns].
  template <class Score>
  DEVICE void load(ScoreTile<Score>& tile, const float* edge, int step) {
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      load_step(lane_scores(tile, step / kStepsPerWord, lane_idx(), r, step % kStepsPerWord),
                scores[r]);
    }
    load_step(edge + kStepColumns * step, entering);
  }
};

// Destinations of the sums of a lane's last row, for two tiles: the last lane is 31 steps behind,
// so its last step of a tile is the first step of a later one.
struct EdgeTargets {
  float* values[2];
  bool enabled[2];
};

// A word of directions for each of a lane's rows.
struct DirectionWords {
  uint32_t words[kRowsPerLane];
};

// Processes a tile of columns with `RowSums::advance`. Reads the row above the strip, edge
// [kTileColumns]; writes the last lane's sums to `targets` and the lane's directions.
template <bool kAssumeNumbers, class Score>
DEVICE void advance_tile(RowSums& sums, ScoreTile<Score>& tile, const float* edge,
                         const EdgeTargets& targets, DirectionWords (&directions)[kWordsPerTile]) {
  constexpr int kNumSteps = kWordsPerTile * kStepsPerWord;
  constexpr int kPrefetchSteps = 2;
  StepOperands prefetched[kPrefetchSteps];
#pragma unroll
  for (int step = 0; step < kPrefetchSteps; ++step) prefetched[step].load(tile, edge, step);
#pragma unroll
  for (int step = 0; step < kNumSteps; ++step) {
    const StepOperands operands = prefetched[step % kPrefetchSteps];
    const int next = step + 1;
    // The load precedes the store, which would delay it.
    if (step + kPrefetchSteps < kNumSteps) {
      prefetched[step % kPrefetchSteps].load(tile, edge, step + kPrefetchSteps);
    }
    const float4 below = sums.advance<kAssumeNumbers>(operands.entering, operands.scores);
    const int target = next / kNumSteps;
    if (targets.enabled[target]) {
      *reinterpret_cast<float4*>(targets.values[target] + next % kNumSteps * kStepColumns) = below;
    }
    if (next % kStepsPerWord == 0) {
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        directions[step / kStepsPerWord].words[r] = sums.directions[r];
      }
    }
  }
}

// Sums up a strip. Reads `stages` [stages] and the row above; writes the strip's last row to the
// strip below, and directions [words, kStripRows].
template <bool kSharedDirections, class Score>
DEVICE void sum_strip(const SearchParams& p, const Lattice& lattice, int strip,
                      SearchSharedMemory& shared, ScoreTile<Score>* stages,
                      DirectionWindow& window) {
  const int strip_in_block = strip % p.strips_per_block, lane = lane_idx();
  const int num_tiles = num_tiles_of(lattice, strip), num_delayed_tiles = num_tiles + kTileLag;
  const bool is_first = strip == 0, is_last = strip == lattice.num_strips - 1;
  const auto global_edge = [&](int below) {
    const int64_t edge_idx = static_cast<int64_t>(lattice.item) * (p.blocks_per_item - 1) +
                             strip / p.strips_per_block - 1 + below;
    return p.edges + edge_idx * p.num_tiles * kTileColumns;
  };
  EdgeReader<kSharedDirections> reader = {shared.edge_rings[strip_in_block],
                                          shared.edge_barriers[strip_in_block],
                                          strip_in_block == 0 ? global_edge(0) : nullptr,
                                          is_first ? 0 : num_tiles_of(lattice, strip - 1)};
  EdgeWriter<kSharedDirections> writer = {
      shared.edge_rings[strip_in_block + 1], shared.edge_barriers[strip_in_block + 1],
      strip_in_block == p.strips_per_block - 1 ? global_edge(1) : nullptr, is_last ? 0 : num_tiles};
  ScoreBarriers& barriers = shared.score_barriers[strip_in_block];
  RowSums sums;
  sums.above_previous = is_first && lane == 0 ? 0.0f : -INFINITY;
  // A lane's words are shifted by its delay, so that a stored word covers the same columns in all
  // lanes.
  const int delay = kStepColumns * lane, num_words = kWordsPerTile * num_tiles * kStripRows;
  uint32_t* words =
      (kSharedDirections ? window.words[kPaddingWords] : strip_directions(p, lattice.item, strip)) +
      kRowsPerLane * lane;
  int at = -(delay / kWordColumns + 1) * kStripRows;
  uint32_t previous[kRowsPerLane] = {};
  constexpr int kTilesBeforeDiagonal = kStripRows / kTileColumns;  // of the strip above
  for (int tile = 0; tile < min(kTilesBeforeDiagonal, reader.num_tiles); ++tile) {
    wait_for_all(reader.acquire(tile, BarrierWait{barriers.full[0], 0}));
    if (lane == 0) sums.above_previous = reader.values(tile)[kTileColumns - 1];
    reader.release(tile);
  }
  int stage = 0;
  unsigned round = 0;
  for (int tile = 0; tile < num_delayed_tiles; ++tile) {
    const BarrierWait scores_ready{barriers.full[stage], round};
    const int tile_above = tile + kTilesBeforeDiagonal, tile_below = tile - kTileLag;
    wait_for_all(scores_ready, reader.acquire(tile_above, scores_ready),
                 writer.acquire(tile_below + 1, scores_ready));
    // Only the first lane reads the strip above.
    const float* edge =
        lane == 0 && reader.has(tile_above) ? reader.values(tile_above) : shared.minus_infinity;
    const EdgeTargets targets = {{writer.values(tile_below), writer.values(tile_below + 1)},
                                 {writer.stores(tile_below), writer.stores(tile_below + 1)}};
    const RowSums start = sums;
    DirectionWords directions[kWordsPerTile];
    advance_tile<true>(sums, stages[stage], edge, targets, directions);
    if (!warp_all(sums.has_numbers())) {
      sums = start;
      advance_tile<false>(sums, stages[stage], edge, targets, directions);
    }
    mbarrier_arrive(barriers.empty[stage]);
    if (++stage == p.num_score_stages) stage = 0, ++round;
    mbarrier_arrive_if(tile == 0 && lane == 0, barriers.first_tile_done);
    reader.release(tile_above);
    writer.publish(tile_below);
#pragma unroll
    for (int w = 0; w < kWordsPerTile; ++w, at += kStripRows) {
      uint32_t shifted[kRowsPerLane];
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        shifted[r] = funnel_shift_left(previous[r], directions[w].words[r], delay % kWordColumns);
        previous[r] = directions[w].words[r];
      }
      if (static_cast<unsigned>(at) < static_cast<unsigned>(num_words)) {
        *reinterpret_cast<uint2*>(words + at) = {shifted[0], shifted[1]};
      }
    }
  }
}

// --- body ---

// The block's number in the order in which blocks start. A block waits only for blocks of lower
// numbers, which have started.
DEVICE int take_block_number(const SearchParams& p, SearchSharedMemory& shared) {
  if (p.blocks_per_item == 1) return block_idx();
  if (thread_idx() == 0) {
    shared.block_number = atomic_increment(p.block_counter) + 1;  // the counter starts at -1
  }
  sync_all_threads();
  return static_cast<int>(shared.block_number);
}

// Whether all other blocks of the item have finished. If so, their directions are visible.
template <bool kSharedDirections>
DEVICE bool is_last_block(const SearchParams& p, int item, SearchSharedMemory& shared) {
  sync_all_threads();
  if (kSharedDirections || p.blocks_per_item == 1) return true;
  if (thread_idx() == 0) {
    thread_fence();
    shared.block_number = atomic_increment(p.done_counters + item) + 1;
    thread_fence();
  }
  sync_all_threads();
  return static_cast<int>(shared.block_number) == p.blocks_per_item - 1;
}

// The search kernel. Reads scores [items, rows, columns]; writes durations [items, rows]. The last
// block of an item to finish runs the traceback. `kSharedDirections`: an item has one block, and
// its directions stay in shared memory.
template <class Score, bool kAligned, bool kSharedDirections>
DEVICE void search(const SearchParams& p, SearchSharedMemory& static_shared,
                   unsigned char* dynamic_shared) {
  trigger_dependent_grids();
  SearchSharedMemory& shared = opaque_reference(static_shared);
  unsigned char* dynamic = &opaque_reference(*dynamic_shared);
  const int warp = uniform_warp_idx();
  const int block = kSharedDirections ? block_idx() : take_block_number(p, shared);
  const int item = block / p.blocks_per_item;
  const int strip_in_block = warp % p.strips_per_block;
  const int strip = block % p.blocks_per_item * p.strips_per_block + strip_in_block;
  TraceSharedMemory& trace_shared = *reinterpret_cast<TraceSharedMemory*>(dynamic);
  ScoreTile<Score>* stages = reinterpret_cast<ScoreTile<Score>*>(
                                 dynamic + (kSharedDirections ? sizeof(TraceSharedMemory) : 0)) +
                             strip_in_block * p.num_score_stages;
  const bool copies = warp >= p.strips_per_block;
  const ItemLengths lengths(p, item);  // loaded before the barriers are initialised
  if (copies) {
    copy_scores<kAligned, kSharedDirections>(p, item, lengths, strip, shared, stages);
  }
  if (!copies) init_shared(p, strip_in_block, shared);
  if (!copies && kSharedDirections) clear_padding(trace_shared.windows[strip_in_block]);
  if (!copies) sync_all_threads();
  const Lattice lattice = make_lattice(p, item, lengths);
  if (!copies && strip < lattice.num_strips) {
    sum_strip<kSharedDirections>(p, lattice, strip, shared, stages,
                                 trace_shared.windows[strip_in_block]);
  }
  if (!is_last_block<kSharedDirections>(p, item, shared)) return;
  int* durations = p.durations + static_cast<int64_t>(item) * p.num_rows;
  for (int i = lattice.num_rows + thread_idx(); i < p.num_rows; i += 64 * p.strips_per_block) {
    durations[i] = 0;
  }
  if constexpr (kSharedDirections) {
    trace_shared_directions(lattice, warp, trace_shared, durations);
  } else {
    trace(p, lattice, warp, trace_shared, durations);
  }
}

}  // namespace megakernel::align
