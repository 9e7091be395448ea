// The input rows that a range of rows needs, for all taps of a convolution.
#pragma once

#include "activations.cuh"

namespace megakernel::codec {

// The window of `kRows` rows: frame by frame, the rows before the frame's first row in the range
// that the taps need (the halo), then the frame's rows in the range.
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

}  // namespace megakernel::codec
