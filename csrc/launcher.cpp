// Loads cubins and launches their kernels, as torch operators. No kernel is named here:
// megakernel_tts/kernels decides what is launched, and checks it.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <string>

namespace megakernel {
namespace {

using at::Tensor;

// A function of the driver, which torch has loaded; so there is no need to link it.
template <class Function>
Function* driver_function(const char* name, Function*) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
  TORCH_CHECK(address != nullptr && found == cudaDriverEntryPointSuccess, "The CUDA driver has no ",
              name, "; update it.");
  return reinterpret_cast<Function*>(address);
}
#define DRIVER(name) \
  static const auto name##_ = driver_function(#name, static_cast<decltype(::name)*>(nullptr))

void check(CUresult result, const std::string& action) {
  if (result == CUDA_SUCCESS) return;
  DRIVER(cuGetErrorString);
  const char* text = nullptr;
  cuGetErrorString_(result, &text);
  TORCH_CHECK(false, "CUDA could not ", action, ": ", text == nullptr ? "unknown error" : text,
              ".");
}

// Sets the thread's device; the driver needs its context, which a new thread does not have.
void use_device(int64_t device) {
  const cudaError_t error = cudaSetDevice(static_cast<int>(device));
  TORCH_CHECK(error == cudaSuccess, "GPU ", device, " failed: ", cudaGetErrorString(error), ".");
}

int64_t load_module(const Tensor& cubin, int64_t device) {
  DRIVER(cuModuleLoadData);
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  use_device(device);
  CUmodule module = nullptr;
  check(cuModuleLoadData_(&module, cubin.const_data_ptr()), "load the kernels");
  return reinterpret_cast<int64_t>(module);
}

int64_t find_kernel(int64_t module, std::string name, int64_t device) {
  DRIVER(cuModuleGetFunction);
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  use_device(device);
  CUfunction function = nullptr;
  check(cuModuleGetFunction_(&function, reinterpret_cast<CUmodule>(module), name.c_str()),
        "find " + name);
  return reinterpret_cast<int64_t>(function);
}

// Lets a kernel use up to so much dynamic shared memory.
void allow_shared_bytes(int64_t kernel, int64_t shared_bytes, int64_t device) {
  DRIVER(cuFuncSetAttribute);
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  use_device(device);
  check(cuFuncSetAttribute_(reinterpret_cast<CUfunction>(kernel),
                            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                            static_cast<int>(shared_bytes)),
        "give a kernel " + std::to_string(shared_bytes) + " bytes of shared memory");
}

// The bytes of a module's global variable, on the host.
Tensor read_symbol(int64_t module, std::string name, int64_t device) {
  DRIVER(cuModuleGetGlobal);
  DRIVER(cuMemcpyDtoH);
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  use_device(device);
  CUdeviceptr address = 0;
  size_t size = 0;
  check(cuModuleGetGlobal_(&address, &size, reinterpret_cast<CUmodule>(module), name.c_str()),
        "find " + name);
  const Tensor bytes = at::empty({static_cast<int64_t>(size)}, at::kByte);
  check(cuMemcpyDtoH_(bytes.mutable_data_ptr(), address, size), "read " + name);
  return bytes;
}

// Launches on the current stream of the device. `params` holds the kernel's only argument, with the
// addresses of the tensors in `writes`, which the kernel changes. All bits of `set_bits` are set
// beforehand.
void launch(int64_t kernel, int64_t device, int64_t num_blocks, int64_t num_threads,
            int64_t shared_bytes, bool cooperative, bool overlap_previous, const Tensor& params,
            at::TensorList writes, const std::optional<Tensor>& set_bits) {
  DRIVER(cuLaunchKernelEx);
  TORCH_CHECK(params.is_cpu() && params.is_contiguous(),
              "The parameters must be contiguous on the host.");
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  use_device(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (set_bits.has_value()) {
    const cudaError_t error =
        cudaMemsetAsync(set_bits->data_ptr(), 0xFF, set_bits->nbytes(), stream);
    TORCH_CHECK(error == cudaSuccess,
                "CUDA could not clear the workspace: ", cudaGetErrorString(error), ".");
  }
  CUlaunchAttribute attributes[2] = {};
  unsigned num_attributes = 0;
  if (cooperative) {
    attributes[num_attributes].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[num_attributes++].value.cooperative = 1;
  }
  if (overlap_previous) {
    attributes[num_attributes].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[num_attributes++].value.programmaticStreamSerializationAllowed = 1;
  }
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(num_blocks);
  config.blockDimX = static_cast<unsigned>(num_threads);
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(shared_bytes);
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  void* arguments[] = {const_cast<void*>(params.const_data_ptr())};
  check(cuLaunchKernelEx_(&config, reinterpret_cast<CUfunction>(kernel), arguments, nullptr),
        "launch a kernel with " + std::to_string(num_blocks) + " thread blocks");
}

}  // namespace
}  // namespace megakernel

TORCH_LIBRARY_FRAGMENT(megakernel_tts, m) {
  m.def("load_module(Tensor cubin, int device) -> int", &megakernel::load_module);
  m.def("find_kernel(int module, str name, int device) -> int", &megakernel::find_kernel);
  m.def("allow_shared_bytes(int kernel, int shared_bytes, int device) -> ()",
        &megakernel::allow_shared_bytes);
  m.def("read_symbol(int module, str name, int device) -> Tensor", &megakernel::read_symbol);
  m.def(
      "launch(int kernel, int device, int num_blocks, int num_threads, int shared_bytes, "
      "bool cooperative, bool overlap_previous, Tensor params, Tensor(a!)[] writes, "
      "Tensor(b!)? set_bits) -> ()");
}

TORCH_LIBRARY_IMPL(megakernel_tts, CUDA, m) { m.impl("launch", &megakernel::launch); }

// Nothing is returned, so that fake tensors need nothing either.
TORCH_LIBRARY_IMPL(megakernel_tts, Meta, m) {
  m.impl("launch", [](int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, const at::Tensor&,
                      at::TensorList, const std::optional<at::Tensor>&) {});
}
