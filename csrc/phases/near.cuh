// Attention of the code predictor: it looks at the frame's own positions alone, at most sixteen, so
// that one warp does all of it for a column and a pair of query heads. With one column every block
// does so for itself, a warp a pair of heads, and nobody hands anything over; with more, the blocks
// share the items. The results are the same bits.
//
// Keys and values lie in a slot as rows of channels, keys as `qkv_word` puts them: lane l has channels
// 2l, 2l + 1, 2l + 64 and 2l + 65 of queries and keys, those that turn with each other. A column is
// alone in its slot.
#pragma once

#include "attend.cuh"

namespace megakernel {

// A warp's workplace.
struct alignas(16) Nearby {
  uint32_t query[kHalves][2][kHeadDim / 2], key[kHalves][kHeadDim / 2];  // pairs of halves
  float share[kBlock][2];                                                // of each position
};

// Two queries and a key of a position: their squares' sums, as those of one.
DEVICE void warp_sums(float (&values)[3]) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
    for (int i = 0; i < 3; ++i) values[i] += shuffle_xor(values[i], mask);
  }
}

// The word of a row of queries, keys and values.
template <class S>
DEVICE int qkv_word(int row) {
  if (!S::near || row >= S::queries + S::keys) return row;
  constexpr int kTurn = kHeadDim / 2;
  const int channel = row % kHeadDim;
  return row - channel + channel % kTurn / 2 * 4 + channel / kTurn * 2 + channel % 2;
}

// a += b c, each rounded once.
DEVICE void add_times(float4& a, float4 b, float c) {
  a.x = fmaf(b.x, c, a.x), a.y = fmaf(b.y, c, a.y);
  a.z = fmaf(b.z, c, a.z), a.w = fmaf(b.w, c, a.w);
}

// What a warp knows before its queries are there.
struct Remembered {
  uint4 keys[kHalves][2][4];  // as the matrix instruction takes them
  Halves values[kBlock - 1];  // a lane's four channels
  uint2 query_norm, key_norm;
  float4 turn;  // cosine, sine; cosine, sine

  DEVICE Remembered(const Network& n, const bf16* norms, size_t slot, int position)
      : query_norm(load_norm(norms)),
        key_norm(load_norm(norms + kHeadDim)),
        turn(reinterpret_cast<const float4*>(n.turns + position * (kHeadDim / 2))[lane()]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int p = 8 * tile + lane() / 4;
      const uint4* from = reinterpret_cast<const uint4*>(n.keys + slot + p * kKept) + lane() % 4;
#pragma unroll
      for (int j = 0; j < 4 * kHalves; ++j) {
        keys[j / 4][tile][j % 4] = p < position ? load_settled(from + 4 * j) : uint4{0, 0, 0, 0};
      }
    }
    if (kRoomy) load_values(n.values + slot, position);
  }

  DEVICE static uint2 load_norm(const bf16* norm) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(norm) + lane();
    return {pairs[0], pairs[kHeadDim / 4]};
  }

  // A head's norm, of these squares, then the turn.
  DEVICE float4 normed(float4 v, float squares, uint2 norm, float eps) const {
    v = times(times(v, rsqrtf(squares / kHeadDim + eps)), opened(norm));
    return {v.x * turn.x - v.z * turn.y, v.y * turn.z - v.w * turn.w, v.z * turn.x + v.x * turn.y,
            v.w * turn.z + v.y * turn.w};
  }

  // Where registers are few, once the keys are used.
  DEVICE void load_values(const bf16* slot, int position) {
    const uint2* from = reinterpret_cast<const uint2*>(slot) + lane();
#pragma unroll
    for (int p = 0; p < kBlock - 1; ++p) {
      each_half([&](int half) {
        values[p].of[half] =
            p < position ? load_settled(from + (p * kHalves + half) * (kHeadDim / 4)) : uint2{0, 0};
      });
    }
  }
};

// Shares of every position for both heads, where the warp keeps them; returns their sums.
DEVICE float2 share_out(Remembered& old, const bf16* values, int position, Nearby& shared) {
  const int g = lane() / 4, t = lane() % 4;  // head g of the two
  Halves first[4], second[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint4 q = reinterpret_cast<const uint4*>(shared.query[half][g % 2])[4 * j + t];
      first[j].of[half] = {q.x, q.y}, second[j].of[half] = {q.z, q.w};
    }
  }
  float score[2][2][4] = {};
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    if (8 * tile > position) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      each_half([&](int half) {
        uint4& k = old.keys[half][tile][j];
        const uint4* own = reinterpret_cast<const uint4*>(shared.key[half]) + 4 * j + t;
        get_if(8 * tile + g == position, *own, k);
        multiply(score[tile][0], rows_of(first[j]), {k.x, k.y});
        multiply(score[tile][1], rows_of(second[j]), {k.z, k.w});
      });
    }
  }
  if (!kRoomy) old.load_values(values, position);  // now that the keys are used
  float s[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int p = 8 * (i / 2) + 2 * t + i % 2;
    s[i] = row_sum(score[i / 2][0], i % 2) + row_sum(score[i / 2][1], i % 2);
    s[i] = p <= position ? s[i] * kScale : -INFINITY;
  }
  const float sum = exponentials(s).y;
  if (g < 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.share[8 * (i / 2) + 2 * t + i % 2][g] = s[i];
  }
  warp_sync();
  return {shuffle_from(sum, 0), shuffle_from(sum, 4)};
}

// One column and pair of heads, by all lanes of a warp: use(head of the two, mean of the values),
// four channels a lane.
template <class S, class Use>
DEVICE void attend_near(const Params& p, const Network& n, int layer, const bf16* norms,
                        const Tags& tags, const Column* columns, int c, int head, bool keeps,
                        Nearby& shared, int& gave_up, Use use) {
  static_assert(kGroups <= kBlock);
  const int position = uniform(columns[c].position);
  const size_t slot =
      ((static_cast<size_t>(layer) * n.slots + columns[c].slot) * S::kv_heads + head) *
      n.positions * kKept;
  Remembered old(n, norms, slot, position);
  const uint32_t* words = n.words.qkv + c * S::Qkv::rows + 4 * lane();
  const uint32_t* at[] = {words + 2 * head * kHeadDim, words + (2 * head + 1) * kHeadDim,
                          words + S::queries + head * kHeadDim,
                          words + S::queries + S::keys + head * kHeadDim};
  uint4 raw[4] = {};
  await(
      raw, 0xF, [&](int i) { return at[i]; },
      [&](int, uint4 words) { return carries(words, tags.of(c)); }, Patience(p, kQkv, gave_up));
  float4 v[3] = {untagged(raw[0]), untagged(raw[1]), untagged(raw[2])};
  float squares[3] = {square(v[0]), square(v[1]), square(v[2])};
  warp_sums(squares);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    v[i] = old.normed(v[i], squares[i], i < 2 ? old.query_norm : old.key_norm, n.eps);
  }
  const Halves key = closed(v[2]), value = closed(untagged(raw[3]));
  each_half([&](int half) {
    reinterpret_cast<uint2*>(shared.query[half][0])[lane()] = closed(v[0]).of[half];
    reinterpret_cast<uint2*>(shared.query[half][1])[lane()] = closed(v[1]).of[half];
    reinterpret_cast<uint2*>(shared.key[half])[lane()] = key.of[half];
    if (!keeps) return;
    const size_t row = slot + position * kKept + half * kHeadDim;
    store_settled(reinterpret_cast<uint2*>(n.keys + row) + lane(), key.of[half]);
    store_settled(reinterpret_cast<uint2*>(n.values + row) + lane(), value.of[half]);
  });
  warp_sync();
  const float2 sums = share_out(old, n.values + slot, position, shared);

  float4 mix[2] = {};
#pragma unroll
  for (int i = 0; i < kBlock - 1; ++i) {
    if (i >= position) break;
#pragma unroll
    for (int j = 0; j < 2; ++j) add_times(mix[j], opened(old.values[i]), shared.share[i][j]);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) add_times(mix[j], opened(value), shared.share[position][j]);
  // A mean of values that fit does, too.
  const float4 own = opened(value);
  const bool fits = fits_pair(2 * own.x) && fits_pair(2 * own.y) && fits_pair(2 * own.z) &&
                    fits_pair(2 * own.w) && isfinite(sums.x) && isfinite(sums.y);
  store_word_if(!fits, p.broken + c, 1);
  use(0, times(mix[0], inverse(sums.x)));
  use(1, times(mix[1], inverse(sums.y)));
}

// With many columns: the blocks share the items, whose results all of them wait for.
template <class S, class F>
DEVICE void attend_apart(F& flow, const Network& n, int layer, const bf16* norms,
                         const Column* columns, int count) {
  if (warp_number() > 0) return;  // where there are as many blocks as items, others have none
#pragma unroll 1
  for (int item = block(); item < count * S::kv_heads; item += blocks()) {
    const int c = item / S::kv_heads, head = item % S::kv_heads;
    const uint32_t tag = flow.tags.of(c);
    attend_near<S>(flow.p, n, layer, norms, flow.tags, columns, c, head, true, flow.nearby[0],
                   flow.gave_up(), [&](int j, float4 v) {
                     const int word = ((2 * head + j) * kHeadDim + 4 * lane()) / 2;
                     each_half([&](int half) {
                       const float4 left = rest(v, half);
                       uint32_t* to = n.words.attended +
                                      PairBoard<S::queries, F::most>::at(
                                          c, half * (S::queries / 2) + word);
                       store_word(to, tagged_pair(left.x, left.y, tag));
                       store_word(to + 1, tagged_pair(left.z, left.w, tag));
                     });
                   });
  }
  flow.watch.lap(kAttend, kSum);
}

// Every block for itself: attention of the only column goes where the product takes it, a step a
// pair of heads.
template <class S, class F>
DEVICE void attend_here(F& flow, const Network& n, int layer, const bf16* norms,
                        const Column* columns, int& gave_up) {
  // All heads at once, and each head's keys are kept by a block that has a part of the product.
  static_assert(S::kv_heads <= kWarps && S::Out::chunks == 1 && S::Out::units >= S::kv_heads);
  if (const int head = warp_number(); head < S::kv_heads) {
    attend_near<S>(flow.p, n, layer, norms, flow.tags, columns, 0, head, head % blocks() == block(),
                   flow.nearby[head], gave_up, [&](int j, float4 v) {
                     const int k = j * kHeadDim + 4 * lane();
                     each_half([&](int half) {
                       const float4 left = rest(v, half);
                       uint4& place = flow.fragments[half].of[head][k / kTile][k % kTile / 8];
                       reinterpret_cast<uint2*>(&place)[lane() % 2] = {
                           tagged_pair(left.x, left.y, 0), tagged_pair(left.z, left.w, 0)};
                     });
                   });
  }
  flow.watch.lap(kAttend, kSum);
  block_sync();
}

}  // namespace megakernel
