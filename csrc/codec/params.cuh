// What each kernel of the codec is given. Activations lie row by row, one row an instant, all
// streams of a call side by side; a stream's rows before its first are its history.
#pragma once

#include "../types.cuh"

namespace megakernel::codec {

constexpr int kBlockThreads = 256;
constexpr int kCodes = 16;   // of a frame
constexpr int kWindow = 72;  // frames that attention sees

// A frame of a call; frames of a stream follow each other. The host writes them.
struct Frame {
  const int* coming;  // where its codes are by now, if the host did not know them; else null
  int slot;
  int first;     // of its stream, in the call
  int position;  // in its stream
  int codes[kCodes];
};
constexpr int kFrameInts = sizeof(Frame) / sizeof(int);

// Half-precision rows [rows, planes, channels]: a second plane holds what the first one rounds off.
// The rows before a stream's first are in `past`: [slots][.. depth rows ..], the slots `stride`
// apart.
struct Rows {
  f16* now;
  f16* past;
  long long stride;
  int planes, channels;
  int depth;  // rows that are remembered
  int rate;   // rows a frame
};

enum Finish {
  kPlain,
  kSnake,  // v + sin^2(a v) / b
  kGelu,
  kGate,  // silu of the even columns times the odd ones: half as many
  kTurn,  // queries, keys and values: turned, and into the stream's memory
  kWave   // two columns' sum is a sample
};

// What follows a column's sum.
struct alignas(16) Column {
  float scale, bias;  // v = scale * sum + bias
  float alpha, beta;  // of a snake, beta inverted
};

// A causal convolution, or a matrix product as that of one tap; a transposed one is that of two
// taps whose columns are the samples of all its phases.
struct Product {
  const Frame* frames;
  bool early;  // whether it may begin before the kernel in front of it ends, the frames being known
  int rows;
  Rows in;
  int taps, dilation;
  const uint4* weights;  // [columns / 8][steps][32 lanes], see product.cuh
  const Column* column;  // [columns]
  int columns;
  int norm;  // channels of the input's root-mean-square norm, or 0
  float eps;
  const float* residual;  // [rows, columns], added
  float* sum;             // [rows, columns], as the next residual
  Finish finish;
  Rows out;  // of its `channels`, several rows side by side in the columns of one
  // kTurn
  const float2* turns;  // [frames, head / 2]
  float* queries;       // [frames, columns / 3]
  float* memory;        // a layer's keys and values [slots][2][ring][columns / 3]
  long long memory_stride;
  int ring, head;
  // kWave
  short* pcm;   // [rows], on the host
  int* broken;  // [frames], on the host: set where a sample is not finite
};

// The sum of a frame's codebook rows, and its rotary angles. `frames` is brought from the host.
// Codes that were coming may be of no frame, and beyond the tables: the nearest code is taken.
struct Embed {
  const Frame* asked;  // on the host
  Frame* frames;
  int count, codes;
  const float* tables;   // [kCodes, codes, channels]
  const float* inverse;  // [head / 2] radians a frame
  float2* turns;         // [frames, head / 2]
  int half;
  Rows out;
};

// Attention to the last frames of the own stream.
struct Attend {
  const Frame* frames;
  int count, heads, head;
  const float* queries;
  const float* memory;
  long long memory_stride;
  int ring;
  Rows out;
};

constexpr int kTaps = 7;       // of a depthwise convolution
constexpr int kMostPairs = 2;  // of its channels, for a thread

// Depthwise convolution and layer norm.
struct Depthwise {
  const Frame* frames;
  int rows;
  Rows in, out;
  const float* weights;  // [taps, channels]
  const float* bias;
  const float* norm;  // [2, channels]: scale and shift
  float eps;
};

constexpr int kMostHistories = 32;

// Every stream's last rows of every layer become its history.
struct Remember {
  const Frame* frames;
  const int* kept;  // [frames], on the host: of a stream's first, how many of its frames count
  int count, layers;
  Rows rows[kMostHistories];
};

}  // namespace megakernel::codec
