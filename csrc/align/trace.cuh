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

// Columns of a tile and, as the upper half, of the one before: later ones are lower bits.
using View = uint64_t;
DEVICE View view(uint32_t tile, uint32_t before) { return static_cast<View>(before) << 32 | tile; }
DEVICE View up_to(int column) { return ~View{0} << (~column & 31); }
// Those before the last of these columns; none where there are none.
DEVICE View before_last(View ones) { return ~(ones ^ (ones - 1)); }

// Where a row begins: of the columns of this tile and the one before that it may have, those at
// which it is reached from the row above; it begins at the last of them.
struct alignas(16) Mark {
  View ones;
  int tile;

  DEVICE int column() const { return kTile * tile + 31 - zeros_below(ones); }
};
struct Marks {
  Mark of[kRowsAtOnce + kStrip];

  DEVICE Mark& row(int index) { return of[kRowsAtOnce + index]; }
  DEVICE const Mark& row(int index) const { return of[kRowsAtOnce + index]; }
};

// What the way back needs of shared memory: for one strip and the next.
struct Way {
  Window windows[2];
  Marks marks[2];
};

// The first tile of a window that ends with this one: two before the strip's first are empty.
DEVICE int window_begin(int last) { return max(-2, last - kWindow + 1); }

// A warp asks for a strip's directions up to a tile.
DEVICE void copy_window(Window& window, const uint32_t* from, int last) {
  const int first = window_begin(last), words = (last - first + 1) * kStrip;
#pragma unroll 4
  for (int i = 4 * lane(); i < words; i += 4 * 32) {
    const int at = first * kStrip + i;
    copy_or_zero<16>(window.tile(0) + i, from + max(at, 0), at < 0 ? 0 : 16);
  }
}

// Follows the way back through a strip, with one warp whose lanes all do the same. Rows and columns
// are counted from the strip's first.
class Tracer {
 public:
  DEVICE Tracer(Window& window, const uint32_t* directions, int last_tile)
      : window_(window), directions_(directions), first_(window_begin(last_tile)) {}

  // Marks where the rows up to this one begin, whose last column is given. What is before the first
  // row is marked as well, by whatever was read.
  DEVICE void follow(int row, int column, Marks& marks) {
    int tile = column / kTile;
    View open = up_to(column), words[kRowsAtOnce];
    bring(tile);
    look(words, row, tile);
    while (row >= 0) {
      View same[kRowsAtOnce], before[kRowsAtOnce], ones[kRowsAtOnce];  // of the next rows
      look(same, row - kRowsAtOnce, tile);
      look(before, row - kRowsAtOnce, tile - 1);
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) {
        ones[u] = words[u] & open, open = before_last(ones[u]);
        marks.row(row - u) = {ones[u], tile};
      }
      if (ones[kRowsAtOnce - 1] == 0) {  // some rows begin before what was looked at
#pragma unroll
        for (int u = 0; u < kRowsAtOnce - 1; ++u) row -= ones[u] != 0;
        if (row < 0) return;
        // On the diagonal a row is always reached from above, though no direction may say so where
        // all sums are minus infinity.
        if (kTile * (tile - 1) <= row) return mark_diagonal(row, marks);
        open = ~View{0}, tile -= 2;
        bring(tile);
        look(words, row, tile);
        continue;
      }
      row -= kRowsAtOnce;
      const bool moves = static_cast<uint32_t>(open) == 0;
      open = moves ? view(static_cast<uint32_t>(open >> 32), ~0u) : open;
      tile -= moves;
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) words[u] = moves ? before[u] : same[u];
      if (row >= 0 && tile < floor()) bring(tile), look(words, row, tile);
    }
  }

 private:
  // The first tile from which on the window has all that is looked at.
  DEVICE int floor() const { return first_ + 2; }

  // Before tiles are looked at that may be before the window.
  DEVICE void bring(int tile) {
    if (tile >= floor()) return;
    warp_sync();
    copy_window(window_, directions_, tile);
    first_ = window_begin(tile);
    wait_for_own();
    warp_sync();
  }

  DEVICE void look(View (&words)[kRowsAtOnce], int row, int tile) const {
    const uint32_t* at = window_.tile(tile - first_) + row;
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      words[u] = view(load_early(at - u), load_early(at - u - kStrip));
    }
  }

  DEVICE static void mark_diagonal(int last, Marks& marks) {
    warp_sync();
#pragma unroll 1
    for (int row = lane(); row <= last; row += 32) marks.row(row) = {up_to(row), row / kTile};
  }

  Window& window_;
  const uint32_t* directions_;
  int first_;  // the window's first tile
};

// A row's duration is from where it begins to where the next one does. `end`: the last row's.
DEVICE void tell(const Marks& marks, int rows, int end, int* durations) {
#pragma unroll 1
  for (int row = lane(); row < rows; row += 32) {
    const int next = row + 1 < rows ? marks.row(row + 1).column() : end;
    durations[row] = next - marks.row(row).column();
  }
}

// By all threads of the block: while the first warp follows a strip, the second one copies the next
// strip's directions and tells the last one's durations.
DEVICE void trace(const Search& p, const Lattice& of, Way& way, int* durations) {
  const auto rows_of = [&](int strip) { return min(kStrip, of.rows - kStrip * strip); };
  const auto last_tile = [&](int strip, int limit) { return (limit - kStrip * strip - 1) / kTile; };
  const auto copy = [&](int strip, int limit) {
    copy_window(way.windows[strip % 2], directions(p, of.item, strip), last_tile(strip, limit));
  };
  // Of the item's columns, the first after a strip's last row, and after the strip below it; and
  // the first that the strip cannot have.
  int end = of.columns, end_below = 0, limit = of.columns;
  if (warp() == 1 && of.strips > 0) copy(of.strips - 1, limit);
  wait_for_own();
  all_sync();
#pragma unroll 1
  for (int strip = of.strips - 1; strip >= -1; --strip) {
    const int top = kStrip * strip, below = strip + 1;
    const bool follows = strip >= 0;
    const int next_limit = follows ? end - rows_of(strip) : 0;  // each row has a column
    if (warp() == 0 && follows) {
      Tracer tracer(way.windows[strip % 2], directions(p, of.item, strip), last_tile(strip, limit));
      tracer.follow(rows_of(strip) - 1, end - 1 - top, way.marks[strip % 2]);
    }
    if (warp() == 1) {
      if (strip > 0) copy(strip - 1, next_limit);
      if (below < of.strips) {
        const int first = kStrip * below;
        tell(way.marks[below % 2], rows_of(below), end_below - first, durations + first);
      }
      wait_for_own();
    }
    all_sync();
    if (!follows) break;
    end_below = end, end = top + way.marks[strip % 2].row(0).column(), limit = next_limit;
  }
}

}  // namespace megakernel::align
