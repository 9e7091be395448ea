// Convolutions and linear layers: one kernel for all of them.
//
//   sum[r, n]    = sum over k of input[r, k] * weights[n, k],   k = (tap, channel)
//   output[r, n] = epilogue(scale[n] * sum[r, n] + bias[n] + residual[r, n])
//
// K is processed in steps of kStepChannels channels of one tap. A lane loads eight adjacent
// channels of a row and uses them in two matrix instructions; the weights are packed for that
// order. Only partial sums are in shared memory. Warps split K into ranges that depend on K alone,
// and their sums are added in a fixed order. So the bits of a row do not depend on other rows.
#pragma once

#include "activations.cuh"
#include "epilogue.cuh"

namespace megakernel::codec {

// --- static asserts ---

static_assert(kStepChannels == 4 * 8, "four lanes have the channels of a step, eight each");

// The sizes of a block. A warp computes 8 * RowGroups rows and 8 * ColumnGroups columns. KSplits
// warps split K; the other warps of the block have other rows.
template <int RowGroups, int ColumnGroups, int KSplits, int Planes>
struct Tile {
  static_assert(kBlockThreads / 32 % KSplits == 0, "each split of K has as many warps");
  static_assert(Planes == 1 || Planes == 2, "activations have one or two planes");
  static constexpr int kRowGroups = RowGroups, kColumnGroups = ColumnGroups;
  static constexpr int kKSplits = KSplits, kPlanes = Planes;
  static constexpr int kRowWarps = kBlockThreads / 32 / KSplits;  // warps with different rows
  static constexpr int kRows = 8 * RowGroups * kRowWarps;         // of a block
  static constexpr int kColumns = 8 * ColumnGroups;               // of a block
  static constexpr int kPaddedColumns = kColumns + 8;  // adjacent rows use different banks
  // With little to load, two blocks per multiprocessor hide each other's prologue and epilogue.
  static constexpr int kBlocksPerSm = RowGroups <= 2 && ColumnGroups <= 2 && Planes == 1 ? 2 : 1;
  // Steps of a batch of loads, as many as registers allow; two batches alternate. A ring of single
  // steps is slower: steps that share one of a warp's few load scoreboards wait for each other.
  static constexpr int kRegistersPerStep = 8 * (RowGroups * Planes + ColumnGroups);
  static constexpr int kFittingSteps = (kBlocksPerSm == 2 ? 64 : 128) / kRegistersPerStep;
  static constexpr int kStepsPerBatch = kFittingSteps < 1 ? 1 : kFittingSteps;
  // Batches of rows in registers; beside the sums of more columns there is room for one.
  static constexpr int kSums = 4 * Planes * ((RowGroups + 1) / 2) * ColumnGroups;
  static constexpr int kRowBatches = kSums > 64 ? 1 : 2;
};

// --- shared memory ---

// The partial sums, [splits of K, rows, columns], and the sums of squares, [splits of K, rows].
template <class T>
struct alignas(16) ProjectionSharedMemory {
  float sums[T::kKSplits][T::kRows][T::kPaddedColumns];
  float square_sums[T::kKSplits][T::kRows];  // of the RMS norm
};

// --- warp roles ---

// Warp w has split w % KSplits of K, for the rows of w / KSplits:
//   multiply  it accumulates its range of K in registers (WarpAccumulator);
//   store     after a block barrier, a thread adds up the splits of two adjacent columns of several
//             rows, and applies the epilogue.

// Position of a step in K.
struct KStep {
  int rows_back;  // of its tap
  int channel;    // the first of kStepChannels

  // The position of step `step`.
  DEVICE KStep(const ProjectionParams& p, int step) {
    rows_back = (p.num_taps - 1 - step % p.num_taps) * p.dilation;
    channel = step / p.num_taps * kStepChannels;
  }
  // Moves to the next step.
  DEVICE void advance(const ProjectionParams& p) {
    rows_back -= p.dilation;
    if (rows_back < 0) rows_back = (p.num_taps - 1) * p.dilation, channel += kStepChannels;
  }
};

// The sum of squares of eight channels. Explicit, because the compiler could contract the sums
// differently in each kernel.
DEVICE float sum_of_squares(uint4 v) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = unpack_f16(pairs[i]);
    sum = fmaf(f.x, f.x, fmaf(f.y, f.y, sum));
  }
  return sum;
}

// The partial sums of one warp, [rows of the warp, columns of the block], over its range of K.
template <class T>
struct WarpAccumulator {
  static constexpr int kRowGroupPairs = (T::kRowGroups + 1) / 2;  // an instruction takes 16 rows

  const ProjectionParams& p;
  RowAddress rows[T::kRowGroups];
  const uint4* weights;
  float sums[T::kPlanes][kRowGroupPairs][T::kColumnGroups][4] = {};
  float square_sums[T::kRowGroups] = {};
  uint4 row_fragments[T::kRowBatches][T::kStepsPerBatch][T::kPlanes][T::kRowGroups];
  uint4 weight_fragments[2][T::kStepsPerBatch][T::kColumnGroups];

  // The warp's rows begin at `first_row`, the block's columns at `first_column`.
  DEVICE WarpAccumulator(const ProjectionParams& p, int first_row, int first_column, int num_steps)
      : p(p) {
#pragma unroll
    for (int i = 0; i < T::kRowGroups; ++i) {
      const int row = min(first_row + 8 * i + lane_idx() / 4, p.num_rows - 1);
      rows[i] = row_address(p.input, p.frames, row);
      rows[i].current += 8 * (lane_idx() % 4);
      rows[i].history += 8 * (lane_idx() % 4);
    }
    weights = p.weights + static_cast<long long>(first_column / 8) * num_steps * 32 + lane_idx();
  }

  // Loads weights [columns / 8, steps, lanes] of a batch of steps from `step` on, below `end`.
  DEVICE void load_weights(int batch, int step, int end, int num_steps) {
#pragma unroll
    for (int d = 0; d < T::kStepsPerBatch; ++d) {
      if (step + d >= end) continue;
#pragma unroll
      for (int j = 0; j < T::kColumnGroups; ++j) {
        const uint4* from = weights + (static_cast<long long>(j) * num_steps + step + d) * 32;
        weight_fragments[batch][d][j] = T::kRowWarps > 1 ? *from : load_read_only(from);
      }
    }
  }

  // Loads input [rows, planes, channels], or its history, for a batch of steps from `step` on,
  // below `end`; `at` is the position of the first, and is advanced.
  DEVICE void load_rows(int batch, int step, int end, KStep& at) {
    const int width = T::kPlanes * p.input.num_channels;
#pragma unroll
    for (int d = 0; d < T::kStepsPerBatch; ++d) {
      if (step + d >= end) continue;
#pragma unroll
      for (int i = 0; i < T::kRowGroups; ++i) {
        const f16* from =
            rows[i].rows_since_start >= at.rows_back ? rows[i].current : rows[i].history;
        from += at.channel - at.rows_back * width;
#pragma unroll
        for (int plane = 0; plane < T::kPlanes; ++plane) {
          row_fragments[batch][d][plane][i] =
              *reinterpret_cast<const uint4*>(from + plane * p.input.num_channels);
        }
      }
      at.advance(p);
    }
  }

  // Adds the products of a step: a [planes, row groups], b [column groups], each of 8 x 32.
  DEVICE void multiply_step(const uint4 (&a)[T::kPlanes][T::kRowGroups],
                            const uint4 (&b)[T::kColumnGroups]) {
#pragma unroll
    for (int i = 0; i < kRowGroupPairs; ++i) {
#pragma unroll
      for (int plane = 0; plane < T::kPlanes; ++plane) {
        const uint4 low = a[plane][2 * i];
        const uint4 high = T::kRowGroups > 1 ? a[plane][2 * i + (T::kRowGroups > 1)] : uint4{};
#pragma unroll
        for (int j = 0; j < T::kColumnGroups; ++j) {
          mma_m16n8k16_f16(sums[plane][i][j], {low.x, high.x, low.y, high.y}, {b[j].x, b[j].y});
          mma_m16n8k16_f16(sums[plane][i][j], {low.z, high.z, low.w, high.w}, {b[j].z, b[j].w});
        }
      }
    }
    if (p.norm_channels == 0) return;
#pragma unroll
    for (int i = 0; i < T::kRowGroups; ++i) square_sums[i] += sum_of_squares(a[0][i]);
  }

  // Loads the first weights; they do not depend on the previous kernel.
  DEVICE void prefetch_weights(int begin, int end, int num_steps) {
#pragma unroll
    for (int batch = 0; batch < 2; ++batch) {
      load_weights(batch, begin + batch * T::kStepsPerBatch, end, num_steps);
    }
  }

  // Accumulates steps `begin` to `end` of K.
  DEVICE void accumulate(int begin, int end, int num_steps) {
    KStep at(p, begin);
#pragma unroll
    for (int batch = 0; batch < T::kRowBatches; ++batch) {
      load_rows(batch, begin + batch * T::kStepsPerBatch, end, at);
    }
#pragma unroll 1
    for (int step = begin; step < end; step += 2 * T::kStepsPerBatch) {
#pragma unroll
      for (int batch = 0; batch < 2; ++batch) {
        const int current = step + batch * T::kStepsPerBatch, rows = batch % T::kRowBatches;
#pragma unroll
        for (int d = 0; d < T::kStepsPerBatch; ++d) {
          if (current + d < end) multiply_step(row_fragments[rows][d], weight_fragments[batch][d]);
        }
        load_weights(batch, current + 2 * T::kStepsPerBatch, end, num_steps);
        load_rows(rows, current + T::kRowBatches * T::kStepsPerBatch, end, at);
      }
    }
  }

  // Writes the warp's sums and square_sums of its split of K. `first_row` is relative to the block.
  DEVICE void store(ProjectionSharedMemory<T>& shared, int k_split, int first_row) {
    const int g = lane_idx() / 4, t = lane_idx() % 4;
#pragma unroll
    for (int i = 0; i < T::kRowGroups; ++i) {
      const int row = first_row + 8 * i + g;
#pragma unroll
      for (int j = 0; j < T::kColumnGroups; ++j) {
        float2 sum = {sums[0][i / 2][j][i % 2 * 2], sums[0][i / 2][j][i % 2 * 2 + 1]};
        if constexpr (T::kPlanes == 2) {
          sum.x += sums[1][i / 2][j][i % 2 * 2];
          sum.y += sums[1][i / 2][j][i % 2 * 2 + 1];
        }
        *reinterpret_cast<float2*>(&shared.sums[k_split][row][8 * j + 2 * t]) = sum;
      }
      if (p.norm_channels == 0) continue;
      float square_sum = square_sums[i];
      square_sum += shuffle_xor(square_sum, 1);
      square_sum += shuffle_xor(square_sum, 2);
      if (t == 0) shared.square_sums[k_split][row] = square_sum;
    }
  }
};

// --- body ---

// The projection kernel. Reads input [rows, planes, channels] and its history, residual [rows,
// columns], and weights [columns / 8, steps, lanes]. Writes residual_out [rows, columns] and what
// `apply_epilogue` names.
template <class T>
DEVICE void project(const ProjectionParams& p, ProjectionSharedMemory<T>& shared) {
  trigger_dependent_grids();
  const int num_steps = p.num_taps * p.input.num_channels / kStepChannels;
  const int column_tiles = p.num_columns / T::kColumns;
  const int first_column = block_idx() % column_tiles * T::kColumns;
  const int first_row = block_idx() / column_tiles * T::kRows;
  const int k_split = warp_idx() % T::kKSplits,
            warp_row = warp_idx() / T::kKSplits * 8 * T::kRowGroups;
  const int begin = num_steps * k_split / T::kKSplits;
  const int end = num_steps * (k_split + 1) / T::kKSplits;

  // A thread's columns and rows in the epilogue; threads beyond whole rows have none. Some operands
  // are loaded before the sums are complete.
  constexpr int kColumnPairs = T::kColumns / 2, kRowStride = kBlockThreads / kColumnPairs;
  constexpr int kRowsPerThread = (T::kRows + kRowStride - 1) / kRowStride;
  constexpr int kRowsPerBatch = kRowsPerThread < 4 ? kRowsPerThread : 4;
  const int n = first_column + thread_idx() % kColumnPairs * 2,
            thread_row =
                thread_idx() < kRowStride * kColumnPairs ? thread_idx() / kColumnPairs : T::kRows;
  const int num_rows = min(T::kRows, p.num_rows - first_row);
  float2 operands[kRowsPerBatch];
  const ColumnParams even = p.column_params[n], odd = p.column_params[n + 1];
  {
    WarpAccumulator<T> accumulator(p, first_row + warp_row, first_column, num_steps);
    accumulator.prefetch_weights(begin, end, num_steps);
    wait_for_prerequisite_grids();
#pragma unroll
    for (int i = 0; i < kRowsPerBatch; ++i) {
      if (thread_row + i * kRowStride >= num_rows) continue;
      operands[i] = load_epilogue_operand(p, first_row + thread_row + i * kRowStride, n);
    }
    accumulator.accumulate(begin, end, num_steps);
    accumulator.store(shared, k_split, warp_row);
  }
  sync_all_threads();
  const auto finish_row = [&](int r, float2 operand) {
    float2 sum = {0, 0};
    float square_sum = 0;
#pragma unroll
    for (int w = 0; w < T::kKSplits; ++w) {
      const float2 partial = *reinterpret_cast<const float2*>(&shared.sums[w][r][n - first_column]);
      sum.x += partial.x;
      sum.y += partial.y;
      if (p.norm_channels > 0) square_sum += shared.square_sums[w][r];
    }
    if (p.norm_channels > 0) {
      const float factor = rsqrtf(square_sum / p.norm_channels + p.eps);
      sum = {sum.x * factor, sum.y * factor};
    }
    apply_epilogue(p, first_row + r, n, sum, even, odd, operand);
  };
  // A batch of rows at a time. The operands of the next batch are loaded before it is finished.
#pragma unroll 1
  for (int r = thread_row; r < num_rows; r += kRowsPerBatch * kRowStride) {
    float2 next[kRowsPerBatch];
#pragma unroll
    for (int i = 0; i < kRowsPerBatch; ++i) {
      const int later = r + (kRowsPerBatch + i) * kRowStride;
      if (kRowsPerThread > kRowsPerBatch && later < num_rows) {
        next[i] = load_epilogue_operand(p, first_row + later, n);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsPerBatch; ++i) {
      if (r + i * kRowStride < num_rows) finish_row(r + i * kRowStride, operands[i]);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerBatch; ++i) operands[i] = next[i];
  }
}

}  // namespace megakernel::codec
