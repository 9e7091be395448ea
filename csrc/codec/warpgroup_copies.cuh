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

// Begins the bulk copies of a step of tiled rows: [planes, instructions, halves of K] ranges of the
// rows of a tile from `rows` on, `halo` rows into a window. If `copied_halo` is not 0, it is `halo`
// and frames are not interleaved: the rows before are copied as well, from the tile `tile_size`
// elements before.
template <class T>
DEVICE void begin_bulk_copies(const f16* rows, long long tile_size, int halo, int copied_halo,
                              uint4* to, Mbarrier& full, uint64_t policy) {
  constexpr int kRanges = 4 * T::kPlanes, kRowBytes = sizeof(uint4);
  mbarrier_expect_copy(full, kRanges * (copied_halo + kTileRows) * kRowBytes);
#pragma unroll
  for (int i = 0; i < kRanges; ++i, rows += 8 * kTileRows, to += T::kWindowRows) {
    copy_async_bulk(to + halo, rows, kTileRows * kRowBytes, full, policy);
    if (copied_halo == 0) continue;
    copy_async_bulk(to, rows - tile_size + 8 * (kTileRows - halo), halo * kRowBytes, full, policy);
  }
}

// Copy warp `warp` of tile `row_tile` of rows copies its rows of window `window_idx` of input
// [rows, planes, channels] and its history: of each stage [planes, instructions, halves of K, rows,
// 8]. As in the other kernels, instruction i of a step has channels 8 t + 4 i to 8 t + 4 i + 3 of
// every t. With one tap, the rows of each step of channels are behind those of the one before. Of a
// tiled input only the history is copied so, and the first warp copies the other rows in bulk.
template <class T>
DEVICE void copy_window_by_rows(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                                int window_idx, int row_tile, int warp,
                                RingPosition<T::kStages>& at) {
  const int steps_of_stage = p.num_taps == 1 ? T::kStageSteps : 1;  // of channels
  const int piece = lane_idx() % 8, t = piece / 2, instruction = piece % 2;
  const int half = 2 * instruction + t / 2, part = t % 2;  // of K; of the half's 16 bytes
  const typename WarpgroupSchedule<T>::Window window(p, window_idx);
  const bool is_tiled = T::kMayBeTiled && p.input.is_tiled;
  const bool has_history = is_tiled && window.first_row == 0 &&
                           p.frames[window.first_frame].first_frame == window.first_frame;
  int end = (window.num_rows + 3) / 4 * 4;  // of the rows that are not copied in bulk
  if (is_tiled) end = has_history ? window.halo : 0;
  const int first_row = 4 * warp + lane_idx() / 8, row_stride = 4 * T::kCopyWarps;
  const int num_rows = max(end - first_row + row_stride - 1, 0) / row_stride;  // of a lane
  const f16** sources = shared.sources[row_tile] + first_row;
  sync_warp();  // the last copies of the previous tile have read their addresses
  for (int i = lane_idx() % 8; i < num_rows; i += 8) {
    sources[i * row_stride] = window.source(first_row + i * row_stride);
  }
  sync_warp();
  const f16* rows = p.input.data + tiled_offset(p.input, window_idx * kTileRows, 0);
  const long long tile_size = static_cast<long long>(kTileRows) * T::kPlanes * p.input.num_channels;
  int channel = 4 * piece;
#pragma unroll 1
  while (channel < p.input.num_channels) {
    Mbarrier& full = shared.full_windows[row_tile][at.entry];
    uint4* entry = shared.windows[row_tile][at.entry];
    wait_for_completion(shared.empty_windows[row_tile][at.entry], at.parity ^ 1);
    if (T::kMayBeTiled && warp == 0) {
      if (is_tiled) {
        begin_bulk_copies<T>(rows, tile_size, window.halo, has_history ? 0 : window.halo, entry,
                             full, l2_evict_first_policy());
        rows += T::kPlanes * kTiledPlaneSize;
      } else {
        mbarrier_arrive_if(lane_idx() == 0, full);  // as `mbarrier_expect_copy` does
      }
    }
    uint2* to = reinterpret_cast<uint2*>(entry) + 2 * (half * T::kWindowRows + first_row) + part;
#pragma unroll 1
    for (int i = 0; i < steps_of_stage; ++i) {
      copy_rows<T>(sources, num_rows, channel, p.input.num_channels, to);
      channel += kStepChannels, to += 2 * window.num_rows;
    }
    mbarrier_arrive_on_copies(full);
    at.advance();
  }
}

// A warp copies window `window_idx` stage by stage, if its rows are tiled and have no predecessors.
template <class T>
DEVICE void copy_stages_of_tile(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                                int window_idx, int row_tile, uint64_t policy,
                                RingPosition<T::kStages>& at) {
  const int num_stages = p.input.num_channels / (T::kStageSteps * kStepChannels);
  const int bytes = T::kWindowSize * static_cast<int>(sizeof(uint4));
  const uint4* from = reinterpret_cast<const uint4*>(p.input.data) +
                      static_cast<long long>(window_idx) * num_stages * T::kWindowSize;
#pragma unroll 1
  for (int stage = 0; stage < num_stages; ++stage, from += T::kWindowSize) {
    Mbarrier& full = shared.full_windows[row_tile][at.entry];
    wait_for_completion(shared.empty_windows[row_tile][at.entry], at.parity ^ 1);
    mbarrier_expect_copy(full, bytes);
    copy_async(shared.windows[row_tile][at.entry], from, bytes, full, policy);
    at.advance();
  }
}

// Four channels of a step of a row: where those of the first step are, and their distance from step
// to step, in elements.
struct RowPiece {
  const f16* at;
  int stride;
};

// Piece `piece` of 8 of plane `plane` of the row before the window's first row of frame `frame` of
// the window.
template <int kPlanes>
DEVICE RowPiece piece_before_window(const ProjectionParams& p,
                                    const InterleavedWindow<kPlanes>& window, int frame, int plane,
                                    int piece) {
  const Activations& x = p.input;
  const int idx = min(window.first_frame + frame, p.num_rows / x.rows_per_frame - 1);
  const Frame& of_row = p.frames[idx];
  const int row = idx * x.rows_per_frame + window.first_row - 1;
  if (window.first_row > 0 || idx > of_row.first_frame) {
    return {x.data + tiled_offset(x, tiled_row(x, row), 4 * piece) + plane * kTiledPlaneSize,
            kPlanes * kTiledPlaneSize};
  }
  const f16* slot = x.history + of_row.slot * x.history_stride;
  return {slot + ((x.history_rows - 1) * kPlanes + plane) * x.num_channels + 4 * piece,
          kStepChannels};
}

// Copy warp `warp` of tile `row_tile` of rows copies its part of window `window_idx` for two taps,
// stage by stage. The first warp copies the tiled rows of the window in bulk: [planes,
// instructions, halves of K] ranges of kTileRows rows. All copy those before, one for each frame.
template <class T>
DEVICE void copy_window_of_two_taps(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                                    int window_idx, int row_tile, int warp, uint64_t policy,
                                    RingPosition<T::kStages>& at) {
  constexpr int kPiecesPerFrame = 8 * T::kPlanes;
  constexpr int kLanes = 32 * T::kCopyWarps;
  constexpr int kPieces = (T::kHaloRows * kPiecesPerFrame + kLanes - 1) / kLanes;  // of a lane
  const InterleavedWindow<T::kPlanes> window(p, window_idx);
  RowPiece pieces[kPieces];
  int targets[kPieces];  // in units of eight bytes; -1: no piece
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int idx = 32 * warp + lane_idx() + i * kLanes, frame = idx / kPiecesPerFrame;
    const int plane = idx / 8 % T::kPlanes, piece = idx % 8, t = piece / 2;
    const int half = 2 * (piece % 2) + t / 2;
    targets[i] = frame < window.num_frames
                     ? 2 * (plane * T::kPlaneSize + half * T::kWindowRows + frame) + t % 2
                     : -1;
    pieces[i] = piece_before_window<T::kPlanes>(p, window, frame, plane, piece);
  }
  const f16* rows = p.input.data + tiled_offset(p.input, window_idx * kTileRows, 0);
#pragma unroll 1
  for (int channel = 0; channel < p.input.num_channels; channel += kStepChannels) {
    Mbarrier& full = shared.full_windows[row_tile][at.entry];
    uint4* to = shared.windows[row_tile][at.entry];
    wait_for_completion(shared.empty_windows[row_tile][at.entry], at.parity ^ 1);
    if (warp == 0) {
      begin_bulk_copies<T>(rows, 0, window.num_frames, 0, to, full, policy);
      rows += T::kPlanes * kTiledPlaneSize;
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      copy_async_8_bytes_if(targets[i] >= 0, reinterpret_cast<uint2*>(to) + targets[i],
                            pieces[i].at);
      pieces[i].at += pieces[i].stride;
    }
    mbarrier_arrive_on_copies(full);
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
    if constexpr (T::kHaloRows > 0) {
      const int last = WarpgroupSchedule<T>::Window::num_windows(p) - 1;
      copy_window_of_two_taps<T>(p, shared, min(window_idx, last), row_tile, warp,
                                 l2_evict_last_policy(), at);
    } else if constexpr (T::kIsTiled) {
      copy_stages_of_tile<T>(p, shared, window_idx, row_tile, l2_evict_last_policy(), at);
    } else {
      copy_window_by_rows<T>(p, shared, window_idx, row_tile, warp, at);
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

// A warp copies the weights of `count` tiles of columns, [steps, 4, kColumns, 8], stage by stage.
// Those of a tile begin `stride` units of 16 bytes after those of the tile before.
template <class T>
DEVICE void copy_tile_weights(WarpgroupSharedMemory<T>& shared, const uint4* from, int num_steps,
                              int count, long long stride, uint64_t policy,
                              RingPosition<T::kWeightStages>& at) {
  constexpr int kStageSize = T::kStageSteps * T::kStepSize;
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
                         min(items.count, T::kColumnTiles), size, policy, at);
    if (T::kIsResident) break;
  }
}

}  // namespace megakernel::codec

#endif  // MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS
