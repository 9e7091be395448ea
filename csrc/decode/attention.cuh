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
  int first_column;  // the first column of the same slot in this launch: those between come before
                     // it
  bool append;       // whether its keys and values are kept
  int frame;         // of this launch, for which scores are told; -1: they are not
};

// An item's workplace.
template <int MaxColumns>
struct alignas(16) AttentionSharedMemory {
  float query[2][kHeadDim];
  float new_key[kColumnCapacity<MaxColumns>][kHeadDim],
      new_value[kColumnCapacity<MaxColumns>][kHeadDim];
  uint32_t query_pairs[kNumSplits][2][kHeadDim / 2];
  float mix[kNumWarps][2][kHeadDim];
  float score[2][kSpanSize];  // of earlier positions
  float new_score[kColumnCapacity<MaxColumns>][2];
  float peak[kNumWarps][2], sum[kNumWarps][2];
};

struct AttentionItem {
  int column, head, span, num_spans;
};

constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(128)

DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

DEVICE float low_bf16(uint32_t pair) { return as_float(pair << 16); }
DEVICE float high_bf16(uint32_t pair) { return as_float(pair & 0xFFFF0000u); }

// Four neighbouring elements.
DEVICE uint2 load_packed_bf16x4(const bf16* at) { return *reinterpret_cast<const uint2*>(at); }
DEVICE float4 unpack_bf16x4(uint2 pairs) {
  return {low_bf16(pairs.x), high_bf16(pairs.x), low_bf16(pairs.y), high_bf16(pairs.y)};
}
DEVICE float4 load_bf16x4(const bf16* at) { return unpack_bf16x4(load_packed_bf16x4(at)); }

DEVICE float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
DEVICE float4 multiply(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float4 multiply(float4 a, float b) { return {a.x * b, a.y * b, a.z * b, a.w * b}; }
DEVICE float square(float4 a) { return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; }

DEVICE float4 split_remainder(float4 v, int split) {
  return {split_remainder(v.x, split), split_remainder(v.y, split), split_remainder(v.z, split),
          split_remainder(v.w, split)};
}

// Four neighbouring elements in halves.
struct SplitBf16x4 {
  uint2 of[kNumSplits];
};
DEVICE SplitBf16x4 split_bf16x4(float4 v) {
  SplitBf16x4 halves;
  for_each_split([&](int split) {
    const float4 left = split_remainder(v, split);
    halves.of[split] = {pack_bf16(left.x, left.y), pack_bf16(left.z, left.w)};
  });
  return halves;
}
DEVICE float4 unpack_bf16x4(const SplitBf16x4& halves) {
  const float4 first = unpack_bf16x4(halves.of[0]);
  return kNumSplits == 1 ? first : add(first, unpack_bf16x4(halves.of[kNumSplits - 1]));
}

// As operand A, of which row g + 8 has the second halves of row g; and the sum of both products.
DEVICE uint4 as_mma_rows(const SplitBf16x4& halves) {
  const uint2 first = halves.of[0],
              second = kNumSplits > 1 ? halves.of[kNumSplits - 1] : uint2{0, 0};
  return {first.x, second.x, first.y, second.y};
}
DEVICE float sum_splits(const float (&acc)[4], int i) {
  return kNumSplits > 1 ? acc[i] + acc[i + 2] : acc[i];
}

// Where a position's value of channel 0 lies within its slot.
DEVICE int value_offset(int position) {
  const int p = position % kPageSize;
  return position / kPageSize * kPageSize * kKvWidth + p % 8 / 2 * 4 + p % 2 + p / 8 * 2;
}

// A lane's part of a position's turn.
struct Rope {
  float4 turns[2];  // cosine, sine; cosine, sine

  DEVICE Rope(const Network& n, int position) {
    const float2* at = n.rope_table + position * (kHeadDim / 2) + lane_idx() % 16 * 4;
    turns[0] = reinterpret_cast<const float4*>(at)[0];
    turns[1] = reinterpret_cast<const float4*>(at)[1];
  }

  // A head's norm, of these squares, then the turn: channel i goes with channel i + 64, which lane
  // + 16 holds.
  DEVICE float4 normed(float4 v, float squares, uint2 norm, float eps) const {
    const float scale = rsqrtf(squares / kHeadDim + eps);
    const float4 weight = unpack_bf16x4(norm);
    auto turned = [](float own, float cosine, float sine) {
      return own * cosine + (lane_idx() < 16 ? -1.0f : 1.0f) * shuffle_xor(own, 16) * sine;
    };
    return {turned(v.x * scale * weight.x, turns[0].x, turns[0].y),
            turned(v.y * scale * weight.y, turns[0].z, turns[0].w),
            turned(v.z * scale * weight.z, turns[1].x, turns[1].y),
            turned(v.w * scale * weight.w, turns[1].z, turns[1].w)};
  }
};

// Queries of the item's column, keys and values of this launch: a warp a vector, a lane channels
// 4 lane to 4 lane + 3. `last` is the item of the newest positions.
template <class S, int MaxColumns>
DEVICE void load_queries_keys_values(const Params& p, const Network& n, const bf16* norms,
                                     const EpochTags& tags, const Column* columns,
                                     AttentionItem item, size_t slot, bool last,
                                     AttentionSharedMemory<MaxColumns>& shared, int& timed_out) {
  const Column column = columns[item.column];
  const int vectors = warp_uniform(2 + (last ? 2 * (item.column - column.first_column + 1) : 0));
#pragma unroll 1
  for (int i = uniform_warp_idx(); i < vectors; i += kNumWarps) {
    const int fresh = i / 2 - 1;  // -1: a query
    const bool is_value = fresh >= 0 && i % 2;
    const int c = fresh < 0 ? item.column : column.first_column + fresh;
    const int row = fresh < 0 ? (2 * item.head + i) * kHeadDim
                              : S::query_size + (is_value ? S::kv_size : 0) + item.head * kHeadDim;
    const uint2 norm = load_packed_bf16x4(norms + (fresh < 0 ? 0 : kHeadDim) + 4 * lane_idx());
    const Rope turn(n, columns[c].position);
    const uint4 raw = wait_for_values(n.exchange.qkv + c * S::Qkv::rows + row + 4 * lane_idx(),
                                      tags.of(c), SpinTimeout(p, kQkv, timed_out));
    float4 v = untag(raw);
    if (!is_value) v = turn.normed(v, warp_sum(square(v)), norm, n.eps);
    const SplitBf16x4 halves = split_bf16x4(v);
    v = unpack_bf16x4(halves);
    float* to = fresh < 0  ? shared.query[i]
                : is_value ? shared.new_value[fresh]
                           : shared.new_key[fresh];
    reinterpret_cast<float4*>(to)[lane_idx()] = v;
#pragma unroll
    for (int split = 0; split < kNumSplits; ++split) {
      const uint2 pairs = halves.of[split];
      if (fresh < 0) reinterpret_cast<uint2*>(shared.query_pairs[split][i])[lane_idx()] = pairs;
      if (fresh < 0 || c != item.column || !column.append) continue;
      if (is_value) {
        const float4 v = unpack_bf16x4(pairs);
        bf16* at = n.values + slot + value_offset(column.position) +
                   (split * kHeadDim + 4 * lane_idx()) * kPageSize;
        store_l2(at, to_bf16(v.x)), store_l2(at + kPageSize, to_bf16(v.y));
        store_l2(at + 2 * kPageSize, to_bf16(v.z)), store_l2(at + 3 * kPageSize, to_bf16(v.w));
      } else {
        bf16* at =
            n.keys + slot + static_cast<size_t>(column.position) * kKvWidth + split * kHeadDim;
        store_l2(reinterpret_cast<uint2*>(at) + lane_idx(), pairs);
      }
    }
  }
}

// Scores of a head, four in each of four neighbouring lanes, to shares of the highest's; returns
// the highest and the shares' sum.
DEVICE float2 softmax_exponentials(float (&s)[4]) {
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
DEVICE bool is_l2_resident(const Params& p, int layer, int positions, int columns) {
  return (layer + 1) * positions * columns <= p.l2_resident_positions;
}

// A warp's sixteen positions from `begin` on, of which those below `end` are there.
struct KvPage {
  uint4 keys[kNumSplits][2][4];
  uint2 values[kNumSplits][16];

  DEVICE void load_keys(const bf16* slot, int begin, int end, uint64_t policy) {
    const bf16* from = slot + (begin + lane_idx() / 4) * kKvWidth + lane_idx() % 4 * 8;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const bool there = begin + 8 * tile + lane_idx() / 4 < end;
#pragma unroll
      for (int j = 0; j < 4 * kNumSplits; ++j) {
        const bf16* at = from + 8 * tile * kKvWidth + 32 * j;
        keys[j / 4][tile][j % 4] =
            there ? load_l2(reinterpret_cast<const uint4*>(at), policy) : uint4{0, 0, 0, 0};
      }
    }
  }

  DEVICE void load_values(const bf16* slot, int begin, uint64_t policy) {
    const bf16* from = slot + begin * kKvWidth + lane_idx() / 4 * kPageSize + lane_idx() % 4 * 4;
#pragma unroll
    for (int n = 0; n < 16 * kNumSplits; ++n) {
      values[n / 16][n % 16] =
          load_l2(reinterpret_cast<const uint2*>(from + 8 * n * kPageSize), policy);
    }
  }

  template <int MaxColumns>
  DEVICE void attend(int begin, int end, AttentionSharedMemory<MaxColumns>& shared) const {
    const int g = lane_idx() / 4, t = lane_idx() % 4;
    float score[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      SplitBf16x4 first, second;
#pragma unroll
      for (int split = 0; split < kNumSplits; ++split) {
        const uint32_t* pairs = shared.query_pairs[split][g % 2];
        const uint4* at = reinterpret_cast<const uint4*>(pairs) + 4 * j + t;
        const uint4 q = g < 2 ? *at : uint4{0, 0, 0, 0};
        first.of[split] = {q.x, q.y}, second.of[split] = {q.z, q.w};
      }
      for_each_split([&](int split) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const uint4 k = keys[split][tile][j];
          mma_m16n8k16(score[tile], as_mma_rows(first), {k.x, k.y});
          mma_m16n8k16(score[tile], as_mma_rows(second), {k.z, k.w});
        }
      });
    }
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = begin + 8 * (i / 2) + 2 * t + i % 2;
      s[i] = position < end ? sum_splits(score[i / 2], i % 2) * kScale : -INFINITY;
    }
    if (g < 2) {
      float2* to = reinterpret_cast<float2*>(&shared.score[g][warp_idx() * kPageSize]) + t;
      to[0] = {s[0], s[1]}, to[4] = {s[2], s[3]};
    }
    const auto [peak, sum] = softmax_exponentials(s);
    if (g < 2 && t == 0) shared.peak[warp_idx()][g] = peak, shared.sum[warp_idx()][g] = sum;
    const uint4 row_groups = as_mma_rows(split_bf16x4({s[0], s[1], s[2], s[3]}));
    // What is left there from another stream may be anything.
    const int left = end - begin - 2 * t;
    const uint32_t low = left >= 2 ? ~0u : left == 1 ? 0xFFFFu : 0u;
    const uint32_t high = left >= 10 ? ~0u : left == 9 ? 0xFFFFu : 0u;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      float mix[4] = {};
      for_each_split([&](int split) {
        mma_m16n8k16(mix, row_groups, {values[split][n].x & low, values[split][n].y & high});
      });
      if (g < 2) {
        float2* to = reinterpret_cast<float2*>(&shared.mix[warp_idx()][g][8 * n + 2 * t]);
        *to = {sum_splits(mix, 0), sum_splits(mix, 1)};
      }
    }
  }
};

// What attention gives; neighbouring threads have neighbouring channels.
template <class S, int MaxColumns>
DEVICE void store_attention_output(const Params& p, const Network& n, int column, int query_head,
                                   int channel, float value, uint32_t tag) {
  store_relaxed_if(!fits_in_pair(value), p.non_finite + column, 1);
  const float next = shuffle_xor(value, 1);
  const int word = (query_head * kHeadDim + channel) / 2;
  for_each_split([&](int split) {
    const int at = PairExchangeLayout<S::query_size, MaxColumns>::index(
        column, split * (S::query_size / 2) + word);
    store_relaxed_if(channel % 2 == 0, n.exchange.attention_output + at,
                     tag_pair(split_remainder(value, split), split_remainder(next, split), tag));
  });
}

// Scores before the softmax of the heads that the host asked for, to their places.
template <class S, int MaxColumns>
DEVICE void store_captured_scores(const Params& p, int layer, AttentionItem item, int frame,
                                  int begin, int before, int fresh,
                                  const AttentionSharedMemory<MaxColumns>& shared) {
  const AttentionCapture& capture = p.attention_capture;
  const int j = 32 * uniform_warp_idx() / kSpanSize, head = 2 * item.head + j,
            i = thread_idx() % kSpanSize;
#pragma unroll 1
  for (int w = 0; w < capture.num_heads; ++w) {
    if (capture.heads[w] != layer * S::num_heads + head) continue;
    const size_t row =
        (static_cast<size_t>(item.column) * p.max_frames + frame) * capture.num_heads + w;
    float* to = capture.scores + row * p.talker.num_positions;
    if (begin + i < before) store_l2(to + begin + i, shared.score[j][i]);
    if (i < fresh) store_l2(to + before + i, shared.new_score[i][j]);
  }
}

// Where an item's slot begins among keys and values.
template <class S>
DEVICE size_t kv_offset(const Network& n, int layer, const Column* columns, AttentionItem item) {
  const size_t slot = static_cast<size_t>(layer) * n.num_slots + columns[item.column].slot;
  return (slot * S::num_kv_heads + item.head) * n.num_positions * kKvWidth;
}

template <class S, int MaxColumns>
DEVICE void attend_item(const Params& p, const Network& n, int layer, const bf16* norms,
                        const Column* columns, int count, const EpochTags& tags,
                        AttentionSharedMemory<MaxColumns>& shared, int& timed_out,
                        AttentionItem item) {
  const Column column = columns[item.column];
  const size_t slot = kv_offset<S>(n, layer, columns, item);
  const int before = warp_uniform(columns[column.first_column].position),
            number = uniform_warp_idx();
  const bool last = item.span == item.num_spans - 1;
  const int fresh = last ? warp_uniform(item.column - column.first_column + 1) : 0;
  const int begin = item.span * kSpanSize + number * kPageSize;
  const int old = min(
      kNumWarps, (before - item.span * kSpanSize + kPageSize - 1) / kPageSize);  // warps with any

  // What earlier passes left is asked for first, where there are registers for it meanwhile.
  const uint64_t policy =
      is_l2_resident(p, layer, before, count) ? l2_evict_last_policy() : l2_evict_first_policy();
  KvPage mine;
  if (kManyRegisters && number < old) mine.load_keys(n.keys + slot, begin, before, policy);
  load_queries_keys_values<S>(p, n, norms, tags, columns, item, slot, last, shared, timed_out);
  if (kManyRegisters && number < old) mine.load_values(n.values + slot, begin, policy);
  sync_compute_threads();
  if (!kManyRegisters && number < old) {
    mine.load_keys(n.keys + slot, begin, before, policy);
    mine.load_values(n.values + slot, begin, policy);
  }
  if (number < old) mine.attend(begin, before, shared);
  for (int i = kNumWarps - 1 - number; i < fresh;
       i += kNumWarps) {  // the last warps, which have none
    const float4 key = reinterpret_cast<const float4*>(shared.new_key[i])[lane_idx()];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 q = reinterpret_cast<const float4*>(shared.query[j])[lane_idx()];
      const float score = warp_sum(q.x * key.x + q.y * key.y + q.z * key.z + q.w * key.w);
      if (lane_idx() == 0) shared.new_score[i][j] = score * kScale;
    }
  }
  sync_compute_threads();

  const int j = thread_idx() / kHeadDim, channel = thread_idx() % kHeadDim;
  float peaks[kNumWarps], sums[kNumWarps], mixes[kNumWarps];  // all asked for at once
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) {
    const float top = shared.peak[w][j], sum = shared.sum[w][j], mix = shared.mix[w][j][channel];
    peaks[w] = w < old ? top : -INFINITY, sums[w] = w < old ? sum : 0, mixes[w] = w < old ? mix : 0;
  }
  float peak = -INFINITY, total = 0, mixed = 0;
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) peak = fmaxf(peak, peaks[w]);
  for (int i = 0; i < fresh; ++i) peak = fmaxf(peak, shared.new_score[i][j]);
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) {
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
  if (item.num_spans == 1) {
    store_attention_output<S, MaxColumns>(p, n, item.column, query_head, channel,
                                          divide(mixed, total), tag);
  } else {
    const int part = (item.column * S::num_heads + query_head) * kMaxSpans + item.span;
    store_relaxed(n.exchange.attention_partials + part * kHeadDim + channel, tag_value(mixed, tag));
    const uint32_t word = tag_value(channel ? total : peak, tag);
    store_relaxed_if(channel < 2, n.exchange.softmax_stats + part * 2 + channel, word);
  }
  if (warp_uniform(column.frame) >= 0) {
    store_captured_scores<S>(p, layer, item, column.frame, item.span * kSpanSize, before, fresh,
                             shared);
  }
  sync_compute_threads();  // before the workplace is used again
}

// The spans of a column and a pair of heads.
template <class S, int MaxColumns>
DEVICE void combine_spans(const Params& p, const Network& n, const EpochTags& tags, int& timed_out,
                          AttentionItem item) {
  const int query_head = 2 * item.head + thread_idx() / kHeadDim, channel = thread_idx() % kHeadDim;
  const uint32_t tag = tags.of(item.column);
  const int first = (item.column * S::num_heads + query_head) * kMaxSpans;
  const uint32_t* partial = n.exchange.attention_partials + first * kHeadDim + channel;
  const uint32_t* statistic = n.exchange.softmax_stats + first * 2;
  float peak = -INFINITY, total = 0, mixed = 0;
  SpinTimeout timeout(p, kAttentionCombine, timed_out);
  constexpr int kBatch = 4;
#pragma unroll 1
  for (int span = 0; span < item.num_spans; span += kBatch) {
    uint32_t mix[kBatch], top[kBatch], sum[kBatch];
    while (true) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = min(span + i, item.num_spans - 1);
        mix[i] = load_relaxed(partial + at * kHeadDim);
        top[i] = load_relaxed(statistic + 2 * at);
        sum[i] = load_relaxed(statistic + 2 * at + 1);
      }
      bool there = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        there &= has_tag(mix[i], tag) && has_tag(top[i], tag) && has_tag(sum[i], tag);
      }
      if (warp_all(there) || !warp_all(timeout.keep_waiting())) break;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (span + i >= item.num_spans) break;
      const float higher = fmaxf(peak, untag(top[i]));
      const float fade = expf(peak - higher), share = expf(untag(top[i]) - higher);
      total = total * fade + untag(sum[i]) * share;
      mixed = mixed * fade + untag(mix[i]) * share;
      peak = higher;
    }
  }
  store_attention_output<S, MaxColumns>(p, n, item.column, query_head, channel,
                                        divide(mixed, total), tag);
}

// The items of this block, in turn. The last blocks have the first ones: they had the least to
// multiply.
template <class S, class Act>
DEVICE void for_each_item(const Column* columns, int count, Act act) {
  int item = num_blocks() - 1 - block_idx();
#pragma unroll 1
  for (int c = 0; c < count; ++c) {
    const int before = warp_uniform(columns[columns[c].first_column].position);
    const int spans = max(1, (before + kSpanSize - 1) / kSpanSize), items = spans * S::num_kv_heads;
#pragma unroll 1
    for (; item < items; item += num_blocks()) {
      act(AttentionItem{c, item % S::num_kv_heads, item / S::num_kv_heads, spans});
    }
    item -= items;
  }
}

// What earlier passes left for this block's items comes to the second-level cache, unless it is
// there already, while others still make queries. For one stream.
template <class S>
DEVICE void prefetch_keys_values(const Params& p, const Network& n, int layer,
                                 const Column* columns, int count) {
  const int before = warp_uniform(columns[0].position);
  if (is_l2_resident(p, layer, before, count)) return;
  const uint64_t once = l2_evict_first_policy();
  for_each_item<S>(columns, count, [&](AttentionItem item) {
    const int begin = item.span * kSpanSize;
    const int positions = (min(kSpanSize, before - begin) + kPageSize - 1) / kPageSize * kPageSize;
    const int bytes = positions * kKvWidth * static_cast<int>(sizeof(bf16));
    const size_t first = kv_offset<S>(n, layer, columns, item) + begin * kKvWidth;
    prefetch_l2_range(n.keys + first, bytes, once);
    prefetch_l2_range(n.values + first, bytes, once);
  });
}

template <class S, class F>
DEVICE void attend(F& context, const Network& n, int layer, const bf16* norms,
                   const Column* columns, int count) {
  auto& shared = context.attention;
  bool parted = false;
  for_each_item<S>(columns, count, [&](AttentionItem item) {
    attend_item<S>(context.p, n, layer, norms, columns, count, context.tags, shared,
                   context.timed_out(), item);
    parted |= item.span == 0 && item.num_spans > 1;
    context.timer.lap(kAttention, kSum);
  });
  if (!parted) return;
  for_each_item<S>(columns, count, [&](AttentionItem item) {
    if (item.span > 0 || item.num_spans == 1) return;
    combine_spans<S, F::max_columns>(context.p, n, context.tags, context.timed_out(), item);
    context.timer.lap(kAttentionCombine, kSum);
  });
}

}  // namespace megakernel
