// The phase `attention` of the code predictor, which attends to the positions of one frame only, at
// most 16:
//   q = rope(norm(q)), k = rope(norm(k)),  a = sum_p softmax_p(q k_p / sqrt(128)) v_p
//
// Layout of a slot, for one layer and KV head: keys and values [positions, splits, head dim]. The
// channels of queries and keys are in the order of `qkv_index`: lane l has channels 2 l, 2 l + 1,
// 2 l + 64 and 2 l + 65, which form the pairs of the rotary embedding. Each stream has its own
// slot; its positions 0 and 1 may be two columns of one pass.
#pragma once

#include "attention.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kNumCodeGroups <= kKvTileSize, "a warp attends to all positions of a frame");
static_assert(kHeadDim == 4 * 32, "a lane has four channels of a head");
constexpr int kQuerySteps = 4;      // steps of the activation fragments that hold the queries
constexpr int kVectorsPerStep = 8;  // vectors of eight channels of a step
static_assert(kQuerySteps * kVectorsPerStep * 8 == 2 * kHeadDim, "the steps hold two queries");

// --- shared memory ---

// Of one warp.
struct alignas(16) ShortAttentionSharedMemory {
  uint32_t key[kNumSplits][kHeadDim / 2];  // the new key, in pairs
  float weight[kKvTileSize][2];            // softmax weights, [positions, query heads]
};

// The warp's two queries lie in the last steps of its activation fragments, which the input of the
// projection `out` does not use. They are addressed by vectors of eight channels.
template <int MaxColumns>
struct QueryFragments {
  static constexpr int kStepStride = kNumWarps * 4 * kColumnCapacity<MaxColumns>;
  static_assert(kVectorsPerStep <= 4 * kColumnCapacity<MaxColumns>,
                "a step of fragments must hold the vectors of a step of queries");

  // Vector `vector` of the first head.
  DEVICE static uint4& at(ActivationFragments<MaxColumns> (&fragments)[kNumSplits], int vector) {
    const int step = kMaxChunkSteps<MaxColumns> - kQuerySteps + vector / kVectorsPerStep;
    return fragments[0].steps[step][warp_idx()][vector % kVectorsPerStep];
  }
  // The distance from a vector of the first head to one of another split, head, step, or vector of
  // the step.
  DEVICE static constexpr int distance(int split, int head, int steps = 0, int vectors = 0) {
    return (split * kMaxChunkSteps<MaxColumns> + 2 * head + steps) * kStepStride + vectors;
  }
};

// A lane's addresses of queries and key in shared memory, computed before the wait for qkv.
template <int MaxColumns>
struct ShortAttentionAddresses {
  PinnedAddress<uint2> query, key;              // the lane's four channels
  PinnedAddress<const uint4> queries, new_key;  // operands: query head lane / 4 % 2, the new key

  // The addresses in fragments [splits] and in the warp's shared memory.
  DEVICE ShortAttentionAddresses(ActivationFragments<MaxColumns> (&fragments)[kNumSplits],
                                 ShortAttentionSharedMemory& shared)
      : query(reinterpret_cast<uint2*>(
            &QueryFragments<MaxColumns>::at(fragments, lane_idx() / 2))[lane_idx() % 2]),
        key(reinterpret_cast<uint2*>(shared.key[0])[lane_idx()]),
        queries(*(&QueryFragments<MaxColumns>::at(fragments, lane_idx() % 4) +
                  QueryFragments<MaxColumns>::distance(0, lane_idx() / 4 % 2))),
        new_key(reinterpret_cast<const uint4*>(shared.key[0])[lane_idx() % 4]) {}
};

// --- warp roles ---

// One warp computes a column and a KV head with its two query heads.
//   One stream: in every thread block, warp w computes KV head w within the phase `out`. Nothing is
//     exchanged.
//   Several streams: the (column, head) items are divided among the first warps of all thread
//     blocks, which exchange the results.
// Both give the same bits.

// --- body: keys and values of earlier passes ---

// The index of a row of queries, keys or values in exchange.qkv.
template <class S>
DEVICE int qkv_index(int row) {
  if (!S::short_context || row >= S::query_size + S::kv_size) return row;
  constexpr int kHalf = kHeadDim / 2;
  const int channel = row % kHeadDim;
  return row - channel + channel % kHalf / 2 * 4 + channel / kHalf * 2 + channel % 2;
}

// The keys and values of the positions below `num_cached`, with the norms and the rope table of the
// new position. Loaded before the wait for qkv.
struct ShortContextCache {
  uint4 keys[kNumSplits][2][4];         // operands, as in KvTile
  SplitBf16x4 values[kKvTileSize - 1];  // the lane's four channels
  uint2 query_norm, key_norm;
  float4 rope;  // cosine, sine; cosine, sine

  // Reads norms [query and key, head dim], and keys and values [positions, splits, head dim] of the
  // slot.
  DEVICE ShortContextCache(const Network& n, const bf16* norms, size_t slot_offset, int position,
                           int num_cached)
      : query_norm(load_norm(norms)),
        key_norm(load_norm(norms + kHeadDim)),
        rope(
            reinterpret_cast<const float4*>(n.rope_table + position * (kHeadDim / 2))[lane_idx()]) {
#pragma unroll
    for (int position_group = 0; position_group < 2; ++position_group) {
      const int p = 8 * position_group + lane_idx() / 4;
      const uint4* from =
          reinterpret_cast<const uint4*>(n.keys + slot_offset + p * kKvWidth) + lane_idx() % 4;
#pragma unroll
      for (int j = 0; j < 4 * kNumSplits; ++j) {
        keys[j / 4][position_group][j % 4] =
            p < num_cached ? load_l2(from + 4 * j) : uint4{0, 0, 0, 0};
      }
    }
    if (kManyRegisters) load_values(n.values + slot_offset, num_cached);
  }

  // The lane's channels of a norm [head dim], in the order of `qkv_index`.
  DEVICE static uint2 load_norm(const bf16* norm) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(norm) + lane_idx();
    return {pairs[0], pairs[kHeadDim / 4]};
  }

  // Normalises a head [head dim] and rotates it: the lane's four channels. `squares` is the head's
  // sum of squares.
  DEVICE static float4 norm_and_rotate(float4 v, float squares, uint2 norm, float4 rope,
                                       float eps) {
    v = multiply(multiply(v, rsqrtf(squares / kHeadDim + eps)), unpack_bf16x4(norm));
    return {v.x * rope.x - v.z * rope.y, v.y * rope.z - v.w * rope.w, v.z * rope.x + v.x * rope.y,
            v.w * rope.z + v.y * rope.w};
  }

  // Sets the key of position 0, a column of the same pass, [splits, head dim] over the lanes.
  DEVICE void set_first_key(const SplitBf16x4& key, ShortAttentionSharedMemory& shared) {
    for_each_split([&](int split) {
      reinterpret_cast<uint2*>(shared.key[split])[lane_idx()] = key.pairs[split];
      sync_warp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4* from =
            reinterpret_cast<const uint4*>(shared.key[split]) + 4 * j + lane_idx() % 4;
        load_shared_if(lane_idx() / 4 == 0, *from, keys[split][0][j]);
      }
      sync_warp();
    });
  }

  // Loads the values of the positions below `num_cached`. If the registers do not suffice for keys
  // and values, it is called after the last use of the keys.
  DEVICE void load_values(const bf16* slot_values, int num_cached) {
    const uint2* from = reinterpret_cast<const uint2*>(slot_values) + lane_idx();
#pragma unroll
    for (int p = 0; p < kKvTileSize - 1; ++p) {
      for_each_split([&](int split) {
        values[p].pairs[split] = p < num_cached
                                     ? load_l2(from + (p * kNumSplits + split) * (kHeadDim / 4))
                                     : uint2{0, 0};
      });
    }
  }
};

// Stores a column's key and value, each [splits, head dim] over the lanes, in its slot.
DEVICE void store_key_value(const Network& n, size_t slot_offset, int position,
                            const SplitBf16x4& key, const SplitBf16x4& value) {
  for_each_split([&](int split) {
    const size_t row = slot_offset + position * kKvWidth + split * kHeadDim;
    store_l2(reinterpret_cast<uint2*>(n.keys + row) + lane_idx(), key.pairs[split]);
    store_l2(reinterpret_cast<uint2*>(n.values + row) + lane_idx(), value.pairs[split]);
  });
}

// --- body: one column and KV head ---

// Replaces values [N] by their sums over the lanes of a warp, in every lane.
template <int N>
DEVICE void warp_sums(float (&values)[N]) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += shuffle_xor(values[i], mask);
  }
}

// Writes exp(score - maximum) to shared.weight [positions, query heads]; returns the sums of the
// two heads. Reads the queries and the new key in shared memory, [splits, head dim] each.
template <int MaxColumns>
DEVICE float2 softmax_weights(ShortContextCache& cache, const bf16* slot_values, int position,
                              int num_cached, const ShortAttentionAddresses<MaxColumns>& addresses,
                              ShortAttentionSharedMemory& shared) {
  const int g = lane_idx() / 4, t = lane_idx() % 4;  // row (query head) and column pair
  float score[2][2][4] = {};                         // [groups of 8 positions, halves of K]
#pragma unroll
  for (int position_group = 0; position_group < 2; ++position_group) {
    if (8 * position_group > position) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      SplitBf16x4 first, second;
#pragma unroll
      for (int split = 0; split < kNumSplits; ++split) {
        const uint4 q =
            *(addresses.queries + QueryFragments<MaxColumns>::distance(split, 0, j / 2, j % 2 * 4));
        first.pairs[split] = {q.x, q.y}, second.pairs[split] = {q.z, q.w};
      }
      for_each_split([&](int split) {
        uint4& k = cache.keys[split][position_group][j];
        constexpr int kSplitStride = sizeof(shared.key[0]) / sizeof(uint4);
        load_shared_if(8 * position_group + g == position,
                       *(addresses.new_key + (split * kSplitStride + 4 * j)), k);
        mma_m16n8k16(score[position_group][0], as_mma_rows(first), {k.x, k.y});
        mma_m16n8k16(score[position_group][1], as_mma_rows(second), {k.z, k.w});
      });
    }
  }
  if (!kManyRegisters) cache.load_values(slot_values, num_cached);
  float s[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int p = 8 * (i / 2) + 2 * t + i % 2;
    s[i] = sum_splits(score[i / 2][0], i % 2) + sum_splits(score[i / 2][1], i % 2);
    s[i] = p <= position ? s[i] * kScoreScale : -INFINITY;
  }
  const float sum = softmax_exponentials(s).y;
  if (g < 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.weight[8 * (i / 2) + 2 * t + i % 2][g] = s[i];
  }
  sync_warp();
  return {shuffle_from(sum, 0), shuffle_from(sum, 4)};
}

// Whether a value can be exchanged as pairs. If so, a weighted mean of such values can be too.
DEVICE bool value_fits(const SplitBf16x4& value) {
  const float4 v = unpack_bf16x4(value);
  return fits_in_pair(2 * v.x) && fits_in_pair(2 * v.y) && fits_in_pair(2 * v.z) &&
         fits_in_pair(2 * v.w);
}

// Computes column `c` and KV head `head` with all lanes of a warp. Reads exchange.qkv, float
// [columns, rows of qkv]. Calls use(column, query head of the two, output), with the output's
// [head dim] four channels per lane. Writes the key and the value if `append`. With
// `kTwoPositions`, column `c` is 1 at position 1; column 0 at position 0, which attends to itself,
// is computed too.
template <class S, bool kTwoPositions, class Context, class Use>
DEVICE void attend_short_context(Context& context, const Network& n, int layer, const bf16* norms,
                                 const Column* columns, int c, int head, bool append,
                                 ShortAttentionSharedMemory& shared, int& timed_out, Use use) {
  constexpr int kMaxColumns = Context::query_columns;
  const Params& p = context.p;
  const EpochTags& epoch_tags = context.epoch_tags;
  const ShortAttentionAddresses<kMaxColumns> addresses(context.fragments, shared);
  const float eps = n.eps;
  const int position = warp_uniform(columns[c].position);
  const size_t slot_offset =
      ((static_cast<size_t>(layer) * n.num_slots + columns[c].slot) * S::num_kv_heads + head) *
      n.num_positions * kKvWidth;
  const int num_cached = kTwoPositions ? 0 : position;
  ShortContextCache cache(n, norms, slot_offset, position, num_cached);
  const float4 first_rope = reinterpret_cast<const float4*>(n.rope_table)[lane_idx()];
  [[maybe_unused]] SplitBf16x4 first_value;

  // Vectors 0 and 1 are the queries, 2 and 3 key and value, 4 and 5 those of the column before.
  const uint32_t* qkv = n.exchange.qkv + c * S::Qkv::rows + 4 * lane_idx();
  const uint32_t* queries = qkv + 2 * head * kHeadDim;
  const uint32_t* keys = qkv + S::query_size + head * kHeadDim;
  constexpr int kColumnStride = S::Qkv::rows;
  auto address = [&](int i) {
    return i < 2 ? queries + i * kHeadDim : keys + i % 2 * S::kv_size - (i < 4 ? 0 : kColumnStride);
  };
  constexpr int kNumVectors = kTwoPositions ? 6 : 4;
  uint4 raw[kNumVectors] = {};
  wait_for_vectors<FloatValues>(
      raw, (1u << kNumVectors) - 1, address, [&](int i) { return epoch_tags.of(c - i / 4); },
      SpinTimeout(p, kQkv, timed_out));

  constexpr int kNumNormed = kTwoPositions ? 4 : 3;  // queries, the key, the key before
  float4 v[kNumNormed];
  float squares[kNumNormed];
#pragma unroll
  for (int i = 0; i < kNumNormed; ++i) v[i] = untag(raw[i + i / 3]), squares[i] = square(v[i]);
  warp_sums(squares);
#pragma unroll
  for (int i = 0; i < kNumNormed; ++i) {
    v[i] = ShortContextCache::norm_and_rotate(v[i], squares[i],
                                              i < 2 ? cache.query_norm : cache.key_norm,
                                              i < 3 ? cache.rope : first_rope, eps);
  }
  if constexpr (kTwoPositions) {
    const SplitBf16x4 key = split_bf16x4(v[3]), value = split_bf16x4(untag(raw[5]));
    if (append) store_key_value(n, slot_offset, 0, key, value);
    cache.set_first_key(key, shared);
    first_value = value;
    store_relaxed_if(!value_fits(value), p.non_finite, 1);
    use(0, 0, unpack_bf16x4(value));
    use(0, 1, unpack_bf16x4(value));
  }
  const SplitBf16x4 key = split_bf16x4(v[2]), value = split_bf16x4(untag(raw[3]));
  for_each_split([&](int split) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      *(addresses.query + 2 * QueryFragments<kMaxColumns>::distance(split, j)) =
          split_bf16x4(v[j]).pairs[split];
    }
    *(addresses.key + split * (kHeadDim / 4)) = key.pairs[split];
  });
  if (append) store_key_value(n, slot_offset, position, key, value);
  sync_warp();
  const float2 sums =
      softmax_weights(cache, n.values + slot_offset, position, num_cached, addresses, shared);
  const float scales[2] = {approx_reciprocal(sums.x), approx_reciprocal(sums.y)};
  if constexpr (kTwoPositions) cache.values[0] = first_value;

  float4 output[2] = {};
#pragma unroll
  for (int i = 0; i < kKvTileSize - 1; ++i) {
    if (i >= position) break;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      multiply_add(output[j], unpack_bf16x4(cache.values[i]), shared.weight[i][j]);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    multiply_add(output[j], unpack_bf16x4(value), shared.weight[position][j]);
  }
  const bool finite = value_fits(value) && isfinite(sums.x) && isfinite(sums.y);
  store_relaxed_if(!finite, p.non_finite + columns[c].slot, 1);
  use(c, 0, multiply(output[0], scales[0]));
  use(c, 1, multiply(output[1], scales[1]));
}

// --- body: all columns and heads ---

// Several streams: the first warp of each thread block computes the thread block's (column, head)
// items; in a wide kernel, all warps do. Writes exchange.attention_output, pairs [columns, splits,
// query size].
template <class S, class Context>
DEVICE void attend_short_distributed(Context& context, const Network& n, int layer,
                                     const bf16* norms, const Column* columns, int num_columns) {
  const int warp = kIsWide ? uniform_warp_idx() : 0;
  if (!kIsWide && uniform_warp_idx() > 0) return;
  constexpr int kNumAttendingWarps = kIsWide ? kNumWarps : 1;
#pragma unroll 1
  for (int item = block_idx() + warp * num_blocks(); item < num_columns * S::num_kv_heads;
       item += kNumAttendingWarps * num_blocks()) {
    const int c = item / S::num_kv_heads, head = item % S::num_kv_heads;
    const uint32_t tag = context.epoch_tags.of(c);
    auto store = [&](int, int j, float4 v) {
      const int pair = ((2 * head + j) * kHeadDim + 4 * lane_idx()) / 2;
      for_each_split([&](int split) {
        const float4 rest = split_remainder(v, split);
        using Layout = PairExchangeLayout<S::query_size, Context::max_columns>;
        uint32_t* to =
            n.exchange.attention_output + Layout::index(c, split * (S::query_size / 2) + pair);
        store_relaxed(to, tag_pair(rest.x, rest.y, tag));
        store_relaxed(to + 1, tag_pair(rest.z, rest.w, tag));
      });
    };
    attend_short_context<S, false>(context, n, layer, norms, columns, c, head, true,
                                   context.short_attention[warp], context.timed_out(), store);
  }
  context.timer.lap(kAttention, kRest);
}

// One stream: every thread block with rows of `out` computes all heads. Writes the output to its
// activation fragments [splits, steps, warps, columns, 4 x 16 bytes], one step per KV head.
template <class S, int NumColumns, class Context>
DEVICE void attend_short_local(Context& context, const Network& n, int layer, const bf16* norms,
                               const Column* columns, int& timed_out) {
  static_assert(S::num_kv_heads <= kNumWarps, "each KV head needs a warp");
  static_assert(S::Out::template num_chunks<1> == 1, "the fragments must hold all heads");
  static_assert(S::Out::num_row_groups >= S::num_kv_heads,
                "the thread block that appends a head's key must have rows of `out`");
  static_assert(S::Out::num_steps + kQuerySteps <= kMaxChunkSteps<1>,
                "the fragments must have space for the queries");
  constexpr int kMaxColumns = Context::max_columns;
  if (const int head = uniform_warp_idx(); head < S::num_kv_heads) {
    constexpr int kColumnStride = 4 * sizeof(uint4) / sizeof(uint2),
                  kKTileStride = kColumnCapacity<kMaxColumns> * kColumnStride;
    uint4& first = context.fragments[0].steps[head][lane_idx() / 8][lane_idx() % 8 / 2];
    const PinnedAddress<uint2> to(reinterpret_cast<uint2*>(&first)[lane_idx() % 2]);
    auto store = [&](int column, int j, float4 v) {
      for_each_split([&](int split) {
        const float4 rest = split_remainder(v, split);
        const int k_tile =
            split * kMaxChunkSteps<kMaxColumns> * kNumWarps + j * (kHeadDim / kTileK);
        *(to + (k_tile * kKTileStride + column * kColumnStride)) = {tag_pair(rest.x, rest.y, 0),
                                                                    tag_pair(rest.z, rest.w, 0)};
      });
    };
    const bool append = pin_register(head % num_blocks() == block_idx());
    attend_short_context<S, NumColumns == 2>(context, n, layer, norms, columns, NumColumns - 1,
                                             head, append, context.short_attention[head], timed_out,
                                             store);
  }
  context.timer.lap(kAttention, kRest);
  sync_compute_threads();
}

}  // namespace megakernel
