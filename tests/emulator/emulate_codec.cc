// The codec's kernels as a host library for the tests. Blocks run one after another, in every other
// launch from the last to the first.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/codec/kernels.cuh"

using namespace megakernel;
using namespace megakernel::codec;

template <class Body>
static void run(int num_blocks, int num_threads, Body body) {
  static bool is_reversed = false;
  is_reversed = !is_reversed;
  prerequisite_writes.launch_blocks(num_blocks, [&](int i) {
    const int block = is_reversed ? num_blocks - 1 - i : i;
    launch(1, num_threads, 0, body, block, num_blocks);
  });
}

#define MEGAKERNEL_EMULATE_PROJECTION(row_groups, column_groups, k_splits, planes, blocks_per_sm, \
                                      shared_bytes)                                               \
  extern "C" void codec_project_##row_groups##_##column_groups##_##k_splits##_##planes(           \
      const ProjectionParams* p, int num_blocks) {                                                \
    using T = Tile<row_groups, column_groups, k_splits, planes>;                                  \
    static ProjectionSharedMemory<T> shared;                                                      \
    run(num_blocks, kBlockThreads, [&] { project<T>(*p, shared); });                              \
  }
MEGAKERNEL_CODEC_TILES(MEGAKERNEL_EMULATE_PROJECTION)

#define MEGAKERNEL_EMULATE_MANY_ROW_PROJECTION(row_groups, column_groups, row_warps, planes,  \
                                               blocks_per_sm, shared_bytes)                   \
  extern "C" void codec_project_many_##row_groups##_##column_groups##_##row_warps##_##planes( \
      const ProjectionParams* p, int num_blocks) {                                            \
    using T = ManyRowTile<row_groups, column_groups, row_warps, planes>;                      \
    static ManyRowSharedMemory<T> shared;                                                     \
    run(num_blocks, kBlockThreads, [&] { project_many_rows<T>(*p, shared); });                \
  }
MEGAKERNEL_CODEC_MANY_ROW_TILES(MEGAKERNEL_EMULATE_MANY_ROW_PROJECTION)

#define MEGAKERNEL_EMULATE_WARPGROUP_PROJECTION(kernel, shared_bytes, ...)         \
  extern "C" void kernel(const ProjectionParams* p, int num_blocks) {              \
    using T = WarpgroupTile<__VA_ARGS__>;                                          \
    static WarpgroupProjectionSharedMemory<T> shared;                              \
    run(num_blocks, T::kThreads, [&] { project_with_warpgroups<T>(*p, shared); }); \
  }
MEGAKERNEL_CODEC_WARPGROUP_TILES(MEGAKERNEL_EMULATE_WARPGROUP_PROJECTION)

#define MEGAKERNEL_EMULATE_RESIDUAL_UNIT(kernel, shared_bytes, ...)              \
  extern "C" void kernel(const ResidualUnitParams* p, int num_blocks) {          \
    using T = ResidualUnitTile<__VA_ARGS__>;                                     \
    static ResidualUnitSharedMemory<T> shared;                                   \
    run(num_blocks, T::kThreads, [&] { compute_residual_unit<T>(*p, shared); }); \
  }
MEGAKERNEL_CODEC_RESIDUAL_UNIT_TILES(MEGAKERNEL_EMULATE_RESIDUAL_UNIT)

#define MEGAKERNEL_EMULATE_ATTENTION(head_dim)                                           \
  extern "C" void codec_attention_##head_dim(const AttentionParams* p, int num_blocks) { \
    static AttentionSharedMemory<head_dim> shared;                                       \
    run(num_blocks, 32 * kAttentionWarps, [&] { attend<head_dim>(*p, shared); });        \
  }
MEGAKERNEL_CODEC_HEAD_DIMS(MEGAKERNEL_EMULATE_ATTENTION)

extern "C" void codec_embed(const EmbedParams* p, int num_blocks) {
  static Frame shared;
  run(num_blocks, kBlockThreads, [&] { embed(*p, shared); });
}

extern "C" void codec_depthwise(const DepthwiseParams* p, int num_blocks) {
  static DepthwiseSharedMemory shared;
  run(num_blocks, kBlockThreads, [&] { depthwise(*p, shared); });
}

extern "C" void codec_samples(const SamplesParams* p, int num_blocks) {
  static SamplesSharedMemory shared;
  run(num_blocks, kSampleThreads, [&] { compute_samples(*p, shared); });
}

extern "C" void codec_update_state(const StateUpdateParams* p, int num_blocks) {
  run(num_blocks, kBlockThreads, [&] { update_state(*p); });
}
