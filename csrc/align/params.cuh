// What the alignment's kernels are given, how their work is cut, and how their workspace is.
#pragma once

#include <algorithm>

#include "../types.cuh"

namespace megakernel::align {

constexpr int kRows = 2;                   // of a lane
constexpr int kStrip = 32 * kRows;         // rows of a warp
constexpr int kStep = 4;                   // columns of a lane at a time
constexpr int kWord = 32;                  // columns of a word of directions
constexpr int kSteps = kWord / kStep;      // of a word
constexpr int kWords = 2;                  // that a warp goes through at a time: a tile
constexpr int kTile = kWords * kWord;      // columns of a tile
constexpr int kLag = 32 * kStep / kTile;   // tiles that the last lane ends after the first
constexpr int kSlots = 4;                  // tiles on the way from a warp to the next
constexpr int kMostWarps = 2;              // of a block that sum up, beside as many that copy
constexpr int kMostBlocks = 4;             // of a multiprocessor
constexpr int kMostStages = 4;             // tiles of scores in shared memory
constexpr int kWindow = 32;                // words of directions that are traced at a time
constexpr int kBefore = 2;                 // empty words before the first one of a strip
constexpr int kRowsAtOnce = 4;             // that are traced together
constexpr uint32_t kMissing = 0xFFFFFFFF;  // no sum: sums are never NaN
constexpr int kLine = 128;  // bytes that are copied together, if they begin on as many

// How many rows or columns each item has: int32 or int64 on the device, or all of them.
struct Lengths {
  const void* each;  // null: `all` for every item
  bool wide;
  int all;
};

// Scores [items, rows, columns] -> durations [items, rows]. Rows are text tokens, columns frames.
struct Search {
  const void* scores;
  int64_t item_stride, row_stride;  // in elements
  int items, rows, columns;
  Lengths text, frames;
  int* durations;
  int strips, tiles;  // that rows and columns make
  int warps;          // of a block that have a strip each, and as many that copy
  int chain;          // blocks of an item
  int stages;         // tiles of scores that a strip has room for
  // The workspace. All but the directions begins as kMissing.
  unsigned* ticket;  // blocks that began
  unsigned* done;    // [items] blocks that ended
  uint32_t* edges;   // [items, chain - 1, tiles, kTile]: what a block hands to the next
  // [items, strips, words of the tiles, kStrip]: a bit a cell, set if reached from the row above; a
  // strip's words are counted from its first row's diagonal on. None where a block is alone.
  uint32_t* direction;
};

// A mask [items, rows, columns] -> lengths [2, items]: how many of its first column and how many of
// its first row are not zero.
struct Mask {
  const void* mask;
  int64_t item_stride, row_stride, column_stride;  // in elements
  int items, rows, columns;
  int bytes;        // of an element
  uint64_t digits;  // the bits that make it nonzero
  int* lengths;
};

// Durations [items, rows] -> path [items, rows, columns] of zeros and ones.
struct Path {
  const int* durations;
  int items, rows, columns;
  void* path;
  int bytes;     // of an element
  uint64_t one;  // its bits
};

// Whether a block has an item alone, and all of its directions in shared memory.
inline bool is_alone(const Search& p) {
  return p.chain == 1 && kWords * p.tiles <= kWindow - kBefore;
}

// A strip a warp; an item's blocks follow each other.
inline void cut_work(Search& p, int most_warps) {
  p.strips = (p.rows + kStrip - 1) / kStrip;
  p.tiles = (p.columns + kTile - 1) / kTile;
  p.warps = std::min(p.strips, most_warps);
  p.chain = (p.strips + p.warps - 1) / p.warps;
}

struct Workspace {
  int64_t words;    // in all
  int64_t missing;  // of them, those that begin as kMissing
};

// Cuts it, given its address; for an address of null, tells its size alone.
inline Workspace lay_out(Search& p, uint32_t* begin) {
  const int64_t counters = (1 + p.items + 3) / 4 * 4;
  const int64_t edges = static_cast<int64_t>(p.items) * (p.chain - 1) * p.tiles * kTile;
  const int64_t strips = is_alone(p) ? 0 : static_cast<int64_t>(p.items) * p.strips;
  const int64_t directions = strips * kWords * p.tiles * kStrip;
  p.ticket = begin;
  p.done = begin + 1;
  p.edges = begin + counters;
  p.direction = begin + counters + edges;
  return {counters + edges + directions, counters + edges};
}

}  // namespace megakernel::align
