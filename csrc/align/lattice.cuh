// An item's lattice [rows, columns], and its division into strips and tiles.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

// An item's lattice. It is empty if there are more rows than columns, no rows or no columns.
struct Lattice {
  int item, num_rows, num_columns, num_strips;
};

// The two halves of an int64 length. They are combined at the first use, so that the loads of an
// item's lengths are in flight together.
struct Length {
  uint32_t low, high;

  // Loads the length of an item.
  DEVICE Length(const Lengths& lengths, int item) : low(lengths.common), high(0) {
    const uint32_t* at = static_cast<const uint32_t*>(lengths.per_item);
    if (at != nullptr) low = at[lengths.is_int64 ? 2 * item : item];
    if (at != nullptr && lengths.is_int64) high = at[2 * item + 1];
  }
  // -1 if the length is negative or more than `max_length`.
  DEVICE int checked(int max_length) const {
    return high == 0 && low <= static_cast<uint32_t>(max_length) ? static_cast<int>(low) : -1;
  }
};

// The lengths of an item.
struct ItemLengths {
  Length text, frames;

  // Loads both lengths.
  DEVICE ItemLengths(const SearchParams& p, int item)
      : text(p.text_lengths, item), frames(p.frame_lengths, item) {}
};

// The lattice of an item; empty if its lengths are not valid.
DEVICE Lattice make_lattice(const SearchParams& p, int item, const ItemLengths& lengths) {
  const int num_rows = lengths.text.checked(p.num_rows);
  const int num_columns = lengths.frames.checked(p.num_columns);
  if (num_rows < 1 || num_rows > num_columns) return {item, 0, 0, 0};
  return {item, num_rows, num_columns, (num_rows + kStripRows - 1) / kStripRows};
}

// Rows of a strip.
DEVICE int num_rows_of(const Lattice& lattice, int strip) {
  return min(kStripRows, lattice.num_rows - kStripRows * strip);
}

// Tiles of a strip, from the diagonal of its first row to the last column from which the end of the
// lattice can be reached.
DEVICE int num_tiles_of(const Lattice& lattice, int strip) {
  const int end =
      min(lattice.num_columns, lattice.num_columns - lattice.num_rows + kStripRows * (strip + 1));
  return (end - kStripRows * strip + kTileColumns - 1) / kTileColumns;
}

// A strip's directions in global memory, [words, kStripRows]: words of 32 columns, the first column
// in the highest bit.
DEVICE uint32_t* strip_directions(const SearchParams& p, int item, int strip) {
  const int64_t num_words = static_cast<int64_t>(kWordsPerTile) * p.num_tiles * kStripRows;
  return p.directions + (static_cast<int64_t>(item) * p.num_strips + strip) * num_words;
}

}  // namespace megakernel::align
