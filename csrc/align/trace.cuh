// From the directions of all cells back along the best way, a row at a time.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

// An item's lattice. Nothing goes through one of more rows than columns, nor through an empty one:
// it has no rows, columns and strips.
struct Lattice {
  int item, rows, columns, strips;
};

DEVICE int64_t length(const Lengths& lengths, int item) {
  if (lengths.each == nullptr) return lengths.all;
  return lengths.wide ? static_cast<const int64_t*>(lengths.each)[item]
                      : static_cast<const int*>(lengths.each)[item];
}

DEVICE Lattice lattice(const Search& p, int item) {
  const int64_t rows = length(p.text, item), columns = length(p.frames, item);
  if (rows < 1 || rows > p.rows || columns > p.columns || rows > columns) return {item, 0, 0, 0};
  const int count = static_cast<int>(rows);
  return {item, count, static_cast<int>(columns), (count + kStrip - 1) / kStrip};
}

// A strip's directions, `kWindow` tiles of them: bit c of a word is column c of the tile as the row's
// lane counts. Two, so that the next strip's come while this one's are followed.
struct Windows {
  alignas(16) uint32_t words[2][kWindow][kStrip];
};

// Asks for a window that ends with the tile `last`; returns its first tile.
DEVICE int copy_window(const Search& p, const Lattice& of, int strip, int last,
                       uint32_t (&words)[kWindow][kStrip]) {
  const int first = max(0, last - kWindow + 1);
  const uint32_t* from =
      p.direction +
      ((static_cast<int64_t>(of.item) * p.strips + strip) * (p.tiles + kLag) + first) * kStrip;
  for (int i = 4 * lane(); i < (last - first + 1) * kStrip; i += 4 * 32) {
    copy_or_zero<16>(words[0] + i, from + i, 16);
  }
  return first;
}

// One warp, whose lanes all do the same. A row's duration is counted from its first column, the last
// at which the way came from the row above.
DEVICE void trace(const Search& p, const Lattice& of, Windows& windows, int* durations) {
  int end = of.columns;  // of the row
  const auto place = [&](int row, int column) {
    return column - row / kStrip * kStrip + row % kStrip / kRows * kStep;
  };
  int row = of.rows - 1, which = 0;
  if (row < 0) return;
  int first = copy_window(p, of, of.strips - 1, place(row, end - 1) / kTile, windows.words[0]);
  for (int strip = of.strips - 1; strip >= 0; --strip) {
    int next = 0;
    wait_for_own();
    warp_sync();
    if (strip > 0) {
      const int above = kStrip * strip - 1, least = min(end - 1, of.columns - of.rows + above);
      next = copy_window(p, of, strip - 1, place(above, least) / kTile, windows.words[1 - which]);
    }
    for (; row >= kStrip * strip; --row) {
      const int lowest = place(row, row);
      int at = place(row, end - 1);
      for (;;) {
        const int tile = at / kTile;
        if (tile < first) {
          warp_sync();
          first = copy_window(p, of, strip, tile, windows.words[which]);
          wait_for_own();
          warp_sync();
        }
        const uint32_t word =
            windows.words[which][tile - first][row % kStrip] & ~0u >> (kTile - 1 - at % kTile);
        at = max(word ? kTile * tile + highest_bit(word) : kTile * tile - 1, lowest);
        if (word || at == lowest) break;
      }
      const int start = at - lowest + row;
      if (lane() == 0) durations[row] = end - start;
      end = start;
    }
    first = next;
    which = 1 - which;
  }
}

}  // namespace megakernel::align
