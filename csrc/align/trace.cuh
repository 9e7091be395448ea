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

// A row's words of a tile and of the kBefore before it, asked for before it is known where to look.
constexpr int kBefore = 2;
struct Words {
  uint32_t of[1 + kBefore];
  unsigned tile;
};

// Follows the way back through a strip, with one warp whose lanes all do the same. Rows are counted
// from the strip's first; columns as a row's lane counts them, also from the strip's first, and a
// step more for every lane.
struct Tracer {
  const uint32_t* directions;  // of the strip's tiles
  int strip;
  Window* window;
  int first = 0;  // the window's first tile; those before the strip's first have no directions

  DEVICE Tracer(const Search& p, const Lattice& of, int strip, Windows& windows)
      : directions(p.direction +
                   (static_cast<int64_t>(of.item) * p.strips + strip) * (p.tiles + kLag) * kStrip),
        strip(strip),
        window(&windows.of[strip % 2]) {}

  // How much later a row's lane is at a column.
  DEVICE static unsigned later(unsigned row) { return row / kRows * kStep; }

  // Asks for the tiles up to one.
  DEVICE void copy(int last) {
    first = max(-kBefore, last - kWindow + 1);
    for (int i = 4 * lane(); i < (last - first + 1) * kStrip; i += 4 * 32) {
      const int at = first * kStrip + i;
      copy_or_zero<16>((*window)[0] + i, directions + max(at, 0), at < 0 ? 0 : 16);
    }
  }

  DEVICE Words words(unsigned row, unsigned tile) {
    const int last = static_cast<int>(tile);
    if (last - kBefore < first) {
      warp_sync();
      copy(last);
      wait_for_own();
      warp_sync();
    }
    const uint32_t* at = (*window)[last - first] + row;
    return {{at[0], at[-kStrip], at[-2 * kStrip]}, tile};
  }

  // The last column, not after `at`, at which a row is reached from the row above. On the diagonal
  // it always is, though no direction may say so where all sums are minus infinity.
  DEVICE unsigned begin(unsigned row, unsigned at) {
    const unsigned lowest = row + later(row);
    while (at > lowest) {
      const uint32_t before = words(row, at / kTile).of[0] << (kTile - 1 - at % kTile);
      if (before) return at - leading_zeros(before);
      if (at / kTile == 0) break;
      at = at / kTile * kTile - 1;
    }
    return lowest;
  }
  // The same, from words of the row at `at` or after it.
  DEVICE unsigned begin(unsigned row, unsigned at, const Words& known) {
    const unsigned back = known.tile - at / kTile;
    const uint32_t high = back ? known.of[1] : known.of[0], low = back ? known.of[2] : known.of[1];
    const uint32_t before = move_up(high, low, kTile - 1 - at % kTile);
    return back < kBefore && before ? at - leading_zeros(before) : begin(row, at);
  }

  // From a row's last column up to the strip's first row, whose first column it returns.
  DEVICE unsigned follow(unsigned row, unsigned at, int* durations) {
    Words known = words(row, at / kTile);
    for (;; --row) {
      const Words above = words(max(row, 1u) - 1, at / kTile);
      const unsigned start = begin(row, at, known);
      if (lane() == 0) durations[row] = static_cast<int>(at - start + 1);
      if (row == 0) return start;
      at = start - 1 - (row % kRows == 0 ? kStep : 0);
      known = above;
    }
  }
};

// A row's duration is counted from the last column at which it is reached from the row above.
DEVICE void trace(const Search& p, const Lattice& of, Windows& windows, int* durations) {
  if (of.rows == 0) return;
  unsigned row = (of.rows - 1) % kStrip, column = of.columns - 1;  // of the item
  Tracer next(p, of, of.strips - 1, windows);
  next.copy((column - kStrip * next.strip + Tracer::later(row)) / kTile);
  for (int strip = of.strips - 1; strip >= 0; --strip) {
    wait_for_own();
    warp_sync();
    Tracer tracer = next;
    const unsigned top = kStrip * strip;
    if (strip > 0) {  // its last column is not known yet, but it is none after these
      const unsigned last = min(column, of.columns - of.rows + top) - 1;
      next = Tracer(p, of, strip - 1, windows);
      next.copy((last - (top - kStrip) + Tracer::later(kStrip - 1)) / kTile);
    }
    const unsigned at = column - top + Tracer::later(row);
    column = top + tracer.follow(row, at, durations + top) - 1;
    row = kStrip - 1;
  }
}

}  // namespace megakernel::align
