// All kernels of the codec, as lists of names for macros: csrc/codec/kernels.cu defines them for a
// GPU, the tests' emulator for a CPU.
#pragma once

#include "attention.cuh"
#include "depthwise.cuh"
#include "embed.cuh"
#include "many_rows.cuh"
#include "projection.cuh"
#include "residual_unit.cuh"
#include "samples.cuh"
#include "state_update.cuh"

// Lists that kernels/codec.py defines: X(row_groups, column_groups, k_splits, planes,
// blocks_per_sm, shared_bytes) for each tile of the projection kernel, X(row_groups,
// column_groups, row_warps, planes, blocks_per_sm, shared_bytes) for each tile of many rows,
// X(kernel, shared_bytes, arguments of WarpgroupTile) for each tile of sm_90a, X(kernel,
// shared_bytes, arguments of ResidualUnitTile) for each tile of a residual unit, X(head_dim) for
// each attention kernel.
#if !defined(MEGAKERNEL_CODEC_TILES) || !defined(MEGAKERNEL_CODEC_MANY_ROW_TILES) || \
    !defined(MEGAKERNEL_CODEC_WARPGROUP_TILES) ||                                    \
    !defined(MEGAKERNEL_CODEC_RESIDUAL_UNIT_TILES) || !defined(MEGAKERNEL_CODEC_HEAD_DIMS)
#error "define the lists of kernels as kernels/codec.py does"
#endif

namespace megakernel::codec {

#define MEGAKERNEL_CHECK_TILE(row_groups, column_groups, k_splits, planes, blocks_per_sm,         \
                              shared_bytes)                                                       \
  static_assert(                                                                                  \
      sizeof(ProjectionSharedMemory<Tile<row_groups, column_groups, k_splits, planes>>) ==        \
          shared_bytes,                                                                           \
      "the shared memory of a tile differs from codec_tiles.py");                                 \
  static_assert(Tile<row_groups, column_groups, k_splits, planes>::kBlocksPerSm == blocks_per_sm, \
                "the blocks per multiprocessor of a tile differ from codec_tiles.py");
MEGAKERNEL_CODEC_TILES(MEGAKERNEL_CHECK_TILE)
#undef MEGAKERNEL_CHECK_TILE

#define MEGAKERNEL_CHECK_MANY_ROW_TILE(row_groups, column_groups, row_warps, planes,            \
                                       blocks_per_sm, shared_bytes)                             \
  static_assert(                                                                                \
      sizeof(ManyRowSharedMemory<ManyRowTile<row_groups, column_groups, row_warps, planes>>) == \
          shared_bytes,                                                                         \
      "the shared memory of a tile of many rows differs from codec_tiles.py");
MEGAKERNEL_CODEC_MANY_ROW_TILES(MEGAKERNEL_CHECK_MANY_ROW_TILE)
#undef MEGAKERNEL_CHECK_MANY_ROW_TILE

#ifndef MEGAKERNEL_EMULATOR  // whose mbarriers are larger
#define MEGAKERNEL_CHECK_WARPGROUP_TILE(kernel, shared_bytes, ...)                         \
  static_assert(                                                                           \
      sizeof(WarpgroupProjectionSharedMemory<WarpgroupTile<__VA_ARGS__>>) == shared_bytes, \
      "the shared memory of a tile of sm_90a differs from codec_tiles.py");
MEGAKERNEL_CODEC_WARPGROUP_TILES(MEGAKERNEL_CHECK_WARPGROUP_TILE)
#undef MEGAKERNEL_CHECK_WARPGROUP_TILE

#define MEGAKERNEL_CHECK_RESIDUAL_UNIT_TILE(kernel, shared_bytes, ...)                 \
  static_assert(                                                                       \
      sizeof(ResidualUnitSharedMemory<ResidualUnitTile<__VA_ARGS__>>) == shared_bytes, \
      "the shared memory of a tile of a residual unit differs from codec_unit_tiles.py");
MEGAKERNEL_CODEC_RESIDUAL_UNIT_TILES(MEGAKERNEL_CHECK_RESIDUAL_UNIT_TILE)
#undef MEGAKERNEL_CHECK_RESIDUAL_UNIT_TILE
#endif

}  // namespace megakernel::codec
