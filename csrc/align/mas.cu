// The alignment's kernels and their launches.
#include <algorithm>

#include "launch.cuh"
#include "lengths.cuh"
#include "path.cuh"
#include "search.cuh"

namespace megakernel::align {
namespace {

template <class E, bool kAligned, bool kAlone>
__global__ void __launch_bounds__(64 * kMostWarps, kMostBlocks)
    search_kernel(const __grid_constant__ Search p) {
  extern __shared__ __align__(kLine) unsigned char room[];
  __shared__ Shared shared;
  search<E, kAligned, kAlone>(p, shared, room);
}

__global__ void __launch_bounds__(32 * kMaskWarps) mask_kernel(const __grid_constant__ Mask p) {
  __shared__ unsigned counts[kMaskWarps];
  measure(p, counts);
}

template <class W>
__global__ void __launch_bounds__(32 * kPathWarps) path_kernel(const __grid_constant__ Path p) {
  __shared__ PathShared shared;
  path<W>(p, shared);
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

size_t stage_bytes(Type type) {
  return type == Type::kFloat ? sizeof(Stage<float>) : sizeof(Stage<bf16>);
}

template <class E, bool kAligned>
cudaError_t start(const Search& p, Type type, cudaStream_t stream) {
  const auto kernel =
      is_alone(p) ? search_kernel<E, kAligned, true> : search_kernel<E, kAligned, false>;
  const size_t stages = p.warps * p.stages * stage_bytes(type);
  const size_t room = is_alone(p) ? sizeof(Way) + stages : std::max(stages, sizeof(Way));
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room));
  if (error != cudaSuccess) return error;
  kernel<<<p.items * p.chain, 64 * p.warps, room, stream>>>(p);
  return cudaGetLastError();
}

template <class E>
cudaError_t start(const Search& p, Type type, bool aligned, cudaStream_t stream) {
  return aligned ? start<E, true>(p, type, stream) : start<E, false>(p, type, stream);
}

}  // namespace

// Up to kMostBlocks share a multiprocessor and its memory; where there are fewer, each has more.
cudaError_t cut(Search& p, Type type) {
  cut_work(p, kMostWarps);
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int fixed = static_cast<int>(sizeof(Shared) + (is_alone(p) ? sizeof(Way) : 0));
  const int stage = static_cast<int>(stage_bytes(type));
  const int processors = attribute(cudaDevAttrMultiProcessorCount);
  const int blocks = std::min((p.items * p.chain + processors - 1) / processors, kMostBlocks);
  const int share = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / blocks -
                    attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  const int stages = (std::min(most, share) - fixed) / (p.warps * stage);
  p.stages = std::clamp(stages, 1, kMostStages);
  return cudaGetLastError();
}

cudaError_t launch(const Search& p, Type type, bool aligned, cudaStream_t stream) {
  if (p.chain > 1) {
    Search same = p;
    const size_t missing = lay_out(same, p.ticket).missing * sizeof(uint32_t);
    const cudaError_t error = cudaMemsetAsync(p.ticket, 0xFF, missing, stream);
    if (error != cudaSuccess) return error;
  }
  switch (type) {
    case Type::kFloat:
      return start<float>(p, type, aligned, stream);
    case Type::kBfloat16:
      return start<bf16>(p, type, aligned, stream);
    default:
      return start<f16>(p, type, aligned, stream);
  }
}

cudaError_t launch(const Mask& p, cudaStream_t stream) {
  mask_kernel<<<2 * p.items, 32 * kMaskWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch(const Path& p, cudaStream_t stream) {
  const auto kernel = p.bytes == 1   ? path_kernel<uint8_t>
                      : p.bytes == 2 ? path_kernel<uint16_t>
                      : p.bytes == 4 ? path_kernel<uint32_t>
                                     : path_kernel<uint64_t>;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.items * ((p.rows + kPathRows - 1) / kPathRows));
  config.blockDim = dim3(32 * kPathWarps);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace megakernel::align
