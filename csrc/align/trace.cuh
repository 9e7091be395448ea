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

// A strip's directions, some tiles of them: bit c of a word is column c of the tile as the row's
// lane counts.
using Window = uint32_t[kWindow][kStrip];

// Two, so that the next strip's come while this one's are followed.
struct Windows {
  alignas(16) Window of[2];
};

// A row's words of a tile and of the two before it.
struct Words {
  uint32_t of[3];
  int tile;  // kUnknown if they are not in the window
};
constexpr int kUnknown = 1 << 30;

// Follows the way back, with one warp whose lanes all do the same. Columns are counted as a row's
// lane counts them: from the strip's first, and a step more for every lane.
struct Tracer {
  const Search& p;
  const Lattice& of;
  Window* window;
  int first = 0;  // its first tile

  DEVICE static int shift(int row) {
    return static_cast<unsigned>(row) % kStrip / kRows * kStep -
           static_cast<unsigned>(row) / kStrip * kStrip;
  }

  // Asks for a window that ends with the tile of a row's column; returns its first tile.
  DEVICE int copy(Window& window, int row, int column) const {
    const int strip = row / kStrip, last = (column + shift(row)) / kTile;
    const int first = max(0, last - kWindow + 1);
    const int64_t tiles = static_cast<int64_t>(of.item) * p.strips + strip;
    const uint32_t* from = p.direction + (tiles * (p.tiles + kLag) + first) * kStrip;
    for (int i = 4 * lane(); i < (last - first + 1) * kStrip; i += 4 * 32) {
      copy_or_zero<16>(window[0] + i, from + i, 16);
    }
    return first;
  }

  DEVICE uint32_t word(int tile, int row) const {
    return (*window)[tile - first][static_cast<unsigned>(row) % kStrip];
  }
  DEVICE Words words(int tile, int row) const {
    if (tile < first || (first > 0 && tile < first + 2)) return {{}, kUnknown};
    return {
        {word(tile, row), tile < 1 ? 0 : word(tile - 1, row), tile < 2 ? 0 : word(tile - 2, row)},
        tile};
  }

  // The last column, not after `at`, at which a row is reached from the row above. On the diagonal,
  // at `lowest`, it always is, though no direction may say so where all sums are minus infinity.
  DEVICE int begin(int row, int at, int lowest) {
    for (;;) {
      const int tile = at / kTile;
      if (tile < first) {
        warp_sync();
        first = copy(*window, row, at - shift(row));
        wait_for_own();
        warp_sync();
      }
      const uint32_t before = word(tile, row) << (kTile - 1 - at % kTile);
      at = max(before ? at - leading_zeros(before) : kTile * tile - 1, lowest);
      if (before || at == lowest) return at;
    }
  }
  // The same, from words that were asked for before it was known where to look.
  DEVICE int begin(int row, int at, int lowest, const Words& known) {
    const unsigned tile = static_cast<unsigned>(at) / kTile, back = known.tile - tile;
    if (back > 1) return begin(row, at, lowest);
    const uint32_t high = back ? known.of[1] : known.of[0], low = back ? known.of[2] : known.of[1];
    const uint32_t before = move_up(high, low, kTile - 1 - static_cast<unsigned>(at) % kTile);
    return before ? at - leading_zeros(before) : begin(row, at, lowest);
  }
};

// A row's duration is counted from the last column at which it is reached from the row above.
DEVICE void trace(const Search& p, const Lattice& of, Windows& windows, int* durations) {
  if (of.rows == 0) return;
  int row = of.rows - 1, end = of.columns;  // of the row
  Tracer tracer = {p, of, &windows.of[0]};
  int next = tracer.copy(windows.of[0], row, end - 1);
  for (int strip = of.strips - 1; strip >= 0; --strip) {
    wait_for_own();
    warp_sync();
    tracer.window = &windows.of[(of.strips - 1 - strip) % 2];
    tracer.first = next;
    const int top = kStrip * strip;
    if (strip > 0) {
      Window& other = windows.of[(of.strips - strip) % 2];
      next = tracer.copy(other, top - 1, min(end - 1, of.columns - of.rows + top - 1));
    }
    Words words = tracer.words((end - 1 + tracer.shift(row)) / kTile, row);
    for (; row >= top; --row) {
      const int shift = tracer.shift(row), at = end - 1 + shift;
      const Words above = row > top ? tracer.words(at / kTile, row - 1) : words;
      const int start = tracer.begin(row, at, row + shift, words) - shift;
      if (lane() == 0) durations[row] = end - start;
      end = start;
      words = above;
    }
  }
}

}  // namespace megakernel::align
