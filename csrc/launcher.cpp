// Torch operators that load cubins and launch their kernels. megakernel_common/kernels names the
// kernels and checks their arguments.
//
// Operators return the driver's status, and call no function that throws; Python raises the
// exception. If a compiler links a C++ runtime of its own into this library, a C++ exception that
// leaves it ends the process.
#include <ATen/core/Tensor.h>
#include <cuda.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

namespace megakernel {
namespace {

using at::Tensor;

constexpr int64_t kNoDriver = -1;  // not a status of the driver

#define STRING_OF(text) #text
#define STRING(name) STRING_OF(name)  // expands names that cuda.h defines as macros
#define DRIVER_FUNCTION(name)                                         \
  const decltype(&::name) name = reinterpret_cast<decltype(&::name)>( \
      library == nullptr ? nullptr : dlsym(library, STRING(name)))

// Functions of the driver, from the library that torch has loaded.
struct Driver {
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY);
  DRIVER_FUNCTION(cuInit);
  DRIVER_FUNCTION(cuGetErrorString);
  DRIVER_FUNCTION(cuDeviceGet);
  DRIVER_FUNCTION(cuDevicePrimaryCtxRetain);
  DRIVER_FUNCTION(cuCtxPushCurrent);
  DRIVER_FUNCTION(cuCtxPopCurrent);
  DRIVER_FUNCTION(cuModuleLoadData);
  DRIVER_FUNCTION(cuModuleGetFunction);
  DRIVER_FUNCTION(cuModuleGetGlobal);
  DRIVER_FUNCTION(cuMemcpyDtoH);
  DRIVER_FUNCTION(cuMemsetD32Async);
  DRIVER_FUNCTION(cuFuncSetAttribute);
  DRIVER_FUNCTION(cuLaunchKernelEx);  // the newest function: a driver with it has all of them
};

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

// Makes a context current for the thread; a new thread has none.
class CurrentContext {
 public:
  explicit CurrentContext(int64_t context)
      : status(driver().cuCtxPushCurrent(reinterpret_cast<CUcontext>(context))) {}
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext() {
    CUcontext popped = nullptr;
    if (status == CUDA_SUCCESS) driver().cuCtxPopCurrent(&popped);
  }

  const CUresult status;
};

// The description of a status.
std::string error_text(int64_t status) {
  if (status == kNoDriver) return "there is no driver for CUDA 12 or later";
  const char* text = nullptr;
  driver().cuGetErrorString(static_cast<CUresult>(status), &text);
  return text == nullptr ? "error " + std::to_string(status) : text;
}

// Returns status, the device's primary context, and the module.
std::tuple<int64_t, int64_t, int64_t> load_module(const Tensor& cubin, int64_t device) {
  if (driver().cuLaunchKernelEx == nullptr) return {kNoDriver, 0, 0};
  CUdevice handle = 0;
  CUcontext context = nullptr;
  CUmodule module = nullptr;
  CUresult status = driver().cuInit(0);
  if (status == CUDA_SUCCESS) status = driver().cuDeviceGet(&handle, static_cast<int>(device));
  if (status == CUDA_SUCCESS) status = driver().cuDevicePrimaryCtxRetain(&context, handle);
  if (status == CUDA_SUCCESS) {
    const CurrentContext current(reinterpret_cast<int64_t>(context));
    status = current.status;
    if (status == CUDA_SUCCESS) {
      status = driver().cuModuleLoadData(&module, cubin.const_data_ptr());
    }
  }
  return {status, reinterpret_cast<int64_t>(context), reinterpret_cast<int64_t>(module)};
}

// Returns status and kernel.
std::tuple<int64_t, int64_t> find_kernel(int64_t context, int64_t module, std::string name) {
  const CurrentContext current(context);
  if (current.status != CUDA_SUCCESS) return {current.status, 0};
  CUfunction kernel = nullptr;
  const CUresult status =
      driver().cuModuleGetFunction(&kernel, reinterpret_cast<CUmodule>(module), name.c_str());
  return {status, reinterpret_cast<int64_t>(kernel)};
}

// Sets the limit of a kernel's dynamic shared memory. Returns status.
int64_t allow_shared_bytes(int64_t context, int64_t kernel, int64_t shared_bytes) {
  const CurrentContext current(context);
  if (current.status != CUDA_SUCCESS) return current.status;
  return driver().cuFuncSetAttribute(reinterpret_cast<CUfunction>(kernel),
                                     CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                     static_cast<int>(shared_bytes));
}

// Copies a module's global variable, which must have the size of `bytes`, to the host. Returns
// status.
int64_t read_symbol(int64_t context, int64_t module, std::string name, const Tensor& bytes) {
  const CurrentContext current(context);
  if (current.status != CUDA_SUCCESS) return current.status;
  CUdeviceptr address = 0;
  size_t size = 0;
  const CUresult status =
      driver().cuModuleGetGlobal(&address, &size, reinterpret_cast<CUmodule>(module), name.c_str());
  if (status != CUDA_SUCCESS) return status;
  if (size != bytes.nbytes()) return CUDA_ERROR_INVALID_VALUE;
  return driver().cuMemcpyDtoH(bytes.mutable_data_ptr(), address, size);
}

// Launches a kernel on a stream of its context. `params` is the address of the kernel's only
// argument. `writes` are the tensors that the kernel writes. All bits of `set_bits` are set before
// the launch. The status is written to a tensor, because torch cannot trace operators that return
// numbers.
void launch(int64_t context, int64_t kernel, int64_t stream, int64_t num_blocks,
            int64_t num_threads, int64_t shared_bytes, bool cooperative, bool overlap_previous,
            int64_t params, at::TensorList writes, const std::optional<Tensor>& set_bits,
            const Tensor& status) {
  int64_t& result = *static_cast<int64_t*>(status.mutable_data_ptr());
  const CurrentContext current(context);
  result = current.status;
  if (result != CUDA_SUCCESS) return;
  const CUstream queue = reinterpret_cast<CUstream>(stream);
  if (set_bits.has_value()) {
    result = driver().cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(set_bits->mutable_data_ptr()),
                                       ~0U, set_bits->nbytes() / sizeof(unsigned), queue);
    if (result != CUDA_SUCCESS) return;
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
  config.hStream = queue;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  void* arguments[] = {reinterpret_cast<void*>(params)};
  result =
      driver().cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel), arguments, nullptr);
}

}  // namespace
}  // namespace megakernel

TORCH_LIBRARY_FRAGMENT(megakernel_tts, m) {
  m.def("error_text(int status) -> str", &megakernel::error_text);
  m.def("load_module(Tensor cubin, int device) -> (int, int, int)", &megakernel::load_module);
  m.def("find_kernel(int context, int module, str name) -> (int, int)", &megakernel::find_kernel);
  m.def("allow_shared_bytes(int context, int kernel, int shared_bytes) -> int",
        &megakernel::allow_shared_bytes);
  m.def("read_symbol(int context, int module, str name, Tensor(a!) bytes) -> int",
        &megakernel::read_symbol);
  m.def(
      "launch(int context, int kernel, int stream, int num_blocks, int num_threads, "
      "int shared_bytes, bool cooperative, bool overlap_previous, int params, "
      "Tensor(a!)[] writes, Tensor(b!)? set_bits, Tensor(c!) status) -> ()");
}

TORCH_LIBRARY_IMPL(megakernel_tts, CUDA, m) { m.impl("launch", &megakernel::launch); }

// The operator returns nothing, so fake tensors need no computation.
TORCH_LIBRARY_IMPL(megakernel_tts, Meta, m) {
  m.impl("launch", [](int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, int64_t,
                      at::TensorList, const std::optional<at::Tensor>&, const at::Tensor&) {});
}
