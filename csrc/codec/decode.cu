// The codec's kernels and their launches; each begins while the one before it ends.
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
__global__ void __launch_bounds__(kBlockThreads, T::resident)
    product_kernel(const __grid_constant__ Product p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  product<T>(p, *reinterpret_cast<Sums<T>*>(bytes));
}

__global__ void __launch_bounds__(kBlockThreads) embed_kernel(const __grid_constant__ Embed p) {
  __shared__ Frame shared;
  embed(p, shared);
}

template <int Head>
__global__ void __launch_bounds__(32 * kAttendWarps)
    attend_kernel(const __grid_constant__ Attend p) {
  __shared__ AttendShared<Head> shared;
  attend<Head>(p, shared);
}

__global__ void __launch_bounds__(kBlockThreads)
    depthwise_kernel(const __grid_constant__ Depthwise p) {
  __shared__ DepthwiseShared shared;
  depthwise(p, shared);
}

__global__ void __launch_bounds__(kBlockThreads)
    remember_kernel(const __grid_constant__ Remember p) {
  remember(p);
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

// `follows`: may begin before the kernel in front of it ends.
template <class P>
cudaError_t start(void (*kernel)(P), const P& p, int blocks, int threads, size_t shared,
                  bool follows, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = follows && attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

cudaError_t launch(const Embed& p, cudaStream_t stream) {
  return start(embed_kernel, p, p.count, kBlockThreads, 0, false, stream);
}

cudaError_t launch(const Product& p, cudaStream_t stream) {
  const int processors = attribute(cudaDevAttrMultiProcessorCount);
  cudaError_t error = cudaSuccess;
  with_tile(p, processors, [&]<class T>(T, int blocks) {
    error = cudaFuncSetAttribute(product_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(Sums<T>));
    if (error != cudaSuccess) return;
    error = start(product_kernel<T>, p, blocks, kBlockThreads, sizeof(Sums<T>), p.early, stream);
  });
  return error;
}

cudaError_t launch(const Attend& p, cudaStream_t stream) {
  const auto kernel = p.head == 64   ? attend_kernel<64>
                      : p.head == 32 ? attend_kernel<32>
                                     : attend_kernel<16>;
  return start(kernel, p, p.count * p.heads, 32 * kAttendWarps, 0, true, stream);
}

cudaError_t launch(const Depthwise& p, cudaStream_t stream) {
  return start(depthwise_kernel, p, p.rows, kBlockThreads, 0, true, stream);
}

cudaError_t launch(const Remember& p, cudaStream_t stream) {
  return start(remember_kernel, p, p.count * p.layers, kBlockThreads, 0, false, stream);
}

}  // namespace megakernel::codec
