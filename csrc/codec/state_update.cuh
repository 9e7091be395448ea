// Updates the histories after all layers have read them.
//
//   history = the last history_rows rows of [history, rows of the frames that were generated]
//
// One block per frame and layer. Blocks of other frames than a stream's first one return at once.
#pragma once

#include "activations.cuh"

namespace megakernel::codec {

// --- static asserts ---

static_assert(sizeof(uint4) == 8 * sizeof(f16), "a thread moves eight channels at a time");

// --- shared memory ---

// None.

// --- warp roles ---

// All warps do the same. A thread moves all rows of its channels, the oldest first, so that rows
// can move within the history without a barrier.

// --- body ---

constexpr int kRowsPerMove = 6;  // loads of a thread in flight

// The state update kernel. Reads and writes history [history_rows, planes, channels] of each layer
// and slot; reads data [rows, planes, channels], or tiled.
DEVICE void update_state(const StateUpdateParams& p) {
  const int first_frame = block_idx() % p.num_frames;
  if (p.frames[first_frame].first_frame != first_frame) return;
  const Activations& layer = p.activations[block_idx() / p.num_frames];
  const int width = layer.num_planes * layer.num_channels / 8;
  const int num_new_rows = p.num_kept_frames[first_frame] * layer.rows_per_frame;
  if (num_new_rows == 0) return;
  uint4* history =
      reinterpret_cast<uint4*>(layer.history + p.frames[first_frame].slot * layer.history_stride);
  const int first_row = first_frame * layer.rows_per_frame;
  for (int c = thread_idx(); c < width; c += kBlockThreads) {
    const int plane = 8 * c / layer.num_channels, channel = 8 * c % layer.num_channels;
#pragma unroll 1
    for (int row = 0; row < layer.history_rows; row += kRowsPerMove) {
      uint4 values[kRowsPerMove];
#pragma unroll
      for (int i = 0; i < kRowsPerMove; ++i) {
        const int from = min(row + i, layer.history_rows - 1) + num_new_rows - layer.history_rows;
        values[i] =
            from >= 0 ? load_eight_maybe_tiled_activations(layer, first_row + from, plane, channel)
                      : history[(from + layer.history_rows) * width + c];
      }
#pragma unroll
      for (int i = 0; i < kRowsPerMove; ++i) {
        if (row + i < layer.history_rows) history[(row + i) * width + c] = values[i];
      }
    }
  }
}

}  // namespace megakernel::codec
