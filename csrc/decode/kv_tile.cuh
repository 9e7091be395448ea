// Attention of a warp to one tile: 16 consecutive positions of earlier passes.
//
//   s[j, p] = q[j] k[p] / sqrt(128),  m[j] = max_p s[j, p],
//   l[j] = sum_p exp(s[j, p] - m[j]),  o[j] = sum_p exp(s[j, p] - m[j]) v[p]
// for the two query heads j of a KV head, by matrix instructions whose rows 0 and 1 are the heads.
//
// Layout of a page, for one layer and KV head:
//   keys:   [positions, splits, head dim]
//   values: [tiles, splits, head dim, 16], the positions of a tile in the order 2t, 2t + 1, 2t + 8,
//           2t + 9 for t = 0 to 3, so that a lane loads its operand of the matrix instruction.
#pragma once

#include "bf16_split.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kKvTileSize == 16, "the matrix instruction has 8 columns, and 16 elements of K");
static_assert(kPageSize % kKvTileSize == 0, "a page consists of whole tiles");
static_assert(kHeadDim == 128, "a lane has four times eight channels, and scores have one scale");
constexpr float kScoreScale = 0.08838834764831845f;  // 1 / sqrt(kHeadDim)

// --- shared memory ---

// Of an attention item: two query heads, kSpanSize earlier positions, and up to `Capacity`
// positions of the current pass ("new").
template <int MaxColumns, int Capacity = kNewPositions<MaxColumns>>
struct alignas(16) AttentionSharedMemory {
  static constexpr int kCapacity = Capacity;
  float query[2][kHeadDim];
  float new_key[kCapacity][kHeadDim], new_value[kCapacity][kHeadDim];
  uint32_t query_pairs[kNumSplits][2][kHeadDim / 2];
  float weighted_values[kNumWarps][2][kHeadDim];  // o of each warp's tile
  float score[2][kSpanSize];
  float new_score[kCapacity][2];
  float max_score[kNumWarps][2], exp_sum[kNumWarps][2];  // m and l of each warp's tile
};

// --- warp roles ---

// One warp attends to one tile for both query heads. Lane 4 g + t of its matrix instructions has
// the query head g, if g < 2, and the column pair t.

// --- body ---

// The offset of a position's value, channel 0, from the first value of its page.
DEVICE int value_offset(int position) {
  const int p = position % kKvTileSize;
  return position % kPageSize / kKvTileSize * kKvTileSize * kKvWidth + p % 8 / 2 * 4 + p % 2 +
         p / 8 * 2;
}

// Replaces the 16 scores of a head, four in each of four neighbouring lanes, by
// exp(score - maximum). Returns the maximum and the sum of the exponentials.
DEVICE float2 softmax_exponentials(float (&s)[4]) {
  float max_score = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), sum = 0;
  max_score = fmaxf(max_score, shuffle_xor(max_score, 1));
  max_score = fmaxf(max_score, shuffle_xor(max_score, 2));
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = expf(s[i] - max_score), sum += s[i];
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  return {max_score, sum};
}

// A tile, of which the first positions (`num_valid`) are attended to. A lane's operands, of one
// warp.
struct KvTile {
  uint4 keys[kNumSplits][2][4];  // [splits, halves of 8 positions, runs of 32 channels]
  uint2 values[kNumSplits][16];  // [splits, runs of 8 channels]

  // Loads the tile's keys [positions, splits, head dim]; 0 from position `num_valid` on.
  DEVICE void load_keys(const bf16* tile_keys, int num_valid, uint64_t policy) {
    const bf16* from = tile_keys + lane_idx() / 4 * kKvWidth + lane_idx() % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool valid = 8 * half + lane_idx() / 4 < num_valid;
#pragma unroll
      for (int j = 0; j < 4 * kNumSplits; ++j) {
        const bf16* at = from + 8 * half * kKvWidth + 32 * j;
        keys[j / 4][half][j % 4] =
            valid ? load_l2(reinterpret_cast<const uint4*>(at), policy) : uint4{0, 0, 0, 0};
      }
    }
  }

  // Loads the tile's values [splits, head dim, 16].
  DEVICE void load_values(const bf16* tile_values, uint64_t policy) {
    const bf16* from = tile_values + lane_idx() / 4 * kKvTileSize + lane_idx() % 4 * 4;
#pragma unroll
    for (int n = 0; n < 16 * kNumSplits; ++n) {
      values[n / 16][n % 16] =
          load_l2(reinterpret_cast<const uint2*>(from + 8 * n * kKvTileSize), policy);
    }
  }

  // Reads query_pairs [splits, query heads, head dim] of `shared`. Writes the warp's entries of
  // score [query heads, kSpanSize], max_score, exp_sum [warps, query heads] and weighted_values
  // [warps, query heads, head dim].
  template <int MaxColumns, int Capacity>
  DEVICE void attend(int num_valid, AttentionSharedMemory<MaxColumns, Capacity>& shared) const {
    const int g = lane_idx() / 4, t = lane_idx() % 4;  // row and column pair of the accumulators
    float score[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      SplitBf16x4 first, second;
#pragma unroll
      for (int split = 0; split < kNumSplits; ++split) {
        const uint32_t* pairs = shared.query_pairs[split][g % 2];
        const uint4* at = reinterpret_cast<const uint4*>(pairs) + 4 * j + t;
        const uint4 q = g < 2 ? *at : uint4{0, 0, 0, 0};
        first.pairs[split] = {q.x, q.y}, second.pairs[split] = {q.z, q.w};
      }
      for_each_split([&](int split) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 k = keys[split][half][j];
          mma_m16n8k16(score[half], as_mma_rows(first), {k.x, k.y});
          mma_m16n8k16(score[half], as_mma_rows(second), {k.z, k.w});
        }
      });
    }
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = 8 * (i / 2) + 2 * t + i % 2;
      s[i] = position < num_valid ? sum_splits(score[i / 2], i % 2) * kScoreScale : -INFINITY;
    }
    if (g < 2) {
      float2* to = reinterpret_cast<float2*>(&shared.score[g][warp_idx() * kKvTileSize]) + t;
      to[0] = {s[0], s[1]}, to[4] = {s[2], s[3]};
    }
    const auto [max_score, exp_sum] = softmax_exponentials(s);
    if (g < 2 && t == 0) {
      shared.max_score[warp_idx()][g] = max_score, shared.exp_sum[warp_idx()][g] = exp_sum;
    }
    const uint4 weights = as_mma_rows(split_bf16x4({s[0], s[1], s[2], s[3]}));
    // Other values may be NaN, left by another stream: a weight of 0 does not mask them.
    const int num_own = num_valid - 2 * t;
    const uint32_t low = num_own >= 2 ? ~0u : num_own == 1 ? 0xFFFFu : 0u;
    const uint32_t high = num_own >= 10 ? ~0u : num_own == 9 ? 0xFFFFu : 0u;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      float weighted[4] = {};
      for_each_split([&](int split) {
        mma_m16n8k16(weighted, weights, {values[split][n].x & low, values[split][n].y & high});
      });
      if (g < 2) {
        float2* to =
            reinterpret_cast<float2*>(&shared.weighted_values[warp_idx()][g][8 * n + 2 * t]);
        *to = {sum_splits(weighted, 0), sum_splits(weighted, 1)};
      }
    }
  }
};

}  // namespace megakernel
