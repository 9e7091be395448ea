// The kernels of the codec and their launches. A kernel starts while the previous one ends.
#include <algorithm>

#include "attention.cuh"
#include "depthwise.cuh"
#include "embed.cuh"
#include "launch.cuh"
#include "state_update.cuh"
#include "tiles.cuh"

namespace megakernel::codec {
namespace {

template <class T>
__global__ void __launch_bounds__(kBlockThreads, T::kBlocksPerSm)
    projection_kernel(const __grid_constant__ ProjectionParams p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  project<T>(p, *reinterpret_cast<ProjectionShared<T>*>(shared_bytes));
}

__global__ void __launch_bounds__(kBlockThreads)
    embed_kernel(const __grid_constant__ EmbedParams p) {
  __shared__ Frame shared;
  embed(p, shared);
}

template <int kHeadDim>
__global__ void __launch_bounds__(32 * kAttentionWarps)
    attention_kernel(const __grid_constant__ AttentionParams p) {
  __shared__ AttentionShared<kHeadDim> shared;
  attend<kHeadDim>(p, shared);
}

__global__ void __launch_bounds__(kBlockThreads)
    depthwise_kernel(const __grid_constant__ DepthwiseParams p) {
  __shared__ DepthwiseShared shared;
  depthwise(p, shared);
}

__global__ void __launch_bounds__(kBlockThreads)
    state_update_kernel(const __grid_constant__ StateUpdateParams p) {
  update_state(p);
}

int device_attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

// `overlaps_previous`: the kernel may start before the previous one ends.
template <class P>
cudaError_t launch_kernel(void (*kernel)(P), const P& p, int num_blocks, int num_threads,
                          size_t dynamic_shared_bytes, bool overlaps_previous,
                          cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_blocks);
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = dynamic_shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps_previous && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

cudaError_t launch(const EmbedParams& p, cudaStream_t stream) {
  return launch_kernel(embed_kernel, p, p.num_frames, kBlockThreads, 0, false, stream);
}

cudaError_t launch(const ProjectionParams& p, cudaStream_t stream) {
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount);
  cudaError_t error = cudaSuccess;
  with_tile(p, num_sms, [&]<class T>(T, int num_blocks) {
    error = cudaFuncSetAttribute(projection_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(ProjectionShared<T>));
    if (error != cudaSuccess) return;
    error = launch_kernel(projection_kernel<T>, p, num_blocks, kBlockThreads,
                          sizeof(ProjectionShared<T>), p.overlaps_previous, stream);
  });
  return error;
}

cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
  const auto kernel = p.head_dim == 64   ? attention_kernel<64>
                      : p.head_dim == 32 ? attention_kernel<32>
                                         : attention_kernel<16>;
  return launch_kernel(kernel, p, p.num_frames * p.num_heads, 32 * kAttentionWarps, 0, true,
                       stream);
}

cudaError_t launch(const DepthwiseParams& p, cudaStream_t stream) {
  return launch_kernel(depthwise_kernel, p, p.num_rows, kBlockThreads, 0, true, stream);
}

cudaError_t launch(const StateUpdateParams& p, cudaStream_t stream) {
  return launch_kernel(state_update_kernel, p, p.num_frames * p.num_layers, kBlockThreads, 0, false,
                       stream);
}

}  // namespace megakernel::codec
