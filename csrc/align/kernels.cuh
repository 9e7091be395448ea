// All kernels of the alignment, as lists of names for macros: csrc/align/kernels.cu defines them
// for a GPU, the tests' emulator for a CPU.
#pragma once

#include "lengths.cuh"
#include "path.cuh"
#include "search.cuh"

// X(name, Score, kAligned, kSharedDirections) for each search kernel.
#define MEGAKERNEL_ALIGN_SEARCHES(X)                        \
  X(align_search_float32, float, false, false)              \
  X(align_search_float32_shared, float, false, true)        \
  X(align_search_float32_aligned, float, true, false)       \
  X(align_search_float32_aligned_shared, float, true, true) \
  X(align_search_bfloat16, bf16, false, false)              \
  X(align_search_bfloat16_shared, bf16, false, true)        \
  X(align_search_bfloat16_aligned, bf16, true, false)       \
  X(align_search_bfloat16_aligned_shared, bf16, true, true) \
  X(align_search_float16, f16, false, false)                \
  X(align_search_float16_shared, f16, false, true)          \
  X(align_search_float16_aligned, f16, true, false)         \
  X(align_search_float16_aligned_shared, f16, true, true)

// X(name, Element) for each path kernel.
#define MEGAKERNEL_ALIGN_PATHS(X) \
  X(align_path_1, uint8_t)        \
  X(align_path_2, uint16_t)       \
  X(align_path_4, uint32_t)       \
  X(align_path_8, uint64_t)

namespace megakernel::align {

// Facts about the kernels that the host reads from the module.
struct AlignInfo {
  int strip_rows, tile_columns, words_per_tile, step_columns;
  int window_words, padding_words;
  int max_strips_per_block, max_blocks_per_sm, max_score_stages;
  int float32_tile_bytes, half_tile_bytes;
  int static_shared_bytes, trace_shared_bytes;
  int length_threads, path_threads, path_rows;
};

constexpr AlignInfo make_align_info() {
  return {kStripRows,
          kTileColumns,
          kWordsPerTile,
          kStepColumns,
          kWindowWords,
          kPaddingWords,
          kMaxStripsPerBlock,
          kMaxBlocksPerSm,
          kMaxScoreStages,
          static_cast<int>(sizeof(ScoreTile<float>)),
          static_cast<int>(sizeof(ScoreTile<bf16>)),
          static_cast<int>(sizeof(SearchSharedMemory)),
          static_cast<int>(sizeof(TraceSharedMemory)),
          32 * kMaskWarps,
          32 * kPathWarps,
          kPathRows};
}

}  // namespace megakernel::align
