// Sliding-window attention of the codec's transformer.
//
//   output = sum over k of exp(query . key[k]) value[k] / sum over k of exp(query . key[k])
//
// k runs over the last kAttentionWindow frames of the stream. One block per frame and head.
#pragma once

#include "activations.cuh"

namespace megakernel::codec {

// --- static asserts ---

constexpr int kAttentionWarps = 4;
constexpr int kKeysPerWarp = kAttentionWindow / kAttentionWarps;
static_assert(kAttentionWindow % kAttentionWarps == 0, "warps have equal parts of the window");

// --- shared memory ---

// The warps' weighted sums of values [warps, head_dim], maxima and sums of weights [warps].
template <int HeadDim>
struct AttentionSharedMemory {
  float weighted_values[kAttentionWarps][HeadDim];
  float max_scores[kAttentionWarps], exp_sums[kAttentionWarps];
};

// --- warp roles ---

// Warp w has the w-th quarter of the window. head_dim / 8 lanes share a key, eight channels each.
// All keys and values of a warp are loaded before the first score is computed, those of earlier
// calls without waiting for the previous kernel. After a block barrier, a thread merges the warps'
// results for two channels.

// --- body ---

// Eight channels.
struct Float8 {
  float values[8];
};

// Loads float32 [8].
DEVICE Float8 load_float8(const float* at) {
  const float4 a = reinterpret_cast<const float4*>(at)[0];
  const float4 b = reinterpret_cast<const float4*>(at)[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
// Converts eight numbers in half precision.
DEVICE Float8 unpack_eight_f16(uint4 v) {
  const float2 a = unpack_f16(v.x), b = unpack_f16(v.y), c = unpack_f16(v.z), d = unpack_f16(v.w);
  return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}

// The attention kernel. Reads queries [frames, heads, head_dim], kv_cache [slots, 2, ring, heads,
// head_dim]; writes output [frames, planes, heads * head_dim].
template <int HeadDim>
DEVICE void attend(const AttentionParams& p, AttentionSharedMemory<HeadDim>& shared) {
  static_assert(HeadDim % 8 == 0 && HeadDim <= 256, "a lane has eight channels of a head");
  constexpr int kLanesPerKey = HeadDim / 8, kKeysPerLoad = 32 / kLanesPerKey;
  constexpr int kNumLoads = (kKeysPerWarp + kKeysPerLoad - 1) / kKeysPerLoad;
  trigger_dependent_grids();
  const int row = block_idx() / p.num_heads, head = block_idx() % p.num_heads;
  const int width = p.num_heads * HeadDim;
  const int channel = head * HeadDim + lane_idx() % kLanesPerKey * 8;
  const Frame& frame = p.frames[row];
  const f16* keys = p.kv_cache + frame.slot * p.kv_slot_stride + channel;
  const f16* values = keys + static_cast<long long>(p.kv_ring_size) * width;
  // The ring has the window and all frames of a stream in a call, so no kernel of the call writes
  // to visible entries of earlier calls. These are complete: the first kernels do not overlap.
  const int first_position = frame.position - (row - frame.first_frame);  // of the call
  uint4 key[kNumLoads] = {}, value[kNumLoads] = {};
  bool visible[kNumLoads];
  const auto load = [&](bool are_of_call) {
#pragma unroll
    for (int i = 0; i < kNumLoads; ++i) {
      const int k = i * kKeysPerLoad + lane_idx() / kLanesPerKey;
      const int position = frame.position + 1 - kAttentionWindow + warp_idx() * kKeysPerWarp + k;
      visible[i] = k < kKeysPerWarp && position >= 0;
      if (!visible[i] || (position >= first_position) != are_of_call) continue;
      const int at = position % p.kv_ring_size * width;
      key[i] = *reinterpret_cast<const uint4*>(keys + at);
      value[i] = *reinterpret_cast<const uint4*>(values + at);
    }
  };
  load(false);
  wait_for_prerequisite_grids();
  load(true);
  const Float8 query = load_float8(p.queries + static_cast<long long>(row) * width + channel);
  float score[kNumLoads], max_score = -1e30f;
#pragma unroll
  for (int i = 0; i < kNumLoads; ++i) {
    score[i] = 0;
    const Float8 of_key = unpack_eight_f16(key[i]);
#pragma unroll
    for (int c = 0; c < 8; ++c) score[i] += query.values[c] * of_key.values[c];
#pragma unroll
    for (int mask = 1; mask < kLanesPerKey; mask *= 2) score[i] += shuffle_xor(score[i], mask);
    if (visible[i]) max_score = max(max_score, score[i]);
  }
#pragma unroll
  for (int mask = kLanesPerKey; mask < 32; mask *= 2) {
    max_score = max(max_score, shuffle_xor(max_score, mask));
  }
  float exp_sum = 0;
  Float8 weighted = {};
#pragma unroll
  for (int i = 0; i < kNumLoads; ++i) {
    const float weight = visible[i] ? expf(score[i] - max_score) : 0.0f;
    exp_sum += weight;
    const Float8 of_value = unpack_eight_f16(value[i]);
#pragma unroll
    for (int c = 0; c < 8; ++c) weighted.values[c] += weight * of_value.values[c];
  }
#pragma unroll
  for (int mask = kLanesPerKey; mask < 32; mask *= 2) {
    exp_sum += shuffle_xor(exp_sum, mask);
#pragma unroll
    for (int c = 0; c < 8; ++c) weighted.values[c] += shuffle_xor(weighted.values[c], mask);
  }
  if (lane_idx() < kLanesPerKey) {
    for (int c = 0; c < 8; ++c) {
      shared.weighted_values[warp_idx()][8 * lane_idx() + c] = weighted.values[c];
    }
  }
  if (lane_idx() == 0)
    shared.max_scores[warp_idx()] = max_score, shared.exp_sums[warp_idx()] = exp_sum;
  sync_all_threads();

  // Merge of the warps: a thread has two channels.
  if (thread_idx() >= HeadDim / 2) return;
  for (int w = 0; w < kAttentionWarps; ++w) max_score = max(max_score, shared.max_scores[w]);
  float low = 0, high = 0, total = 0;
  for (int w = 0; w < kAttentionWarps; ++w) {
    const float factor = expf(shared.max_scores[w] - max_score);
    total += factor * shared.exp_sums[w];
    low += factor * shared.weighted_values[w][2 * thread_idx()];
    high += factor * shared.weighted_values[w][2 * thread_idx() + 1];
  }
  store_activations(p.output, row, head * HeadDim + 2 * thread_idx(), low / total, high / total);
}

}  // namespace megakernel::codec
