// Parameters of the kernels of a Conformer block with a past, between its matrix products.
//
// Activations are rows [streams * chunk_size, ...]: the frames of a stream's chunk are adjacent.
// What a stream keeps is read from one state slot and written to another one.
#pragma once

#include "../types.cuh"

namespace megakernel::conformer {

constexpr int kBlockThreads = 256;
constexpr int kMaxFewRows = 4;  // that `project` takes; kernels.cu compiles it for these

// The sizes of the model; without them, those of the released ones.
#ifdef MEGAKERNEL_CONFORMER_HIDDEN
constexpr int kHidden = MEGAKERNEL_CONFORMER_HIDDEN;
constexpr int kIntermediate = MEGAKERNEL_CONFORMER_INTERMEDIATE;
constexpr int kHeadDim = MEGAKERNEL_CONFORMER_HEAD_DIM;
constexpr int kNumTaps = MEGAKERNEL_CONFORMER_TAPS;
#else
constexpr int kHidden = 1024;
constexpr int kIntermediate = 4096;  // width inside the feed-forward modules
constexpr int kHeadDim = 128;
constexpr int kNumTaps = 9;  // of the depthwise convolution
#endif
constexpr int kMaxOutputs = kIntermediate > 3 * kHidden ? kIntermediate : 3 * kHidden;
// Warps that a launch of `project` needs: 128 thread blocks for the released models.
constexpr int kFewRowWarps = kMaxOutputs > 4096 ? kMaxOutputs / 4 : 1024;
constexpr int kNumHeads = kHidden / kHeadDim;
constexpr int kNumPast = kNumTaps - 1;  // frames before the first of a chunk that it depends on

// A layer normalisation; [kHidden] each.
struct Norm {
  const void* weight;
  const void* bias;
};

// The streams of a launch. A stream's chunk begins at its frame `num_frames[source]`; it ends at
// frame `lengths`, which may be in the chunk, before or behind it.
struct Streams {
  const int64_t* sources;     // [streams], state slot to read
  const int64_t* targets;     // [streams], state slot to write
  const int64_t* lengths;     // [streams], frames in all
  const int64_t* num_frames;  // [state slots], frames before the chunk
  int chunk_size;             // frames
};

// x += scale * y;  x = norm_out(x), if there is one;  h = norm_next(x), if there is one.
struct AddNormParams {
  void* x;        // [rows, kHidden]
  const void* y;  // [rows, kHidden]; null: nothing is added
  void* h;        // [rows, kHidden]
  Norm norm_out;
  Norm norm_next;
  float scale;  // a power of two
};

// A linear layer for few rows (project.cuh).
struct ProjectParams {
  const void* input;     // [num_rows, inputs]
  const void* weights;   // [outputs, inputs]
  const void* bias;      // [outputs]; null: none
  Norm norm_out;         // of the block before; may be missing
  Norm norm;             // of the input
  void* normed_out;      // [num_rows, kHidden], receives norm_out(input), if there is one
  const void* residual;  // [num_rows, outputs]
  void* output;          // [num_rows, outputs]; may be the residual
  int num_rows;
  float scale;  // of what is added to the residual; a power of two
};

// Attention with relative positions. The query at frame i of a chunk and the key at j of
// [cached frames, chunk] have the distance chunk_size - 1 - i + j in `positions`.
struct AttendParams {
  Streams streams;
  const void* qkv;            // [rows, 3, kNumHeads, kHeadDim]
  const void* content_bias;   // [kNumHeads, kHeadDim], added to queries for keys
  const void* position_bias;  // [kNumHeads, kHeadDim], added to queries for distances
  const void* positions;      // [kNumHeads, num_cached + 2 * chunk_size - 1, kHeadDim]
  void* keys;                 // [state slots][kNumHeads, num_cached, kHeadDim], of the block
  void* values;               // the same
  int64_t slot_stride;        // of keys and values, in numbers
  void* output;               // [rows, kNumHeads, kHeadDim]
  int num_cached;
  float root_head_dim;  // sqrt(head_dim), by which scores are divided
};

// v = a * sigmoid(b) with (a, b) = input;
// output = silu(norm(bias + sum over k of weights[k] * v[frame + k - kNumPast])).
// No frame depends on later ones, so frames behind a recording's end need no mask.
struct ConvolveParams {
  Streams streams;
  const void* input;    // [rows, 2, kHidden]
  const void* weights;  // [kNumTaps, kHidden]
  const void* bias;     // [kHidden]; null: none
  Norm norm;
  void* gated;          // [state slots][kHidden, kNumPast], v of the last frames, of the block
  int64_t slot_stride;  // in numbers
  void* output;         // [rows, kHidden]
};

}  // namespace megakernel::conformer
