// Attention of a chunk to itself and to the cached frames, with relative positions.
//
//   score(i, j) = ((q_i + u) . k_j + (q_i + w) . r_(chunk - 1 - i + j)) / sqrt(kHeadDim)
//   output_i    = sum over visible j of softmax(score)_j v_j
//
// One thread block per stream and head. It also writes the keys and values of the last frames to
// the stream's target slot.
#pragma once

#include "streams.cuh"

namespace megakernel::conformer {

// --- static asserts ---

static_assert(kHidden % kHeadDim == 0, "heads divide the width");
static_assert(kHeadDim % 8 == 0, "a head has whole vectors");

// --- shared memory ---

// Numbers of float32 that a thread block needs: queries with either bias [2, chunk, kHeadDim],
// weights [chunk, keys], and partial sums of outputs [groups, chunk, kHeadDim], where a group has
// every num_groups-th key.
struct AttendLayout {
  int chunk_size, num_keys, num_groups;

  // The layout for a launch with these parameters.
  template <class Number>
  DEVICE static AttendLayout of(const AttendParams& p) {
    const int items = p.streams.chunk_size * (kHeadDim / kVectorSize<Number>);
    return {p.streams.chunk_size, p.num_cached + p.streams.chunk_size,
            max(kBlockThreads / items, 1)};
  }
  DEVICE int queries(int bias) const { return bias * chunk_size * kHeadDim; }
  DEVICE int weights() const { return 2 * chunk_size * kHeadDim; }
  DEVICE int partials() const { return weights() + chunk_size * num_keys; }
};

// --- warp roles ---

// All warps do the same: a thread has a vector to copy, then pairs of a query and a key; a warp has
// every 8th softmax; a thread has a vector of an output, for a group of keys.

// --- body ---

// One head of one stream of a launch.
template <class Number>
class Attention {
 public:
  static constexpr int kSize = kVectorSize<Number>;
  static constexpr int kNumVectors = kHeadDim / kSize;  // of a head's channels

  // The head of the stream that this thread block has; `shared` has AttendLayout.
  DEVICE Attention(const AttendParams& p, float* shared)
      : p_(p),
        layout_(AttendLayout::of<Number>(p)),
        shared_(shared),
        stream_(block_idx() / kNumHeads),
        head_(block_idx() % kNumHeads) {
    const Streams& streams = p.streams;
    const int64_t head = static_cast<int64_t>(head_) * p.num_cached * kHeadDim;
    source_ = streams.sources[stream_] * p.slot_stride + head;
    target_ = streams.targets[stream_] * p.slot_stride + head;
    const int64_t num_frames = streams.num_frames[streams.sources[stream_]];
    first_visible_ = p.num_cached - static_cast<int>(min(num_frames, int64_t(p.num_cached)));
    end_visible_ = p.num_cached + StageFrames(streams, stream_, kNumStages).end;
  }

  // Called by all threads.
  DEVICE void run() {
    add_biases();
    update_cache(p_.keys, 1);
    update_cache(p_.values, 2);
    sync_all_threads();
    score();
    sync_all_threads();
    for (int i = warp_idx(); i < layout_.chunk_size; i += kBlockThreads / 32) softmax(i);
    sync_all_threads();
    add_values();
    sync_all_threads();
    add_groups();
  }

 private:
  // Vector `vector` of part `part` (query, key, value) of a frame of the chunk.
  DEVICE const uint4* chunk_vector(int part, int frame, int vector) const {
    const int64_t row = static_cast<int64_t>(stream_) * layout_.chunk_size + frame;
    return static_cast<const uint4*>(p_.qkv) +
           ((3 * row + part) * kNumHeads + head_) * kNumVectors + vector;
  }
  // The same of key or value j of [cached frames, chunk].
  DEVICE const uint4* key_vector(const void* cache, int part, int j, int vector) const {
    if (j >= p_.num_cached) return chunk_vector(part, j - p_.num_cached, vector);
    return reinterpret_cast<const uint4*>(static_cast<const Number*>(cache) + source_) +
           j * kNumVectors + vector;
  }

  // Queries with either bias, [2, chunk, kHeadDim].
  DEVICE void add_biases() {
    for (int i = thread_idx(); i < layout_.chunk_size * kNumVectors; i += kBlockThreads) {
      float query[kSize];
      unpack(*chunk_vector(0, i / kNumVectors, i % kNumVectors), query);
#pragma unroll
      for (int bias = 0; bias < 2; ++bias) {
        float added[kSize];
        const void* const biases = bias ? p_.position_bias : p_.content_bias;
        unpack(static_cast<const uint4*>(biases)[head_ * kNumVectors + i % kNumVectors], added);
#pragma unroll
        for (int c = 0; c < kSize; ++c) {
          shared_[layout_.queries(bias) + i * kSize + c] = round_to<Number>(query[c] + added[c]);
        }
      }
    }
  }

  // Writes the last num_cached keys or values to the target slot.
  DEVICE void update_cache(void* cache, int part) {
    uint4* const target = reinterpret_cast<uint4*>(static_cast<Number*>(cache) + target_);
    for (int i = thread_idx(); i < p_.num_cached * kNumVectors; i += kBlockThreads) {
      target[i] = *key_vector(cache, part, i / kNumVectors + layout_.chunk_size, i % kNumVectors);
    }
  }

  // Scores of visible keys, [chunk, keys]. Adjacent threads have adjacent keys.
  DEVICE void score() {
    for (int i = thread_idx(); i < layout_.chunk_size * layout_.num_keys; i += kBlockThreads) {
      const int query = i / layout_.num_keys, j = i % layout_.num_keys;
      if (j < first_visible_ || j >= end_visible_) continue;
      const int distance = layout_.chunk_size - 1 - query + j;
      const int num_distances = layout_.num_keys + layout_.chunk_size - 1;
      const uint4* const position = static_cast<const uint4*>(p_.positions) +
                                    (head_ * num_distances + distance) * kNumVectors;
      const float content = dot(query, 0, key_vector(p_.keys, 1, j, 0));
      const float both = round_to<Number>(content + dot(query, 1, position));
      shared_[layout_.weights() + i] = both / p_.root_head_dim;
    }
  }

  // Product of a query with one of the biases and a vector [kHeadDim], rounded.
  DEVICE float dot(int query, int bias, const uint4* key) const {
    const float* const values = shared_ + layout_.queries(bias) + query * kHeadDim;
    float sum = 0;
#pragma unroll 16
    for (int vector = 0; vector < kNumVectors; ++vector) {
      float numbers[kSize];
      unpack(key[vector], numbers);
#pragma unroll
      for (int c = 0; c < kSize; ++c) sum += values[vector * kSize + c] * numbers[c];
    }
    return round_to<Number>(sum);
  }

  // Scores of a query to weights, which are 0 for keys that are not visible. All lanes take part.
  DEVICE void softmax(int query) {
    float* const row = shared_ + layout_.weights() + query * layout_.num_keys;
    float largest = -INFINITY;
    for (int j = first_visible_ + lane_idx(); j < end_visible_; j += 32) {
      largest = max(largest, row[j]);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) largest = max(largest, shuffle_xor(largest, mask));
    float sum = 0;
    for (int j = first_visible_ + lane_idx(); j < end_visible_; j += 32) {
      row[j] = expf(row[j] - largest);
      sum += row[j];
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    for (int j = lane_idx(); j < layout_.num_keys; j += 32) {
      const bool visible = j >= first_visible_ && j < end_visible_;
      row[j] = visible ? round_to<Number>(row[j] / sum) : 0.0f;
    }
  }

  // Weighted sums of values, by group of keys: [groups, chunk, kHeadDim].
  DEVICE void add_values() {
    const int num_items = layout_.chunk_size * kNumVectors;
    for (int i = thread_idx(); i < layout_.num_groups * num_items; i += kBlockThreads) {
      const int group = i / num_items, query = i % num_items / kNumVectors,
                vector = i % kNumVectors;
      const float* const weights = shared_ + layout_.weights() + query * layout_.num_keys;
      float sums[kSize] = {};
#pragma unroll 4
      for (int j = group; j < layout_.num_keys; j += layout_.num_groups) {
        float numbers[kSize];
        unpack(*key_vector(p_.values, 2, j, vector), numbers);
#pragma unroll
        for (int c = 0; c < kSize; ++c) sums[c] += weights[j] * numbers[c];
      }
#pragma unroll
      for (int c = 0; c < kSize; ++c) shared_[layout_.partials() + i * kSize + c] = sums[c];
    }
  }

  // The output [chunk, kHeadDim]: the groups' sums in order.
  DEVICE void add_groups() {
    const int count = layout_.chunk_size * kHeadDim;
    for (int i = thread_idx(); i < count; i += kBlockThreads) {
      float sum = 0;
      for (int group = 0; group < layout_.num_groups; ++group) {
        sum += shared_[layout_.partials() + group * count + i];
      }
      const int64_t row = static_cast<int64_t>(stream_) * layout_.chunk_size + i / kHeadDim;
      static_cast<Number*>(p_.output)[(row * kNumHeads + head_) * kHeadDim + i % kHeadDim] =
          to_number<Number>(sum);
    }
  }

  const AttendParams& p_;
  const AttendLayout layout_;
  float* const shared_;
  const int stream_, head_;
  int64_t source_, target_;
  int first_visible_, end_visible_;  // keys; the visible ones are adjacent
};

// The kernel. Reads qkv [rows, 3, kNumHeads, kHeadDim] and the source's keys and values [kNumHeads,
// num_cached, kHeadDim]; writes output [rows, kNumHeads, kHeadDim] and the target's keys and
// values.
template <class Number>
DEVICE void attend(const AttendParams& p, float* shared) {
  trigger_dependent_grids();
  wait_for_prerequisite_grids();
  Attention<Number>(p, shared).run();
}

}  // namespace megakernel::conformer
