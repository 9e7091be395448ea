// Traceback: follows the directions from the last cell to the first and writes durations.
//
// A row ends before the column at which the row below starts. It starts at its last column before
// that whose direction bit is set: there the path enters from the row above. Directions are read as
// pairs of words: the word of the current column and the word before it.
#pragma once

#include "lattice.cuh"

namespace megakernel::align {

// --- static asserts ---

static_assert(kTraceRows == 4, "a group of rows is loaded with 16 bytes");
static_assert(kStripRows == 2 * 32, "a strip has two warps and 64 rows: one thread per row");
static_assert(kWordColumns == 32, "two words of directions are one WordPair");

// --- shared memory ---

// The columns of two adjacent words; the earlier word is the upper half, later columns are lower
// bits.
using WordPair = uint64_t;
DEVICE WordPair make_pair(uint32_t word, uint32_t previous) {
  return static_cast<WordPair>(previous) << 32 | word;
}
// All columns up to this one.
DEVICE WordPair columns_up_to(int column) { return ~WordPair{0} << (~column & 31); }
// Whether there is a column.
DEVICE bool has_any(WordPair columns) {
  return static_cast<uint32_t>(columns | columns >> 32) != 0;
}
// All columns before the last of these; none if there are none.
DEVICE WordPair columns_before_last(WordPair columns) { return ~(columns ^ (columns - 1)); }

// Directions of a strip in shared memory. Words before the first one are read, but have no effect.
struct alignas(16) DirectionWindow {
  uint32_t padding[kTraceRows];
  uint32_t words[kWindowWords][kStripRows];
};

// Start columns of a strip's rows. `candidates` holds the columns of two words at which a row can
// start; the row starts at the last of them. `words` is the index of the later word.
struct RowStarts {
  alignas(16) WordPair candidates[kStripRows];
  alignas(16) int words[kStripRows];

  // The column at which a row starts.
  DEVICE int column(int row) const {
    return kWordColumns * words[row] + 31 - count_trailing_zeros(candidates[row]);
  }
};

// Shared memory of the traceback, for a strip and the next one. Scores may follow it.
struct alignas(kLineBytes) TraceSharedMemory {
  DirectionWindow windows[2];
  RowStarts starts[2];
};

// --- warp roles ---

// The first warp follows the path from strip to strip (StripTracer). With directions in global
// memory, the second warp copies the directions of the next strip and writes the durations of the
// previous one. With directions in shared memory, all threads write durations at the end.

// The first word of a window that ends with this word.
DEVICE int first_window_word(int last) { return max(-kPaddingWords, last - kWindowWords + 1); }

// A warp clears the words before a strip's first one, [kPaddingWords, kStripRows], in a window that
// begins with them.
DEVICE void clear_padding(DirectionWindow& window) {
  for (int word = 0; word < kPaddingWords; ++word) {
    for (int row = lane_idx(); row < kStripRows; row += 32) window.words[word][row] = 0;
  }
}

// A warp starts to copy a strip's directions [words, kStripRows] up to word `last`.
DEVICE void copy_window(DirectionWindow& window, const uint32_t* from, int last) {
  const int first = first_window_word(last), num_words = (last - first + 1) * kStripRows;
#pragma unroll 1
  for (int i = 4 * lane_idx(); i < num_words; i += 4 * 32) {
    const int at = first * kStripRows + i;
    copy_async_zero_fill<16>(window.words[0] + i, from + max(at, 0), at < 0 ? 0 : 16);
  }
}

// Follows the path through a strip; all lanes of a warp do the same. Rows and columns are relative
// to the strip's first ones. `kWholeStrip`: the window holds all of the strip's directions.
template <bool kWholeStrip>
class StripTracer {
 public:
  // Starts at the last column of a row; the window ends with `last_word`.
  DEVICE StripTracer(DirectionWindow& window, const uint32_t* directions, int last_word, int row,
                     int column)
      : window_(window),
        directions_(directions),
        first_(first_window_word(last_word)),
        row_(row),
        word_(column / kWordColumns),
        open_(columns_up_to(column)) {}

  // Finds the start of every row, [kStripRows].
  DEVICE void run(RowStarts& starts) {
    while (row_ >= 0) {
      if (!is_in_window(word_)) load_window();
      if (row_ % kTraceRows < kTraceRows - 1 || !follow_groups(starts)) follow_row(starts);
    }
  }

 private:
  // Follows groups of kTraceRows rows while all rows of a group start in the current pair of words.
  // Returns whether that holds for the last group. The two pairs that the next group may need are
  // loaded first. There is one branch per group, because a branch takes longer than a row.
  DEVICE bool follow_groups(RowStarts& starts) {
    uint4 words = load_rows(row_, word_), previous = load_rows(row_, word_ - 1);
    while (true) {
      const uint4 next = load_rows(row_ - kTraceRows, word_);
      const uint4 next_previous = load_rows(row_ - kTraceRows, word_ - 1);
      const uint4 next_second_previous = load_rows(row_ - kTraceRows, word_ - 2);
      const WordPair row3 = make_pair(words.w, previous.w) & open_;
      const WordPair row2 = make_pair(words.z, previous.z) & columns_before_last(row3);
      const WordPair row1 = make_pair(words.y, previous.y) & columns_before_last(row2);
      const WordPair row0 = make_pair(words.x, previous.x) & columns_before_last(row1);
      const bool all = has_any(row0);  // a row without candidates leaves none to the rows above
      const bool can_continue = row_ >= 2 * kTraceRows - 1 && is_in_window(word_ - 1);
      const bool continues = has_any(can_continue ? row0 : 0);
      const int top = row_ - kTraceRows + 1;
      Pair* candidates = reinterpret_cast<Pair*>(starts.candidates + top);
      candidates[0] = {row0, row1}, candidates[1] = {row2, row3};
      *reinterpret_cast<Quad*>(starts.words + top) = {word_, word_, word_, word_};
      if (!continues) {
        if (all) move_above(row_ - kTraceRows, row0);
        return all;
      }
      const bool moved_back = move_above(row_ - kTraceRows, row0);
      words = moved_back ? next_previous : next;
      previous = moved_back ? next_second_previous : next_previous;
    }
  }

  // Follows one row, or moves two words back if the row does not start in the current pair.
  DEVICE void follow_row(RowStarts& starts) {
    const uint32_t* at = window_.words[word_ - first_] + row_;
    const WordPair candidates = make_pair(at[0], at[-kStripRows]) & open_;
    if (has_any(candidates)) {
      starts.candidates[row_] = candidates, starts.words[row_] = word_;
      move_above(row_ - 1, candidates);
    } else if (kWordColumns * (word_ - 1) > row_) {
      open_ = ~WordPair{0}, word_ -= 2;
    } else {
      // On the diagonal the path enters from above, even if no bit says so because all sums are
      // minus infinity.
      sync_warp();
#pragma unroll 1
      for (int row = lane_idx(); row <= row_; row += 32) {
        starts.candidates[row] = columns_up_to(row), starts.words[row] = row / kWordColumns;
      }
      row_ = -1;
    }
  }

  // Moves to a row above one that starts at the last of these columns. Returns whether the current
  // pair moved a word back, because no column of its later word is left.
  DEVICE bool move_above(int row, WordPair candidates) {
    const WordPair open = columns_before_last(candidates);
    const bool moves_back = static_cast<uint32_t>(candidates) << 1 == 0;
    row_ = row, open_ = moves_back ? make_pair(static_cast<uint32_t>(open >> 32), ~0u) : open,
    word_ -= moves_back;
    return moves_back;
  }

  // Whether the window holds all words that are read for a column in this word.
  DEVICE bool is_in_window(int word) const { return kWholeStrip || word >= first_ + kPaddingWords; }

  // Loads the window that ends with the current word.
  DEVICE void load_window() {
    sync_warp();
    copy_window(window_, directions_, word_);
    copy_async_wait_all();
    sync_warp();
    first_ = first_window_word(word_);
  }

  // A word of kTraceRows rows, of which `last` is the last.
  DEVICE uint4 load_rows(int last, int word) const {
    const uint32_t* at = window_.words[word - first_] + last - kTraceRows + 1;
    return load_shared_volatile(reinterpret_cast<const uint4*>(at));
  }

  struct alignas(16) Pair {
    WordPair values[2];
  };
  struct alignas(16) Quad {
    int values[4];
  };

  DirectionWindow& window_;
  const uint32_t* directions_;
  int first_;      // the window's first word
  int row_;        // whose start is searched
  int word_;       // the later word of the current pair
  WordPair open_;  // columns at which the row can start
};

// The last word that a strip reads if its path ends before this column of the item.
DEVICE int last_word_of(int strip, int end_column) {
  return (end_column - kStripRows * strip - 1) / kWordColumns;
}

// Writes durations [rows] of every `stride`th row from `first` on: from the start of a row to the
// start of the next one. `end`: the end of the last row.
DEVICE void write_durations(const RowStarts& starts, int num_rows, int end, int* durations,
                            int first, int stride) {
#pragma unroll 1
  for (int row = first; row < num_rows; row += stride) {
    durations[row] = (row + 1 < num_rows ? starts.column(row + 1) : end) - starts.column(row);
  }
}

// --- body ---

// Traceback of an item with one block, whose directions are in shared memory. Called by all
// threads. Writes durations [rows].
DEVICE void trace_shared_directions(const Lattice& lattice, int warp, TraceSharedMemory& shared,
                                    int* durations) {
  if (warp == 0) {
    int end = lattice.num_columns;  // the item's column after the strip's last row
#pragma unroll 1
    for (int strip = lattice.num_strips - 1; strip >= 0; --strip) {
      const int top = kStripRows * strip;
      StripTracer<true> tracer(shared.windows[strip], nullptr, last_word_of(strip, end),
                               num_rows_of(lattice, strip) - 1, end - 1 - top);
      tracer.run(shared.starts[strip]);
      sync_warp();
      end = top + shared.starts[strip].column(0);
    }
  }
  sync_all_threads();
  const int strip = thread_idx() / kStripRows, top = kStripRows * strip;
  if (strip >= lattice.num_strips) return;
  const bool is_last = strip == lattice.num_strips - 1;
  const int end =
      is_last ? lattice.num_columns - top : kStripRows + shared.starts[strip + 1].column(0);
  write_durations(shared.starts[strip], num_rows_of(lattice, strip), end, durations + top,
                  thread_idx() % kStripRows, kStripRows);
}

// Traceback with directions in global memory. Called by all threads. Writes durations [rows].
DEVICE void trace(const SearchParams& p, const Lattice& lattice, int warp,
                  TraceSharedMemory& shared, int* durations) {
  const auto copy = [&](int strip, int end_column) {
    if (strip < 0) return;
    copy_window(shared.windows[strip % 2], strip_directions(p, lattice.item, strip),
                last_word_of(strip, end_column));
  };
  // Columns of the item: the one after a strip's last row, the same of the strip below, and the
  // first one that the strip cannot have.
  int end = lattice.num_columns, end_below = 0, limit = lattice.num_columns;
  if (warp == 1) copy(lattice.num_strips - 1, limit);
  copy_async_wait_all();
  sync_all_threads();
#pragma unroll 1
  for (int strip = lattice.num_strips - 1; strip >= -1; --strip) {
    const int top = kStripRows * strip, below = strip + 1;
    const bool follows = strip >= 0;
    // Every row has at least one column.
    const int next_limit = follows ? end - num_rows_of(lattice, strip) : 0;
    if (warp == 0 && follows) {
      StripTracer<false> tracer(shared.windows[strip % 2], strip_directions(p, lattice.item, strip),
                                last_word_of(strip, limit), num_rows_of(lattice, strip) - 1,
                                end - 1 - top);
      tracer.run(shared.starts[strip % 2]);
    }
    if (warp == 1) {
      copy(strip - 1, next_limit);
      if (below < lattice.num_strips) {
        const int first = kStripRows * below;
        write_durations(shared.starts[below % 2], num_rows_of(lattice, below), end_below - first,
                        durations + first, lane_idx(), 32);
      }
      copy_async_wait_all();
    }
    sync_all_threads();
    if (!follows) break;
    end_below = end, end = top + shared.starts[strip % 2].column(0), limit = next_limit;
  }
}

}  // namespace megakernel::align
