// The decode kernels of one model. Define MEGAKERNEL_MODEL, a model type of shapes.cuh, beforehand.
#pragma once

#include "../workspace.cuh"
#include "frame.cuh"
#include "prefill.cuh"
#include "wide_frame.cuh"
#include "wide_prefill.cuh"

namespace megakernel {

using KernelModel = MEGAKERNEL_MODEL;

// Facts about this build that the host needs; megakernel_tts/kernels/structs.py mirrors it.
struct DecodeInfo {
  int max_streams;
  int max_prefill_columns;    // of `prefill_large` or `prefill_wide`; 0 without either
  int small_prefill_columns;  // of `prefill_small`; `prefill_medium` takes `max_streams`
  int kv_tile_size, span_size, page_size, max_pages, kv_width;
  int num_threads;        // of a thread block
  int max_blocks;         // of a grid; each has rows of every matrix that exchange.cuh names
  int max_residual_rows;  // that a thread block can own
  int stage_steps, max_row_groups;
  // Dynamic shared memory, by the columns that a kernel is compiled for.
  int shared_bytes_one_column, shared_bytes_streams, shared_bytes_large_prefill;
  WorkspaceOffsets workspace;
};

// Shared memory of a kernel; 0 if the program has none for so many columns.
template <int MaxColumns>
constexpr int shared_bytes() {
  if constexpr (kIsWide && MaxColumns != kWideStreams) {
    return 0;
  } else {
    return static_cast<int>(sizeof(SharedMemory<KernelModel, MaxColumns>));
  }
}
template <int MaxColumns>
constexpr int kSharedBytes = shared_bytes<MaxColumns>();

constexpr DecodeInfo make_decode_info() {
  return {kMaxStreams,
          kIsWide ? kWidePrefillColumns : kMaxPrefillColumns,
          kColumnCapacity<1>,
          kKvTileSize,
          kSpanSize,
          kPageSize,
          kMaxPages,
          kKvWidth,
          kNumLaunchedThreads,
          KernelModel::max_blocks,
          kMaxResidualRowGroups * kRowGroupSize,
          KernelModel::stage_steps,
          kMaxRowGroups,
          kSharedBytes<1>,
          kSharedBytes<kMaxStreams>,
          kSharedBytes<kMaxPrefillColumns>,
          workspace_offsets<KernelModel>()};
}

// The kernels by name: what each runs, and the columns that it is compiled for.
#if defined(MEGAKERNEL_WIDE_STREAMS) && MEGAKERNEL_WIDE_STREAMS < 32
#define MEGAKERNEL_DECODE_KERNELS(KERNEL) KERNEL(generate_wide, generate_wide_frames, kWideStreams)
#elif defined(MEGAKERNEL_WIDE_STREAMS)
#define MEGAKERNEL_DECODE_KERNELS(KERNEL)                   \
  KERNEL(generate_wide, generate_wide_frames, kWideStreams) \
  KERNEL(prefill_wide, prefill_wide_prompts, kWideStreams)
#else
#define MEGAKERNEL_DECODE_KERNELS(KERNEL)                \
  KERNEL(generate_single, generate_frames, 1)            \
  KERNEL(generate_streams, generate_frames, kMaxStreams) \
  KERNEL(prefill_small, prefill_prompts, 1)              \
  KERNEL(prefill_medium, prefill_prompts, kMaxStreams)   \
  KERNEL(prefill_large, prefill_prompts, kMaxPrefillColumns)
#endif

}  // namespace megakernel
