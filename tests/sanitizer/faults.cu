// Faults that the tools must find, or their silence would prove nothing.
#include <stdio.h>
#include <string.h>

// Threads read what others write, and nobody waits.
__global__ void race(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = static_cast<int>(clock());
  out[threadIdx.x] = shared[63 - threadIdx.x];
}

__global__ void bounds(int* out) { out[1 << 20 | threadIdx.x] = 1; }

// Some threads wait for all.
__global__ void barrier(int* out) {
  if (threadIdx.x < 48) __syncthreads();
  out[threadIdx.x] = 1;
}

int main(int count, char** arguments) {
  const char* what = count == 2 ? arguments[1] : "";
  int* out;
  if (cudaMalloc(&out, 64 * sizeof(int)) != cudaSuccess) return 1;
  if (strcmp(what, "race") == 0) {
    race<<<1, 64>>>(out);
  } else if (strcmp(what, "bounds") == 0) {
    bounds<<<1, 64>>>(out);
  } else if (strcmp(what, "barrier") == 0) {
    barrier<<<1, 64>>>(out);
  } else {
    fprintf(stderr, "Say which fault: race, bounds or barrier.\n");
    return 1;
  }
  cudaDeviceSynchronize();
  return 0;
}
