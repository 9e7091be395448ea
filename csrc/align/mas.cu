// The alignment kernels and their launches.
#include <algorithm>

#include "launch.cuh"
#include "lengths.cuh"
#include "path.cuh"
#include "search.cuh"

namespace megakernel::align {
namespace {

template <class Score, bool kAligned, bool kSharedDirections>
__global__ void __launch_bounds__(64 * kMaxStripsPerBlock, kMaxBlocksPerSm)
    search_kernel(const __grid_constant__ SearchParams p) {
  extern __shared__ __align__(kLineBytes) unsigned char dynamic_shared[];
  __shared__ SearchShared shared;
  search<Score, kAligned, kSharedDirections>(p, shared, dynamic_shared);
}

__global__ void __launch_bounds__(32 * kMaskWarps)
    mask_kernel(const __grid_constant__ MaskParams p) {
  __shared__ unsigned warp_counts[kMaskWarps];
  count_lengths(p, warp_counts);
}

template <class Element>
__global__ void __launch_bounds__(32 * kPathWarps)
    path_kernel(const __grid_constant__ PathParams p) {
  __shared__ PathShared shared;
  write_path<Element>(p, shared);
}

int device_attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

size_t stage_bytes(Type type) {
  return type == Type::kFloat ? sizeof(ScoreTile<float>) : sizeof(ScoreTile<bf16>);
}

template <class Score, bool kAligned>
cudaError_t launch_search(const SearchParams& p, Type type, cudaStream_t stream) {
  const auto kernel = has_shared_directions(p) ? search_kernel<Score, kAligned, true>
                                               : search_kernel<Score, kAligned, false>;
  const size_t stages = p.strips_per_block * p.num_stages * stage_bytes(type);
  const size_t dynamic_shared = has_shared_directions(p) ? sizeof(TraceShared) + stages
                                                         : std::max(stages, sizeof(TraceShared));
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic_shared));
  if (error != cudaSuccess) return error;
  kernel<<<p.num_items * p.blocks_per_item, 64 * p.strips_per_block, dynamic_shared, stream>>>(p);
  return cudaGetLastError();
}

template <class Score>
cudaError_t launch_search(const SearchParams& p, Type type, bool aligned, cudaStream_t stream) {
  return aligned ? launch_search<Score, true>(p, type, stream)
                 : launch_search<Score, false>(p, type, stream);
}

}  // namespace

// Up to kMaxBlocksPerSm share a multiprocessor and its memory; where there are fewer, each has
// more.
cudaError_t partition(SearchParams& p, Type type) {
  partition_work(p, kMaxStripsPerBlock);
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int fixed =
      static_cast<int>(sizeof(SearchShared) + (has_shared_directions(p) ? sizeof(TraceShared) : 0));
  const int stage = static_cast<int>(stage_bytes(type));
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int blocks =
      std::min((p.num_items * p.blocks_per_item + processors - 1) / processors, kMaxBlocksPerSm);
  const int share = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / blocks -
                    device_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  const int stages = (std::min(most, share) - fixed) / (p.strips_per_block * stage);
  p.num_stages = std::clamp(stages, 1, kMaxScoreStages);
  return cudaGetLastError();
}

cudaError_t launch(const SearchParams& p, Type type, bool aligned, cudaStream_t stream) {
  if (p.blocks_per_item > 1) {
    SearchParams same = p;
    const size_t initialised_bytes =
        lay_out_workspace(same, p.block_counter).num_initialised * sizeof(uint32_t);
    const cudaError_t error = cudaMemsetAsync(p.block_counter, 0xFF, initialised_bytes, stream);
    if (error != cudaSuccess) return error;
  }
  switch (type) {
    case Type::kFloat:
      return launch_search<float>(p, type, aligned, stream);
    case Type::kBfloat16:
      return launch_search<bf16>(p, type, aligned, stream);
    default:
      return launch_search<f16>(p, type, aligned, stream);
  }
}

cudaError_t launch(const MaskParams& p, cudaStream_t stream) {
  mask_kernel<<<2 * p.num_items, 32 * kMaskWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch(const PathParams& p, cudaStream_t stream) {
  const auto kernel = p.element_bytes == 1   ? path_kernel<uint8_t>
                      : p.element_bytes == 2 ? path_kernel<uint16_t>
                      : p.element_bytes == 4 ? path_kernel<uint32_t>
                                             : path_kernel<uint64_t>;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.num_items * ((p.num_rows + kPathRows - 1) / kPathRows));
  config.blockDim = dim3(32 * kPathWarps);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace megakernel::align
