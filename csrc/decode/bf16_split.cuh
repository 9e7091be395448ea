// Vectors of four elements, and activations as sums of kNumSplits bf16 values.
//
// A projection multiplies bf16 operands. In the precise build an activation x is hi + lo with
// hi = bf16(x) and lo = bf16(x - hi), which is nearly a float32. In the ordinary build it is hi.
#pragma once

#include "../exchange.cuh"

namespace megakernel {

// --- four float32 elements ---

// Element-wise sum and product, and the sum of squares.
DEVICE float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
DEVICE float4 multiply(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float4 multiply(float4 a, float b) { return {a.x * b, a.y * b, a.z * b, a.w * b}; }
DEVICE float square(float4 a) { return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; }
// a += b c, with one rounding per element.
DEVICE void multiply_add(float4& a, float4 b, float c) {
  a.x = fmaf(b.x, c, a.x), a.y = fmaf(b.y, c, a.y);
  a.z = fmaf(b.z, c, a.z), a.w = fmaf(b.w, c, a.w);
}

// --- four bf16 elements ---

// The elements of a pair, and of two pairs.
DEVICE float low_bf16(uint32_t pair) { return as_float(pair << 16); }
DEVICE float high_bf16(uint32_t pair) { return as_float(pair & 0xFFFF0000u); }
DEVICE float4 unpack_bf16x4(uint2 pairs) {
  return {low_bf16(pairs.x), high_bf16(pairs.x), low_bf16(pairs.y), high_bf16(pairs.y)};
}
// Loads four elements from `at`.
DEVICE uint2 load_packed_bf16x4(const bf16* at) { return *reinterpret_cast<const uint2*>(at); }
DEVICE float4 load_bf16x4(const bf16* at) { return unpack_bf16x4(load_packed_bf16x4(at)); }

// --- splits ---

// Calls act(split) for hi (0) and, in the precise build, for lo (1).
template <class Act>
DEVICE void for_each_split(Act act) {
  act(0);
  if constexpr (kNumSplits > 1) act(1);
}

// The number that a split rounds to bf16: x for hi, x - hi for lo.
DEVICE float split_remainder(float value, int split) {
  return split == 0 ? value : value - to_float(to_bf16(value));
}
DEVICE float4 split_remainder(float4 v, int split) {
  return {split_remainder(v.x, split), split_remainder(v.y, split), split_remainder(v.z, split),
          split_remainder(v.w, split)};
}

// Four elements, [splits] vectors of two bf16 pairs.
struct SplitBf16x4 {
  uint2 pairs[kNumSplits];
};
// Splits four elements, and adds up the splits.
DEVICE SplitBf16x4 split_bf16x4(float4 v) {
  SplitBf16x4 result;
  for_each_split([&](int split) {
    const float4 rest = split_remainder(v, split);
    result.pairs[split] = {pack_bf16(rest.x, rest.y), pack_bf16(rest.z, rest.w)};
  });
  return result;
}
DEVICE float4 unpack_bf16x4(const SplitBf16x4& v) {
  const float4 hi = unpack_bf16x4(v.pairs[0]);
  return kNumSplits == 1 ? hi : add(hi, unpack_bf16x4(v.pairs[kNumSplits - 1]));
}

// Operand A of the matrix instruction: row g has the hi values, row g + 8 the lo values.
DEVICE uint4 as_mma_rows(const SplitBf16x4& v) {
  const uint2 hi = v.pairs[0], lo = kNumSplits > 1 ? v.pairs[kNumSplits - 1] : uint2{0, 0};
  return {hi.x, lo.x, hi.y, lo.y};
}
// Element i of row g of the result: the sum of the rows of hi and lo.
DEVICE float sum_splits(const float (&acc)[4], int i) {
  return kNumSplits > 1 ? acc[i] + acc[i + 2] : acc[i];
}

}  // namespace megakernel
