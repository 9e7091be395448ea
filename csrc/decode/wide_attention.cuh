// The phases `attention` and `attention_combine` of the talker in a wide kernel, where a thread
// block has many items: the work of attention.cuh, for two items at a time. Every sum has the
// order of attention.cuh. Each column has one position of the pass.
#pragma once

#include "attention.cuh"

namespace megakernel {

// --- static asserts ---

constexpr int kItemsTogether = 2;
constexpr int kItemVectors = 4;  // two queries, the new key and value
static_assert(kItemVectors * kItemsTogether <= kNumWarps, "a warp loads at most one vector");

// --- shared memory ---

// `AttentionSharedMemory` of kv_tile.cuh for each of the items.
template <int MaxColumns>
struct WideAttentionSharedMemory {
  AttentionSharedMemory<MaxColumns> items[kItemsTogether];
};

// --- warp roles ---

// All compute warps work on the same two items:
//   load    a warp loads one vector of one item: four warps for each;
//   attend  warp w attends to KV tile w of one item and then of the other, and the last warp to the
//           new positions;
//   merge   each thread merges the warps' softmaxes for one channel of one query head per item.

// --- body: the order of items ---

// The items of a pass, in the order of columns, spans and KV heads. All lanes of a warp call it.
template <class S, int MaxColumns>
class WideAttentionItems {
 public:
  // `num_earlier(column)` is the number of positions of earlier passes of a column's slot.
  template <class NumEarlier>
  DEVICE WideAttentionItems(int num_columns, NumEarlier num_earlier) {
    int num_spans = 0;  // of the lane's columns
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const int c = kLaneColumns * lane_idx() + i;
      if (c < num_columns) num_spans += max(1, (num_earlier(c) + kSpanSize - 1) / kSpanSize);
      ends_[i] = num_spans;
    }
    int total = num_spans;  // of the lanes up to this one
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = shuffle_from(total, max(lane_idx() - distance, 0));
      if (lane_idx() >= distance) total += before;
    }
#pragma unroll
    for (int& end : ends_) end += total - num_spans;
    count_ = shuffle_from(total, 31) * S::num_kv_heads;
  }

  // Items of the pass.
  DEVICE int count() const { return count_; }

  // Item `index`.
  DEVICE AttentionItem operator[](int index) const {
    const int span = index / S::num_kv_heads;  // of all columns
    int column = 0;
#pragma unroll
    for (const int end : ends_) column += count_set_bits(warp_ballot(end <= span));
    const int begin = column > 0 ? end_of(column - 1) : 0, end = end_of(column);
    return {column, index % S::num_kv_heads, span - begin, end - begin};
  }

 private:
  static constexpr int kLaneColumns = (MaxColumns + 31) / 32;

  // Spans of the columns up to `column`.
  DEVICE int end_of(int column) const {
    int end = shuffle_from(ends_[0], column / kLaneColumns);
#pragma unroll
    for (int i = 1; i < kLaneColumns; ++i) {
      const int later = shuffle_from(ends_[i], column / kLaneColumns);
      if (column % kLaneColumns == i) end = later;
    }
    return warp_uniform(end);
  }

  int ends_[kLaneColumns];  // spans of the columns up to each of the lane's columns
  int count_;
};

// --- body: some items ---

// Attends to kItemsTogether items of this thread block, from item `first` on, as far as they exist.
// Shapes as in `attend_item`.
template <class S, class Context>
DEVICE void attend_items(Context& context, const Network& n, int layer, const bf16* norms,
                         const Column* columns, int num_columns,
                         const WideAttentionItems<S, Context::max_columns>& order, int first) {
  const Params& p = context.p;
  const int warp = uniform_warp_idx(), count = order.count();
  auto& shared = context.attention.items;
  int pages[kItemsTogether];  // of the items' spans
#pragma unroll
  for (int i = 0; i < kItemsTogether; ++i) {
    const AttentionItem item = order[min(first + i * num_blocks(), count - 1)];
    pages[i] = page_of(n, columns[item.column].slot, item.span * kSpanSize);
  }
  // A warp loads a vector of one item.
  const int loaded = warp / kItemVectors, loaded_index = first + loaded * num_blocks();
  if (loaded < kItemsTogether && loaded_index < count) {
    const AttentionItem item = order[loaded_index];
    const Column column = columns[item.column];
    load_queries_keys_values<S>(p, n, norms, context.epoch_tags, columns, layer, item,
                                page_of(n, column.slot, column.position),
                                item.span == item.num_spans - 1, warp % kItemVectors,
                                shared[loaded], context.timed_out(), EarlierPasses());
  }
  sync_compute_threads();
  float new_values[kItemsTogether];  // read before the next items overwrite them
#pragma unroll
  for (int i = 0; i < kItemsTogether; ++i) {
    const int index = first + i * num_blocks();
    if (index >= count) break;
    const AttentionItem item = order[index];
    const int num_earlier = warp_uniform(columns[item.column].position),
              num_valid = num_earlier - item.span * kSpanSize - warp * kKvTileSize;
    if (num_valid > 0) {
      const size_t offset =
          kv_offset<S>(n, pages[i], layer, item.head) + warp * (kKvTileSize * kKvWidth);
      const uint64_t policy = is_l2_resident(p, layer, num_earlier, num_columns)
                                  ? l2_evict_last_policy()
                                  : l2_evict_first_policy();
      KvTile tile;
      tile.load_keys(n.keys + offset, num_valid, policy);
      tile.load_values(n.values + offset, policy);
      tile.attend(num_valid, shared[i]);
    }
    score_new_positions(item.span == item.num_spans - 1, warp, shared[i]);
    new_values[i] = shared[i].new_value[0][thread_idx() % kHeadDim];
  }
  sync_compute_threads();
#pragma unroll
  for (int i = 0; i < kItemsTogether; ++i) {
    const int index = first + i * num_blocks();
    if (index >= count) break;
    const AttentionItem item = order[index];
    const int num_earlier = warp_uniform(columns[item.column].position);
    const int num_positions = min(kSpanSize, num_earlier - item.span * kSpanSize);
    merge_tiles<S>(p, n, layer, context.epoch_tags, item, columns[item.column].frame, num_earlier,
                   (num_positions + kKvTileSize - 1) / kKvTileSize, item.span == item.num_spans - 1,
                   shared[i], [&](int, int) { return new_values[i]; });
  }
}

// --- body ---

// The phase `attention_combine`: merges the spans of this thread block's items.
template <class S, class Context>
DEVICE void combine_wide(Context& context, const Network& n,
                         const WideAttentionItems<S, Context::max_columns>& order) {
#pragma unroll 1
  for (int i = num_blocks() - 1 - block_idx(); i < order.count(); i += num_blocks()) {
    const AttentionItem item = order[i];
    if (item.span > 0 || item.num_spans == 1) continue;
    combine_spans<S, Context::max_columns>(context.p, n, context.epoch_tags, context.timed_out(),
                                           item);
    context.timer.lap(kAttentionCombine, kRest);
  }
}

// The phases `attention` and `attention_combine`: all items of this thread block, then the merging
// of their spans. The first items belong to the last thread blocks, which have the fewest row
// groups.
template <class S, class Context>
DEVICE void attend_wide(Context& context, const Network& n, int layer, const bf16* norms,
                        const Column* columns, int num_columns) {
  const WideAttentionItems<S, Context::max_columns> order(
      num_columns, [&](int c) { return columns[c].position; });
  const int first = num_blocks() - 1 - block_idx();
#pragma unroll 1
  for (int i = first; i < order.count(); i += kItemsTogether * num_blocks()) {
    attend_items<S>(context, n, layer, norms, columns, num_columns, order, i);
  }
  context.timer.lap(kAttention, kRest);
  combine_wide<S>(context, n, order);
}

// --- body: prompts ---

// The order of keys and values in the KV cache, if some positions before a column's prompt tile are
// of the same pass: an item that has written them stores tags, for which items of later prompt
// tiles wait (exchange.cuh, point 8).
template <class S, class Context>
struct EarlierTiles {
  Context& context;
  const Column* columns;
  uint32_t* cache_tags;  // [kv heads, columns, 2]: of the key and of the value

  // The tags of a column's key and value, side by side.
  DEVICE uint32_t* tags_of(int head, int column) const {
    return cache_tags + 2 * (head * Context::max_columns + column);
  }

  // Publishes the key or the value of the item's column, which this warp has written.
  DEVICE void publish(AttentionItem item, bool is_value) const {
    if (!warp_uniform(columns[item.column].precedes_tile)) return;
    sync_warp();  // all lanes have written
    thread_fence();
    store_relaxed_if(lane_idx() == 0, tags_of(item.head, item.column) + is_value,
                     context.epoch_tags.of(item.column));
  }

  // Waits for the positions of the warp's KV tile that are of this pass; `num_earlier` positions
  // precede the item's prompt tile. A lane waits for one tag. Lanes without such a position wait
  // for another position of the slot.
  DEVICE void wait(AttentionItem item, int num_earlier) const {
    const int slot = columns[item.column].slot, end = columns[item.column].first_column;
    if (!warp_uniform(end > 0 && columns[end - 1].slot == slot)) return;
    const int position = item.span * kSpanSize + uniform_warp_idx() * kKvTileSize + lane_idx() / 2;
    int column = max(0, min(end - num_earlier + position, end - 1));
    if (columns[column].slot != slot) column = end - 1;
    const uint32_t* at = tags_of(item.head, column) + lane_idx() % 2;
    const uint32_t tag = context.epoch_tags.of(column);
    SpinTimeout timeout(context.p, kAttention, context.timed_out());
    uint32_t found = load_acquire(at);
    while (!warp_all(has_tag(found, tag))) {
      observe_tag(found & kTagMask, tag);
      if (!warp_all(timeout.keep_waiting())) break;
      found = load_acquire(at);
    }
  }
};

// The same phases for the columns of prompts, of which several have the same slot: one item at a
// time. `attend_item` uses the memory of the partial sums, which have no values between two
// projections.
template <class S, class Context>
DEVICE void attend_prompts(Context& context, const Network& n, const WideBuffers& buffers,
                           int layer, const bf16* norms, const Column* columns, int num_columns) {
  using Shared = AttentionSharedMemory<Context::max_columns, kPromptTileSize>;
  static_assert(sizeof(Shared) <= sizeof(context.sums.sums),
                "an item's memory is that of the sums");
  static_assert(alignof(Shared) <= alignof(std::remove_reference_t<decltype(context.sums)>),
                "an item's memory is aligned");
  Shared& shared = reinterpret_cast<Shared&>(context.sums.sums);
  const WideAttentionItems<S, Context::max_columns> order(
      num_columns, [&](int c) { return columns[columns[c].first_column].position; });
  const EarlierTiles<S, Context> earlier{context, columns, buffers.cache_tags};
#pragma unroll 1
  for (int i = num_blocks() - 1 - block_idx(); i < order.count(); i += num_blocks()) {
    attend_item<S>(context.p, n, layer, norms, columns, num_columns, context.epoch_tags, shared,
                   context.timed_out(), order[i], earlier);
  }
  context.timer.lap(kAttention, kRest);
  combine_wide<S>(context, n, order);
}

}  // namespace megakernel
