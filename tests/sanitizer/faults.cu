// Faults that compute-sanitizer must report. They show that its tools work on this machine.
#include <stdio.h>
#include <string.h>

// Threads read shared memory that other threads write, without a barrier.
__global__ void race(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = static_cast<int>(clock());
  out[threadIdx.x] = shared[63 - threadIdx.x];
}

__global__ void bounds(int* out) { out[1 << 20 | threadIdx.x] = 1; }

// Only some threads of the block arrive at a barrier of all.
__global__ void barrier(int* out) {
  if (threadIdx.x < 48) __syncthreads();
  out[threadIdx.x] = 1;
}

int main(int num_arguments, char** arguments) {
  const char* fault = num_arguments == 2 ? arguments[1] : "";
  int* out;
  if (cudaMalloc(&out, 64 * sizeof(int)) != cudaSuccess) return 1;
  if (strcmp(fault, "race") == 0) {
    race<<<1, 64>>>(out);
  } else if (strcmp(fault, "bounds") == 0) {
    bounds<<<1, 64>>>(out);
  } else if (strcmp(fault, "barrier") == 0) {
    barrier<<<1, 64>>>(out);
  } else {
    fprintf(stderr, "Name a fault: race, bounds or barrier.\n");
    return 1;
  }
  cudaDeviceSynchronize();
  return 0;
}
