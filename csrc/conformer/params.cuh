// Parameters of the kernels of the encoder: features, subsampling, and Conformer blocks with a
// past, between their matrix products.
//
// Activations are rows [streams * chunk_size, ...]: the frames of a stream's chunk are adjacent.
// What a stream keeps is read from one state slot and written to another one.
#pragma once

#include "../types.cuh"

namespace megakernel::conformer {

constexpr int kBlockThreads = 256;
constexpr int kMaxFewRows = 4;  // that `project` takes; kernels.cu compiles it for these
constexpr int kNumStages = 3;   // of the subsampling, each with stride 2
constexpr int kWindowSize = 400, kFftSize = 512, kHopSize = 160;  // samples of a mel frame

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

// The streams of a launch. A stream's chunk begins at its frame `num_frames[source]`; its recording
// ends at mel frame `lengths`, which may be in the chunk, before or behind it.
struct Streams {
  const int64_t* sources;     // [streams], state slot to read
  const int64_t* targets;     // [streams], state slot to write
  const int64_t* lengths;     // [streams], mel frames in all
  const int64_t* num_frames;  // [state slots], frames before the chunk
  int chunk_size;             // frames
};

// The features of a chunk's samples (log_mel.cuh). Mel frame i has samples from kHopSize * i on,
// one more than its window for the pre-emphasis.
struct LogMelParams {
  const float* samples;    // [streams, num_samples]
  const int64_t* counts;   // [streams], samples before the recording's end
  const float* window;     // [kWindowSize]
  const float2* twiddles;  // [kFftSize / 2], exp(-2 pi i k / kFftSize)
  const float* filters;    // [num_bins, kFftSize / 2 + 1]
  const int* ranges;       // [num_bins, 2], the bins of the transform that a filter has
  void* output;            // [streams, num_mels, num_bins]
  int num_samples;
  int num_mels;  // of a chunk
  int num_bins;
  float preemphasis;
  float log_floor;
};

// A strided convolution of the subsampling (subsample.cuh); of the first stage's input, a mel frame
// has one channel.
struct SubsampleParams {
  Streams streams;
  const void* input;    // [rows, num_bins, channels]: mel frames, or what a product returned
  const void* weights;  // [3, 3, num_channels]
  const void* bias;     // [num_channels]; null: none
  void* last;           // [state slots][num_bins, channels], the last frame of the input
  int64_t slot_stride;  // in numbers
  void* output;         // [num_rows, num_bins / 2 + 1, num_channels]
  int stage;            // from 0 on
  int num_rows;         // of the output, of all streams
  int num_bins;
  int num_channels;
};

// The end of the subsampling (subsample.cuh).
struct FlattenParams {
  Streams streams;
  const void* input;    // [num_rows, num_bins, num_channels], of the last product
  void* output;         // [num_rows, num_channels, num_bins]
  int64_t* num_frames;  // [state slots], of which the targets are written
  int num_rows;         // frames of all streams
  int num_bins;
  int num_channels;
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
