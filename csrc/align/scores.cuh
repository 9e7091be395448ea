// Scores in shared memory: the layout of a tile, its copy from global memory, reads by lanes.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

// --- shared memory ---

// Scores of one strip and one tile of columns. A lane's scores are shifted by one step to the left
// of those of the previous lane, because the lane is one step behind it.
template <class Score>
struct alignas(kLineBytes) ScoreTile {
  Score cells[kWordsPerTile][kStripRows][kWordColumns];
};

// A lane's scores of one step of a word, [kStepColumns], permuted so that the lanes of a warp use
// different banks.
template <class Score>
DEVICE Score* lane_scores(ScoreTile<Score>& tile, int word, int lane, int row, int step) {
  constexpr int kRowsPerBankCycle = 128 / (kWordColumns * sizeof(Score));
  return tile.cells[word][32 * row + lane] +
         kStepColumns * (step ^ lane / kRowsPerBankCycle % kStepsPerWord);
}

// Loads a step's scores as float32.
DEVICE void load_step(const float* from, float (&scores)[kStepColumns]) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  scores[0] = v.x, scores[1] = v.y, scores[2] = v.z, scores[3] = v.w;
}
template <class Score>
DEVICE void load_step(const Score* from, float (&scores)[kStepColumns]) {
  struct alignas(8) Vector {
    Score values[kStepColumns];
  };
  const Vector v = *reinterpret_cast<const Vector*>(from);
#pragma unroll
  for (int c = 0; c < kStepColumns; ++c) scores[c] = to_float(v.values[c]);
}

// --- copies from global memory ---

// Copies a strip's scores with one warp: eight lanes per row, four rows at a time.
template <class Score>
struct ScoreCopier {
  static constexpr int kRowsAtOnce = 32 / kStepsPerWord;
  const Score *first, *end;  // the strip's first cell; behind the last cell of the tensor
  int64_t stride;            // from row to row
  int step = lane_idx() % kStepsPerWord, owner = lane_idx() / kStepsPerWord;  // of this lane

  // Starts to copy a tile of scores [rows, columns]. Unaligned rows begin at a multiple of four
  // bytes. Rows and columns beyond the item's lengths are copied too: no path contains them.
  template <bool kAligned>
  DEVICE void copy(ScoreTile<Score>& tile, int tile_idx) const {
#pragma unroll 1
    for (int w = 0; w < kWordsPerTile; ++w) {
      const int word = kWordsPerTile * tile_idx + w;
      const Score* last = first + (kStripRows - 1) * stride + kWordColumns * (word + 1);
      // With shorter rows, the shifted rows begin before the tensor's first cell.
      const bool is_inside = stride >= kStepColumns / kRowsPerLane && last <= end;
      is_inside ? copy_word<kAligned, true>(tile, w, word)
                : copy_word<kAligned, false>(tile, w, word);
    }
  }

  // Starts to copy a word of a tile. `kInside`: all cells lie inside the tensor. Otherwise cells
  // outside are not read.
  template <bool kAligned, bool kInside>
  DEVICE void copy_word(ScoreTile<Score>& tile, int to_word, int word) const {
    constexpr int kCopyBytes = kAligned ? kStepColumns * sizeof(Score) : 4;
    constexpr int kCopyCells = kCopyBytes / sizeof(Score);
#pragma unroll kInside ? kRowsPerLane : 1
    for (int row = 0; row < kRowsPerLane; ++row) {
      const Score* from = first + (kRowsPerLane * owner + row) * stride + kWordColumns * word +
                          kStepColumns * (step - owner);
#pragma unroll kInside ? 32 / kRowsAtOnce : 1
      for (int lane = 0; lane < 32; lane += kRowsAtOnce) {
        Score* to = lane_scores(tile, to_word, owner + lane, row, step);
#pragma unroll
        for (int c = 0; c < kStepColumns; c += kCopyCells) {
          const bool inside = kInside || (first <= from && from + c < end);
          const int64_t num_cells = kInside ? kCopyCells : min(end - from - c, int64_t{kCopyCells});
          copy_async_zero_fill<kCopyBytes>(to + c, inside ? from + c : first,
                                           inside ? num_cells * sizeof(Score) : 0);
        }
        from += kRowsAtOnce * (kRowsPerLane * stride - kStepColumns);
      }
    }
  }
};

// The copier of a strip of an item of scores [items, rows, columns].
template <class Score>
DEVICE ScoreCopier<Score> make_score_copier(const SearchParams& p, int item, int strip) {
  const Score* begin = static_cast<const Score*>(p.scores) + item * p.item_stride;
  const int64_t num_cells =
      (p.num_items - 1 - item) * p.item_stride + (p.num_rows - 1) * p.row_stride + p.num_columns;
  return {begin + kStripRows * strip * (p.row_stride + 1), begin + num_cells, p.row_stride};
}

}  // namespace megakernel::align
