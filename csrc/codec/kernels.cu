// The codec's kernels, under the names that the host launches. A kernel starts while the previous
// one ends if the host launches it so.
#include "kernels.cuh"

namespace megakernel::codec {

#define MEGAKERNEL_DEFINE_PROJECTION(row_groups, column_groups, k_splits, planes, blocks_per_sm, \
                                     shared_bytes_)                                              \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, blocks_per_sm)                     \
      codec_project_##row_groups##_##column_groups##_##k_splits##_##planes(                      \
          const __grid_constant__ ProjectionParams p) {                                          \
    using T = Tile<row_groups, column_groups, k_splits, planes>;                                 \
    extern __shared__ __align__(16) unsigned char shared_bytes[];                                \
    project<T>(p, *reinterpret_cast<ProjectionSharedMemory<T>*>(shared_bytes));                  \
  }
MEGAKERNEL_CODEC_TILES(MEGAKERNEL_DEFINE_PROJECTION)
#undef MEGAKERNEL_DEFINE_PROJECTION

#define MEGAKERNEL_DEFINE_MANY_ROW_PROJECTION(row_groups, column_groups, row_warps, planes, \
                                              blocks_per_sm, shared_bytes_)                 \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, blocks_per_sm)                \
      codec_project_many_##row_groups##_##column_groups##_##row_warps##_##planes(           \
          const __grid_constant__ ProjectionParams p) {                                     \
    using T = ManyRowTile<row_groups, column_groups, row_warps, planes>;                    \
    extern __shared__ __align__(16) unsigned char shared_bytes[];                           \
    project_many_rows<T>(p, *reinterpret_cast<ManyRowSharedMemory<T>*>(shared_bytes));      \
  }
MEGAKERNEL_CODEC_MANY_ROW_TILES(MEGAKERNEL_DEFINE_MANY_ROW_PROJECTION)
#undef MEGAKERNEL_DEFINE_MANY_ROW_PROJECTION

// On other architectures these kernels exist, but are empty and never launched.
#ifdef MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS
#define MEGAKERNEL_PROJECT_WITH_WARPGROUPS(...)                 \
  using T = __VA_ARGS__;                                        \
  extern __shared__ __align__(16) unsigned char shared_bytes[]; \
  project_with_warpgroups<T>(                                   \
      p, *reinterpret_cast<WarpgroupProjectionSharedMemory<T>*>(shared_bytes));
#define MEGAKERNEL_COMPUTE_RESIDUAL_UNIT(...)                   \
  using T = __VA_ARGS__;                                        \
  extern __shared__ __align__(16) unsigned char shared_bytes[]; \
  compute_residual_unit<T>(p, *reinterpret_cast<ResidualUnitSharedMemory<T>*>(shared_bytes));
#else
#define MEGAKERNEL_PROJECT_WITH_WARPGROUPS(...)
#define MEGAKERNEL_COMPUTE_RESIDUAL_UNIT(...)
#endif
#define MEGAKERNEL_DEFINE_WARPGROUP_PROJECTION(kernel, shared_bytes_, ...)              \
  extern "C" __global__ void __launch_bounds__(WarpgroupTile<__VA_ARGS__>::kThreads, 1) \
      kernel(const __grid_constant__ ProjectionParams p) {                              \
    MEGAKERNEL_PROJECT_WITH_WARPGROUPS(WarpgroupTile<__VA_ARGS__>)                      \
  }
MEGAKERNEL_CODEC_WARPGROUP_TILES(MEGAKERNEL_DEFINE_WARPGROUP_PROJECTION)
#undef MEGAKERNEL_DEFINE_WARPGROUP_PROJECTION
#undef MEGAKERNEL_PROJECT_WITH_WARPGROUPS

#define MEGAKERNEL_DEFINE_RESIDUAL_UNIT(kernel, shared_bytes_, ...)                        \
  extern "C" __global__ void __launch_bounds__(ResidualUnitTile<__VA_ARGS__>::kThreads, 1) \
      kernel(const __grid_constant__ ResidualUnitParams p) {                               \
    MEGAKERNEL_COMPUTE_RESIDUAL_UNIT(ResidualUnitTile<__VA_ARGS__>)                        \
  }
MEGAKERNEL_CODEC_RESIDUAL_UNIT_TILES(MEGAKERNEL_DEFINE_RESIDUAL_UNIT)
#undef MEGAKERNEL_DEFINE_RESIDUAL_UNIT
#undef MEGAKERNEL_COMPUTE_RESIDUAL_UNIT

#define MEGAKERNEL_DEFINE_ATTENTION(head_dim)                                 \
  extern "C" __global__ void __launch_bounds__(32 * kAttentionWarps)          \
      codec_attention_##head_dim(const __grid_constant__ AttentionParams p) { \
    __shared__ AttentionSharedMemory<head_dim> shared;                        \
    attend<head_dim>(p, shared);                                              \
  }
MEGAKERNEL_CODEC_HEAD_DIMS(MEGAKERNEL_DEFINE_ATTENTION)
#undef MEGAKERNEL_DEFINE_ATTENTION

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    codec_embed(const __grid_constant__ EmbedParams p) {
  __shared__ Frame shared;
  embed(p, shared);
}

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    codec_depthwise(const __grid_constant__ DepthwiseParams p) {
  __shared__ DepthwiseSharedMemory shared;
  depthwise(p, shared);
}

extern "C" __global__ void __launch_bounds__(kSampleThreads, 3)
    codec_samples(const __grid_constant__ SamplesParams p) {
  __shared__ SamplesSharedMemory shared;
  compute_samples(p, shared);
}

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    codec_update_state(const __grid_constant__ StateUpdateParams p) {
  update_state(p);
}

}  // namespace megakernel::codec
