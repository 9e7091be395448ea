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

// A length's lower and upper half, of which nothing is made yet: so that nobody waits for one
// before the other is asked for.
struct Length {
  uint32_t low, high;

  DEVICE Length(const Lengths& lengths, int item) : low(lengths.all), high(0) {
    const uint32_t* at = static_cast<const uint32_t*>(lengths.each);
    if (at != nullptr) low = at[lengths.wide ? 2 * item : item];
    if (at != nullptr && lengths.wide) high = at[2 * item + 1];
  }
  // -1 if it is negative or more than there is.
  DEVICE int within(int most) const {
    return high == 0 && low <= static_cast<uint32_t>(most) ? static_cast<int>(low) : -1;
  }
};

DEVICE Lattice lattice(const Search& p, int item) {
  const Length text(p.text, item), frames(p.frames, item);
  const int rows = text.within(p.rows), columns = frames.within(p.columns);
  if (rows < 1 || rows > columns) return {item, 0, 0, 0};
  return {item, rows, columns, (rows + kStrip - 1) / kStrip};
}

// A strip's directions: words of a tile's columns, bit c the column c, row after row.
DEVICE uint32_t* directions(const Search& p, int item, int strip) {
  return p.direction + (static_cast<int64_t>(item) * p.strips + strip) * p.tiles * kStrip;
}

// Some tiles of them. There are two windows: the next strip's come while this one's are followed.
using Window = uint32_t[kWindow][kStrip];
struct Windows {
  alignas(16) Window of[2];
};

// Words of a row: a column's tile and the two before. Nobody waits for them until 64 columns of
// them are wanted, the column the highest bit.
struct Words {
  uint32_t of[3];
  int column;
};
struct View {
  uint32_t high, low;

  DEVICE explicit View(const Words& w)
      : high(move_up(w.of[0], w.of[1], ~w.column & 31)),
        low(move_up(w.of[1], w.of[2], ~w.column & 31)) {}
};

// Follows the way back through a strip, with one warp whose lanes all do the same. Rows and columns
// are counted from the strip's first. Where a row begins is the end of the one above, so that each
// row waits for the one below: but for that, it is looked at two rows earlier.
struct Tracer {
  static constexpr int kAtOnce = 4;     // rows
  static constexpr int kLookAhead = 2;  // rows
  // Tiles without directions, before the first: those that rows at once can have, two of a view,
  // and one for what stands before the first row.
  static constexpr int kBefore = kAtOnce + 3;
  const uint32_t* from;
  Window* window;
  int first = 0;  // the window's first tile

  DEVICE Tracer(const Search& p, const Lattice& of, int strip, Windows& windows)
      : from(directions(p, of.item, strip)), window(&windows.of[strip % 2]) {}

  // Asks for the tiles up to a column's.
  DEVICE void copy(int column) {
    const int last = column / kTile;
    first = max(-kBefore, last - kWindow + 1);
#pragma unroll 1
    for (int i = 4 * lane(); i < (last - first + 1) * kStrip; i += 4 * 32) {
      const int at = first * kStrip + i;
      copy_or_zero<16>((*window)[0] + i, from + max(at, 0), at < 0 ? 0 : 16);
    }
  }
  // The first column from which on the window has what is looked at.
  DEVICE int floor() const { return kTile * (first + kBefore); }

  // What is before the first row is of another, and nobody goes by it.
  DEVICE Words look(int row, int column) const {
    const uint32_t* at = (*window)[0] + ((column >> 5) - first) * kStrip + row;
    return {{load_early(at), load_early(at - kStrip), load_early(at - 2 * kStrip)}, column};
  }

  // The last column, not after `at`, at which a row is reached from the row above. On the diagonal
  // it always is, though no direction may say so where all sums are minus infinity.
  DEVICE int begin(int row, int at) {
    while (at > row) {
      if (at < floor()) {
        warp_sync();
        copy(at);
        wait_for_own();
        warp_sync();
      }
      const View view(look(row, at));
      if (view.high) return at - zeros_before_one(view.high);
      at -= 32;
    }
    return row;
  }

  // From a row's last column up to the strip's first row, whose first column it returns.
  DEVICE int follow(int row, int at, int* durations) {
    while (true) {
      glide(row, at, durations);
      if (row < 0) return at + 1;
      const int start = begin(row, at);
      if (lane() == 0) durations[row] = at - start + 1;
      --row, at = start - 1;
    }
  }

  // Goes up some rows at a time, as long as 32 columns of each tell where it begins; whether they
  // did is asked once for all.
  DEVICE void glide(int& row, int& at, int* durations) {
    if (row < kAtOnce - 1 || at < floor()) return;
    View view(look(row, at));
    Words above = look(row - 1, at - 1);
    int skip = 0;   // columns of the view behind the row's last
    int below = 0;  // columns that the row below has, but one
    do {
      int column = at;
      unsigned most = 0;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const Words next = look(row - u - kLookAhead, column - kLookAhead);
        const int back = zeros_before_one(move_up(view.high, view.low, skip));  // -1: not seen
        if (lane() == 0) durations[row - u] = back + 1;
        most |= back | skip;
        column -= back + 1;
        skip = below + back, below = back;
        view = View(above), above = next;
      }
      if (most >= 32) return;
      row -= kAtOnce, at = column;
    } while (row >= kAtOnce - 1 && at >= floor());
  }
};

// A row's duration is counted from the last column at which it is reached from the row above.
DEVICE void trace(const Search& p, const Lattice& of, Windows& windows, int* durations) {
  if (of.rows == 0) return;
  int row = (of.rows - 1) % kStrip, column = of.columns - 1;  // of the item
  Tracer next(p, of, of.strips - 1, windows);
  next.copy(column - kStrip * (of.strips - 1));
  for (int strip = of.strips - 1; strip >= 0; --strip) {
    wait_for_own();
    warp_sync();
    Tracer tracer = next;
    const int top = kStrip * strip;
    if (strip > 0) {  // its last column is not known yet, but it is none after these
      next = Tracer(p, of, strip - 1, windows);
      next.copy(min(column, of.columns - of.rows + top) - 1 - (top - kStrip));
    }
    column = top + tracer.follow(row, column - top, durations + top) - 1;
    row = kStrip - 1;
  }
}

}  // namespace megakernel::align
