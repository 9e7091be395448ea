// The joint network, for a window of frames of every stream, and the confidence of its choices.
//
//   logits = W relu(frame + output) + b
//   id = argmax logits[: vocab_size];  duration = argmax logits[vocab_size :]
//
// A thread block has some tiles of rows. It adds its largest logits to keys: the logit's order in
// the upper half, the inverted index in the lower half, so that of equal logits the lowest index
// has the largest key. The result does not depend on the order of the additions.
//
// A round uses the keys of buffer `round % 3`. Block 0 clears those of round + 2 between the two
// barriers of rounds `round` and `round + 1`: all thread blocks have read them, and none adds to
// them yet.
#pragma once

#include "shared_memory.cuh"

namespace megakernel::transducer {

// --- static asserts ---

static_assert(kMaxColumns == 8 * kNumWarps, "a half-warp has every 16th column");
static_assert(kMaxPlanes >= kMaxColumns / 8, "a tile of weights has a plane for eight columns");
// Tiles of weights that are loaded together, for up to eight columns.
template <class Number>
constexpr int kJointTiles = sizeof(Number) == 2 ? 4 : 2;
static_assert(kJointTiles<bf16> <= kMaxPlanes, "each needs a plane");

// --- shared memory ---

// activations of SharedMemory: relu(frame + output) of a group of columns. planes: logits.

// --- warp roles ---

// All warps multiply. Then lane 16 h + r of warp w has row r of the columns 16 i + 2 w + h.

// --- body: the sums of a choice ---

constexpr float kLeastLogit = -3.0e38f;
constexpr float kThird = 1.0f / 3;  // the order of the entropy

// The sums of exp(logit) and of exp(logit / 3), relative to the largest logit.
struct Certainty {
  float largest = kLeastLogit;
  float powers = 0;  // of exponent 1
  float roots = 0;   // of exponent 1/3

  // Adds sums that are relative to another logit.
  DEVICE void add(float other_largest, float other_powers, float other_roots) {
    const float next = fmaxf(largest, other_largest);
    const float own = expf((largest - next) * kThird),
                other = expf((other_largest - next) * kThird);
    powers = powers * (own * own * own) + other_powers * (other * other * other);
    roots = roots * own + other_roots * other;
    largest = next;
  }
  // Adds the sums of the lane `lane ^ mask`.
  DEVICE void add_lane(int mask) {
    const float other_largest = shuffle_xor(largest, mask),
                other_powers = shuffle_xor(powers, mask);
    add(other_largest, other_powers, shuffle_xor(roots, mask));
  }
  // The exponential of the negative entropy, scaled to 0 .. 1.
  DEVICE float value(float least) const {
    const float entropy = (roots / cbrtf(powers) - 1) / (1 - kThird);
    return fminf(fmaxf((expf(-entropy) - least) / (1 - least), 0.0f), 1.0f);
  }
};

// The choice of a lane: keys of the largest logits.
struct Choice {
  uint64_t id = 0;
  uint64_t duration = 0;
  Certainty certainty;
};

// The key of a logit; equal logits have equal upper halves, whatever their sign if they are 0.
DEVICE uint64_t logit_key(float logit, int index) {
  return static_cast<uint64_t>(ordered(logit + 0.0f)) << 32 | ~static_cast<uint32_t>(index);
}

// --- body: the network ---

// Tiles of the thread block from `first_tile` on, at most `NumTiles`.
template <int NumTiles>
DEVICE int count_tiles(int first_tile, int num_rows) {
  const int num_tiles = (num_rows + kTileRows - 1) / kTileRows, stride = num_blocks();
  return min(max((num_tiles - first_tile + stride - 1) / stride, 0), NumTiles);
}

// The activations of the columns first .. first + count.
template <class Number>
DEVICE void fill_joint(const TransducerParams& p, SharedMemory<Number>& shared, int first,
                       int count) {
  const SearchState& search = shared.search;
  fill_activations(shared, 0, count, [&](int i, int vector) {
    const int s = search.stream_of(first + i);
    const int64_t row = static_cast<int64_t>(s) * p.num_frames + search.frame_of(first + i);
    float frame[kVectorSize<Number>], output[kVectorSize<Number>];
    unpack(load_vector<Number>(p.frames, row, vector), frame);
    unpack(load_vector<Number>(p.workspace.output, s, vector), output);
#pragma unroll
    for (int j = 0; j < kVectorSize<Number>; ++j) {
      frame[j] = max_propagate_nan(round_to<Number>(frame[j] + output[j]), 0.0f);
    }
    return pack(frame);
  });
}

// Adds up to `NumTiles` tiles of logits of `count` columns, whose weights are loaded, to the
// choices of the lanes, and loads the next tiles.
template <class Number, int NumTiles>
DEVICE void choose(const TransducerParams& p, SharedMemory<Number>& shared,
                   TileWeights<Number, NumTiles>& weights, int first_tile, int num_rows, int count,
                   Choice (&choices)[4]) {
  const int num_column_tiles = (count + 7) / 8, row = lane_idx() % 16, stride = num_blocks();
  const int first_column = 2 * uniform_warp_idx() + lane_idx() / 16;
  const int num_tiles = count_tiles<NumTiles>(first_tile, num_rows);
  float bias[NumTiles];
#pragma unroll
  for (int t = 0; t < NumTiles; ++t) {
    const int index = (first_tile + t * stride) * kTileRows + row;
    bias[t] = index < num_rows ? read_bias<Number>(p.head, index) : 0.0f;
  }
  weights.multiply(shared.activations[0], num_column_tiles, shared.planes, 0);
  const int next = first_tile + NumTiles * stride;
  const int num_next = count_tiles<NumTiles>(next, num_rows);
  if (num_next > 0) weights.load(p.head.data, next, stride, num_next);
  sync_all_threads();
  add_up_planes(shared.planes, num_tiles * num_column_tiles);
  sync_all_threads();
#pragma unroll
  for (int t = 0; t < NumTiles; ++t) {
    const int index = (first_tile + t * stride) * kTileRows + row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 16 * i + first_column;
      if (column >= count || index >= num_rows) continue;
      const Plane& plane = shared.planes[0][t * num_column_tiles + column / 8];
      const float logit = add_bias<Number>(plane_element(plane, row, column % 8), bias[t]);
      Choice& choice = choices[i];
      if (index < p.vocab_size) {
        const uint64_t key = logit_key(logit, index);
        if (key > choice.id) choice.id = key;
        choice.certainty.add(logit, 1, 1);
      } else {
        const uint64_t key = logit_key(logit, index - p.vocab_size);
        if (key > choice.duration) choice.duration = key;
      }
    }
  }
  sync_all_threads();
}

// The choices of the lanes among all rows of the thread block, for the columns first .. first +
// count.
template <class Number, int NumTiles>
DEVICE void choose_all(const TransducerParams& p, SharedMemory<Number>& shared, int first,
                       int count, int num_rows, Choice (&choices)[4]) {
  TileWeights<Number, NumTiles> weights;
  const int stride = num_blocks();
  weights.load(p.head.data, block_idx(), stride, count_tiles<NumTiles>(block_idx(), num_rows));
  fill_joint(p, shared, first, count);
  sync_all_threads();
  for (int tile = block_idx(); tile * kTileRows < num_rows; tile += NumTiles * stride) {
    choose<Number, NumTiles>(p, shared, weights, tile, num_rows, count, choices);
  }
}

// The joint network. Reads frames [batch, num_frames, kHidden] and workspace.output; adds to keys
// [2, columns] and writes the thread block's values of partials [columns, blocks].
template <class Number>
DEVICE void join(const TransducerParams& p, SharedMemory<Number>& shared, uint64_t* keys) {
  const int num_rows = p.vocab_size + p.num_durations, stride = num_blocks();
  if (block_idx() * kTileRows >= num_rows) return;
  const int num_columns = shared.search.num_running << shared.search.log2_window;
  for (int first = 0; first < num_columns; first += kColumnCapacity<Number>) {
    const int count = min(num_columns - first, kColumnCapacity<Number>);
    Choice choices[4];
    const int first_column = 2 * uniform_warp_idx() + lane_idx() / 16;
    if (count <= 8) {
      choose_all<Number, kJointTiles<Number>>(p, shared, first, count, num_rows, choices);
    } else {
      choose_all<Number, 1>(p, shared, first, count, num_rows, choices);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (16 * i >= count) break;
      Choice& choice = choices[i];
#pragma unroll
      for (int mask = 8; mask > 0; mask /= 2) {
        const uint64_t id = shuffle_xor(choice.id, mask);
        const uint64_t duration = shuffle_xor(choice.duration, mask);
        if (id > choice.id) choice.id = id;
        if (duration > choice.duration) choice.duration = duration;
        choice.certainty.add_lane(mask);
      }
      const int column = 16 * i + first_column;
      if (lane_idx() % 16 > 0 || column >= count) continue;
      atomic_max(keys + first + column, choice.id);
      atomic_max(keys + kMaxColumns + first + column, choice.duration);
      const Certainty& sums = choice.certainty;
      p.workspace.partials[static_cast<int64_t>(first + column) * stride + block_idx()] = {
          sums.largest, sums.powers, sums.roots, 0};
    }
  }
}

// Clears keys [2, columns]. Called by block 0.
DEVICE void clear_keys(uint64_t* keys) {
  if (thread_idx() < 2 * kMaxColumns) keys[thread_idx()] = 0;
}

// Writes the confidence of the round's tokens to results. Reads partials; a warp has a stream.
DEVICE void write_confidence(const TransducerParams& p, const SearchState& search) {
  const int num_tiles = (p.vocab_size + p.num_durations + kTileRows - 1) / kTileRows;
  const int num_parts = min(num_tiles, num_blocks());
  for (int i = block_idx() + num_blocks() * uniform_warp_idx(); i < search.num_labelled;
       i += num_blocks() * kNumWarps) {
    const int s = search.labelled[i];
    const float4* parts =
        p.workspace.partials + static_cast<int64_t>(search.column[s]) * num_blocks();
    Certainty certainty;
    for (int part = lane_idx(); part < num_parts; part += 32) {
      const uint4 v = load_l2(reinterpret_cast<const uint4*>(parts + part));
      certainty.add(as_float(v.x), as_float(v.y), as_float(v.z));
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) certainty.add_lane(mask);
    if (lane_idx() == 0) {
      const int64_t row = s * static_cast<int64_t>(1 + p.max_results) + search.num_results[s];
      p.results[row].confidence = certainty.value(p.least_certainty);
    }
  }
}

}  // namespace megakernel::transducer
