// Parameters of the kernels of a Conformer block with a past, between its matrix products.
//
// Activations are rows [streams * chunk_size, width]: the frames of a stream's chunk are adjacent.
// What a stream keeps is read from one state slot and written to another one.
#pragma once

#include "../types.cuh"

namespace megakernel::conformer {

constexpr int kBlockThreads = 256;
constexpr int kMaxVectors = 4;   // of sixteen bytes, of a thread, in a row
constexpr int kMaxChannels = 8;  // of a thread, in a row

// A layer normalisation; [width] each.
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
  void* x;        // [rows, width]
  const void* y;  // [rows, width]; null: nothing is added
  void* h;        // [rows, width]
  Norm norm_out;
  Norm norm_next;
  int width;
  float scale;  // a power of two
};

// Attention with relative positions. The query at frame i of a chunk and the key at j of
// [cached frames, chunk] have the distance chunk_size - 1 - i + j in `positions`.
struct AttendParams {
  Streams streams;
  const void* qkv;            // [rows, 3, heads, head_dim]
  const void* content_bias;   // [heads, head_dim], added to queries for keys
  const void* position_bias;  // [heads, head_dim], added to queries for distances
  const void* positions;      // [heads, num_cached + 2 * chunk_size - 1, head_dim]
  void* keys;                 // [state slots][heads, num_cached, head_dim], of the block
  void* values;               // the same
  int64_t slot_stride;        // of keys and values, in numbers
  void* output;               // [rows, heads, head_dim]
  int num_heads;
  int head_dim;
  int num_cached;
  float root_head_dim;  // sqrt(head_dim), by which scores are divided
};

// v = a * sigmoid(b) with (a, b) = input, 0 where there is no frame;
// output = silu(norm(bias + sum over k of weights[k] * v[frame + k - (kernel_size - 1)])).
struct ConvolveParams {
  Streams streams;
  const void* input;    // [rows, 2, width]
  const void* weights;  // [kernel_size, width]
  const void* bias;     // [width]; null: none
  Norm norm;
  void* gated;          // [state slots][width, kernel_size - 1], v of the last frames, of the block
  int64_t slot_stride;  // in numbers
  void* output;         // [rows, width]
  int width;
  int kernel_size;
};

}  // namespace megakernel::conformer
