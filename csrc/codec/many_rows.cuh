// The projection of many rows: the equation of projection.cuh with both operands in shared memory.
//
// A block computes a tile of rows and columns, for all of K. The rows of a step of channels are
// copied to shared memory once and serve all taps. The order of the sums is that of
// projection.cuh: the partial sums of the same splits of K, added in the same order. So a row has
// the same bits from both kernels.
#pragma once

#include "projection.cuh"
#include "row_window.cuh"

namespace megakernel::codec {

// --- static asserts ---

// The sizes of a block. A warp computes 8 * RowGroups rows and 8 * ColumnGroups columns; RowWarps
// warps have different rows, the others different columns.
template <int RowGroups, int ColumnGroups, int RowWarps, int Planes>
struct ManyRowTile {
  static_assert(RowGroups % 2 == 0, "a matrix instruction takes 16 rows");
  static_assert(kBlockThreads / 32 % RowWarps == 0, "the warps form a rectangle");
  static_assert(Planes == 1 || Planes == 2, "activations have one or two planes");
  static constexpr int kRowGroups = RowGroups, kColumnGroups = ColumnGroups, kPlanes = Planes;
  static constexpr int kColumnWarps = kBlockThreads / 32 / RowWarps;
  static constexpr int kRows = 8 * RowGroups * RowWarps;            // of a block
  static constexpr int kColumns = 8 * ColumnGroups * kColumnWarps;  // of a block
};

// Steps of K whose weights are in shared memory; the last one is being copied.
constexpr int kManyRowStages = 4;
// Shared memory for rows, in units of eight channels of a plane, and the rows of a window.
constexpr int kRowPoolSize = 3328;
constexpr int kMaxWindowRows = 448;

// --- shared memory ---

// The weights of the stages, [stages, columns / 8, lanes]; a ring of windows (RowWindow) of a step
// of channels, each [planes, window rows, 4]; the address of each row of a window.
template <class T>
struct alignas(16) ManyRowSharedMemory {
  uint4 weights[kManyRowStages][T::kColumns / 8][32];
  uint4 rows[kRowPoolSize];
  const f16* sources[kMaxWindowRows];
};

// --- warp roles ---

// All warps copy and multiply. Lane 4 g + t has rows g and g + 8 of every 16 rows of its warp, and
// columns 2 t and 2 t + 1 of every eight, as the matrix instruction leaves them; in the epilogue
// too.

// Copies of a block into shared memory; a thread copies 16 bytes at a time.
template <class T>
struct ManyRowCopies {
  const ProjectionParams& p;
  ManyRowSharedMemory<T>& shared;
  const RowWindow<T::kRows, T::kPlanes> window;
  const int num_windows;  // in the ring
  const uint4* weights;
  const int num_steps;

  // Copies the weights [columns / 8, lanes] of a step.
  DEVICE void copy_weights(int step) {
    constexpr int kPieces = T::kColumns / 8 * 32;
    uint4* to = &shared.weights[step % kManyRowStages][0][0];
#pragma unroll
    for (int first = 0; first < kPieces; first += kBlockThreads) {
      const int i = first + thread_idx();
      if (kPieces % kBlockThreads > 0 && i >= kPieces) break;
      copy_async_16_bytes(
          to + i, weights + (static_cast<long long>(i / 32) * num_steps + step) * 32 + i % 32);
    }
  }

  // Copies the window [planes, rows, channels of a step] of a step of channels.
  DEVICE void copy_rows(int channel_step) {
    uint4* to = shared.rows + channel_step % num_windows * (T::kPlanes * window.num_rows * 4);
    for (int i = thread_idx(); i < 4 * window.num_rows; i += kBlockThreads) {
      const f16* from = shared.sources[i / 4] + channel_step * kStepChannels + i % 4 * 8;
#pragma unroll
      for (int plane = 0; plane < T::kPlanes; ++plane) {
        copy_async_16_bytes(to + plane * window.num_rows * 4 + i,
                            from + plane * p.input.num_channels);
      }
    }
  }
};

// The sums of one warp, [rows of the warp, columns of the warp].
template <class T>
struct ManyRowAccumulator {
  static constexpr int kRowGroupPairs = T::kRowGroups / 2;

  float totals[kRowGroupPairs][T::kColumnGroups][4] = {};            // of the splits before
  float sums[T::kPlanes][kRowGroupPairs][T::kColumnGroups][4] = {};  // of the split
  float total_square_sums[T::kRowGroups] = {}, square_sums[T::kRowGroups] = {};

  // Adds the products of a step: rows[i] is the row of the first plane of row group i, weights
  // those of the warp's first column group.
  DEVICE void multiply_step(const uint4* window, const int (&rows)[T::kRowGroups], int plane_size,
                            const uint4* weights, bool normed) {
    uint4 b[T::kColumnGroups];
#pragma unroll
    for (int j = 0; j < T::kColumnGroups; ++j) b[j] = weights[32 * j];
#pragma unroll
    for (int plane = 0; plane < T::kPlanes; ++plane) {
#pragma unroll
      for (int i = 0; i < kRowGroupPairs; ++i) {
        const uint4 low = window[plane * plane_size + rows[2 * i]];
        const uint4 high = window[plane * plane_size + rows[2 * i + 1]];
#pragma unroll
        for (int j = 0; j < T::kColumnGroups; ++j) {
          mma_m16n8k16_f16(sums[plane][i][j], {low.x, high.x, low.y, high.y}, {b[j].x, b[j].y});
          mma_m16n8k16_f16(sums[plane][i][j], {low.z, high.z, low.w, high.w}, {b[j].z, b[j].w});
        }
        if (plane == 0 && normed) {
          square_sums[2 * i] += sum_of_squares(low);
          square_sums[2 * i + 1] += sum_of_squares(high);
        }
      }
    }
  }

  // Ends a split of K: adds its sums to the totals.
  DEVICE void finish_split(bool normed) {
#pragma unroll
    for (int i = 0; i < kRowGroupPairs; ++i) {
#pragma unroll
      for (int j = 0; j < T::kColumnGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float sum = sums[0][i][j][e];
          if constexpr (T::kPlanes == 2) sum += sums[1][i][j][e];
          totals[i][j][e] += sum;
#pragma unroll
          for (int plane = 0; plane < T::kPlanes; ++plane) sums[plane][i][j][e] = 0;
        }
      }
    }
    if (!normed) return;
#pragma unroll
    for (int i = 0; i < T::kRowGroups; ++i) {
      float square_sum = square_sums[i];
      square_sum += shuffle_xor(square_sum, 1);
      square_sum += shuffle_xor(square_sum, 2);
      total_square_sums[i] += square_sum;
      square_sums[i] = 0;
    }
  }
};

// --- body ---

// The output channels that a thread stores: of two adjacent groups of eight columns it stores four
// adjacent channels of one, so that the warp's stores fill whole sectors.
template <class T>
struct ChannelStores {
  static constexpr int kPairs = T::kColumnGroups / 2;

  f16* data;             // of the first row
  long long row_stride;  // in channels
  int offsets[kPairs < 1 ? 1 : kPairs];
  int plane_size;  // in channels; 0: one plane

  // Of the warp's columns from `first_column` on.
  DEVICE ChannelStores(const ProjectionParams& p, int first_column)
      : data(p.output.data),
        row_stride(static_cast<long long>(p.output.num_planes) * p.num_columns),
        plane_size(p.output.num_planes == 2 ? p.output.num_channels : 0) {
    const int t = lane_idx() % 4;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int n = first_column + 16 * j + t % 2 * 8 + t / 2 * 4;
      const int num_channels = max(p.output.num_channels, 1);
      const int output_row = n / num_channels;
      offsets[j] = output_row * (p.output.num_planes - 1) * num_channels + n;
    }
  }

  // Stores a plane of a pair of groups: `even` has two channels of the first one, `odd` of the
  // second one.
  DEVICE void store_plane(f16* to, bool valid, uint32_t even, uint32_t odd) const {
    const bool is_odd = lane_idx() % 2;
    const uint32_t other = shuffle_xor(is_odd ? even : odd, 1);
    const uint2 channels = is_odd ? uint2{other, odd} : uint2{even, other};
    if (valid) *reinterpret_cast<uint2*>(to) = channels;
  }

  // Stores pair `j` of groups of a row. Called by all lanes of a warp; `valid` lanes store.
  DEVICE void store(int j, int row, bool valid, float2 even, float2 odd) const {
    f16* to = data + row * row_stride + offsets[j];
    const uint32_t first = pack_f16(even.x, even.y), second = pack_f16(odd.x, odd.y);
    store_plane(to, valid, first, second);
    if (plane_size == 0) return;
    const float2 a = unpack_f16(first), b = unpack_f16(second);
    store_plane(to + plane_size, valid, pack_f16(even.x - a.x, even.y - a.y),
                pack_f16(odd.x - b.x, odd.y - b.y));
  }
};

// Applies the epilogue to the totals. The warp's rows begin at `first_row`, its columns at
// `first_column`.
template <class T>
DEVICE void finish_many_rows(const ProjectionParams& p, const ManyRowAccumulator<T>& accumulator,
                             int first_row, int first_column) {
  constexpr bool kPaired = T::kColumnGroups % 2 == 0;
  const int g = lane_idx() / 4, n = first_column + lane_idx() % 4 * 2;
  const ChannelStores<T> stores(p, first_column);
  ColumnParams even[T::kColumnGroups], odd[T::kColumnGroups];
  float2 operands[T::kColumnGroups];
  const auto load_operands = [&](int i) {
    const int row = min(first_row + 8 * i + g, p.num_rows - 1);
#pragma unroll
    for (int j = 0; j < T::kColumnGroups; ++j) {
      operands[j] = load_epilogue_operand(p, row, n + 8 * j);
    }
  };
  load_operands(0);
#pragma unroll
  for (int j = 0; j < T::kColumnGroups; ++j) {
    even[j] = p.column_params[n + 8 * j];
    odd[j] = p.column_params[n + 8 * j + 1];
  }
  const bool stores_channels = p.epilogue == kLinear || p.epilogue == kSnake || p.epilogue == kGelu;
#pragma unroll
  for (int i = 0; i < T::kRowGroups; ++i) {
    const int row = first_row + 8 * i + g;
    const bool valid = row < p.num_rows;
    float2 v[T::kColumnGroups];
    float factor = 1;
    if (p.norm_channels > 0) {
      factor = rsqrtf(accumulator.total_square_sums[i] / p.norm_channels + p.eps);
    }
#pragma unroll
    for (int j = 0; j < T::kColumnGroups; ++j) {
      const float* totals = accumulator.totals[i / 2][j] + i % 2 * 2;
      v[j] = {totals[0], totals[1]};
      if (p.norm_channels > 0) v[j] = {v[j].x * factor, v[j].y * factor};
    }
    float2 current[T::kColumnGroups];
#pragma unroll
    for (int j = 0; j < T::kColumnGroups; ++j) current[j] = operands[j];
    if (i + 1 < T::kRowGroups) load_operands(i + 1);
    if (valid) {
#pragma unroll
      for (int j = 0; j < T::kColumnGroups; ++j) {
        if (kPaired && stores_channels) {
          finish_columns(p, row, n + 8 * j, v[j], even[j], odd[j], current[j]);
        } else {
          apply_epilogue(p, row, n + 8 * j, v[j], even[j], odd[j], current[j]);
        }
      }
    }
    if constexpr (kPaired) {
      if (!stores_channels) continue;
#pragma unroll
      for (int j = 0; j < T::kColumnGroups; j += 2) stores.store(j / 2, row, valid, v[j], v[j + 1]);
    }
  }
}

// The projection kernel of many rows. Reads and writes what `project` does.
template <class T>
DEVICE void project_many_rows(const ProjectionParams& p, ManyRowSharedMemory<T>& shared) {
  trigger_dependent_grids();
  constexpr int kAhead = kManyRowStages - 1;
  const int num_steps = p.num_taps * p.input.num_channels / kStepChannels;
  const int column_tiles = p.num_columns / T::kColumns;
  const int first_column = block_idx() % column_tiles * T::kColumns;
  const int first_row = block_idx() / column_tiles * T::kRows;
  const int warp_row = warp_idx() / T::kColumnWarps * 8 * T::kRowGroups;
  const int warp_column_group = warp_idx() % T::kColumnWarps * T::kColumnGroups;
  const bool normed = p.norm_channels > 0;
  // Steps that are copied ahead reach into this many windows.
  const int num_windows = (kManyRowStages - 2 + p.num_taps) / p.num_taps + 1;
  ManyRowCopies<T> copies{p,
                          shared,
                          {p, first_row},
                          num_windows,
                          p.weights + static_cast<long long>(first_column / 8) * num_steps * 32,
                          num_steps};
  const auto& window = copies.window;

  // Weights do not depend on the previous kernel.
  for (int step = 0; step < min(kAhead, num_steps); ++step) copies.copy_weights(step);
  for (int i = thread_idx(); i < window.num_rows; i += kBlockThreads) {
    shared.sources[i] = window.source(i);
  }
  int rows[T::kRowGroups];  // of the current tap, relative to a window, in units of 16 bytes
#pragma unroll
  for (int i = 0; i < T::kRowGroups; ++i) {
    rows[i] = 4 * window.position(warp_row + 8 * i + lane_idx() / 4) + lane_idx() % 4;
  }
  wait_for_prerequisite_grids();
  sync_all_threads();
  int next = 0, next_tap = 0, next_channel_step = 0;  // the next step to copy
  const auto copy_next_rows = [&] {
    if (next < num_steps && next_tap == 0) copies.copy_rows(next_channel_step);
    if (++next_tap == p.num_taps) next_tap = 0, ++next_channel_step;
    ++next;
    copy_async_commit();
  };
  for (int i = 0; i < kAhead; ++i) copy_next_rows();

  ManyRowAccumulator<T> accumulator;
  const int plane_size = 4 * window.num_rows;
  int step = 0, tap = 0, window_idx = 0;
#pragma unroll 1
  for (int split = 1; split <= p.num_k_splits; ++split) {
    const int end = num_steps * split / p.num_k_splits;
#pragma unroll 1
    for (; step < end; ++step) {
      copy_async_wait<kAhead - 1>();
      sync_all_threads();
      if (next < num_steps) copies.copy_weights(next);
      copy_next_rows();
      const uint4* at = shared.rows + window_idx * (T::kPlanes * plane_size) + tap * p.dilation * 4;
      accumulator.multiply_step(
          at, rows, plane_size,
          &shared.weights[step % kManyRowStages][warp_column_group][lane_idx()], normed);
      if (++tap == p.num_taps) {
        tap = 0;
        if (++window_idx == num_windows) window_idx = 0;
      }
    }
    accumulator.finish_split(normed);
  }
  copy_async_wait<0>();
  finish_many_rows<T>(p, accumulator, first_row + warp_row, first_column + 8 * warp_column_group);
}

}  // namespace megakernel::codec
