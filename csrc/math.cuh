// Arithmetic: conversions, operations without branches, and the matrix instruction.
#pragma once

#include "warp.cuh"

#ifndef MEGAKERNEL_EMULATOR

namespace megakernel {

// The same bits as another type.
DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }

// --- bfloat16 ---

DEVICE float to_float(bf16 value) { return __bfloat162float(value); }
DEVICE bf16 to_bf16(float value) { return __float2bfloat16_rn(value); }
// Two bf16 in one register of a matrix operand; `low` has the lower index.
DEVICE uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}
DEVICE float2 unpack_bf16(uint32_t pair) {
  return {as_float(pair << 16), as_float(pair & 0xFFFF0000u)};
}

// --- half precision ---

// Conversions round to nearest, and clamp to the largest finite number; NaN stays NaN.
DEVICE float to_float(f16 value) { return __half2float(value); }
DEVICE f16 to_f16(float value) {
  unsigned short bits;
  asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return __ushort_as_half(bits);
}
DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE float2 unpack_f16(uint32_t pair) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

// --- float32 ---

DEVICE float to_float(float value) { return value; }
// 1 / value to about one unit in the last place, without the branch of an exact division.
DEVICE float approx_reciprocal(float value) {
  float v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(value));
  return v;
}
// The sine to 7e-7 for |value| up to pi.
DEVICE float approx_sine(float value) { return __sinf(value); }
// a / b for operands and quotients of normal range, without the branch of an exact division.
DEVICE float divide(float a, float b) {
  const float first = approx_reciprocal(b), inverted = fmaf(first, fmaf(-b, first, 1), first);
  const float nearly = a * inverted;
  return fmaf(inverted, fmaf(-b, nearly, a), nearly);
}
// The maximum; if one operand is NaN, the other operand.
DEVICE float max_ignore_nan(float a, float b) { return fmaxf(a, b); }
// The maximum; NaN if an operand is NaN.
DEVICE float max_propagate_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// --- bits ---

DEVICE int count_set_bits(uint32_t bits) { return __popc(bits); }
// The index of the lowest set bit; -1 if there is none.
DEVICE int count_trailing_zeros(uint64_t bits) { return __ffsll(bits) - 1; }
// Shifts `bits` left by one and appends the bit a < b, which is the sign of a - b. Neither operand
// may be NaN, and a must not be -0 where b is 0. The difference of equal infinities is a NaN whose
// sign bit is 0.
DEVICE uint32_t shift_in_less_than(uint32_t bits, float a, float b) {
  return __funnelshift_l(as_bits(a - b), bits, 1);
}
// The upper 32 bits of high:low << (bits % 32).
DEVICE uint32_t funnel_shift_left(uint32_t high, uint32_t low, int bits) {
  return __funnelshift_l(low, high, bits);
}

// --- the matrix instruction ---

// acc += A B with A [16, 16], B [16, 8], acc [16, 8]. Lane 4 g + t holds:
//   A: row g, columns 2t, 2t + 1 in a.x and 2t + 8, 2t + 9 in a.z; row g + 8 likewise in a.y, a.w;
//   B: column g, rows 2t, 2t + 1 in b.x and 2t + 8, 2t + 9 in b.y;
//   acc: row g, columns 2t, 2t + 1 in acc[0], acc[1]; row g + 8 in acc[2], acc[3].
DEVICE void mma_m16n8k16(float (&acc)[4], uint4 a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
// The same with half-precision operands.
DEVICE void mma_m16n8k16_f16(float (&acc)[4], uint4 a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

}  // namespace megakernel

#endif

namespace megakernel {

// A monotonic map from float32 to integers.
DEVICE uint32_t ordered(float value) {
  const uint32_t bits = as_bits(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace megakernel
