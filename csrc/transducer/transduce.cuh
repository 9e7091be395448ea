// The kernel: label looping of a batch of streams in one launch.
//
//   until no stream has frames left:
//     joint network ==> next token of every stream
//     for streams with a token: LSTM layer ==> .. ==> projection ==>
//
//   ==> barrier of all thread blocks
#pragma once

#include "grid_barrier.cuh"
#include "joint.cuh"
#include "predict.cuh"

namespace megakernel::transducer {

// --- static asserts ---

static_assert(sizeof(SharedMemory<float>) <= kSharedMemoryBytes &&
                  sizeof(SharedMemory<bf16>) <= kSharedMemoryBytes,
              "the activations must leave room for the products");

// --- shared memory ---

// SharedMemory (shared_memory.cuh).

// --- warp roles ---

// All thread blocks keep the same SearchState and take the same branches. A thread block has tiles
// of every matrix.

// --- body ---

// Calls copy(stream, layer, vector) for this thread block's part of all vectors of all layers.
template <class Number, class Copy>
DEVICE void for_each_vector(const TransducerParams& p, int num_layers, Copy copy) {
  constexpr int kVectors = kHidden / kVectorSize<Number>;
  const int count = p.batch * num_layers * kVectors;
  for (int i = block_idx() * kNumThreads + thread_idx(); i < count;
       i += num_blocks() * kNumThreads) {
    const int row = i / kVectors;
    copy(row / num_layers, row % num_layers, i % kVectors);
  }
}

// Vector `vector` of row `row` of an array [rows, kHidden].
template <class Number>
DEVICE uint4* vector_address(void* data, int64_t row, int vector) {
  return static_cast<uint4*>(data) + row * (kHidden / kVectorSize<Number>)+vector;
}

// Copies the streams' states [slots, ...] to the workspace [batch, ...].
template <class Number>
DEVICE void load_states(const TransducerParams& p) {
  const Workspace& to = p.workspace;
  for_each_vector<Number>(p, p.num_layers, [&](int s, int layer, int vector) {
    const int64_t from = static_cast<int64_t>(p.sources[s]) * p.num_layers + layer;
    const int64_t row = hidden_row(p, 0, s, layer);
    *vector_address<Number>(to.hidden, row, vector) =
        *vector_address<Number>(p.states.hidden, from, vector);
    *vector_address<Number>(to.cell, row, vector) =
        *vector_address<Number>(p.states.cell, from, vector);
  });
  for_each_vector<Number>(p, 1, [&](int s, int, int vector) {
    *vector_address<Number>(to.output, s, vector) =
        *vector_address<Number>(p.states.output, p.sources[s], vector);
  });
}

// Copies the workspace to the streams' new states, and writes the headers of results [batch].
template <class Number>
DEVICE void store_states(const TransducerParams& p, const SearchState& search) {
  for_each_vector<Number>(p, p.num_layers, [&](int s, int layer, int vector) {
    const int64_t to = static_cast<int64_t>(p.targets[s]) * p.num_layers + layer;
    *vector_address<Number>(p.states.hidden, to, vector) =
        load_vector<Number>(p.workspace.hidden, hidden_row(p, search.buffer[s], s, layer), vector);
    *vector_address<Number>(p.states.cell, to, vector) =
        load_vector<Number>(p.workspace.cell, hidden_row(p, 0, s, layer), vector);
  });
  for_each_vector<Number>(p, 1, [&](int s, int, int vector) {
    *vector_address<Number>(p.states.output, p.targets[s], vector) =
        load_vector<Number>(p.workspace.output, s, vector);
  });
  const int s = thread_idx();
  if (block_idx() > 0 || s >= p.batch) return;
  p.results[s * static_cast<int64_t>(1 + p.max_results)].token = search.num_results[s];
  const int64_t num_frames = p.states.num_frames[p.sources[s]];
  p.states.num_frames[p.targets[s]] = num_frames + search.length[s];
  p.states.frame[p.targets[s]] = num_frames + search.position[s];
}

// Decodes a batch. Reads frames and states; writes results and states.
template <class Number>
DEVICE void transduce(const TransducerParams& p, SharedMemory<Number>& shared) {
  constexpr int kKeys = 2 * kMaxColumns;  // of a buffer
  SearchState& search = shared.search;
  GridBarrier barrier(p.workspace.barrier);
  load_states<Number>(p);
  begin_search(p, search);
  if (block_idx() == 0) {
    for (int i = 0; i < kNumKeyBuffers; ++i) clear_keys(p.workspace.keys + i * kKeys);
  }
  barrier.wait();
  for (int round = 0;; ++round) {
    list_running(search);
    if (search.num_running == 0) break;
    uint64_t* keys = p.workspace.keys + round % kNumKeyBuffers * kKeys;
    join(p, shared, keys);
    barrier.wait();
    find_tokens(p, keys, search);
    if (block_idx() == 0) clear_keys(p.workspace.keys + (round + 2) % kNumKeyBuffers * kKeys);
    if (search.num_labelled == 0) continue;
    write_confidence(p, search);
    for (int layer = 0; layer < p.num_layers; ++layer) {
      predict_layer(p, shared, layer);
      barrier.wait();
    }
    project_output(p, shared);
    barrier.wait();
    const int s = thread_idx();
    if (s < kMaxBatch && search.token[s] >= 0) search.buffer[s] = 1 - search.buffer[s];
  }
  store_states<Number>(p, search);
}

}  // namespace megakernel::transducer
