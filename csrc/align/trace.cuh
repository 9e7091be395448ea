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

// A strip's directions: words of a tile's columns, the first one the highest bit, row after row.
DEVICE uint32_t* directions(const Search& p, int item, int strip) {
  return p.direction + (static_cast<int64_t>(item) * p.strips + strip) * p.tiles * kStrip;
}

// Some tiles of them. What stands before the first row of all is read, but not heeded.
struct alignas(16) Window {
  static constexpr int kBefore = 2 * kRowsAtOnce;
  uint32_t words[kBefore + kWindow * kStrip];

  DEVICE uint32_t* tile(int index) { return words + kBefore + index * kStrip; }
};

// Where a row begins: of this tile's columns that it may have, those at which it is reached from
// the row above; it begins at the last of them.
struct Mark {
  uint32_t ones;
  int tile;

  DEVICE int column() const { return kTile * tile + zeros_above(ones & (0 - ones)); }
};

// What the way back needs of shared memory. There are two windows: the next strip's comes while
// this one's is followed.
struct Way {
  Window windows[2];
  Mark marks[kRowsAtOnce + kStrip];

  DEVICE Mark* row(int index) { return marks + kRowsAtOnce + index; }
};

// Columns of a word up to this one; columns before the last of these, none where there are none.
DEVICE uint32_t up_to(int column) { return ~0u << (~column & 31); }
DEVICE uint32_t before_last(uint32_t ones) { return ~(ones ^ (ones - 1)); }

// Follows the way back through a strip, with one warp whose lanes all do the same. Rows and columns
// are counted from the strip's first.
struct Tracer {
  const uint32_t* from;
  Window* window;
  int first = 0;  // the window's first tile

  DEVICE Tracer(const Search& p, const Lattice& of, int strip, Way& way)
      : from(directions(p, of.item, strip)), window(&way.windows[strip % 2]) {}

  // Asks for the tiles up to this one.
  DEVICE void copy(int last) {
    first = max(0, last - kWindow + 1);
#pragma unroll 1
    for (int i = 4 * lane(); i < (last - first + 1) * kStrip; i += 4 * 32) {
      copy_or_zero<16>(window->tile(0) + i, from + first * kStrip + i, 16);
    }
  }

  DEVICE void look(uint32_t (&words)[kRowsAtOnce], int row, int tile) {
    if (tile < first) {
      warp_sync();
      copy(tile);
      wait_for_own();
      warp_sync();
    }
    const uint32_t* at = window->tile(tile - first) + row;
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) words[u] = load_early(at - u);
  }

  // Marks where the rows up to this one begin, whose last column is given. What is before the first
  // row is marked as well, by whatever was read.
  DEVICE void follow(int row, int column, Way& way) {
    int tile = column / kTile;
    uint32_t open = up_to(column), words[kRowsAtOnce];
    look(words, row, tile);
    while (row >= 0) {
      uint32_t above[kRowsAtOnce], ones[kRowsAtOnce];
      look(above, row - kRowsAtOnce, tile);
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) {
        ones[u] = words[u] & open, open = before_last(ones[u]);
        *way.row(row - u) = {ones[u], tile};
        words[u] = above[u];
      }
      if (ones[kRowsAtOnce - 1] != 0) {  // then all of them have some
        row -= kRowsAtOnce;
        continue;
      }
#pragma unroll
      for (int u = 0; u < kRowsAtOnce - 1; ++u) row -= ones[u] != 0;
      // On the diagonal a row is always reached from above, though no direction may say so where
      // all sums are minus infinity.
      if (kTile * tile <= row) return mark_diagonal(row, way);
      if (row >= 0) look(words, row, --tile);
      open = ~0u;
    }
  }

  DEVICE void mark_diagonal(int last, Way& way) {
    warp_sync();
    for (int row = lane(); row <= last; row += 32) *way.row(row) = {up_to(row), row / kTile};
  }
};

// A row's duration is counted from where it begins to where the next one does.
DEVICE void trace(const Search& p, const Lattice& of, Way& way, int* durations) {
  if (of.rows == 0) return;
  int end = of.columns;                    // of the strip's last row, in the item
  const auto last_tile = [&](int strip) {  // that the way may look at
    const int below = of.rows - min(kStrip * (strip + 1), of.rows);
    return (min(end, of.columns - below) - 1 - kStrip * strip) / kTile;
  };
  Tracer next(p, of, of.strips - 1, way);
  next.copy(last_tile(of.strips - 1));
  for (int strip = of.strips - 1; strip >= 0; --strip) {
    wait_for_own();
    warp_sync();
    Tracer tracer = next;
    const int top = kStrip * strip, rows = min(kStrip, of.rows - top);
    if (strip > 0) {  // its last column is not known yet, but it is none after these
      next = Tracer(p, of, strip - 1, way);
      next.copy(last_tile(strip - 1));
    }
    tracer.follow(rows - 1, end - 1 - top, way);
    warp_sync();
    for (int row = lane(); row < rows; row += 32) {
      const int after = row + 1 < rows ? way.row(row + 1)->column() : end - top;
      durations[top + row] = after - way.row(row)->column();
    }
    end = top + way.row(0)->column();
    warp_sync();
  }
}

}  // namespace megakernel::align
