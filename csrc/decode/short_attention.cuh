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
struct alignas(16) Nearby {
  uint32_t key[kHalves][kHeadDim / 2];  // pairs of halves
  float share[kBlock][2];               // of each position
};

// Its two queries lie where the product takes what attention gives, in the last steps, which that
// does not fill: the i-th eight elements of a head.
constexpr int kQuerySteps = 4;
template <int Most>
struct Queries {
  static constexpr int kTogether = 8;  // eights of a step
  static constexpr int kStepEights = kWarps * 4 * kRoom<Most>;
  static_assert(kTogether <= 4 * kRoom<Most> && kQuerySteps * kTogether * 8 == 2 * kHeadDim);

  DEVICE static uint4& at(Fragments<Most> (&fragments)[kHalves], int eight) {
    const int step = kMostSteps<Most> - kQuerySteps + eight / kTogether;
    return fragments[0].of[step][warp()][eight % kTogether];
  }
  // From an eight of the first head to one of another half, head, and so many whole steps and
  // eights within a step further.
  DEVICE static constexpr int further(int half, int head, int steps = 0, int eights = 0) {
    return (half * kMostSteps<Most> + 2 * head + steps) * kStepEights + eights;
  }
};

// What a warp's lanes write and read while they attend, found out before anything is waited for.
template <int Most>
struct NearPlaces {
  Held<uint2> query, key;              // a lane's four channels
  Held<const uint4> queries, own_key;  // its eights of head `lane / 4 % 2`, of the new key

  DEVICE NearPlaces(Fragments<Most> (&fragments)[kHalves], Nearby& shared)
      : query(reinterpret_cast<uint2*>(&Queries<Most>::at(fragments, lane() / 2))[lane() % 2]),
        key(reinterpret_cast<uint2*>(shared.key[0])[lane()]),
        queries(*(&Queries<Most>::at(fragments, lane() % 4) +
                  Queries<Most>::further(0, lane() / 4 % 2))),
        own_key(reinterpret_cast<const uint4*>(shared.key[0])[lane() % 4]) {}
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

// What a warp knows before its queries are there: of the positions below `known`.
struct Remembered {
  uint4 keys[kHalves][2][4];  // as the matrix instruction takes them
  Halves values[kBlock - 1];  // a lane's four channels
  uint2 query_norm, key_norm;
  float4 turn;  // cosine, sine; cosine, sine

  DEVICE Remembered(const Network& n, const bf16* norms, size_t slot, int position, int known)
      : query_norm(load_norm(norms)),
        key_norm(load_norm(norms + kHeadDim)),
        turn(reinterpret_cast<const float4*>(n.turns + position * (kHeadDim / 2))[lane()]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int p = 8 * tile + lane() / 4;
      const uint4* from = reinterpret_cast<const uint4*>(n.keys + slot + p * kKept) + lane() % 4;
#pragma unroll
      for (int j = 0; j < 4 * kHalves; ++j) {
        keys[j / 4][tile][j % 4] = p < known ? load_settled(from + 4 * j) : uint4{0, 0, 0, 0};
      }
    }
    if (kRoomy) load_values(n.values + slot, known);
  }

  DEVICE static uint2 load_norm(const bf16* norm) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(norm) + lane();
    return {pairs[0], pairs[kHeadDim / 4]};
  }

  // A head's norm, of these squares, then a position's turn.
  DEVICE static float4 normed(float4 v, float squares, uint2 norm, float4 turn, float eps) {
    v = times(times(v, rsqrtf(squares / kHeadDim + eps)), opened(norm));
    return {v.x * turn.x - v.z * turn.y, v.y * turn.z - v.w * turn.w, v.z * turn.x + v.x * turn.y,
            v.w * turn.z + v.y * turn.w};
  }

  // The key of position 0, which is of the same pass.
  DEVICE void take_first(const Halves& key, Nearby& shared) {
    each_half([&](int half) {
      reinterpret_cast<uint2*>(shared.key[half])[lane()] = key.of[half];
      warp_sync();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4* from = reinterpret_cast<const uint4*>(shared.key[half]) + 4 * j + lane() % 4;
        get_if(lane() / 4 == 0, *from, keys[half][0][j]);
      }
      warp_sync();
    });
  }

  // Where registers are few, once the keys are used.
  DEVICE void load_values(const bf16* slot, int known) {
    const uint2* from = reinterpret_cast<const uint2*>(slot) + lane();
#pragma unroll
    for (int p = 0; p < kBlock - 1; ++p) {
      each_half([&](int half) {
        values[p].of[half] =
            p < known ? load_settled(from + (p * kHalves + half) * (kHeadDim / 4)) : uint2{0, 0};
      });
    }
  }
};

// Shares of every position for both heads, where the warp keeps them; returns their sums.
template <int Most>
DEVICE float2 share_out(Remembered& old, const bf16* values, int position, int known,
                        const NearPlaces<Most>& places, Nearby& shared) {
  const int g = lane() / 4, t = lane() % 4;  // head g of the two
  float score[2][2][4] = {};                 // of eight positions, of eight more
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    if (8 * tile > position) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Halves first, second;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint4 q = *(places.queries + Queries<Most>::further(half, 0, j / 2, j % 2 * 4));
        first.of[half] = {q.x, q.y}, second.of[half] = {q.z, q.w};
      }
      each_half([&](int half) {
        uint4& k = old.keys[half][tile][j];
        constexpr int kKey = sizeof(shared.key[0]) / sizeof(uint4);
        get_if(8 * tile + g == position, *(places.own_key + (half * kKey + 4 * j)), k);
        multiply(score[tile][0], rows_of(first), {k.x, k.y});
        multiply(score[tile][1], rows_of(second), {k.z, k.w});
      });
    }
  }
  if (!kRoomy) old.load_values(values, known);  // now that the keys are used
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

// A column's key and value, to their slot.
DEVICE void keep(const Network& n, size_t slot, int position, const Halves& key,
                 const Halves& value) {
  each_half([&](int half) {
    const size_t row = slot + position * kKept + half * kHeadDim;
    store_settled(reinterpret_cast<uint2*>(n.keys + row) + lane(), key.of[half]);
    store_settled(reinterpret_cast<uint2*>(n.values + row) + lane(), value.of[half]);
  });
}

// A mean of values that fit does, too.
DEVICE bool fits(const Halves& value) {
  const float4 v = opened(value);
  return fits_pair(2 * v.x) && fits_pair(2 * v.y) && fits_pair(2 * v.z) && fits_pair(2 * v.w);
}

// One column and pair of heads, by all lanes of a warp: use(column, head of the two, mean of the
// values), four channels a lane. With `Both`, it is column 1 at position 1, and column 0 at
// position 0, which sees itself alone, goes along.
template <class S, bool Both, class F, class Use>
DEVICE void attend_near(F& flow, const Network& n, int layer, const bf16* norms,
                        const Column* columns, int c, int head, bool keeps, Nearby& shared,
                        int& gave_up, Use use) {
  const Params& p = flow.p;
  const Tags& tags = flow.tags;
  static_assert(kGroups <= kBlock);
  const NearPlaces<F::most> places(flow.fragments, shared);
  const float eps = n.eps;
  const int position = uniform(columns[c].position);
  const size_t slot =
      ((static_cast<size_t>(layer) * n.slots + columns[c].slot) * S::kv_heads + head) *
      n.positions * kKept;
  const int known = Both ? 0 : position;
  Remembered old(n, norms, slot, position, known);
  const float4 first_turn = reinterpret_cast<const float4*>(n.turns)[lane()];
  [[maybe_unused]] Halves first;
  const uint32_t* words = n.words.qkv + c * S::Qkv::rows + 4 * lane();
  const uint32_t* query_words = words + 2 * head * kHeadDim;
  const uint32_t* key_words = words + S::queries + head * kHeadDim;
  constexpr int kBefore = S::Qkv::rows;  // words between columns
  auto at = [&](int i) {                 // two queries, key and value, those of the column before
    return i < 2 ? query_words + i * kHeadDim : key_words + i % 2 * S::keys - (i < 4 ? 0 : kBefore);
  };
  constexpr int kVectors = Both ? 6 : 4;
  uint4 raw[kVectors] = {};
  await(
      raw, (1u << kVectors) - 1, at,
      [&](int i, uint4 words) { return carries(words, tags.of(c - i / 4)); },
      Patience(p, kQkv, gave_up));
  constexpr int kNormed = Both ? 4 : 3;  // two queries, the key, the key before
  float4 v[kNormed];
  float squares[kNormed];
#pragma unroll
  for (int i = 0; i < kNormed; ++i) v[i] = untagged(raw[i + i / 3]), squares[i] = square(v[i]);
  warp_sums(squares);
#pragma unroll
  for (int i = 0; i < kNormed; ++i) {
    v[i] = Remembered::normed(v[i], squares[i], i < 2 ? old.query_norm : old.key_norm,
                              i < 3 ? old.turn : first_turn, eps);
  }
  if constexpr (Both) {
    const Halves key = closed(v[3]), value = closed(untagged(raw[5]));
    if (keeps) keep(n, slot, 0, key, value);
    old.take_first(key, shared);
    first = value;
    store_word_if(!fits(value), p.broken, 1);
    use(0, 0, opened(value));
    use(0, 1, opened(value));
  }
  const Halves key = closed(v[2]), value = closed(untagged(raw[3]));
  each_half([&](int half) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      *(places.query + 2 * Queries<F::most>::further(half, j)) = closed(v[j]).of[half];
    }
    *(places.key + half * (kHeadDim / 4)) = key.of[half];
  });
  if (keeps) keep(n, slot, position, key, value);
  warp_sync();
  const float2 sums = share_out(old, n.values + slot, position, known, places, shared);
  const float scales[2] = {inverse(sums.x), inverse(sums.y)};
  if constexpr (Both) old.values[0] = first;

  float4 mix[2] = {};
#pragma unroll
  for (int i = 0; i < kBlock - 1; ++i) {
    if (i >= position) break;
#pragma unroll
    for (int j = 0; j < 2; ++j) add_times(mix[j], opened(old.values[i]), shared.share[i][j]);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) add_times(mix[j], opened(value), shared.share[position][j]);
  const bool fine = fits(value) && isfinite(sums.x) && isfinite(sums.y);
  store_word_if(!fine, p.broken + columns[c].slot, 1);
  use(c, 0, times(mix[0], scales[0]));
  use(c, 1, times(mix[1], scales[1]));
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
    auto hand_over = [&](int, int j, float4 v) {
      const int word = ((2 * head + j) * kHeadDim + 4 * lane()) / 2;
      each_half([&](int half) {
        const float4 left = rest(v, half);
        using Words = PairBoard<S::queries, F::most>;
        uint32_t* to = n.words.attended + Words::at(c, half * (S::queries / 2) + word);
        store_word(to, tagged_pair(left.x, left.y, tag));
        store_word(to + 1, tagged_pair(left.z, left.w, tag));
      });
    };
    attend_near<S, false>(flow, n, layer, norms, columns, c, head, true, flow.nearby[0],
                          flow.gave_up(), hand_over);
  }
  flow.watch.lap(kAttention, kSum);
}

// Every block for itself: attention of the only stream goes where the product takes it, a step a
// pair of heads.
template <class S, int N, class F>
DEVICE void attend_here(F& flow, const Network& n, int layer, const bf16* norms,
                        const Column* columns, int& gave_up) {
  // All heads at once, and each head's keys are kept by a block that has a part of the product.
  static_assert(S::kv_heads <= kWarps && S::Out::template chunks<1> == 1 &&
                S::Out::units >= S::kv_heads);
  static_assert(S::Out::steps + kQuerySteps <= kMostSteps<1>);
  if (const int head = warp_number(); head < S::kv_heads) {
    constexpr int kColumn = 4 * sizeof(uint4) / sizeof(uint2),
                  kTilePlaces = kRoom<F::most> * kColumn;
    uint4& first = flow.fragments[0].of[head][lane() / 8][lane() % 8 / 2];
    const Held<uint2> to(reinterpret_cast<uint2*>(&first)[lane() % 2]);
    auto put = [&](int column, int j, float4 v) {
      each_half([&](int half) {
        const float4 left = rest(v, half);
        const int tiles = half * kMostSteps<F::most> * kWarps + j * (kHeadDim / kTile);
        *(to + (tiles * kTilePlaces + column * kColumn)) = {tagged_pair(left.x, left.y, 0),
                                                            tagged_pair(left.z, left.w, 0)};
      });
    };
    const bool keeps = held(head % blocks() == block());
    attend_near<S, N == 2>(flow, n, layer, norms, columns, N - 1, head, keeps, flow.nearby[head],
                           gave_up, put);
  }
  flow.watch.lap(kAttention, kSum);
  block_sync();
}

}  // namespace megakernel
