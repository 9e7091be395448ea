// A convolution module between its two products: gate, depthwise convolution, norm, SiLU. One
// thread block per row; that of a chunk's last frame writes the stream's new state.
#pragma once

#include "row_norm.cuh"

namespace megakernel::conformer {

// --- static asserts ---

static_assert(kMaxChannels * kBlockThreads >= 2048, "a row of the widest model must fit");

// --- shared memory ---

// RowSums (row_norm.cuh).

// --- warp roles ---

// All warps do the same. A thread has up to kMaxChannels channels, kBlockThreads apart.

// --- body ---

DEVICE float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

// Whether frame `t` of a stream's chunk is a frame of its recording.
DEVICE bool is_frame(const Streams& streams, int stream, int t) {
  return streams.num_frames[streams.sources[stream]] + t < streams.lengths[stream];
}

// The kernel. Reads input [rows, 2, width] and the source's gated [width, kernel_size - 1]; writes
// output [rows, width] and the target's gated.
template <class Number>
DEVICE void convolve(const ConvolveParams& p, RowSums& sums) {
  const Streams& streams = p.streams;
  const int stream = block_idx() / streams.chunk_size, t = block_idx() % streams.chunk_size;
  const int64_t first_row = static_cast<int64_t>(stream) * streams.chunk_size;
  const int num_past = p.kernel_size - 1;
  const bool is_last = t == streams.chunk_size - 1;
  const int64_t source = streams.sources[stream] * p.slot_stride;
  const int64_t target = streams.targets[stream] * p.slot_stride;
  float v[kMaxChannels];
#pragma unroll
  for (int i = 0; i < kMaxChannels; ++i) {
    const int c = thread_idx() + i * kBlockThreads;
    if (c >= p.width) break;
    float sum = 0;
    for (int k = 0; k < p.kernel_size; ++k) {
      const int frame = t + k - num_past;  // of the chunk; negative: of the past
      const int64_t at = static_cast<int64_t>(c) * num_past;
      float gated;
      if (frame < 0) {
        gated = read_number<Number>(p.gated, source + at + num_past + frame);
      } else {
        const int64_t row = 2 * p.width * (first_row + frame);
        const float a = read_number<Number>(p.input, row + c);
        const float b = read_number<Number>(p.input, row + p.width + c);
        gated = is_frame(streams, stream, frame) ? round_to<Number>(a * sigmoid(b)) : 0.0f;
      }
      if (is_last && k > 0)
        static_cast<Number*>(p.gated)[target + at + k - 1] = to_number<Number>(gated);
      sum += read_number<Number>(p.weights, static_cast<int64_t>(k) * p.width + c) * gated;
    }
    v[i] = round_to<Number>(p.bias ? sum + read_number<Number>(p.bias, c) : sum);
  }
  const Moments moments = row_moments(sums, p.width, [&](auto act) {
#pragma unroll
    for (int i = 0; i < kMaxChannels; ++i) {
      if (thread_idx() + i * kBlockThreads < p.width) act(v[i]);
    }
  });
  Number* const output = static_cast<Number*>(p.output) + (first_row + t) * p.width;
#pragma unroll
  for (int i = 0; i < kMaxChannels; ++i) {
    const int c = thread_idx() + i * kBlockThreads;
    if (c >= p.width) break;
    const float normed = round_to<Number>(normalise(
        v[i], moments, read_number<Number>(p.norm.weight, c), read_number<Number>(p.norm.bias, c)));
    output[c] = to_number<Number>(normed * sigmoid(normed));
  }
}

}  // namespace megakernel::conformer
