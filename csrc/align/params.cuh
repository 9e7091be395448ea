// Parameters of the alignment kernels. kernels/align.py partitions the work and fills them.
//
// Rows are text tokens, columns are frames. An item is one [rows, columns] lattice of a batch.
#pragma once

#include "../types.cuh"

namespace megakernel::align {

constexpr int kRowsPerLane = 2;
constexpr int kStripRows = 32 * kRowsPerLane;  // rows of a warp
constexpr int kStepColumns = 4;                // columns that a lane processes at a time
constexpr int kWordColumns = 32;               // columns of a word of directions
constexpr int kStepsPerWord = kWordColumns / kStepColumns;
constexpr int kWordsPerTile = 2;  // a warp processes a tile at a time
constexpr int kTileColumns = kWordsPerTile * kWordColumns;
constexpr int kTileLag = 32 * kStepColumns / kTileColumns;  // tiles from the first lane to the last
constexpr int kEdgeStages = 4;         // tiles of sums buffered between two warps of a block
constexpr int kMaxStripsPerBlock = 2;  // each has a summing warp and a copying warp
constexpr int kMaxBlocksPerSm = 4;
constexpr int kMaxScoreStages = 4;          // tiles of scores of a strip in shared memory
constexpr int kWindowWords = 32;            // words of directions of a row in shared memory
constexpr int kPaddingWords = 2;            // empty words before the first one of a strip
constexpr int kTraceRows = 4;               // rows that the traceback follows per branch
constexpr uint32_t kNotReady = 0xFFFFFFFF;  // a NaN, which no sum is
constexpr int kLineBytes = 128;             // alignment of scores in shared memory

static_assert(kStripRows % kTileColumns == 0, "a strip must begin at the boundary of a tile");
static_assert(kTileLag * kTileColumns == 32 * kStepColumns, "the lanes must span whole tiles");

// Rows or columns of each item.
struct Lengths {
  const void* per_item;  // int32 or int64 [items] on the device; null: `common` for all items
  bool is_int64;
  int common;
};

// Scores [items, rows, columns] -> durations [items, rows].
struct SearchParams {
  const void* scores;
  int64_t item_stride, row_stride;  // in elements
  int num_items, num_rows, num_columns;
  Lengths text_lengths, frame_lengths;
  int* durations;
  int num_strips, num_tiles;  // of all rows, of all columns
  int strips_per_block;
  int blocks_per_item;
  int num_score_stages;  // tiles of scores of a strip in shared memory
  // Workspace. All of it except the directions is set to kNotReady before the launch.
  unsigned* block_counter;  // blocks that have started
  unsigned* done_counters;  // [items]: blocks that have finished
  uint32_t* edges;  // [items, blocks_per_item - 1, num_tiles, kTileColumns]: sums of the last row
  // [items, num_strips, words of the tiles, kStripRows]: one bit per cell, set if the path enters
  // the cell from the row above. Words of a strip are counted from the diagonal of its first row.
  uint32_t* directions;  // unused with directions in shared memory
};

// A mask [items, rows, columns] -> lengths [2, items]: the nonzero elements of an item's first
// column, and of its first row.
struct MaskParams {
  const void* mask;
  int64_t item_stride, row_stride, column_stride;  // in elements
  int num_items, num_rows, num_columns;
  int element_bytes;
  uint64_t nonzero_bits;  // an element is not zero if any of these bits is set
  int* lengths;
};

// Durations [items, rows] -> path [items, rows, columns] of zeros and ones.
struct PathParams {
  const int* durations;
  int num_items, num_rows, num_columns;
  void* path;
  int element_bytes;
  uint64_t one_bits;  // the bits of an element that is 1
};

}  // namespace megakernel::align
