// Conversions, roundings and vectors of sixteen bytes for kernels whose numbers are float32 or
// bfloat16; activations of all networks.
#pragma once

#include "memory.cuh"

namespace megakernel {

// Numbers in sixteen bytes.
template <class Number>
constexpr int kVectorSize = 16 / sizeof(Number);
// Rounds as torch does between two operations.
template <class Number>
DEVICE Number to_number(float value);
template <>
DEVICE float to_number<float>(float value) {
  return value;
}
template <>
DEVICE bf16 to_number<bf16>(float value) {
  return to_bf16(value);
}
template <class Number>
DEVICE float round_to(float value) {
  return to_float(to_number<Number>(value));
}

// Element i of an array of the kernel's numbers that the host wrote.
template <class Number>
DEVICE float read_number(const void* data, int64_t i) {
  return to_float(static_cast<const Number*>(data)[i]);
}

// Converts sixteen bytes to floats, and back.
DEVICE void unpack(uint4 v, float (&values)[4]) {
  values[0] = as_float(v.x), values[1] = as_float(v.y);
  values[2] = as_float(v.z), values[3] = as_float(v.w);
}
DEVICE void unpack(uint4 v, float (&values)[8]) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bf16(pairs[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}
DEVICE uint4 pack(const float (&values)[4]) {
  return {as_bits(values[0]), as_bits(values[1]), as_bits(values[2]), as_bits(values[3])};
}
DEVICE uint4 pack(const float (&values)[8]) {
  return {pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
          pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7])};
}

DEVICE float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }
DEVICE float silu(float v) { return v / (1.0f + expf(-v)); }

}  // namespace megakernel
