// The phases `attention` and `attention_combine` of the talker:
//   q = rope(norm(q)), k = rope(norm(k)),  a = sum_p softmax_p(q k_p / sqrt(128)) v_p
//
// An attention item is a column, a KV head with its two query heads, and a span of kSpanSize
// positions. One thread block computes an item. If a column has several spans, the thread block of
// its first span merges them: the phase `attention_combine`. Positions of the current pass ("new")
// are read from the exchanged values of their columns.
//
// Reads exchange.qkv, float [columns, rows of qkv]. Writes exchange.attention_output, pairs
// [columns, splits, query size], and the keys and values of columns with `append`.
#pragma once

#include "kv_tile.cuh"
#include "projection.cuh"
#include "rope.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(2 * kHeadDim == kNumThreads, "a thread merges one channel of one query head");
static_assert(2 * kSpanSize == kNumThreads, "half of the threads copy a query head's scores");

// Whether the registers suffice for keys and values that are loaded before the wait for qkv. In a
// wide kernel they would be spilled.
constexpr bool kLoadsEarly = kManyRegisters && !kIsWide;

// --- shared memory ---

// `AttentionSharedMemory` of kv_tile.cuh, for one item at a time.

// --- warp roles ---

// All compute warps work on the same item:
//   load    warp w loads KV tile w of the span's earlier positions, and every eighth new vector;
//   attend  warp w attends to its tile, and the last warps first to the new positions;
//   merge   each thread merges the warps' softmaxes for one channel of one query head.

// A column of a pass.
struct Column {
  int slot;
  int position;
  int first_column;  // the first of the slot, or of its prompt tile; those between precede this one
  int frame;         // the launch's frame for which scores are captured, or -1
  bool append;       // whether its key and value are written to the slot
  bool precedes_tile;  // whether a later prompt tile of the slot is in the pass
};

struct AttentionItem {
  int column, head, span, num_spans;  // `head` is the KV head
};

// The order of keys and values in the KV cache, if all positions before a column's prompt tile are
// of earlier passes: there is nothing to wait for. See `EarlierTiles` of wide_attention.cuh.
struct EarlierPasses {
  DEVICE void publish(AttentionItem, bool) const {}
  DEVICE void wait(AttentionItem, int) const {}
};

// --- body: one item ---

// The page that has a slot's position. A load may take as long as one of keys: begin it early.
DEVICE int page_of(const Network& n, int slot, int position) {
  return load_cached(n.page_table + slot * kMaxPages + position / kPageSize);
}

// The offset of a layer and a KV head of a page in Network::keys and values.
template <class S>
DEVICE size_t kv_offset(const Network& n, int page, int layer, int head) {
  const size_t row = static_cast<size_t>(page) * n.num_layers + layer;
  return (row * S::num_kv_heads + head) * (kPageSize * kKvWidth);
}

// Whether the layer's keys and values stay in the L2 cache from frame to frame: those of the first
// layers do, if there is space. The others are read once per frame.
DEVICE bool is_l2_resident(const Params& p, int layer, int num_positions, int num_columns) {
  return (layer + 1) * num_positions * num_columns <= p.l2_resident_positions;
}

// Loads the queries of the item's column from exchange.qkv, and for the last span (`with_new`) the
// new keys and values of the prompt tile's columns, from the item's back to the first. A warp loads
// one vector [head dim] at a time, from vector `first_vector` on; lane l has channels 4 l to
// 4 l + 3. Writes `shared`: query [2, head dim], query_pairs [splits, 2, head dim], new_key and
// new_value [columns, head dim]. Writes the column's own key and value to the page of its position,
// `own_page`, and then calls `earlier.publish`.
template <class S, int MaxColumns, int Capacity, class Earlier>
DEVICE void load_queries_keys_values(const Params& p, const Network& n, const bf16* norms,
                                     const EpochTags& epoch_tags, const Column* columns, int layer,
                                     AttentionItem item, int own_page, bool with_new,
                                     int first_vector,
                                     AttentionSharedMemory<MaxColumns, Capacity>& shared,
                                     int& timed_out, const Earlier& earlier) {
  const Column column = columns[item.column];
  const int num_vectors =
      warp_uniform(2 + (with_new ? 2 * (item.column - column.first_column + 1) : 0));
#pragma unroll 1
  for (int i = first_vector; i < num_vectors; i += kNumWarps) {
    const int distance = i / 2 - 1;  // from the column to the item's; -1: a query
    const bool is_query = distance < 0, is_own = distance == 0, is_value = !is_query && i % 2;
    const int c = item.column - max(distance, 0), new_idx = c - column.first_column;
    const int row = is_query ? (2 * item.head + i) * kHeadDim
                             : S::query_size + (is_value ? S::kv_size : 0) + item.head * kHeadDim;
    const uint2 norm = load_packed_bf16x4(norms + (is_query ? 0 : kHeadDim) + 4 * lane_idx());
    const Rope rope(n, columns[c].position);
    const uint4 raw = wait_for_values(n.exchange.qkv + c * S::Qkv::rows + row + 4 * lane_idx(),
                                      epoch_tags.of(c), SpinTimeout(p, kQkv, timed_out));
    float4 v = untag(raw);
    if (!is_value) v = rope.norm_and_rotate(v, warp_sum(square(v)), norm, n.eps);
    const SplitBf16x4 splits = split_bf16x4(v);
    v = unpack_bf16x4(splits);
    float* to = is_query   ? shared.query[i]
                : is_value ? shared.new_value[new_idx]
                           : shared.new_key[new_idx];
    reinterpret_cast<float4*>(to)[lane_idx()] = v;
#pragma unroll
    for (int split = 0; split < kNumSplits; ++split) {
      const uint2 pairs = splits.pairs[split];
      if (is_query) reinterpret_cast<uint2*>(shared.query_pairs[split][i])[lane_idx()] = pairs;
      if (!is_own || !column.append) continue;
      const size_t own_offset = kv_offset<S>(n, own_page, layer, item.head);
      if (is_value) {
        const float4 v = unpack_bf16x4(pairs);
        bf16* at = n.values + own_offset + value_offset(column.position) +
                   (split * kHeadDim + 4 * lane_idx()) * kKvTileSize;
        store_l2(at, to_bf16(v.x)), store_l2(at + kKvTileSize, to_bf16(v.y));
        store_l2(at + 2 * kKvTileSize, to_bf16(v.z)), store_l2(at + 3 * kKvTileSize, to_bf16(v.w));
      } else {
        bf16* at = n.keys + own_offset + column.position % kPageSize * kKvWidth + split * kHeadDim;
        store_l2(reinterpret_cast<uint2*>(at) + lane_idx(), pairs);
      }
    }
    if (is_own && column.append) earlier.publish(item, is_value);
  }
}

// Stores a channel of a query head's output in exchange.attention_output. Consecutive threads have
// consecutive channels.
template <class S, int MaxColumns>
DEVICE void store_attention_output(const Params& p, const Network& n, int column, int query_head,
                                   int channel, float value, uint32_t tag) {
  store_relaxed_if(!fits_in_pair(value), p.non_finite + column, 1);
  const float next = shuffle_xor(value, 1);
  const int pair = (query_head * kHeadDim + channel) / 2;
  for_each_split([&](int split) {
    const int at = PairExchangeLayout<S::query_size, MaxColumns>::index(
        column, split * (S::query_size / 2) + pair);
    store_relaxed_if(channel % 2 == 0, n.exchange.attention_output + at,
                     tag_pair(split_remainder(value, split), split_remainder(next, split), tag));
  });
}

// Copies the item's scores before the softmax, for captured heads, from score [2, kSpanSize] and
// new_score [columns, 2] to AttentionCapture::scores.
template <class S, int MaxColumns, int Capacity>
DEVICE void store_captured_scores(const Params& p, int layer, AttentionItem item, int frame,
                                  int begin, int num_earlier, int num_new,
                                  const AttentionSharedMemory<MaxColumns, Capacity>& shared) {
  const AttentionCapture& capture = p.attention_capture;
  const int j = 32 * uniform_warp_idx() / kSpanSize, head = 2 * item.head + j,
            i = thread_idx() % kSpanSize;
#pragma unroll 1
  for (int h = 0; h < capture.num_heads; ++h) {
    if (capture.heads[h] != layer * S::num_heads + head) continue;
    const size_t row =
        (static_cast<size_t>(item.column) * p.max_frames + frame) * capture.num_heads + h;
    float* to = capture.scores + row * p.talker.num_positions;
    if (begin + i < num_earlier) store_l2(to + begin + i, shared.score[j][i]);
    if (i < num_new) store_l2(to + num_earlier + i, shared.new_score[i][j]);
  }
}

// Computes new_score [columns, 2] of `shared` from the last warp on: the last warps are the last to
// have a tile.
template <int MaxColumns, int Capacity>
DEVICE void score_new_positions(int num_new, int warp,
                                AttentionSharedMemory<MaxColumns, Capacity>& shared) {
  for (int i = kNumWarps - 1 - warp; i < num_new; i += kNumWarps) {
    const float4 key = reinterpret_cast<const float4*>(shared.new_key[i])[lane_idx()];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 q = reinterpret_cast<const float4*>(shared.query[j])[lane_idx()];
      const float score = warp_sum(q.x * key.x + q.y * key.y + q.z * key.z + q.w * key.w);
      if (lane_idx() == 0) shared.new_score[i][j] = score * kScoreScale;
    }
  }
}

// Merges the softmaxes of an item's tiles and new positions; new_value(i, channel) is an element of
// a new value. With one span it writes exchange.attention_output. With several it writes the
// span's attention_partials [columns, heads, spans, head dim] and softmax_stats [columns, heads,
// spans, 2].
template <class S, int MaxColumns, int Capacity, class NewValue>
DEVICE void merge_tiles(const Params& p, const Network& n, int layer, const EpochTags& epoch_tags,
                        AttentionItem item, int frame, int num_earlier, int num_tiles, int num_new,
                        const AttentionSharedMemory<MaxColumns, Capacity>& shared,
                        NewValue new_value) {
  const int j = thread_idx() / kHeadDim, channel = thread_idx() % kHeadDim;
  float max_scores[kNumWarps], exp_sums[kNumWarps], weighted[kNumWarps];  // one batch of loads
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) {
    const float max_score = shared.max_score[w][j], exp_sum = shared.exp_sum[w][j],
                values = shared.weighted_values[w][j][channel];
    max_scores[w] = w < num_tiles ? max_score : -INFINITY;
    exp_sums[w] = w < num_tiles ? exp_sum : 0, weighted[w] = w < num_tiles ? values : 0;
  }
  float max_score = -INFINITY, exp_sum = 0, weighted_value = 0;
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) max_score = fmaxf(max_score, max_scores[w]);
  for (int i = 0; i < num_new; ++i) max_score = fmaxf(max_score, shared.new_score[i][j]);
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) {
    const float factor = expf(max_scores[w] - max_score);
    exp_sum += exp_sums[w] * factor;
    weighted_value += weighted[w] * factor;
  }
  for (int i = 0; i < num_new; ++i) {
    const float weight = expf(shared.new_score[i][j] - max_score);
    exp_sum += weight;
    weighted_value += new_value(i, channel) * weight;
  }
  const uint32_t tag = epoch_tags.of(item.column);
  const int query_head = 2 * item.head + j;
  if (item.num_spans == 1) {
    store_attention_output<S, MaxColumns>(p, n, item.column, query_head, channel,
                                          divide(weighted_value, exp_sum), tag);
  } else {
    const int span = (item.column * S::num_heads + query_head) * kMaxSpans + item.span;
    store_relaxed(n.exchange.attention_partials + span * kHeadDim + channel,
                  tag_value(weighted_value, tag));
    const uint32_t stat = tag_value(channel ? exp_sum : max_score, tag);
    store_relaxed_if(channel < 2, n.exchange.softmax_stats + span * 2 + channel, stat);
  }
  if (warp_uniform(frame) >= 0) {
    store_captured_scores<S>(p, layer, item, frame, item.span * kSpanSize, num_earlier, num_new,
                             shared);
  }
}

// Attends to one span for two query heads. Reads exchange.qkv, and keys and values of the span's
// page [kPageSize, kKvWidth] after `earlier.wait`. With one span it writes
// exchange.attention_output. With several it writes the span's attention_partials [columns, heads,
// spans, head dim] and softmax_stats [columns, heads, spans, 2].
template <class S, int MaxColumns, int Capacity, class Earlier>
DEVICE void attend_item(const Params& p, const Network& n, int layer, const bf16* norms,
                        const Column* columns, int num_columns, const EpochTags& epoch_tags,
                        AttentionSharedMemory<MaxColumns, Capacity>& shared, int& timed_out,
                        AttentionItem item, const Earlier& earlier) {
  const Column column = columns[item.column];
  const int page = page_of(n, column.slot, item.span * kSpanSize),
            own_page = page_of(n, column.slot, column.position);
  const int num_earlier = warp_uniform(columns[column.first_column].position),
            warp = uniform_warp_idx();
  const bool is_last_span = item.span == item.num_spans - 1;
  const int num_new = is_last_span ? warp_uniform(item.column - column.first_column + 1) : 0;
  // Positions of the warp's tile, and tiles of the span, that are attended to.
  const int num_valid = num_earlier - item.span * kSpanSize - warp * kKvTileSize;
  const int num_tiles =
      min(kNumWarps, (num_earlier - item.span * kSpanSize + kKvTileSize - 1) / kKvTileSize);

  // Loads of earlier keys and values begin before the wait for qkv if possible.
  const uint64_t policy = is_l2_resident(p, layer, num_earlier, num_columns)
                              ? l2_evict_last_policy()
                              : l2_evict_first_policy();
  const auto tile_offset = [&] {
    return kv_offset<S>(n, page, layer, item.head) + warp * (kKvTileSize * kKvWidth);
  };
  KvTile tile;
  if (kLoadsEarly && warp < num_tiles) tile.load_keys(n.keys + tile_offset(), num_valid, policy);
  load_queries_keys_values<S>(p, n, norms, epoch_tags, columns, layer, item, own_page, is_last_span,
                              uniform_warp_idx(), shared, timed_out, earlier);
  if (warp < num_tiles) earlier.wait(item, num_earlier);
  if (kLoadsEarly && warp < num_tiles) tile.load_values(n.values + tile_offset(), policy);
  sync_compute_threads();
  if (!kLoadsEarly && warp < num_tiles) {
    tile.load_keys(n.keys + tile_offset(), num_valid, policy);
    tile.load_values(n.values + tile_offset(), policy);
  }
  if (warp < num_tiles) tile.attend(num_valid, shared);
  score_new_positions(num_new, warp, shared);
  sync_compute_threads();
  merge_tiles<S>(p, n, layer, epoch_tags, item, column.frame, num_earlier, num_tiles, num_new,
                 shared, [&](int i, int channel) { return shared.new_value[i][channel]; });
  sync_compute_threads();  // the next item overwrites the shared memory
}

// --- body: attention_combine ---

// Merges the spans of a column and a KV head; a thread has one channel of one query head. Reads
// attention_partials [columns, heads, spans, head dim] and softmax_stats [columns, heads, spans,
// 2]. Writes exchange.attention_output.
template <class S, int MaxColumns>
DEVICE void combine_spans(const Params& p, const Network& n, const EpochTags& epoch_tags,
                          int& timed_out, AttentionItem item) {
  const int query_head = 2 * item.head + thread_idx() / kHeadDim, channel = thread_idx() % kHeadDim;
  const uint32_t tag = epoch_tags.of(item.column);
  const int first = (item.column * S::num_heads + query_head) * kMaxSpans;
  const uint32_t* partials = n.exchange.attention_partials + first * kHeadDim + channel;
  const uint32_t* stats = n.exchange.softmax_stats + first * 2;
  float max_score = -INFINITY, exp_sum = 0, weighted_value = 0;
  SpinTimeout timeout(p, kAttention, timed_out);
  constexpr int kBatch = 4;  // spans whose loads are in flight together
#pragma unroll 1
  for (int span = 0; span < item.num_spans; span += kBatch) {
    uint32_t weighted[kBatch], span_max[kBatch], span_sum[kBatch];
    while (true) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = min(span + i, item.num_spans - 1);
        weighted[i] = load_relaxed(partials + at * kHeadDim);
        span_max[i] = load_relaxed(stats + 2 * at);
        span_sum[i] = load_relaxed(stats + 2 * at + 1);
      }
      bool arrived = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        arrived &=
            has_tag(weighted[i], tag) && has_tag(span_max[i], tag) && has_tag(span_sum[i], tag);
        observe_epoch<FloatValues>({weighted[i], span_max[i], span_sum[i], tag}, tag);
      }
      if (warp_all(arrived) || !warp_all(timeout.keep_waiting())) break;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (span + i >= item.num_spans) break;
      const float new_max = fmaxf(max_score, untag(span_max[i]));
      const float old_factor = expf(max_score - new_max),
                  factor = expf(untag(span_max[i]) - new_max);
      exp_sum = exp_sum * old_factor + untag(span_sum[i]) * factor;
      weighted_value = weighted_value * old_factor + untag(weighted[i]) * factor;
      max_score = new_max;
    }
  }
  store_attention_output<S, MaxColumns>(p, n, item.column, query_head, channel,
                                        divide(weighted_value, exp_sum), tag);
}

// --- body: all items of a pass ---

// Calls act(item) for the items of this thread block. The first items belong to the last thread
// blocks, which have the fewest row groups.
template <class S, class Act>
DEVICE void for_each_item(const Column* columns, int num_columns, Act act) {
  int item = num_blocks() - 1 - block_idx();
#pragma unroll 1
  for (int c = 0; c < num_columns; ++c) {
    const int num_earlier = warp_uniform(columns[columns[c].first_column].position);
    const int num_spans = max(1, (num_earlier + kSpanSize - 1) / kSpanSize),
              num_items = num_spans * S::num_kv_heads;
#pragma unroll 1
    for (; item < num_items; item += num_blocks()) {
      act(AttentionItem{c, item % S::num_kv_heads, item / S::num_kv_heads, num_spans});
    }
    item -= num_items;
  }
}

// One stream: fetches the earlier keys and values of this thread block's items, each [positions,
// kKvWidth], into L2 before qkv is computed, unless they are resident.
template <class S>
DEVICE void prefetch_keys_values(const Params& p, const Network& n, int layer,
                                 const Column* columns, int num_columns) {
  const int num_earlier = warp_uniform(columns[0].position);
  if (is_l2_resident(p, layer, num_earlier, num_columns)) return;
  const uint64_t policy = l2_evict_first_policy();
  for_each_item<S>(columns, num_columns, [&](AttentionItem item) {
    const int begin = item.span * kSpanSize;
    const int num_positions =
        (min(kSpanSize, num_earlier - begin) + kKvTileSize - 1) / kKvTileSize * kKvTileSize;
    const int bytes = num_positions * kKvWidth * static_cast<int>(sizeof(bf16));
    const int page = page_of(n, columns[item.column].slot, begin);
    const size_t first = kv_offset<S>(n, page, layer, item.head);
    prefetch_l2_range(n.keys + first, bytes, policy);
    prefetch_l2_range(n.values + first, bytes, policy);
  });
}

// The phases `attention` and `attention_combine`: all items of this thread block, then the merging
// of their spans. Shapes as in `attend_item` and `combine_spans`.
template <class S, class Context>
DEVICE void attend(Context& context, const Network& n, int layer, const bf16* norms,
                   const Column* columns, int num_columns) {
  auto& shared = context.attention;
  bool combines = false;
  for_each_item<S>(columns, num_columns, [&](AttentionItem item) {
    attend_item<S>(context.p, n, layer, norms, columns, num_columns, context.epoch_tags, shared,
                   context.timed_out(), item, EarlierPasses());
    combines |= item.span == 0 && item.num_spans > 1;
    context.timer.lap(kAttention, kRest);
  });
  if (!combines) return;
  for_each_item<S>(columns, num_columns, [&](AttentionItem item) {
    if (item.span > 0 || item.num_spans == 1) return;
    combine_spans<S, Context::max_columns>(context.p, n, context.epoch_tags, context.timed_out(),
                                           item);
    context.timer.lap(kAttentionCombine, kRest);
  });
}

}  // namespace megakernel
