// A CUDA driver without a GPU. Calls are counted by name; the one that is named by `fail` fails.
#include <cuda.h>

#include <cstring>
#include <string>

namespace {

std::string failing, called;

CUresult call(const char* name) {
  called += std::string(name) + " ";
  return failing == name ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void fail(const char* name) {
  failing = name;
  called.clear();
}
const char* calls() { return called.c_str(); }

CUresult cuGetErrorString(CUresult status, const char** text) {
  *text = status == CUDA_ERROR_UNKNOWN ? "a failing call" : nullptr;
  return CUDA_SUCCESS;
}

#define SUCCEEDS(name, ...) \
  CUresult name(__VA_ARGS__) { return call(#name); }
SUCCEEDS(cuInit, unsigned)
SUCCEEDS(cuDeviceGet, CUdevice*, int)
SUCCEEDS(cuDevicePrimaryCtxRetain, CUcontext*, CUdevice)
SUCCEEDS(cuCtxPushCurrent, CUcontext)
SUCCEEDS(cuCtxPopCurrent, CUcontext*)
SUCCEEDS(cuModuleLoadData, CUmodule*, const void*)
SUCCEEDS(cuModuleGetFunction, CUfunction*, CUmodule, const char*)
SUCCEEDS(cuMemsetD32Async, CUdeviceptr, unsigned, size_t, CUstream)
SUCCEEDS(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int)
SUCCEEDS(cuLaunchKernelEx, const CUlaunchConfig*, CUfunction, void**, void**)

CUresult cuModuleGetGlobal(CUdeviceptr*, size_t* size, CUmodule, const char*) {
  *size = 4;
  return call("cuModuleGetGlobal");
}
CUresult cuMemcpyDtoH(void* host, CUdeviceptr, size_t size) {
  std::memset(host, 7, size);
  return call("cuMemcpyDtoH");
}

}  // extern "C"
