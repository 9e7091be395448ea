// Parameters of the codec's kernels.
//
// One call decodes frames of several streams. Activations are rows: one row per time step, all
// frames of the call side by side, frames of a stream adjacent. A layer that needs rows before the
// first one of a stream reads them from the history in the stream's slot.
#pragma once

#include "../types.cuh"

namespace megakernel::codec {

constexpr int kBlockThreads = 256;
constexpr int kNumCodebooks = 16;     // codes of a frame
constexpr int kAttentionWindow = 72;  // frames, the current one included
constexpr int kStepChannels = 32;     // channels of a step of K
constexpr int kTileRows = 64;         // of tiled activations

// One frame of a call; written by the host.
struct Frame {
  const int* pending_address;  // codes that the host did not have when it launched; else null
  int slot;
  int first_frame;  // index in the call of the first frame of the same stream
  int position;     // frames of the stream before this one
  int codes[kNumCodebooks];
};
constexpr int kFrameInts = sizeof(Frame) / sizeof(int);

// Half-precision activations [rows, num_planes, num_channels]. Plane 1, if there is one, holds the
// rounding error of plane 0. Tiled, they are operands of warpgroup instructions [tiles of kTileRows
// rows, steps, num_planes, 2 instructions, halves of K, kTileRows, 8]: instruction i of a step has
// channels 8 t + 4 i to 8 t + 4 i + 3 of every t. Tiled rows are in the order of `tiled_row`.
struct Activations {
  f16* data;
  f16* history;            // [slots][.. history_rows rows ..]: the rows before those of the call
  int64_t history_stride;  // from slot to slot, in elements
  int num_planes, num_channels;
  int history_rows;
  int rows_per_frame;
  int is_tiled;
};

// Applied to v = scale * sum + bias.
enum Epilogue : int {
  kLinear,
  kSnake,     // v + sin^2(alpha v) * beta
  kGelu,      // exact
  kSiluGate,  // silu(even column) * odd column: half as many columns
  kRopeQkv    // rotated queries; rotated keys and values into the KV cache
};

struct alignas(16) ColumnParams {
  float scale, bias;
  float alpha, beta;  // of kSnake; beta is the inverse of the trained parameter
};

// output[r, n] = epilogue(sum over taps and channels of input[r - back, c] * weights[n, tap, c]).
// A causal convolution has num_taps taps, a linear layer one. A transposed convolution of stride s
// has two, and its columns are the channels of s output rows.
struct ProjectionParams {
  const Frame* frames;
  int num_rows;
  Activations input;
  int num_taps, dilation;
  const uint4* weights;               // [columns / 8][steps][32 lanes], see weight_packing.py
  const ColumnParams* column_params;  // [num_columns]
  // The same for tiles of warpgroup_columns columns and rows in shared memory, see
  // weight_packing.py. 0: not packed.
  const uint4* warpgroup_weights;
  const ColumnParams* warpgroup_column_params;
  int warpgroup_columns;
  int num_columns;
  int num_k_splits;   // ranges of K whose sums are added in order
  int norm_channels;  // channels of the input's RMS norm; 0: no norm
  float eps;
  const float* residual;  // [num_rows, num_columns], added before the epilogue; may be null
  float* residual_out;    // [num_rows, num_columns], the sum before the epilogue; may be null
  Epilogue epilogue;
  Activations output;  // num_columns / num_channels rows for each row of the input
  // kRopeQkv
  const float2* rope;      // [frames, head_dim / 2]: cosine and sine
  float* queries;          // [frames, num_columns / 3]
  f16* kv_cache;           // one layer: [slots][2][kv_ring_size][num_columns / 3]
  int64_t kv_slot_stride;  // in elements
  int kv_ring_size, head_dim;
};

// A residual unit: `pointwise`, of one tap, reads the output of `convolution`, which its kernel
// does not write. Otherwise the kernel computes what the two projections do.
struct ResidualUnitParams {
  ProjectionParams convolution, pointwise;
  const uint4* pointwise_weights;  // of tiles, for rows in registers, see weight_packing.py
  int is_reversed;  // the last rows first: those that the previous kernel has left in L2
};

// output[f] = sum over g of codebooks[g, codes[f, g]]; rope[f] = cos and sin of position *
// frequency. Copies the requests from the host to `frames`. Codes are clamped to the codebook: a
// pending frame that was not generated may hold any value.
struct EmbedParams {
  const Frame* requests;  // on the host
  Frame* frames;
  int num_frames, codebook_size;
  const float* codebooks;            // [kNumCodebooks, codebook_size, num_channels]
  const float* inverse_frequencies;  // [head_dim / 2], radians per frame
  float2* rope;                      // [num_frames, head_dim / 2]
  int half_head_dim;
  Activations output;
};

// output = softmax(queries keys^T) values, over the last kAttentionWindow frames of the stream.
// The queries are scaled by 1 / sqrt(head_dim) already.
struct AttentionParams {
  const Frame* frames;
  int num_frames, num_heads, head_dim;
  const float* queries;  // [num_frames, num_heads * head_dim]
  const f16* kv_cache;   // one layer: [slots][2][kv_ring_size][num_heads * head_dim]
  int64_t kv_slot_stride;
  int kv_ring_size;
  Activations output;
};

constexpr int kDepthwiseTaps = 7;
constexpr int kMaxChannelPairs = 2;  // of a thread
constexpr int kMaxDepthwiseChannels = 2 * kMaxChannelPairs * kBlockThreads;

// output = layer_norm(bias + sum over taps of input[r - back] * weights[tap]), channel by channel.
struct DepthwiseParams {
  const Frame* frames;
  int num_rows;
  Activations input, output;
  const float* weights;  // [kDepthwiseTaps, channels]
  const float* bias;     // [channels]
  const float* norm;     // [2, channels]: scale and shift
  float eps;
};

constexpr int kSampleTaps = 7;
constexpr int kSampleRows = 16;  // that lanes compute together; a frame has a multiple of them

// sample[r] = bias + sum over taps and channels of input[r - back, c] * weights[tap, c].
struct SamplesParams {
  const Frame* frames;
  int num_rows;
  Activations input;
  const float* weights;  // [kSampleTaps, channels]
  float bias;
  short* pcm;       // [num_rows], on the host
  int* non_finite;  // [frames], on the host: set to 1 where a sample is not finite
};

constexpr int kMaxHistories = 32;

// Moves the last rows of every convolution's input into the histories.
struct StateUpdateParams {
  const Frame* frames;
  const int* num_kept_frames;  // [num_frames], on the host; read at a stream's first frame: how
                               // many of its frames in this call were generated
  int num_frames, num_layers;
  Activations activations[kMaxHistories];
};
static_assert(sizeof(StateUpdateParams) <= 4096, "kernel arguments are limited to 4096 bytes");

}  // namespace megakernel::codec
