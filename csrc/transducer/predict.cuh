// The prediction network, for the streams that have a new token.
//
//   x = embedding[token]
//   for each layer: gates = W_x x + b_x + W_h h + b_h
//                   cell = sigmoid(f) cell + sigmoid(i) tanh(g);  x = h = sigmoid(o) tanh(cell)
//   output = W x + b
//
// Rounded to the kernel's numbers after every operation, as torch does.
#pragma once

#include "shared_memory.cuh"

namespace megakernel::transducer {

// --- static asserts ---

static_assert(kHidden % kUnitsPerTile == 0, "a tile of gates has whole units");
static_assert(kNumThreads % kTileRows == 0, "all columns of a thread have the same row");
static_assert(kColumnCapacity<float> % 16 == 0 && kColumnCapacity<bf16> % 16 == 0,
              "inputs and hidden states are whole tiles of columns");

// --- shared memory ---

// activations of SharedMemory: inputs of a group of streams, then their hidden states.
// planes: products of the inputs, then of the hidden states.

// --- warp roles ---

// All warps do the same: each multiplies a part of K. A thread then has a unit of a stream.

// --- body ---

// The thread block's tile after another one; after its last, its first one.
DEVICE int next_tile(int tile, int num_tiles) {
  return tile + num_blocks() < num_tiles ? tile + num_blocks() : block_idx();
}

// The row of a stream's hidden state in workspace.hidden: the current one, or the next one.
DEVICE int64_t hidden_row(const TransducerParams& p, int buffer, int stream, int layer) {
  return (static_cast<int64_t>(buffer) * p.batch + stream) * p.num_layers + layer;
}

// The biases of a unit's gates.
template <class Number>
struct GateBiases {
  float input[4];
  float hidden[4];

  // Unit `tile_unit` of a tile.
  DEVICE GateBiases(const LstmLayer& layer, int tile, int tile_unit) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int row = tile * kTileRows + q * kUnitsPerTile + tile_unit;
      input[q] = read_bias<Number>(layer.input, row);
      hidden[q] = read_bias<Number>(layer.hidden, row);
    }
  }
};

// New cell and hidden state of a unit from the sums of its gates.
template <class Number>
DEVICE void step_unit(const TransducerParams& p, const GateBiases<Number>& biases,
                      const Plane (&planes)[kMaxPlanes], int num_column_tiles, int tile, int i,
                      int layer_idx, const SearchState& search, int stream) {
  const int column = i / kUnitsPerTile, tile_unit = i % kUnitsPerTile;
  float gates[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int row = q * kUnitsPerTile + tile_unit;
    const float x = plane_element(planes[column / 8], row, column % 8);
    const float h = plane_element(planes[num_column_tiles + column / 8], row, column % 8);
    gates[q] = round_to<Number>(add_bias<Number>(x, biases.input[q]) +
                                add_bias<Number>(h, biases.hidden[q]));
  }
  const int unit = tile * kUnitsPerTile + tile_unit;
  Number* cell = static_cast<Number*>(p.workspace.cell) +
                 (static_cast<int64_t>(stream) * p.num_layers + layer_idx) * kHidden + unit;
  const float kept = round_to<Number>(round_to<Number>(sigmoid(gates[1])) * to_float(*cell));
  const float added =
      round_to<Number>(round_to<Number>(sigmoid(gates[0])) * round_to<Number>(tanhf(gates[2])));
  const float next = round_to<Number>(kept + added);
  *cell = to_number<Number>(next);
  store_element<Number>(p.workspace.hidden,
                        hidden_row(p, 1 - search.buffer[stream], stream, layer_idx), unit,
                        round_to<Number>(sigmoid(gates[3])) * round_to<Number>(tanhf(next)));
}

// One layer. Reads the embedding [ids, kHidden] or the layer before in workspace.hidden; writes the
// thread block's units of workspace.hidden and workspace.cell [batch, layers, kHidden].
template <class Number>
DEVICE void predict_layer(const TransducerParams& p, SharedMemory<Number>& shared, int layer_idx) {
  constexpr int kNumTiles = kHidden / kUnitsPerTile, kGroup = kColumnCapacity<Number> / 2;
  if (block_idx() >= kNumTiles) return;
  const SearchState& search = shared.search;
  const LstmLayer& layer = p.layers[layer_idx];
  TileWeights<Number, 1> input, hidden;
  input.load(layer.input.data, block_idx());
  hidden.load(layer.hidden.data, block_idx());
  for (int first = 0; first < search.num_labelled; first += kGroup) {
    const int count = min(search.num_labelled - first, kGroup);
    const int num_column_tiles = (count + 7) / 8;
    fill_activations(shared, 0, count, [&](int i, int vector) {
      const int s = search.labelled[first + i];
      if (layer_idx == 0) return load_vector<Number>(p.embedding, search.token[s], vector);
      const int64_t row = hidden_row(p, 1 - search.buffer[s], s, layer_idx - 1);
      return load_vector<Number>(p.workspace.hidden, row, vector);
    });
    fill_activations(shared, 8 * num_column_tiles, count, [&](int i, int vector) {
      const int s = search.labelled[first + i];
      const int64_t row = hidden_row(p, search.buffer[s], s, layer_idx);
      return load_vector<Number>(p.workspace.hidden, row, vector);
    });
    sync_all_threads();
    for (int tile = block_idx(); tile < kNumTiles; tile += num_blocks()) {
      const GateBiases<Number> biases(layer, tile, thread_idx() % kUnitsPerTile);
      input.multiply(shared.activations[0], num_column_tiles, shared.planes, 0);
      hidden.multiply(shared.activations[8 * num_column_tiles], num_column_tiles, shared.planes,
                      num_column_tiles);
      const int next = next_tile(tile, kNumTiles);
      if (next != tile) input.load(layer.input.data, next), hidden.load(layer.hidden.data, next);
      sync_all_threads();
      add_up_planes(shared.planes, 2 * num_column_tiles);
      sync_all_threads();
      for (int i = thread_idx(); i < count * kUnitsPerTile; i += kNumThreads) {
        step_unit<Number>(p, biases, shared.planes[0], num_column_tiles, tile, i, layer_idx, search,
                          search.labelled[first + i / kUnitsPerTile]);
      }
      sync_all_threads();
    }
  }
}

// The projection of the last layer. Reads workspace.hidden; writes the thread block's rows of
// workspace.output [batch, kHidden].
template <class Number>
DEVICE void project_output(const TransducerParams& p, SharedMemory<Number>& shared) {
  constexpr int kNumTiles = kHidden / kTileRows;
  if (block_idx() >= kNumTiles) return;
  const SearchState& search = shared.search;
  TileWeights<Number, 1> weights;
  weights.load(p.projector.data, block_idx());
  for (int first = 0; first < search.num_labelled; first += kColumnCapacity<Number>) {
    const int count = min(search.num_labelled - first, kColumnCapacity<Number>);
    const int num_column_tiles = (count + 7) / 8;
    fill_activations(shared, 0, count, [&](int i, int vector) {
      const int s = search.labelled[first + i];
      const int64_t row = hidden_row(p, 1 - search.buffer[s], s, p.num_layers - 1);
      return load_vector<Number>(p.workspace.hidden, row, vector);
    });
    sync_all_threads();
    for (int tile = block_idx(); tile < kNumTiles; tile += num_blocks()) {
      const int row = thread_idx() % kTileRows, unit = tile * kTileRows + row;
      const float bias = read_bias<Number>(p.projector, unit);
      weights.multiply(shared.activations[0], num_column_tiles, shared.planes, 0);
      const int next = next_tile(tile, kNumTiles);
      if (next != tile) weights.load(p.projector.data, next);
      sync_all_threads();
      add_up_planes(shared.planes, num_column_tiles);
      sync_all_threads();
      for (int i = thread_idx(); i < count * kTileRows; i += kNumThreads) {
        const int column = i / kTileRows;
        const float sum = plane_element(shared.planes[0][column / 8], row, column % 8);
        store_element<Number>(p.workspace.output, search.labelled[first + column], unit,
                              add_bias<Number>(sum, bias));
      }
      sync_all_threads();
    }
  }
}

}  // namespace megakernel::transducer
