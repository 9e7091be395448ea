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

// How long an item is: asked for, but not waited for.
struct Extent {
  Length text, frames;

  DEVICE Extent(const Search& p, int item) : text(p.text, item), frames(p.frames, item) {}
};

DEVICE Lattice lattice(const Search& p, int item, const Extent& extent) {
  const int rows = extent.text.within(p.rows), columns = extent.frames.within(p.columns);
  if (rows < 1 || rows > columns) return {item, 0, 0, 0};
  return {item, rows, columns, (rows + kStrip - 1) / kStrip};
}

// A strip's directions in global memory: words of columns, the first one the highest bit, row after
// row.
DEVICE uint32_t* directions(const Search& p, int item, int strip) {
  const int64_t words = static_cast<int64_t>(kWords) * p.tiles * kStrip;
  return p.direction + (static_cast<int64_t>(item) * p.strips + strip) * words;
}

// Some of them. What stands before the first one is read, but not heeded.
struct alignas(16) Window {
  uint32_t before[kRowsAtOnce];
  uint32_t words[kWindow][kStrip];
};

// Columns of a word and, as the upper half, of the one before: later ones are lower bits.
using View = uint64_t;
DEVICE View view(uint32_t word, uint32_t before) { return static_cast<View>(before) << 32 | word; }
DEVICE View up_to(int column) { return ~View{0} << (~column & 31); }
DEVICE bool any(View columns) { return static_cast<uint32_t>(columns | columns >> 32) != 0; }
// Those before the last of these columns; none where there are none.
DEVICE View before_last(View ones) { return ~(ones ^ (ones - 1)); }

// Where rows begin: of the columns of a word and the one before that a row may have, those at which
// it is reached from the row above. It begins at the last of them.
struct Marks {
  alignas(16) View ones[kStrip];
  alignas(16) int words[kStrip];

  DEVICE int column(int row) const {
    return kWord * words[row] + 31 - count_trailing_zeros(ones[row]);
  }
};

// What the way back needs of shared memory: for one strip and the next. Scores may follow it.
struct alignas(kLine) Way {
  Window windows[2];
  Marks marks[2];
};

// The first word of a window that ends with this one: those before the strip's first are empty.
DEVICE int window_begin(int last) { return max(-kBefore, last - kWindow + 1); }

// A warp empties what is before a strip's first word, in a window that begins there.
DEVICE void clear_before(Window& window) {
  for (int word = 0; word < kBefore; ++word) {
    for (int row = lane_idx(); row < kStrip; row += 32) window.words[word][row] = 0;
  }
}

// A warp asks for a strip's directions up to a word.
DEVICE void copy_window(Window& window, const uint32_t* from, int last) {
  const int first = window_begin(last), words = (last - first + 1) * kStrip;
#pragma unroll 1
  for (int i = 4 * lane_idx(); i < words; i += 4 * 32) {
    const int at = first * kStrip + i;
    copy_async_zero_fill<16>(window.words[0] + i, from + max(at, 0), at < 0 ? 0 : 16);
  }
}

// Follows the way back through a strip, with one warp whose lanes all do the same. Rows and columns
// are counted from the strip's first. `kWhole`: the window has all of the strip's directions.
template <bool kWhole>
class Tracer {
 public:
  // From the last column of this row on; the window has no word after `last_word`.
  DEVICE Tracer(Window& window, const uint32_t* directions, int last_word, int row, int column)
      : window_(window),
        directions_(directions),
        first_(window_begin(last_word)),
        row_(row),
        word_(column / kWord),
        open_(up_to(column)) {}

  // Marks where the rows begin.
  DEVICE void follow(Marks& marks) {
    while (row_ >= 0) {
      if (!is_there(word_)) bring();
      if (row_ % kRowsAtOnce < kRowsAtOnce - 1 || !glide(marks)) step(marks);
    }
  }

 private:
  // Goes up some rows at a time, as long as all of them begin in a word or the one before, and says
  // whether that was so to the end. Their words are asked for before it is known in which of these;
  // there is one branch for all, since its wait is longer than what is to be done for a row.
  DEVICE bool glide(Marks& marks) {
    static_assert(kRowsAtOnce == 4);
    uint4 words = rows(row_, word_), before = rows(row_, word_ - 1);
    while (true) {
      const uint4 next = rows(row_ - kRowsAtOnce, word_);
      const uint4 next_before = rows(row_ - kRowsAtOnce, word_ - 1);
      const uint4 next_two_before = rows(row_ - kRowsAtOnce, word_ - 2);
      const View last = view(words.w, before.w) & open_;
      const View third = view(words.z, before.z) & before_last(last);
      const View second = view(words.y, before.y) & before_last(third);
      const View first = view(words.x, before.x) & before_last(second);
      const bool all = any(first);  // if one has none, those above it have none either
      const bool may = row_ >= 2 * kRowsAtOnce - 1 && is_there(word_ - 1);
      const bool more = any(may ? first : 0);
      const int top = row_ - kRowsAtOnce + 1;
      Pair* ones = reinterpret_cast<Pair*>(marks.ones + top);
      ones[0] = {first, second}, ones[1] = {third, last};
      *reinterpret_cast<Four*>(marks.words + top) = {word_, word_, word_, word_};
      if (!more) {
        if (all) go_on(row_ - kRowsAtOnce, first);
        return all;
      }
      const bool moved = go_on(row_ - kRowsAtOnce, first);
      words = moved ? next_before : next;
      before = moved ? next_two_before : next_before;
    }
  }

  // Goes up a row, or two words back if it does not begin in these.
  DEVICE void step(Marks& marks) {
    const uint32_t* at = window_.words[word_ - first_] + row_;
    const View ones = view(at[0], at[-kStrip]) & open_;
    if (any(ones)) {
      marks.ones[row_] = ones, marks.words[row_] = word_;
      go_on(row_ - 1, ones);
    } else if (kWord * (word_ - 1) > row_) {
      open_ = ~View{0}, word_ -= 2;
    } else {
      // On the diagonal a row is always reached from above, though no direction may say so where
      // all sums are minus infinity.
      sync_warp();
#pragma unroll 1
      for (int row = lane_idx(); row <= row_; row += 32) {
        marks.ones[row] = up_to(row), marks.words[row] = row / kWord;
      }
      row_ = -1;
    }
  }

  // To a row that is above one that begins at the last of these; whether that is a word back, since
  // nothing is left of this one.
  DEVICE bool go_on(int row, View ones) {
    const View open = before_last(ones);
    const bool moves = static_cast<uint32_t>(ones) << 1 == 0;
    row_ = row, open_ = moves ? view(static_cast<uint32_t>(open >> 32), ~0u) : open, word_ -= moves;
    return moves;
  }

  // Whether the window has all that is looked at from a word on; a whole strip's always has.
  DEVICE bool is_there(int word) const { return kWhole || word >= first_ + kBefore; }

  DEVICE void bring() {
    sync_warp();
    copy_window(window_, directions_, word_);
    copy_async_wait_all();
    sync_warp();
    first_ = window_begin(word_);
  }

  // Words of as many rows, of which this is the last.
  DEVICE uint4 rows(int last, int word) const {
    const uint32_t* at = window_.words[word - first_] + last - kRowsAtOnce + 1;
    return load_shared_volatile(reinterpret_cast<const uint4*>(at));
  }

  struct alignas(16) Pair {
    View of[2];
  };
  struct alignas(16) Four {
    int of[4];
  };

  Window& window_;
  const uint32_t* directions_;
  int first_;  // the window's first word
  int row_;    // whose beginning is looked for
  int word_;
  View open_;  // columns that it may have
};

// Rows of a strip.
DEVICE int rows_of(const Lattice& of, int strip) { return min(kStrip, of.rows - kStrip * strip); }

// The word with the last column that a strip can have, if the strip below, or the end, leaves it so
// many of the item's columns.
DEVICE int last_word(int strip, int limit) { return (limit - kStrip * strip - 1) / kWord; }

// A row's duration is from where it begins to where the next one does. `end`: the last row's.
// Every `step`th row from the first on.
DEVICE void tell(const Marks& marks, int rows, int end, int* durations, int first, int step) {
#pragma unroll 1
  for (int row = first; row < rows; row += step) {
    durations[row] = (row + 1 < rows ? marks.column(row + 1) : end) - marks.column(row);
  }
}

// By all threads of an item's only block, which has the directions of its one or two strips.
DEVICE void trace_alone(const Lattice& of, int number, Way& way, int* durations) {
  if (number == 0) {
    int end = of.columns;  // of the item's, the first after a strip's last row
#pragma unroll 1
    for (int strip = of.strips - 1; strip >= 0; --strip) {
      const int top = kStrip * strip;
      Tracer<true> tracer(way.windows[strip], nullptr, last_word(strip, end),
                          rows_of(of, strip) - 1, end - 1 - top);
      tracer.follow(way.marks[strip]);
      sync_warp();
      end = top + way.marks[strip].column(0);
    }
  }
  static_assert(kStrip == 2 * 32, "two warps a strip: a thread a row");
  sync_all_threads();
  const int strip = thread_idx() / kStrip, top = kStrip * strip;
  if (strip >= of.strips) return;
  const bool last = strip == of.strips - 1;
  const int end = last ? of.columns - top : kStrip + way.marks[strip + 1].column(0);
  tell(way.marks[strip], rows_of(of, strip), end, durations + top, thread_idx() % kStrip, kStrip);
}

// By all threads of the block, each with its warp's number: while the first warp follows a strip,
// the second one copies the next strip's directions and tells the last one's durations.
DEVICE void trace(const Search& p, const Lattice& of, int number, Way& way, int* durations) {
  const auto copy = [&](int strip, int limit) {
    if (strip < 0) return;
    copy_window(way.windows[strip % 2], directions(p, of.item, strip), last_word(strip, limit));
  };
  // Of the item's columns, the first after a strip's last row, and after the strip below it; and
  // the first that the strip cannot have.
  int end = of.columns, end_below = 0, limit = of.columns;
  if (number == 1) copy(of.strips - 1, limit);
  copy_async_wait_all();
  sync_all_threads();
#pragma unroll 1
  for (int strip = of.strips - 1; strip >= -1; --strip) {
    const int top = kStrip * strip, below = strip + 1;
    const bool follows = strip >= 0;
    const int next_limit = follows ? end - rows_of(of, strip) : 0;  // each row has a column
    if (number == 0 && follows) {
      Tracer<false> tracer(way.windows[strip % 2], directions(p, of.item, strip),
                           last_word(strip, limit), rows_of(of, strip) - 1, end - 1 - top);
      tracer.follow(way.marks[strip % 2]);
    }
    if (number == 1) {
      copy(strip - 1, next_limit);
      if (below < of.strips) {
        const int first = kStrip * below;
        tell(way.marks[below % 2], rows_of(of, below), end_below - first, durations + first,
             lane_idx(), 32);
      }
      copy_async_wait_all();
    }
    sync_all_threads();
    if (!follows) break;
    end_below = end, end = top + way.marks[strip % 2].column(0), limit = next_limit;
  }
}

}  // namespace megakernel::align
