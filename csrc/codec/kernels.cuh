// All kernels of the codec, as lists of names for macros: csrc/codec/kernels.cu defines them for a
// GPU, the tests' emulator for a CPU.
#pragma once

#include "attention.cuh"
#include "depthwise.cuh"
#include "embed.cuh"
#include "projection.cuh"
#include "state_update.cuh"

// X(row_groups, column_groups, k_splits, planes, blocks_per_sm, shared_bytes) for each tile of the
// projection kernel. kernels/codec.py passes the list; these tiles are a default for other builds.
#ifndef MEGAKERNEL_CODEC_TILES
#define MEGAKERNEL_CODEC_TILES(X) X(2, 4, 2, 1, 1, 20992) X(2, 4, 2, 2, 1, 20992)
#endif

// X(head_dim) for each head size of the attention kernel.
#define MEGAKERNEL_CODEC_HEAD_DIMS(X) X(16) X(32) X(64)

namespace megakernel::codec {

#define MEGAKERNEL_CHECK_TILE(row_groups, column_groups, k_splits, planes, blocks_per_sm,         \
                              shared_bytes)                                                       \
  static_assert(                                                                                  \
      sizeof(ProjectionSharedMemory<Tile<row_groups, column_groups, k_splits, planes>>) ==        \
          shared_bytes,                                                                           \
      "the shared memory of a tile differs from kernels/codec.py");                               \
  static_assert(Tile<row_groups, column_groups, k_splits, planes>::kBlocksPerSm == blocks_per_sm, \
                "the blocks per multiprocessor of a tile differ from kernels/codec.py");
MEGAKERNEL_CODEC_TILES(MEGAKERNEL_CHECK_TILE)
#undef MEGAKERNEL_CHECK_TILE

}  // namespace megakernel::codec
