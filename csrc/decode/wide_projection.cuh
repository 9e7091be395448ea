// A projection y = W a of a wide kernel, with up to 64 columns. Every sum has the order of
// projection.cuh, so a column's results are the same bits.
//
//   y[r, c] = sum_w sum_{k in K tiles of warp w} W[r, k] a[k, c]
//
// Activations are exchanged as bf16 pairs in operand order. A warp polls its K tiles of all columns
// directly into registers and multiplies them by all row groups: neither weights nor activations
// are read twice. The 16 rows of the matrix instruction are two row groups.
#pragma once

#include "phase_context.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kWideStreams % 8 == 0, "a tile of the matrix instruction has eight columns");
static_assert(kRowGroupSize == 8, "the matrix instruction has two row groups in 16 rows");
static_assert(kTileK == 32, "a lane's 16 bytes are the operands of two halves of 16 of a K tile");

constexpr int kQueryColumns = 2;  // columns of the fragments that hold queries of short contexts

// --- shared memory ---

// Partial sums of the warps, [row groups, warps, tiles of columns, rows, columns of the tile].
template <int MaxColumns>
struct alignas(16) WideSums {
  static constexpr int num_column_tiles = MaxColumns / 8;
  static constexpr int kColumnTileSize = kRowGroupSize * 8;
  static constexpr int kWarpSize = num_column_tiles * kColumnTileSize;
  float sums[kMaxRowGroups][kNumWarps][num_column_tiles][kRowGroupSize][8];
  float scales[MaxColumns];  // of the input: 1 / rms of each column
  float squares[kNumWarps];  // sums of squares of a column
  int timed_out;
};

// The columns of a pass, rounded up so that no result is located by a division by a variable: to a
// power of two, or to `MaxColumns` if that is not a power of two.
template <int MaxColumns>
struct RoundedColumns {
  static constexpr bool is_power_of_two = (MaxColumns & (MaxColumns - 1)) == 0;
  int log2;  // rounded up

  DEVICE int count() const { return is_power_of_two ? 1 << log2 : MaxColumns; }
  // The column and the row group of a vector of kRowGroupSize results.
  DEVICE int column_of(int vector) const {
    return is_power_of_two ? vector & ((1 << log2) - 1) : vector % MaxColumns;
  }
  DEVICE int row_group_of(int vector) const {
    return is_power_of_two ? vector >> log2 : vector / MaxColumns;
  }
};

// What a compute thread passes from phase to phase.
template <int MaxColumns>
struct ResidualRows;
template <int MaxColumns>
struct WideAttentionSharedMemory;
template <class R, int MaxColumns>
struct WidePhaseContext {
  static constexpr int max_columns = MaxColumns;
  static constexpr int query_columns = kQueryColumns;
  const Params& p;
  WideSums<MaxColumns>& sums;
  ActivationFragments<kQueryColumns> (&fragments)[kNumSplits];
  WideAttentionSharedMemory<MaxColumns>& attention;  // overlaps `fragments`
  ShortAttentionSharedMemory* short_attention;       // [warps]
  ResidualRows<MaxColumns>& residual;
  PinnedAddress<R> ring;
  PhaseTimer timer;
  const RowGroupRange* row_groups = nullptr;        // this thread block's, by phase
  typename R::Cursor cursor = {};                   // the next stage of the ring
  EpochTags epoch_tags = {};                        // of the layer's exchange buffers
  int num_pass_columns = 0, log2_pass_columns = 0;  // the latter rounded up

  DEVICE RoundedColumns<MaxColumns> rounded_columns() const { return {log2_pass_columns}; }
  // Set to 1 by a wait that times out. It is set before the first barrier of a projection or after
  // the second, and read between them, so that all threads read the same.
  DEVICE int& timed_out() { return sums.timed_out; }
  // Called by all compute threads, which then synchronise.
  DEVICE void reset_timeouts() {
    if (thread_idx() == 0) sums.timed_out = 0;
  }
};

// --- warp roles ---

// Compute warp w has K tiles w, w + 8, .. It polls its activations of a ring stage's steps,
// multiplies them by the row groups of the stage, and adds to its partial sums. After a block
// barrier, all warps add up the warps' partial sums, in the order of the warps.

// The exchanged input of a projection.
struct WideInput {
  const uint32_t* values;  // operand layout, [columns, k]
  uint32_t tag;
  Phase source;  // the phase that writes it
};

template <class R>
struct WideProgress {
  typename R::Cursor cursor;
  PhaseTimer timer;
};

// Waits until the stage at `cursor` is full; returns the lane's weights [steps] of it.
template <class R>
DEVICE void load_stage(const R& ring, typename R::Cursor cursor, SpinTimeout timeout,
                       uint4 (&weights)[R::stage_steps]) {
  while (!warp_all(mbarrier_try_wait(ring.full[cursor.stage], cursor.parity))) {
    if (!warp_all(timeout.keep_waiting())) break;
  }
#pragma unroll
  for (int s = 0; s < R::stage_steps; ++s) weights[s] = ring.stages[cursor.stage][s][thread_idx()];
}

// A copy in four consecutive registers, as the matrix instruction takes an operand. Without `zero`,
// which the compiler must not know to be 0, it copies the registers anew for every instruction.
DEVICE uint4 copy_registers(uint4 v, uint32_t zero) {
  return {v.x ^ zero, v.y ^ zero, v.z ^ zero, v.w ^ zero};
}

// Polls the input [columns, k] and multiplies it by `num_row_groups` row groups, from the ring's
// cursor on. Writes the partial sums. Returns the next cursor.
template <int MaxColumns, class R>
DEVICE_NOINLINE WideProgress<R> load_and_multiply(const Params& p, Phase phase, WideInput input,
                                                  int k, int num_columns, int num_row_groups,
                                                  PinnedAddress<R> ring, typename R::Cursor cursor,
                                                  WideSums<MaxColumns>& sums, PhaseTimer timer) {
  constexpr int kSteps = R::stage_steps, kNumColumnTiles = MaxColumns / 8,
                kNumVectors = kSteps * kNumColumnTiles;
  constexpr int kColumnTileValues = 32 * 4,
                kStepValues = kNumWarps * kNumColumnTiles * kColumnTileValues;  // in the input
  num_columns = warp_uniform(num_columns), num_row_groups = warp_uniform(num_row_groups);
  const int num_steps = warp_uniform((k + kStepK - 1) / kStepK), warp = uniform_warp_idx();
  const uint32_t* from = input.values + (warp * kNumColumnTiles * 32 + lane_idx()) * 4;
  // Two column tiles are multiplied together, since a matrix instruction has a long latency, if
  // there are two and the registers suffice.
  constexpr int kTilesTogether = MaxColumns == 8 || MaxColumns > 48 ? 1 : 2;
  constexpr int kNextRowGroup = kNumWarps * WideSums<MaxColumns>::kWarpSize / 2;
  static_assert(kNumColumnTiles % kTilesTogether == 0,
                "column tiles are multiplied in whole groups");
  const uint32_t zero = num_columns >> 16;
  float2* const first_sum =
      reinterpret_cast<float2*>(&sums.sums[0][warp][0][lane_idx() / 4][2 * (lane_idx() % 4)]);
  // The vectors of a stage that exist, and their addresses; the others are 0.
  auto vectors_of = [&](int step) {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < kNumVectors; ++i) {
      const bool in_pass = i % kNumColumnTiles * 8 + lane_idx() / 4 < num_columns;
      const bool in_width = (step + i / kNumColumnTiles) * kStepK + warp * kTileK < k;
      mask |= static_cast<uint32_t>(in_pass && in_width) << i;
    }
    return mask;
  };
  auto address = [&](int i) {
    return from + i / kNumColumnTiles * kStepValues + i % kNumColumnTiles * kColumnTileValues;
  };
  uint4 a[kNumVectors];
  auto request = [&](int i, uint32_t mask) {
    a[i] = {0, 0, 0, 0};
    load_relaxed_if(mask >> i & 1, reinterpret_cast<const uint4*>(address(i)), a[i]);
  };
  uint32_t vectors = vectors_of(0);
#pragma unroll
  for (int i = 0; i < kNumVectors; ++i) request(i, vectors);
#pragma unroll 1
  for (int step = 0; step < num_steps; step += kSteps) {
    wait_for_loaded_vectors<PairValues>(a, vectors, address, input.tag,
                                        SpinTimeout(p, input.source, sums.timed_out));
#pragma unroll
    for (int i = 0; i < kNumVectors; ++i) a[i] = untag_pairs(a[i]);
    timer.lap(phase, kWait);
    // The next stage is requested while the last row groups are multiplied.
    from += kSteps * kStepValues;
    vectors = step + kSteps < num_steps ? vectors_of(step + kSteps) : 0;
#pragma unroll 1
    for (int row_group = 0; row_group < num_row_groups; row_group += 2) {
      const bool has_second = row_group + 1 < num_row_groups;
      const SpinTimeout timeout(p, phase, sums.timed_out);
      const typename R::Cursor first = cursor;
      uint4 w[2][kSteps];
      load_stage(*ring, first, timeout, w[0]);
      cursor.advance();
      if (has_second) {
        load_stage(*ring, cursor, timeout, w[1]);
      } else {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) w[1][s] = w[0][s];
      }
      // Operands of the lower and the upper half of a K tile.
      uint4 low_rows[kSteps], high_rows[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        low_rows[s] = copy_registers({w[0][s].x, w[1][s].x, w[0][s].z, w[1][s].z}, zero);
        high_rows[s] = copy_registers({w[0][s].y, w[1][s].y, w[0][s].w, w[1][s].w}, zero);
      }
      float2* sum = first_sum + row_group * kNextRowGroup;
#pragma unroll
      for (int first_column_tile = 0; first_column_tile < kNumColumnTiles;
           first_column_tile += kTilesTogether) {
        if (8 * first_column_tile >= num_columns) break;
        float low[kTilesTogether][2][4] = {}, high[kTilesTogether][2][4] = {};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int t = 0; t < kTilesTogether; ++t) {
            const uint4 b = a[s * kNumColumnTiles + first_column_tile + t];
            mma_m16n8k16(low[t][s % 2], low_rows[s], {b.x, b.y});
            mma_m16n8k16(high[t][s % 2], high_rows[s], {b.z, b.w});
          }
        }
        if (row_group + 2 >= num_row_groups && step + kSteps < num_steps) {
#pragma unroll
          for (int i = 0; i < kSteps * kTilesTogether; ++i) {
            request(i / kTilesTogether * kNumColumnTiles + first_column_tile + i % kTilesTogether,
                    vectors);
          }
        }
#pragma unroll
        for (int t = 0; t < kTilesTogether; ++t) {
          float2* at = sum + (first_column_tile + t) * (WideSums<MaxColumns>::kColumnTileSize / 2);
#pragma unroll
          for (int i = 0; i < 2; ++i, at += kNextRowGroup) {
            if (i == 1 && !has_second) break;
            float2 total = step > 0 ? *at : float2{0, 0};
            total.x +=
                low[t][0][2 * i] + low[t][1][2 * i] + (high[t][0][2 * i] + high[t][1][2 * i]);
            total.y += low[t][0][2 * i + 1] + low[t][1][2 * i + 1] +
                       (high[t][0][2 * i + 1] + high[t][1][2 * i + 1]);
            *at = total;
          }
        }
      }
      // After the products, which depend on all loads of the stages.
      mbarrier_arrive(ring->empty[first.stage]);
      if (has_second) {
        mbarrier_arrive(ring->empty[cursor.stage]);
        cursor.advance();
      }
    }
    timer.lap(phase, kMultiply);
  }
  return {cursor, timer};
}

// --- body ---

// One element of the result y.
struct WideResult {
  int k, row_group, row, column;  // `k` is the row of the matrix, `row` that of the row group
};

// The i-th result of `count` row groups from `first` on, each of `columns`.
template <int MaxColumns>
DEVICE WideResult wide_result_of(int i, int first, int count, RoundedColumns<MaxColumns> columns) {
  const int row = i % kRowGroupSize, column = columns.column_of(i / kRowGroupSize);
  const int row_group = first + min(columns.row_group_of(i / kRowGroupSize), count - 1);
  return {row_group * kRowGroupSize + row, row_group, row, column};
}

// Computes this thread block's rows of y [rows, columns]. A thread adds up the partial sums of
// `ResultsTogether` results at a time, which hides latency where it has many.
//   wait() waits for what `store` needs, once; all threads call it, before a block barrier, unless
//   the thread block has no rows;
//   preload(result) returns an operand of `store`;
//   store(result, sum, operand, valid) receives y[r, c]; all lanes call it, some without a valid
//   sum.
// Returns false after a timeout.
template <class Shape, int ResultsTogether, class Context, class Wait, class Preload, class Store>
DEVICE bool project_wide(Context& context, Phase phase, WideInput input, Wait wait, Preload preload,
                         Store store) {
  using Sums = WideSums<Context::max_columns>;
  const RowGroupRange row_groups = context.row_groups[phase];
  const int num_row_groups = warp_uniform(row_groups.count);
#pragma unroll 1
  for (int done = 0; done < num_row_groups; done += kMaxRowGroups) {
    const int count = min(kMaxRowGroups, num_row_groups - done), first = row_groups.first + done;
    const auto progress = load_and_multiply<Context::max_columns>(
        context.p, phase, input, Shape::k, context.num_pass_columns, count, context.ring,
        context.cursor, context.sums, context.timer);
    context.cursor = progress.cursor, context.timer = progress.timer;
    const int num_columns = context.num_pass_columns;
    const auto columns = context.rounded_columns();
    const int num_results = count * kRowGroupSize * columns.count();
    WideResult results[ResultsTogether];
    decltype(preload(results[0])) operands[ResultsTogether];
    int i = thread_idx();  // the thread's first result of the iteration
#pragma unroll
    for (int j = 0; j < ResultsTogether; ++j) {
      results[j] = wide_result_of(i + j * kNumThreads, first, count, columns);
      operands[j] = preload(results[j]);
    }
    if (done == 0) wait();
    sync_compute_threads();
    const bool ok = context.sums.timed_out == 0;
#pragma unroll 1
    for (int whole = 32 * uniform_warp_idx(); whole < num_results;
         whole += ResultsTogether * kNumThreads) {
      float sums[ResultsTogether] = {};
#pragma unroll
      for (int j = 0; j < ResultsTogether; ++j) {
        const WideResult& r = results[j];
        const float* partial =
            &context.sums.sums[r.row_group - first][0][r.column / 8][r.row][0] + r.column % 8;
#pragma unroll
        for (int w = 0; w < kNumWarps; ++w) sums[j] += partial[w * Sums::kWarpSize];
      }
#pragma unroll
      for (int j = 0; j < ResultsTogether; ++j) {
        const bool exists = i + j * kNumThreads < num_results && results[j].column < num_columns;
        store(results[j], sums[j], operands[j], ok && exists);
      }
      i += ResultsTogether * kNumThreads;
      if (whole + ResultsTogether * kNumThreads >= num_results) break;
#pragma unroll
      for (int j = 0; j < ResultsTogether; ++j) {
        results[j] = wide_result_of(i + j * kNumThreads, first, count, columns);
        operands[j] = preload(results[j]);
      }
    }
    sync_compute_threads();  // the next products overwrite the partial sums
    if (!warp_all(ok)) return false;
    context.timer.lap(phase, kRest);
  }
  return true;
}

}  // namespace megakernel
