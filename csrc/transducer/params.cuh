// The argument of a launch, the sizes of the kernels, and what a launch returns.
#pragma once

#include "../shapes.cuh"
#include "../types.cuh"

namespace megakernel::transducer {

// --- sizes ---

constexpr int kMaxBatch = 64;      // streams of a launch
constexpr int kMaxColumns = 64;    // pairs of stream and frame that the joint network takes at once
constexpr int kMaxLog2Window = 3;  // of the frames of a stream among them
constexpr int kTileRows = 16;      // rows of a tile of weights: the matrix instruction's unit
constexpr int kStepK = 16;         // elements of K of a tile's step
constexpr int kUnitsPerTile = 4;   // LSTM units of a tile: four gates each
constexpr int kNumKeyBuffers = 3;  // see joint.cuh
constexpr int kMaxLayers = 16;     // of the LSTM
#ifdef MEGAKERNEL_TRANSDUCER_HIDDEN
constexpr int kHidden = MEGAKERNEL_TRANSDUCER_HIDDEN;  // width of prediction and joint network
#else
constexpr int kHidden = 640;
#endif

// --- the argument ---

// A matrix in operand order: [tiles, steps of K, lanes] (tiles.cuh).
struct Weights {
  const void* data;
  const void* bias;  // [16 tiles], in the order of rows
};

// A layer of the LSTM. Row q * 4 + u of tile i is gate q (input, forget, cell, output) of unit
// 4 i + u.
struct LstmLayer {
  Weights input;
  Weights hidden;
};

// States of streams, [slots, ...]. `Number` is the kernel's.
struct States {
  void* hidden;         // [slots, layers, kHidden]
  void* cell;           // [slots, layers, kHidden]
  void* output;         // [slots, kHidden], of the prediction network, projected
  int64_t* num_frames;  // [slots], frames so far
  int64_t* frame;       // [slots], the next frame to look at
};

// What a launch decoded: a header and then the tokens of a stream.
struct Result {
  int token;         // header: the number of tokens
  int frame;         // from the first frame of the launch
  int duration;      // in frames
  float confidence;  // from 0 to 1
};

// The workspace, [streams of the launch, ...]. Bits of `barrier` are set before a launch.
struct Workspace {
  unsigned* barrier;
  uint64_t* keys;    // [kNumKeyBuffers, 2, kMaxColumns]: the largest logits of ids and of durations
  float4* partials;  // [kMaxColumns, blocks]: sums of the confidence
  void* hidden;      // [2, batch, layers, kHidden]: before and after a token
  void* cell;        // [batch, layers, kHidden]
  void* output;      // [batch, kHidden]
};

struct TransducerParams {
  const void* frames;  // [batch, num_frames, kHidden], projected for the joint network
  const int* lengths;  // [batch], frames of a stream
  const int* sources;  // [batch], slot of a stream's state
  const int* targets;  // [batch], slot for its new state
  States states;
  const void* embedding;  // [ids, kHidden]
  LstmLayer layers[kMaxLayers];
  Weights projector;     // [kHidden, kHidden]
  Weights head;          // [vocab_size + num_durations, kHidden]
  const int* durations;  // [num_durations]
  Result* results;       // [batch, 1 + max_results]
  Workspace workspace;
  int batch;
  int num_frames;
  int num_layers;
  int vocab_size;     // ids, blank included
  int num_durations;  // 0: RNN-T
  int blank_id;
  int max_symbols;  // tokens of one frame, after which the next frame follows
  int max_results;
  float least_certainty;  // exponential of the negative entropy of equal logits
};

}  // namespace megakernel::transducer
