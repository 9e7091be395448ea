// The copy warps of warpgroup_rows.cuh, which fill the rings of windows and of weights.
#pragma once

#include "warpgroup_tile.cuh"

#ifdef MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

namespace megakernel::codec {

// A lane copies 4 channels of `num_rows` rows of a window, each 4 kCopyWarps rows behind the one
// before: from channel `channel` of the rows at `sources` to `to`.
template <class T>
DEVICE void copy_rows(const f16* const* sources, int num_rows, int channel, int num_channels,
                      uint2* to) {
  constexpr int kBatch = 4;  // loads of addresses in flight
  constexpr int kRowStride = 4 * T::kCopyWarps;
  const f16* from[kBatch];
#pragma unroll 1
  for (; num_rows >= kBatch; num_rows -= kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) from[i] = sources[i * kRowStride] + channel;
#pragma unroll
    for (int i = 0; i < kBatch * T::kPlanes; ++i) {
      const int row = i / T::kPlanes, plane = i % T::kPlanes;
      copy_async_8_bytes(to + 2 * (plane * T::kPlaneSize + row * kRowStride),
                         from[row] + plane * num_channels);
    }
    sources += kBatch * kRowStride, to += 2 * kBatch * kRowStride;
  }
  if (num_rows == 0) return;
#pragma unroll
  for (int i = 0; i < kBatch - 1; ++i) {
    from[i] = sources[min(i, num_rows - 1) * kRowStride] + channel;
  }
#pragma unroll
  for (int i = 0; i < (kBatch - 1) * T::kPlanes; ++i) {
    const int row = i / T::kPlanes, plane = i % T::kPlanes;
    copy_async_8_bytes_if(row < num_rows, to + 2 * (plane * T::kPlaneSize + row * kRowStride),
                          from[row] + plane * num_channels);
  }
}

// Copy warp `warp` of tile `row_tile` of rows copies its rows of window `window_idx` of input
// [rows, planes, channels] and its history: of each stage [planes, instructions, halves of K, rows,
// 8]. As in the other kernels, instruction i of a step has channels 8 t + 4 i to 8 t + 4 i + 3 of
// every t. With one tap, the rows of each step of channels are behind those of the one before.
template <class T>
DEVICE void copy_tile_windows(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                              int window_idx, int row_tile, int warp,
                              RingPosition<T::kStages>& at) {
  const int steps_of_stage = p.num_taps == 1 ? T::kStageSteps : 1;  // of channels
  const int piece = lane_idx() % 8, t = piece / 2, instruction = piece % 2;
  const int half = 2 * instruction + t / 2, part = t % 2;  // of K; of the half's 16 bytes
  const typename WarpgroupSchedule<T>::Window window(p, window_idx);
  const int num_fours = (window.num_rows + 3) / 4;                              // of rows
  const int num_rows = (num_fours - warp + T::kCopyWarps - 1) / T::kCopyWarps;  // of a lane
  const int first_row = 4 * warp + lane_idx() / 8, row_stride = 4 * T::kCopyWarps;
  const f16** sources = shared.sources[row_tile] + first_row;
  sync_warp();  // the last copies of the previous tile have read their addresses
  for (int i = lane_idx() % 8; i < num_rows; i += 8) {
    sources[i * row_stride] = window.source(first_row + i * row_stride);
  }
  sync_warp();
  int channel = 4 * piece;
#pragma unroll 1
  while (channel < p.input.num_channels) {
    wait_for_completion(shared.empty_windows[row_tile][at.entry], at.parity ^ 1);
    uint2* to = reinterpret_cast<uint2*>(shared.windows[row_tile][at.entry]) +
                2 * (half * T::kWindowRows + first_row) + part;
#pragma unroll 1
    for (int i = 0; i < steps_of_stage; ++i) {
      copy_rows<T>(sources, num_rows, channel, p.input.num_channels, to);
      channel += kStepChannels, to += 2 * window.num_rows;
    }
    mbarrier_arrive_on_copies(shared.full_windows[row_tile][at.entry]);
    at.advance();
  }
}

// A warp copies tile `tile` of tiled rows, stage by stage.
template <class T>
DEVICE void copy_tiled_rows(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared, int tile,
                            uint64_t policy, RingPosition<T::kStages>& at) {
  const int num_stages = p.input.num_channels / (kStepChannels * T::kStageSteps);
  const int bytes = T::kWindowSize * static_cast<int>(sizeof(uint4));
  const uint4* from = reinterpret_cast<const uint4*>(p.input.data) +
                      static_cast<long long>(tile) * num_stages * T::kWindowSize;
#pragma unroll 1
  for (int stage = 0; stage < num_stages; ++stage, from += T::kWindowSize) {
    Mbarrier& full = shared.full_windows[0][at.entry];
    wait_for_completion(shared.empty_windows[0][at.entry], at.parity ^ 1);
    mbarrier_expect_copy(full, bytes);
    copy_async(shared.windows[0][at.entry], from, bytes, full, policy);
    at.advance();
  }
}

// The copies of rows for all items of `row_tile`.
template <class T>
DEVICE void copy_windows(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                         const WarpgroupSchedule<T>& schedule, int row_tile, int warp) {
  RingPosition<T::kStages> at;
#pragma unroll 1
  for (int round = 0; round <= schedule.num_full_rounds; ++round) {
    const Items items = schedule.items(round);
    if (row_tile >= items.count) break;
    const int window_idx = schedule.window_idx(items.first + row_tile);
    if constexpr (T::kIsTiled) {
      copy_tiled_rows<T>(p, shared, window_idx, l2_evict_last_policy(), at);
    } else {
      copy_tile_windows<T>(p, shared, window_idx, row_tile, warp, at);
    }
  }
}

// A warp copies a stage of weights: of each of `count` tiles of columns `size` units of 16 bytes,
// which are `stride` units behind those of the tile before.
template <class T>
DEVICE void copy_stage(WarpgroupSharedMemory<T>& shared, const uint4* from, int size, int count,
                       long long stride, uint64_t policy, RingPosition<T::kWeightStages>& at) {
  const int bytes = size * static_cast<int>(sizeof(uint4));
  Mbarrier& full = shared.full_weights[at.entry];
  wait_for_completion(shared.empty_weights[at.entry], at.parity ^ 1);
  mbarrier_expect_copy(full, bytes * count);
#pragma unroll
  for (int i = 0; i < T::kColumnTiles; ++i) {
    if (i < count) {
      copy_async(shared.weights[i][at.entry * T::kStageSteps], from + i * stride, bytes, full,
                 policy);
    } else {
      mbarrier_arrive_if(lane_idx() > 0, full);  // as `copy_async` does
    }
  }
  at.advance();
}

// A warp copies the weights of the tiles of columns of a block, [steps, 4, kColumns, 8], stage by
// stage.
template <class T>
DEVICE void copy_tile_weights(WarpgroupSharedMemory<T>& shared, const uint4* from, int num_steps,
                              int count, uint64_t policy, RingPosition<T::kWeightStages>& at) {
  constexpr int kStageSize = T::kStageSteps * T::kStepSize;
  const long long stride = static_cast<long long>(num_steps) * T::kStepSize;
#pragma unroll 1
  for (int step = 0; step < num_steps; step += T::kStageSteps, from += kStageSize) {
    copy_stage<T>(shared, from, kStageSize, count, stride, policy, at);
  }
}

// A warp copies warpgroup_weights [column tiles, steps, 4, kColumns, 8] for the items of all
// rounds.
template <class T>
DEVICE void copy_weights(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                         const WarpgroupSchedule<T>& schedule) {
  const uint64_t policy = l2_evict_last_policy();
  RingPosition<T::kWeightStages> at;
#pragma unroll 1
  for (int round = 0; round <= schedule.num_full_rounds; ++round) {
    const Items items = schedule.items(round);
    if (items.count == 0) break;
    const long long size = static_cast<long long>(schedule.num_steps) * T::kStepSize;
    const int column_tile = schedule.first_column(items.first) / T::kColumns;
    copy_tile_weights<T>(shared, p.warpgroup_weights + column_tile * size, schedule.num_steps,
                         min(items.count, T::kColumnTiles), policy, at);
  }
}

}  // namespace megakernel::codec

#endif  // MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS
