// The input rows that some rows need, for all taps of a convolution.
#pragma once

#include "activations.cuh"

namespace megakernel::codec {

// The window of a range of `kRows` rows: frame by frame, the rows before the frame's first row in
// the range that the taps need (the halo), then the frame's rows in the range.
template <int kRows, int kPlanes>
struct RowWindow {
  const ProjectionParams& p;
  int first_row;  // of the range; it may end behind the last row, and begin there
  int halo;       // rows before a frame's first row
  int num_rows;   // of the window

  // Of the rows from `first_row` on.
  DEVICE RowWindow(const ProjectionParams& p, int first_row)
      : p(p), first_row(first_row), halo((p.num_taps - 1) * p.dilation) {
    num_rows = position(kRows - 1) + halo + 1;
  }

  // The row of the window that holds the input of `row` of the range at the oldest tap.
  DEVICE int position(int row) const {
    const int rows_per_frame = p.input.rows_per_frame;
    const int frame = (first_row + row) / rows_per_frame - first_row / rows_per_frame;
    return row + frame * halo;
  }

  // The address of row `at` of the window. Behind the last row it is that of another row.
  DEVICE const f16* source(int at) const {
    const int rows_per_frame = p.input.rows_per_frame;
    const int rows_of_first_frame = min(kRows, rows_per_frame - first_row % rows_per_frame);
    int first = first_row, offset = at;  // the frame's first row in the range; row of its part
    if (at >= halo + rows_of_first_frame) {
      const int further = at - halo - rows_of_first_frame;
      const int frame = further / (halo + rows_per_frame);
      first += rows_of_first_frame + frame * rows_per_frame;
      offset = further % (halo + rows_per_frame);
    }
    const int row = min(max(first, first - halo + offset), p.num_rows - 1);
    const int back = max(halo - offset, 0);
    const RowAddress address = row_address(p.input, p.frames, row);
    const f16* from = address.rows_since_start >= back ? address.current : address.history;
    return from - back * kPlanes * p.input.num_channels;
  }
};

// The window of kTileRows rows for matrix instructions whose rows have a constant distance in
// shared memory. kTileRows / F adjacent rows of a frame are computed together with the same rows of
// F - 1 following frames, in the order of `tiled_row`: row i is of frame i % F, and its input is
// `tap * dilation * F` rows of the window after that of the oldest tap, which is row i of the
// window.
template <int kPlanes>
struct InterleavedWindow {
  const ProjectionParams& p;
  int num_frames, first_frame;  // F; the first frame
  int first_row;                // in each frame
  int halo;                     // rows before the first one that the taps need
  int num_rows;                 // of the window

  // Window `idx` of a launch.
  DEVICE InterleavedWindow(const ProjectionParams& p, int idx)
      : p(p),
        num_frames(interleaved_frames(p.input.rows_per_frame)),
        halo((p.num_taps - 1) * p.dilation) {
    const int rows = kTileRows / num_frames, windows = p.input.rows_per_frame / rows;
    first_frame = idx / windows * num_frames;
    first_row = idx % windows * rows;
    num_rows = (rows + halo) * num_frames;
  }

  // The windows of a launch.
  DEVICE static int num_windows(const ProjectionParams& p) {
    const int num_frames = interleaved_frames(p.input.rows_per_frame);
    const int groups = (p.num_rows / p.input.rows_per_frame + num_frames - 1) / num_frames;
    return groups * (p.input.rows_per_frame * num_frames / kTileRows);
  }

  // Row `i` of the kTileRows rows as a row of the call, or one behind its last row.
  DEVICE int row(int i) const {
    return (first_frame + i % num_frames) * p.input.rows_per_frame + first_row + i / num_frames;
  }

  // The address of row `at` of the window. Behind the last row it is that of another row.
  DEVICE const f16* source(int at) const {
    const int rows_per_frame = p.input.rows_per_frame;
    at = min(at, num_rows - 1);
    const int frame = min(first_frame + at % num_frames, p.num_rows / rows_per_frame - 1);
    const int offset = at / num_frames - halo;  // from the first row
    const int row = frame * rows_per_frame + first_row + max(offset, 0), back = max(-offset, 0);
    const RowAddress address = row_address(p.input, p.frames, row);
    const f16* from = address.rows_since_start >= back ? address.current : address.history;
    return from - back * kPlanes * p.input.num_channels;
  }
};

}  // namespace megakernel::codec
