// Rotary position embedding of the talker's queries and keys, after the norm of the head:
//   h = x w / rms(x),  y_i = h_i cos_i - h_{i+64} sin_i,  y_{i+64} = h_{i+64} cos_i + h_i sin_i
// (Su et al., RoFormer, 2021; the halves are paired as in the Qwen models). A warp holds one head:
// lane l has channels 4 l to 4 l + 3, so that lanes l and l + 16 hold a pair.
#pragma once

#include "bf16_split.cuh"

namespace megakernel {

// The sum over the lanes of a warp, in every lane.
DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// A lane's cosines and sines of a position.
struct Rope {
  float4 table[2];  // cosine, sine; cosine, sine

  // Reads rope_table [positions, head dim / 2].
  DEVICE Rope(const Network& n, int position) {
    const float2* at = n.rope_table + position * (kHeadDim / 2) + lane_idx() % 16 * 4;
    table[0] = reinterpret_cast<const float4*>(at)[0];
    table[1] = reinterpret_cast<const float4*>(at)[1];
  }

  // Normalises a head [head dim] and rotates it: the lane's four channels. `squares` is the head's
  // sum of squares.
  DEVICE float4 norm_and_rotate(float4 v, float squares, uint2 norm, float eps) const {
    const float scale = rsqrtf(squares / kHeadDim + eps);
    const float4 weight = unpack_bf16x4(norm);
    auto rotate = [](float own, float cosine, float sine) {
      return own * cosine + (lane_idx() < 16 ? -1.0f : 1.0f) * shuffle_xor(own, 16) * sine;
    };
    return {rotate(v.x * scale * weight.x, table[0].x, table[0].y),
            rotate(v.y * scale * weight.y, table[0].z, table[0].w),
            rotate(v.z * scale * weight.z, table[1].x, table[1].y),
            rotate(v.w * scale * weight.w, table[1].z, table[1].w)};
  }
};

}  // namespace megakernel
