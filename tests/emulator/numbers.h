// Vector types and number formats of CUDA, on a host.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <vector>  // defines std::max and std::min, too, in less time than <algorithm>

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace megakernel {

using std::isfinite;
using std::max;
using std::min;

inline float as_float(uint32_t bits) {
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
inline uint32_t as_bits(float value) {
  uint32_t out;
  memcpy(&out, &value, 4);
  return out;
}
inline float to_float(float value) { return value; }

struct bf16 {
  uint16_t bits;
};
inline float to_float(bf16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }
inline bf16 to_bf16(float value) {
  const uint32_t bits = as_bits(value);
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline uint32_t pack_bf16(float low, float high) {
  return to_bf16(low).bits | static_cast<uint32_t>(to_bf16(high).bits) << 16;
}
inline float2 unpack_bf16(uint32_t pair) {
  return {to_float(bf16{static_cast<uint16_t>(pair & 0xFFFF)}),
          to_float(bf16{static_cast<uint16_t>(pair >> 16)})};
}

using f16 = _Float16;
inline float to_float(f16 value) { return value; }
inline f16 to_f16(float value) {
  return static_cast<f16>(value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value);
}
inline uint32_t pack_f16(float low, float high) {
  const f16 pair[2] = {to_f16(low), to_f16(high)};
  uint32_t bits;
  memcpy(&bits, pair, 4);
  return bits;
}
inline float2 unpack_f16(uint32_t bits) {
  f16 pair[2];
  memcpy(pair, &bits, 4);
  return {static_cast<float>(pair[0]), static_cast<float>(pair[1])};
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float approx_reciprocal(float x) { return 1.0f / x; }
inline float approx_sine(float x) { return sinf(x); }
inline float divide(float a, float b) { return a / b; }
// Of the host's library, a call.
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
inline float max_ignore_nan(float a, float b) { return fmaxf(a, b); }
inline float max_propagate_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
inline uint32_t shift_in_less_than(uint32_t bits, float a, float b) { return bits << 1 | (a < b); }
inline int count_set_bits(uint32_t bits) { return __builtin_popcount(bits); }
inline int count_trailing_zeros(uint64_t bits) { return __builtin_ctzll(bits); }
inline uint32_t funnel_shift_left(uint32_t high, uint32_t low, int bits) {
  return ((static_cast<uint64_t>(high) << 32 | low) << (bits & 31)) >> 32;
}

}  // namespace megakernel
