// Epilogues of the projection kernel: scale and bias, the residual, the activation function, the
// store.
#pragma once

#include "../math.cuh"
#include "../numbers.cuh"
#include "activations.cuh"

namespace megakernel::codec {

// sin^2(x) to 1.5e-6 + 3e-8 |x|, without the branches of sinf: the error of x itself, a rounded
// product, is twice as large in |x|. Larger x than 1e7 have no phase, and any result from 0 to 1.
DEVICE float sin_squared(float x) {
  constexpr float kToInteger = 12582912;  // 1.5 * 2^23: a sum with it is rounded to an integer
  const float k = fmaf(x, 0.318309886f, kToInteger) - kToInteger;
  const float s = approx_sine(fmaf(k, -3.14159274f, x));
  return fminf(s * s, 1.0f);
}
// SnakeBeta: v + sin^2(alpha v) / b; ColumnParams::beta is 1 / b.
DEVICE float snake(float v, const ColumnParams& column) {
  return fmaf(sin_squared(v * column.alpha), column.beta, v);
}
// GELU.
DEVICE float gelu(float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678f)); }

// Stores columns n and n + 1: a rope pair of a query or key, or two channels of a value. Writes
// queries [frames, width], or the slot's keys and values, rounded, to kv_cache [slots, 2, ring,
// width].
DEVICE void store_qkv(const ProjectionParams& p, int row, int n, float low, float high,
                      float2 rope) {
  const int width = p.num_columns / 3;
  if (n < 2 * width) {
    // Explicit, because the compiler could contract the sums differently in each kernel.
    const float rotated = fmaf(low, rope.x, -(high * rope.y));
    high = fmaf(high, rope.x, low * rope.y);
    low = rotated;
  }
  if (n < width) {
    *reinterpret_cast<float2*>(p.queries + static_cast<long long>(row) * width + n) = {low, high};
    return;
  }
  const Frame& frame = p.frames[row];
  const int entry = (n >= 2 * width) * p.kv_ring_size + frame.position % p.kv_ring_size;
  f16* slot = p.kv_cache + frame.slot * p.kv_slot_stride;
  *reinterpret_cast<uint32_t*>(slot + entry * width + n % width) = pack_f16(low, high);
}

// The operand of columns n and n + 1 that does not depend on the sums: a pair of rope [frames,
// head_dim / 2], or of residual [rows, columns].
DEVICE float2 load_epilogue_operand(const ProjectionParams& p, int row, int n) {
  if (p.epilogue == kRopeQkv) return p.rope[row * (p.head_dim / 2) + n % p.head_dim / 2];
  if (p.residual == nullptr) return {0, 0};
  const long long at = static_cast<long long>(row) * p.num_columns + n;
  return *reinterpret_cast<const float2*>(p.residual + at);
}

// Finishes columns n and n + 1 of a row, except for the store of two output channels. Writes
// residual_out [rows, columns]; with the other epilogues queries and kv_cache, or one channel
// of output. Returns whether `sum` then holds two channels to be stored.
DEVICE bool finish_columns(const ProjectionParams& p, int row, int n, float2& sum,
                           const ColumnParams& even, const ColumnParams& odd, float2 operand) {
  float low = fmaf(sum.x, even.scale, even.bias);
  float high = fmaf(sum.y, odd.scale, odd.bias);
  if (p.epilogue == kRopeQkv) {
    store_qkv(p, row, n, low, high, operand);
    return false;
  }
  if (p.residual != nullptr) {
    low += operand.x;
    high += operand.y;
  }
  if (p.residual_out != nullptr) {
    const long long at = static_cast<long long>(row) * p.num_columns + n;
    *reinterpret_cast<float2*>(p.residual_out + at) = {low, high};
  }
  if (p.epilogue == kSiluGate) {
    store_activations(p.output, row, n / 2, silu(low) * high);
    return false;
  }
  if (p.epilogue == kSnake) low = snake(low, even), high = snake(high, odd);
  if (p.epilogue == kGelu) low = gelu(low), high = gelu(high);
  sum = {low, high};
  return true;
}

// The same, with the store to output [rows * columns / channels, planes, channels].
DEVICE void apply_epilogue(const ProjectionParams& p, int row, int n, float2 sum, ColumnParams even,
                           ColumnParams odd, float2 operand) {
  if (!finish_columns(p, row, n, sum, even, odd, operand)) return;
  const int num_output_rows = p.num_columns / p.output.num_channels;
  const int output_row = n / p.output.num_channels;
  store_activations(p.output, static_cast<long long>(row) * num_output_rows + output_row,
                    n - output_row * p.output.num_channels, sum.x, sum.y);
}

}  // namespace megakernel::codec
