// Attention: head norms, rotary embedding, the new keys and values into their slot, and
//   sum_p softmax(q k_p / sqrt(128)) v_p
// over spans of `kSpan` positions. An item is a column, a pair of query heads that shares keys and
// values, and a span; where a column has several spans, the block of the first puts them together.
//
// Positions of earlier passes are attended to in blocks of sixteen, one a warp, by matrix
// instructions whose rows are the two heads. Keys lie in a slot as rows of channels; values as
// blocks [head dim][16], the positions of a channel in the order 2t, 2t + 1, 2t + 8, 2t + 9 for
// t = 0 .. 3, so that what a lane loads is its operand. Second halves lie behind a position's key
// and behind a block's values. Positions of this launch come from the words of their columns.
#pragma once

#include "projection.cuh"

namespace megakernel {

// Where a column stands in its network.
struct Column {
  int slot;
  int position;
  int first;    // the first column of the same slot in this launch: those between come before it
  bool append;  // whether its keys and values are kept
  int frame;    // of this launch, for which scores are told; -1: they are not
};

// An item's workplace.
template <int Most>
struct alignas(16) Attention {
  float query[2][kHeadDim];
  float new_key[kRoom<Most>][kHeadDim], new_value[kRoom<Most>][kHeadDim];
  uint32_t query_pairs[kHalves][2][kHeadDim / 2];
  float mix[kWarps][2][kHeadDim];
  float score[2][kSpan];  // of earlier positions
  float new_score[kRoom<Most>][2];
  float peak[kWarps][2], sum[kWarps][2];
};

struct Item {
  int column, head, span, spans;
};

constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(128)

DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

DEVICE float low_half(uint32_t pair) { return as_float(pair << 16); }
DEVICE float high_half(uint32_t pair) { return as_float(pair & 0xFFFF0000u); }

// Four neighbouring elements.
DEVICE uint2 load_pairs(const bf16* at) { return *reinterpret_cast<const uint2*>(at); }
DEVICE float4 opened(uint2 pairs) {
  return {low_half(pairs.x), high_half(pairs.x), low_half(pairs.y), high_half(pairs.y)};
}
DEVICE float4 load_halves(const bf16* at) { return opened(load_pairs(at)); }

DEVICE float4 plus(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
DEVICE float4 times(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float4 times(float4 a, float b) { return {a.x * b, a.y * b, a.z * b, a.w * b}; }
DEVICE float square(float4 a) { return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; }

DEVICE float4 rest(float4 v, int half) {
  return {rest(v.x, half), rest(v.y, half), rest(v.z, half), rest(v.w, half)};
}

// Four neighbouring elements in halves.
struct Halves {
  uint2 of[kHalves];
};
DEVICE Halves closed(float4 v) {
  Halves halves;
  each_half([&](int half) {
    const float4 left = rest(v, half);
    halves.of[half] = {pack(left.x, left.y), pack(left.z, left.w)};
  });
  return halves;
}
DEVICE float4 opened(const Halves& halves) {
  const float4 first = opened(halves.of[0]);
  return kHalves == 1 ? first : plus(first, opened(halves.of[kHalves - 1]));
}

// As operand A, of which row g + 8 has the second halves of row g; and the sum of both products.
DEVICE uint4 rows_of(const Halves& halves) {
  const uint2 first = halves.of[0], second = kHalves > 1 ? halves.of[kHalves - 1] : uint2{0, 0};
  return {first.x, second.x, first.y, second.y};
}
DEVICE float row_sum(const float (&acc)[4], int i) {
  return kHalves > 1 ? acc[i] + acc[i + 2] : acc[i];
}

// Where a position's value of channel 0 lies within its slot.
DEVICE int value_place(int position) {
  const int p = position % kBlock;
  return position / kBlock * kBlock * kKept + p % 8 / 2 * 4 + p % 2 + p / 8 * 2;
}

// A lane's part of a position's turn.
struct Turn {
  float4 turns[2];  // cosine, sine; cosine, sine

  DEVICE Turn(const Network& n, int position) {
    const float2* at = n.turns + position * (kHeadDim / 2) + lane() % 16 * 4;
    turns[0] = reinterpret_cast<const float4*>(at)[0];
    turns[1] = reinterpret_cast<const float4*>(at)[1];
  }

  // A head's norm, of these squares, then the turn: channel i goes with channel i + 64, which lane
  // + 16 holds.
  DEVICE float4 normed(float4 v, float squares, uint2 norm, float eps) const {
    const float scale = rsqrtf(squares / kHeadDim + eps);
    const float4 weight = opened(norm);
    auto turned = [](float own, float cosine, float sine) {
      return own * cosine + (lane() < 16 ? -1.0f : 1.0f) * shuffle_xor(own, 16) * sine;
    };
    return {turned(v.x * scale * weight.x, turns[0].x, turns[0].y),
            turned(v.y * scale * weight.y, turns[0].z, turns[0].w),
            turned(v.z * scale * weight.z, turns[1].x, turns[1].y),
            turned(v.w * scale * weight.w, turns[1].z, turns[1].w)};
  }
};

// Queries of the item's column, keys and values of this launch: a warp a vector, a lane channels
// 4 lane to 4 lane + 3. `last` is the item of the newest positions.
template <class S, int Most>
DEVICE void take_in(const Params& p, const Network& n, const bf16* norms, const Tags& tags,
                    const Column* columns, Item item, size_t slot, bool last,
                    Attention<Most>& shared, int& gave_up) {
  const Column column = columns[item.column];
  const int vectors = uniform(2 + (last ? 2 * (item.column - column.first + 1) : 0));
#pragma unroll 1
  for (int i = warp_number(); i < vectors; i += kWarps) {
    const int fresh = i / 2 - 1;  // -1: a query
    const bool is_value = fresh >= 0 && i % 2;
    const int c = fresh < 0 ? item.column : column.first + fresh;
    const int row = fresh < 0 ? (2 * item.head + i) * kHeadDim
                              : S::queries + (is_value ? S::keys : 0) + item.head * kHeadDim;
    const uint2 norm = load_pairs(norms + (fresh < 0 ? 0 : kHeadDim) + 4 * lane());
    const Turn turn(n, columns[c].position);
    const uint4 raw = await_words(n.words.qkv + c * S::Qkv::rows + row + 4 * lane(), tags.of(c),
                                  Patience(p, kQkv, gave_up));
    float4 v = untagged(raw);
    if (!is_value) v = turn.normed(v, warp_sum(square(v)), norm, n.eps);
    const Halves halves = closed(v);
    v = opened(halves);
    float* to = fresh < 0  ? shared.query[i]
                : is_value ? shared.new_value[fresh]
                           : shared.new_key[fresh];
    reinterpret_cast<float4*>(to)[lane()] = v;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint2 pairs = halves.of[half];
      if (fresh < 0) reinterpret_cast<uint2*>(shared.query_pairs[half][i])[lane()] = pairs;
      if (fresh < 0 || c != item.column || !column.append) continue;
      if (is_value) {
        const float4 v = opened(pairs);
        bf16* at = n.values + slot + value_place(column.position) +
                   (half * kHeadDim + 4 * lane()) * kBlock;
        store_settled(at, to_bf16(v.x)), store_settled(at + kBlock, to_bf16(v.y));
        store_settled(at + 2 * kBlock, to_bf16(v.z)), store_settled(at + 3 * kBlock, to_bf16(v.w));
      } else {
        bf16* at = n.keys + slot + static_cast<size_t>(column.position) * kKept + half * kHeadDim;
        store_settled(reinterpret_cast<uint2*>(at) + lane(), pairs);
      }
    }
  }
}

// Scores of a head, four in each of four neighbouring lanes, to shares of the highest's; returns
// the highest and the shares' sum.
DEVICE float2 exponentials(float (&s)[4]) {
  float peak = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), sum = 0;
  peak = fmaxf(peak, shuffle_xor(peak, 1));
  peak = fmaxf(peak, shuffle_xor(peak, 2));
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = expf(s[i] - peak), sum += s[i];
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  return {peak, sum};
}

// Keys and values are read once a frame, as all weights are. As many of the first layers' as have
// room stay in the second-level cache from frame to frame; the others' only pass through it.
DEVICE bool stays(const Params& p, int layer, int positions, int columns) {
  return (layer + 1) * positions * columns <= p.remembered;
}

// A warp's sixteen positions from `begin` on, of which those below `end` are there.
struct Sixteen {
  uint4 keys[kHalves][2][4];
  uint2 values[kHalves][16];

  DEVICE void load_keys(const bf16* slot, int begin, int end, uint64_t policy) {
    const bf16* from = slot + (begin + lane() / 4) * kKept + lane() % 4 * 8;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const bool there = begin + 8 * tile + lane() / 4 < end;
#pragma unroll
      for (int j = 0; j < 4 * kHalves; ++j) {
        const bf16* at = from + 8 * tile * kKept + 32 * j;
        keys[j / 4][tile][j % 4] =
            there ? load_settled(reinterpret_cast<const uint4*>(at), policy) : uint4{0, 0, 0, 0};
      }
    }
  }

  DEVICE void load_values(const bf16* slot, int begin, uint64_t policy) {
    const bf16* from = slot + begin * kKept + lane() / 4 * kBlock + lane() % 4 * 4;
#pragma unroll
    for (int n = 0; n < 16 * kHalves; ++n) {
      values[n / 16][n % 16] =
          load_settled(reinterpret_cast<const uint2*>(from + 8 * n * kBlock), policy);
    }
  }

  template <int Most>
  DEVICE void attend(int begin, int end, Attention<Most>& shared) const {
    const int g = lane() / 4, t = lane() % 4;
    float score[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Halves first, second;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint32_t* pairs = shared.query_pairs[half][g % 2];
        const uint4* at = reinterpret_cast<const uint4*>(pairs) + 4 * j + t;
        const uint4 q = g < 2 ? *at : uint4{0, 0, 0, 0};
        first.of[half] = {q.x, q.y}, second.of[half] = {q.z, q.w};
      }
      each_half([&](int half) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const uint4 k = keys[half][tile][j];
          multiply(score[tile], rows_of(first), {k.x, k.y});
          multiply(score[tile], rows_of(second), {k.z, k.w});
        }
      });
    }
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = begin + 8 * (i / 2) + 2 * t + i % 2;
      s[i] = position < end ? row_sum(score[i / 2], i % 2) * kScale : -INFINITY;
    }
    if (g < 2) {
      float2* to = reinterpret_cast<float2*>(&shared.score[g][warp() * kBlock]) + t;
      to[0] = {s[0], s[1]}, to[4] = {s[2], s[3]};
    }
    const auto [peak, sum] = exponentials(s);
    if (g < 2 && t == 0) shared.peak[warp()][g] = peak, shared.sum[warp()][g] = sum;
    const uint4 shares = rows_of(closed({s[0], s[1], s[2], s[3]}));
    // What is left there from another stream may be anything.
    const int left = end - begin - 2 * t;
    const uint32_t low = left >= 2 ? ~0u : left == 1 ? 0xFFFFu : 0u;
    const uint32_t high = left >= 10 ? ~0u : left == 9 ? 0xFFFFu : 0u;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      float mix[4] = {};
      each_half([&](int half) {
        multiply(mix, shares, {values[half][n].x & low, values[half][n].y & high});
      });
      if (g < 2) {
        float2* to = reinterpret_cast<float2*>(&shared.mix[warp()][g][8 * n + 2 * t]);
        *to = {row_sum(mix, 0), row_sum(mix, 1)};
      }
    }
  }
};

// What attention gives; neighbouring threads have neighbouring channels.
template <class S, int Most>
DEVICE void hand_over(const Params& p, const Network& n, int column, int query_head, int channel,
                      float value, uint32_t tag) {
  store_word_if(!fits_pair(value), p.broken + column, 1);
  const float next = shuffle_xor(value, 1);
  const int word = (query_head * kHeadDim + channel) / 2;
  each_half([&](int half) {
    const int at = PairBoard<S::queries, Most>::at(column, half * (S::queries / 2) + word);
    store_word_if(channel % 2 == 0, n.words.attended + at,
                  tagged_pair(rest(value, half), rest(next, half), tag));
  });
}

// Scores before the softmax of the heads that the host asked for, to their places.
template <class S, int Most>
DEVICE void tell_scores(const Params& p, int layer, Item item, int frame, int begin, int before,
                        int fresh, const Attention<Most>& shared) {
  const Watch& watch = p.watch;
  const int j = 32 * warp_number() / kSpan, head = 2 * item.head + j, i = thread() % kSpan;
#pragma unroll 1
  for (int w = 0; w < watch.count; ++w) {
    if (watch.heads[w] != layer * S::heads + head) continue;
    const size_t row = (static_cast<size_t>(item.column) * p.max_frames + frame) * watch.count + w;
    float* to = watch.scores + row * p.talker.positions;
    if (begin + i < before) store_settled(to + begin + i, shared.score[j][i]);
    if (i < fresh) store_settled(to + before + i, shared.new_score[i][j]);
  }
}

// Where an item's slot begins among keys and values.
template <class S>
DEVICE size_t slot_of(const Network& n, int layer, const Column* columns, Item item) {
  const size_t slot = static_cast<size_t>(layer) * n.slots + columns[item.column].slot;
  return (slot * S::kv_heads + item.head) * n.positions * kKept;
}

template <class S, int Most>
DEVICE void attend_item(const Params& p, const Network& n, int layer, const bf16* norms,
                        const Column* columns, int count, const Tags& tags, Attention<Most>& shared,
                        int& gave_up, Item item) {
  const Column column = columns[item.column];
  const size_t slot = slot_of<S>(n, layer, columns, item);
  const int before = uniform(columns[column.first].position), number = warp_number();
  const bool last = item.span == item.spans - 1;
  const int fresh = last ? uniform(item.column - column.first + 1) : 0;
  const int begin = item.span * kSpan + number * kBlock;
  const int old =
      min(kWarps, (before - item.span * kSpan + kBlock - 1) / kBlock);  // warps with any

  // What earlier passes left is asked for first, where there are registers for it meanwhile.
  const uint64_t policy = stays(p, layer, before, count) ? read_again() : read_once();
  Sixteen mine;
  if (kRoomy && number < old) mine.load_keys(n.keys + slot, begin, before, policy);
  take_in<S>(p, n, norms, tags, columns, item, slot, last, shared, gave_up);
  if (kRoomy && number < old) mine.load_values(n.values + slot, begin, policy);
  block_sync();
  if (!kRoomy && number < old) {
    mine.load_keys(n.keys + slot, begin, before, policy);
    mine.load_values(n.values + slot, begin, policy);
  }
  if (number < old) mine.attend(begin, before, shared);
  for (int i = kWarps - 1 - number; i < fresh; i += kWarps) {  // the last warps, which have none
    const float4 key = reinterpret_cast<const float4*>(shared.new_key[i])[lane()];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 q = reinterpret_cast<const float4*>(shared.query[j])[lane()];
      const float score = warp_sum(q.x * key.x + q.y * key.y + q.z * key.z + q.w * key.w);
      if (lane() == 0) shared.new_score[i][j] = score * kScale;
    }
  }
  block_sync();

  const int j = thread() / kHeadDim, channel = thread() % kHeadDim;
  float peaks[kWarps], sums[kWarps], mixes[kWarps];  // all asked for at once
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float top = shared.peak[w][j], sum = shared.sum[w][j], mix = shared.mix[w][j][channel];
    peaks[w] = w < old ? top : -INFINITY, sums[w] = w < old ? sum : 0, mixes[w] = w < old ? mix : 0;
  }
  float peak = -INFINITY, total = 0, mixed = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, peaks[w]);
  for (int i = 0; i < fresh; ++i) peak = fmaxf(peak, shared.new_score[i][j]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float fade = expf(peaks[w] - peak);
    total += sums[w] * fade;
    mixed += mixes[w] * fade;
  }
  for (int i = 0; i < fresh; ++i) {
    const float share = expf(shared.new_score[i][j] - peak);
    total += share;
    mixed += shared.new_value[i][channel] * share;
  }
  const uint32_t tag = tags.of(item.column);
  const int query_head = 2 * item.head + j;
  if (item.spans == 1) {
    hand_over<S, Most>(p, n, item.column, query_head, channel, quotient(mixed, total), tag);
  } else {
    const int part = (item.column * S::heads + query_head) * kMaxSpans + item.span;
    store_word(n.words.partial + part * kHeadDim + channel, tagged(mixed, tag));
    const uint32_t word = tagged(channel ? total : peak, tag);
    store_word_if(channel < 2, n.words.statistic + part * 2 + channel, word);
  }
  if (uniform(column.frame) >= 0) {
    tell_scores<S>(p, layer, item, column.frame, item.span * kSpan, before, fresh, shared);
  }
  block_sync();  // before the workplace is used again
}

// The spans of a column and a pair of heads.
template <class S, int Most>
DEVICE void combine(const Params& p, const Network& n, const Tags& tags, int& gave_up, Item item) {
  const int query_head = 2 * item.head + thread() / kHeadDim, channel = thread() % kHeadDim;
  const uint32_t tag = tags.of(item.column);
  const int first = (item.column * S::heads + query_head) * kMaxSpans;
  const uint32_t* partial = n.words.partial + first * kHeadDim + channel;
  const uint32_t* statistic = n.words.statistic + first * 2;
  float peak = -INFINITY, total = 0, mixed = 0;
  Patience patience(p, kAttentionCombine, gave_up);
  constexpr int kBatch = 4;
#pragma unroll 1
  for (int span = 0; span < item.spans; span += kBatch) {
    uint32_t mix[kBatch], top[kBatch], sum[kBatch];
    while (true) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = min(span + i, item.spans - 1);
        mix[i] = load_word(partial + at * kHeadDim);
        top[i] = load_word(statistic + 2 * at);
        sum[i] = load_word(statistic + 2 * at + 1);
      }
      bool there = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        there &= carries(mix[i], tag) && carries(top[i], tag) && carries(sum[i], tag);
      }
      if (in_all_lanes(there) || !in_all_lanes(patience.lasts())) break;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (span + i >= item.spans) break;
      const float higher = fmaxf(peak, untagged(top[i]));
      const float fade = expf(peak - higher), share = expf(untagged(top[i]) - higher);
      total = total * fade + untagged(sum[i]) * share;
      mixed = mixed * fade + untagged(mix[i]) * share;
      peak = higher;
    }
  }
  hand_over<S, Most>(p, n, item.column, query_head, channel, quotient(mixed, total), tag);
}

// The items of this block, in turn. The last blocks have the first ones: they had the least to
// multiply.
template <class S, class Act>
DEVICE void each_item(const Column* columns, int count, Act act) {
  int item = blocks() - 1 - block();
#pragma unroll 1
  for (int c = 0; c < count; ++c) {
    const int before = uniform(columns[columns[c].first].position);
    const int spans = max(1, (before + kSpan - 1) / kSpan), items = spans * S::kv_heads;
#pragma unroll 1
    for (; item < items; item += blocks()) {
      act(Item{c, item % S::kv_heads, item / S::kv_heads, spans});
    }
    item -= items;
  }
}

// What earlier passes left for this block's items comes to the second-level cache, unless it is
// there already, while others still make queries. For one stream.
template <class S>
DEVICE void fetch_remembered(const Params& p, const Network& n, int layer, const Column* columns,
                             int count) {
  const int before = uniform(columns[0].position);
  if (stays(p, layer, before, count)) return;
  const uint64_t once = read_once();
  each_item<S>(columns, count, [&](Item item) {
    const int begin = item.span * kSpan;
    const int positions = (min(kSpan, before - begin) + kBlock - 1) / kBlock * kBlock;
    const int bytes = positions * kKept * static_cast<int>(sizeof(bf16));
    const size_t first = slot_of<S>(n, layer, columns, item) + begin * kKept;
    fetch_lines(n.keys + first, bytes, once);
    fetch_lines(n.values + first, bytes, once);
  });
}

template <class S, class F>
DEVICE void attend(F& flow, const Network& n, int layer, const bf16* norms, const Column* columns,
                   int count) {
  auto& shared = flow.attention;
  bool parted = false;
  each_item<S>(columns, count, [&](Item item) {
    attend_item<S>(flow.p, n, layer, norms, columns, count, flow.tags, shared, flow.gave_up(),
                   item);
    parted |= item.span == 0 && item.spans > 1;
    flow.watch.lap(kAttention, kSum);
  });
  if (!parted) return;
  each_item<S>(columns, count, [&](Item item) {
    if (item.span > 0 || item.spans == 1) return;
    combine<S, F::most>(flow.p, n, flow.tags, flow.gave_up(), item);
    flow.watch.lap(kAttentionCombine, kSum);
  });
}

}  // namespace megakernel
