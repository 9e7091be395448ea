// Attention of the code predictor: it looks at the frame's own positions alone, at most sixteen, so
// that one warp does all of it for a column and a pair of query heads. With one stream every block
// does so for itself, a warp a pair of heads, and nobody hands anything over; with more, the blocks
// share the items. The results are the same bits.
//
// Keys and values lie in a slot as rows of channels, keys as `qkv_word` puts them: lane l has
// channels 2l, 2l + 1, 2l + 64 and 2l + 65 of queries and keys, those that turn with each other. A
// stream is alone in its slot; its positions 0 and 1 may be two columns of one pass.
#pragma once

#include "attention.cuh"

namespace megakernel {

// A warp's workplace.
struct alignas(16) ShortAttentionSharedMemory {
  uint32_t key[kNumSplits][kHeadDim / 2];  // pairs of halves
  float share[kPageSize][2];               // of each position
};

// Its two queries lie where the product takes what attention gives, in the last steps, which that
// does not fill: the i-th eight elements of a head.
constexpr int kQuerySteps = 4;
template <int MaxColumns>
struct QueryFragments {
  static constexpr int kTogether = 8;  // eights of a step
  static constexpr int kStepEights = kNumWarps * 4 * kColumnCapacity<MaxColumns>;
  static_assert(kTogether <= 4 * kColumnCapacity<MaxColumns> &&
                kQuerySteps * kTogether * 8 == 2 * kHeadDim);

  DEVICE static uint4& at(ActivationFragments<MaxColumns> (&fragments)[kNumSplits], int eight) {
    const int step = kMaxChunkSteps<MaxColumns> - kQuerySteps + eight / kTogether;
    return fragments[0].num_steps[step][warp_idx()][eight % kTogether];
  }
  // From an eight of the first head to one of another half, head, and so many whole steps and
  // eights within a step further.
  DEVICE static constexpr int further(int split, int head, int num_steps = 0, int eights = 0) {
    return (split * kMaxChunkSteps<MaxColumns> + 2 * head + num_steps) * kStepEights + eights;
  }
};

// What a warp's lanes write and read while they attend, found out before anything is waited for.
template <int MaxColumns>
struct ShortAttentionAddresses {
  PinnedAddress<uint2> query, key;              // a lane's four channels
  PinnedAddress<const uint4> queries, own_key;  // its eights of head `lane / 4 % 2`, of the new key

  DEVICE ShortAttentionAddresses(ActivationFragments<MaxColumns> (&fragments)[kNumSplits],
                                 ShortAttentionSharedMemory& shared)
      : query(reinterpret_cast<uint2*>(
            &QueryFragments<MaxColumns>::at(fragments, lane_idx() / 2))[lane_idx() % 2]),
        key(reinterpret_cast<uint2*>(shared.key[0])[lane_idx()]),
        queries(*(&QueryFragments<MaxColumns>::at(fragments, lane_idx() % 4) +
                  QueryFragments<MaxColumns>::further(0, lane_idx() / 4 % 2))),
        own_key(reinterpret_cast<const uint4*>(shared.key[0])[lane_idx() % 4]) {}
};

// Queries and keys: their squares' sums, as those of one.
template <int N>
DEVICE void warp_sums(float (&values)[N]) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += shuffle_xor(values[i], mask);
  }
}

// The word of a row of queries, keys and values.
template <class S>
DEVICE int qkv_index(int row) {
  if (!S::short_context || row >= S::query_size + S::kv_size) return row;
  constexpr int kTurn = kHeadDim / 2;
  const int channel = row % kHeadDim;
  return row - channel + channel % kTurn / 2 * 4 + channel / kTurn * 2 + channel % 2;
}

// a += b c, each rounded once.
DEVICE void add_times(float4& a, float4 b, float c) {
  a.x = fmaf(b.x, c, a.x), a.y = fmaf(b.y, c, a.y);
  a.z = fmaf(b.z, c, a.z), a.w = fmaf(b.w, c, a.w);
}

// What a warp knows before its queries are there: of the positions below `known`.
struct ShortContextCache {
  uint4 keys[kNumSplits][2][4];       // as the matrix instruction takes them
  SplitBf16x4 values[kPageSize - 1];  // a lane's four channels
  uint2 query_norm, key_norm;
  float4 turn;  // cosine, sine; cosine, sine

  DEVICE ShortContextCache(const Network& n, const bf16* norms, size_t slot, int position,
                           int known)
      : query_norm(load_norm(norms)),
        key_norm(load_norm(norms + kHeadDim)),
        turn(
            reinterpret_cast<const float4*>(n.rope_table + position * (kHeadDim / 2))[lane_idx()]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int p = 8 * tile + lane_idx() / 4;
      const uint4* from =
          reinterpret_cast<const uint4*>(n.keys + slot + p * kKvWidth) + lane_idx() % 4;
#pragma unroll
      for (int j = 0; j < 4 * kNumSplits; ++j) {
        keys[j / 4][tile][j % 4] = p < known ? load_l2(from + 4 * j) : uint4{0, 0, 0, 0};
      }
    }
    if (kManyRegisters) load_values(n.values + slot, known);
  }

  DEVICE static uint2 load_norm(const bf16* norm) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(norm) + lane_idx();
    return {pairs[0], pairs[kHeadDim / 4]};
  }

  // A head's norm, of these squares, then a position's turn.
  DEVICE static float4 normed(float4 v, float squares, uint2 norm, float4 turn, float eps) {
    v = multiply(multiply(v, rsqrtf(squares / kHeadDim + eps)), unpack_bf16x4(norm));
    return {v.x * turn.x - v.z * turn.y, v.y * turn.z - v.w * turn.w, v.z * turn.x + v.x * turn.y,
            v.w * turn.z + v.y * turn.w};
  }

  // The key of position 0, which is of the same pass.
  DEVICE void take_first(const SplitBf16x4& key, ShortAttentionSharedMemory& shared) {
    for_each_split([&](int split) {
      reinterpret_cast<uint2*>(shared.key[split])[lane_idx()] = key.of[split];
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

  // Where registers are few, once the keys are used.
  DEVICE void load_values(const bf16* slot, int known) {
    const uint2* from = reinterpret_cast<const uint2*>(slot) + lane_idx();
#pragma unroll
    for (int p = 0; p < kPageSize - 1; ++p) {
      for_each_split([&](int split) {
        values[p].of[split] =
            p < known ? load_l2(from + (p * kNumSplits + split) * (kHeadDim / 4)) : uint2{0, 0};
      });
    }
  }
};

// Shares of every position for both heads, where the warp keeps them; returns their sums.
template <int MaxColumns>
DEVICE float2 softmax_weights(ShortContextCache& old, const bf16* values, int position, int known,
                              const ShortAttentionAddresses<MaxColumns>& places,
                              ShortAttentionSharedMemory& shared) {
  const int g = lane_idx() / 4, t = lane_idx() % 4;  // head g of the two
  float score[2][2][4] = {};                         // of eight positions, of eight more
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    if (8 * tile > position) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      SplitBf16x4 first, second;
#pragma unroll
      for (int split = 0; split < kNumSplits; ++split) {
        const uint4 q =
            *(places.queries + QueryFragments<MaxColumns>::further(split, 0, j / 2, j % 2 * 4));
        first.of[split] = {q.x, q.y}, second.of[split] = {q.z, q.w};
      }
      for_each_split([&](int split) {
        uint4& k = old.keys[split][tile][j];
        constexpr int kKey = sizeof(shared.key[0]) / sizeof(uint4);
        load_shared_if(8 * tile + g == position, *(places.own_key + (split * kKey + 4 * j)), k);
        mma_m16n8k16(score[tile][0], as_mma_rows(first), {k.x, k.y});
        mma_m16n8k16(score[tile][1], as_mma_rows(second), {k.z, k.w});
      });
    }
  }
  if (!kManyRegisters) old.load_values(values, known);  // now that the keys are used
  float s[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int p = 8 * (i / 2) + 2 * t + i % 2;
    s[i] = sum_splits(score[i / 2][0], i % 2) + sum_splits(score[i / 2][1], i % 2);
    s[i] = p <= position ? s[i] * kScale : -INFINITY;
  }
  const float sum = softmax_exponentials(s).y;
  if (g < 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.share[8 * (i / 2) + 2 * t + i % 2][g] = s[i];
  }
  sync_warp();
  return {shuffle_from(sum, 0), shuffle_from(sum, 4)};
}

// A column's key and value, to their slot.
DEVICE void store_key_value(const Network& n, size_t slot, int position, const SplitBf16x4& key,
                            const SplitBf16x4& value) {
  for_each_split([&](int split) {
    const size_t row = slot + position * kKvWidth + split * kHeadDim;
    store_l2(reinterpret_cast<uint2*>(n.keys + row) + lane_idx(), key.of[split]);
    store_l2(reinterpret_cast<uint2*>(n.values + row) + lane_idx(), value.of[split]);
  });
}

// A mean of values that fit does, too.
DEVICE bool value_fits(const SplitBf16x4& value) {
  const float4 v = unpack_bf16x4(value);
  return fits_in_pair(2 * v.x) && fits_in_pair(2 * v.y) && fits_in_pair(2 * v.z) &&
         fits_in_pair(2 * v.w);
}

// One column and pair of heads, by all lanes of a warp: use(column, head of the two, mean of the
// values), four channels a lane. With `Both`, it is column 1 at position 1, and column 0 at
// position 0, which sees itself alone, goes along.
template <class S, bool Both, class F, class Use>
DEVICE void attend_short_context(F& context, const Network& n, int layer, const bf16* norms,
                                 const Column* columns, int c, int head, bool keeps,
                                 ShortAttentionSharedMemory& shared, int& timed_out, Use use) {
  const Params& p = context.p;
  const EpochTags& tags = context.tags;
  static_assert(kNumCodeGroups <= kPageSize);
  const ShortAttentionAddresses<F::max_columns> places(context.fragments, shared);
  const float eps = n.eps;
  const int position = warp_uniform(columns[c].position);
  const size_t slot =
      ((static_cast<size_t>(layer) * n.num_slots + columns[c].slot) * S::num_kv_heads + head) *
      n.num_positions * kKvWidth;
  const int known = Both ? 0 : position;
  ShortContextCache old(n, norms, slot, position, known);
  const float4 first_turn = reinterpret_cast<const float4*>(n.rope_table)[lane_idx()];
  [[maybe_unused]] SplitBf16x4 first;
  const uint32_t* words = n.exchange.qkv + c * S::Qkv::rows + 4 * lane_idx();
  const uint32_t* query_words = words + 2 * head * kHeadDim;
  const uint32_t* key_words = words + S::query_size + head * kHeadDim;
  constexpr int kBefore = S::Qkv::rows;  // words between columns
  auto at = [&](int i) {                 // two queries, key and value, those of the column before
    return i < 2 ? query_words + i * kHeadDim
                 : key_words + i % 2 * S::kv_size - (i < 4 ? 0 : kBefore);
  };
  constexpr int kVectors = Both ? 6 : 4;
  uint4 raw[kVectors] = {};
  wait_for_vectors(
      raw, (1u << kVectors) - 1, at,
      [&](int i, uint4 words) { return has_tag(words, tags.of(c - i / 4)); },
      SpinTimeout(p, kQkv, timed_out));
  constexpr int kNormed = Both ? 4 : 3;  // two queries, the key, the key before
  float4 v[kNormed];
  float squares[kNormed];
#pragma unroll
  for (int i = 0; i < kNormed; ++i) v[i] = untag(raw[i + i / 3]), squares[i] = square(v[i]);
  warp_sums(squares);
#pragma unroll
  for (int i = 0; i < kNormed; ++i) {
    v[i] = ShortContextCache::normed(v[i], squares[i], i < 2 ? old.query_norm : old.key_norm,
                                     i < 3 ? old.turn : first_turn, eps);
  }
  if constexpr (Both) {
    const SplitBf16x4 key = split_bf16x4(v[3]), value = split_bf16x4(untag(raw[5]));
    if (keeps) store_key_value(n, slot, 0, key, value);
    old.take_first(key, shared);
    first = value;
    store_relaxed_if(!value_fits(value), p.non_finite, 1);
    use(0, 0, unpack_bf16x4(value));
    use(0, 1, unpack_bf16x4(value));
  }
  const SplitBf16x4 key = split_bf16x4(v[2]), value = split_bf16x4(untag(raw[3]));
  for_each_split([&](int split) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      *(places.query + 2 * QueryFragments<F::max_columns>::further(split, j)) =
          split_bf16x4(v[j]).of[split];
    }
    *(places.key + split * (kHeadDim / 4)) = key.of[split];
  });
  if (keeps) store_key_value(n, slot, position, key, value);
  sync_warp();
  const float2 sums = softmax_weights(old, n.values + slot, position, known, places, shared);
  const float scales[2] = {approx_reciprocal(sums.x), approx_reciprocal(sums.y)};
  if constexpr (Both) old.values[0] = first;

  float4 mix[2] = {};
#pragma unroll
  for (int i = 0; i < kPageSize - 1; ++i) {
    if (i >= position) break;
#pragma unroll
    for (int j = 0; j < 2; ++j) add_times(mix[j], unpack_bf16x4(old.values[i]), shared.share[i][j]);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) add_times(mix[j], unpack_bf16x4(value), shared.share[position][j]);
  const bool fine = value_fits(value) && isfinite(sums.x) && isfinite(sums.y);
  store_relaxed_if(!fine, p.non_finite + columns[c].slot, 1);
  use(c, 0, multiply(mix[0], scales[0]));
  use(c, 1, multiply(mix[1], scales[1]));
}

// With many columns: the blocks share the items, whose results all of them wait for.
template <class S, class F>
DEVICE void attend_short_distributed(F& context, const Network& n, int layer, const bf16* norms,
                                     const Column* columns, int count) {
  if (uniform_warp_idx() > 0) return;  // where there are as many blocks as items, others have none
#pragma unroll 1
  for (int item = block_idx(); item < count * S::num_kv_heads; item += num_blocks()) {
    const int c = item / S::num_kv_heads, head = item % S::num_kv_heads;
    const uint32_t tag = context.tags.of(c);
    auto store_output = [&](int, int j, float4 v) {
      const int word = ((2 * head + j) * kHeadDim + 4 * lane_idx()) / 2;
      for_each_split([&](int split) {
        const float4 left = split_remainder(v, split);
        using Layout = PairExchangeLayout<S::query_size, F::max_columns>;
        uint32_t* to =
            n.exchange.attention_output + Layout::index(c, split * (S::query_size / 2) + word);
        store_relaxed(to, tag_pair(left.x, left.y, tag));
        store_relaxed(to + 1, tag_pair(left.z, left.w, tag));
      });
    };
    attend_short_context<S, false>(context, n, layer, norms, columns, c, head, true,
                                   context.short_attention[0], context.timed_out(), store_output);
  }
  context.timer.lap(kAttention, kSum);
}

// Every block for itself: attention of the only stream goes where the product takes it, a step a
// pair of heads.
template <class S, int N, class F>
DEVICE void attend_short_local(F& context, const Network& n, int layer, const bf16* norms,
                               const Column* columns, int& timed_out) {
  // All heads at once, and each head's keys are kept by a block that has a part of the product.
  static_assert(S::num_kv_heads <= kNumWarps && S::Out::template num_chunks<1> == 1 &&
                S::Out::num_row_groups >= S::num_kv_heads);
  static_assert(S::Out::num_steps + kQuerySteps <= kMaxChunkSteps<1>);
  if (const int head = uniform_warp_idx(); head < S::num_kv_heads) {
    constexpr int kColumn = 4 * sizeof(uint4) / sizeof(uint2),
                  kTilePlaces = kColumnCapacity<F::max_columns> * kColumn;
    uint4& first = context.fragments[0].num_steps[head][lane_idx() / 8][lane_idx() % 8 / 2];
    const PinnedAddress<uint2> to(reinterpret_cast<uint2*>(&first)[lane_idx() % 2]);
    auto put = [&](int column, int j, float4 v) {
      for_each_split([&](int split) {
        const float4 left = split_remainder(v, split);
        const int tiles =
            split * kMaxChunkSteps<F::max_columns> * kNumWarps + j * (kHeadDim / kTileK);
        *(to + (tiles * kTilePlaces + column * kColumn)) = {tag_pair(left.x, left.y, 0),
                                                            tag_pair(left.z, left.w, 0)};
      });
    };
    const bool keeps = pin_register(head % num_blocks() == block_idx());
    attend_short_context<S, N == 2>(context, n, layer, norms, columns, N - 1, head, keeps,
                                    context.short_attention[head], timed_out, put);
  }
  context.timer.lap(kAttention, kSum);
  sync_compute_threads();
}

}  // namespace megakernel
