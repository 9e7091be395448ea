// A convolution module between its two products: gate, depthwise convolution, norm, SiLU. One
// thread block per row; that of a chunk's last frame writes the stream's new state.
#pragma once

#include "row_norm.cuh"

namespace megakernel::conformer {

// --- static asserts ---

constexpr int kThreadChannels = (kHidden + kBlockThreads - 1) / kBlockThreads;
static_assert(kNumTaps > 1, "a convolution of one frame has no state");

// --- shared memory ---

// RowSums (row_norm.cuh).

// --- warp roles ---

// All warps do the same. A thread has every kBlockThreads-th channel of a row. All inputs of a
// channel are loaded before the first one is used.

// --- body ---

// The inputs v of the convolution at frame t of a stream's chunk, for channel c: [kNumTaps].
template <class Number>
DEVICE void load_gated(const ConvolveParams& p, int stream, int t, int c, float (&v)[kNumTaps]) {
  const Streams& streams = p.streams;
  const int64_t past = streams.sources[stream] * p.slot_stride + static_cast<int64_t>(c) * kNumPast;
  float a[kNumTaps], b[kNumTaps];
#pragma unroll
  for (int k = 0; k < kNumTaps; ++k) {
    const int frame = t + k - kNumPast;  // of the chunk; negative: of the past
    const int64_t row = static_cast<int64_t>(stream) * streams.chunk_size + max(frame, 0);
    v[k] = a[k] = b[k] = 0;
    if (frame < 0) v[k] = read_number<Number>(p.gated, past + kNumPast + frame);
    if (frame >= 0) a[k] = read_number<Number>(p.input, 2 * kHidden * row + c);
    if (frame >= 0) b[k] = read_number<Number>(p.input, 2 * kHidden * row + kHidden + c);
  }
#pragma unroll
  for (int k = 0; k < kNumTaps; ++k) {
    if (t + k >= kNumPast) v[k] = round_to<Number>(a[k] * sigmoid(b[k]));
  }
}

// The kernel. Reads input [rows, 2, kHidden] and the source's gated [kHidden, kNumPast]; writes
// output [rows, kHidden] and the target's gated.
template <class Number>
DEVICE void convolve(const ConvolveParams& p, RowSums& sums) {
  trigger_dependent_grids();
  wait_for_prerequisite_grids();
  const Streams& streams = p.streams;
  const int stream = block_idx() / streams.chunk_size, t = block_idx() % streams.chunk_size;
  Number* const target = static_cast<Number*>(p.gated) + streams.targets[stream] * p.slot_stride;
  float convolved[kThreadChannels];
#pragma unroll
  for (int i = 0; i < kThreadChannels; ++i) {
    const int c = thread_idx() + i * kBlockThreads;
    if (c >= kHidden) continue;
    float v[kNumTaps], sum = 0;
    load_gated<Number>(p, stream, t, c, v);
#pragma unroll
    for (int k = 0; k < kNumTaps; ++k)
      sum += read_number<Number>(p.weights, k * kHidden + c) * v[k];
    convolved[i] = round_to<Number>(p.bias ? sum + read_number<Number>(p.bias, c) : sum);
    if (t < streams.chunk_size - 1) continue;
#pragma unroll
    for (int k = 0; k < kNumPast; ++k) {
      target[static_cast<int64_t>(c) * kNumPast + k] = to_number<Number>(v[k + 1]);
    }
  }
  const Moments moments = row_moments(BlockSum{sums}, [&](auto act) {
#pragma unroll
    for (int i = 0; i < kThreadChannels; ++i) {
      if (thread_idx() + i * kBlockThreads < kHidden) act(convolved[i]);
    }
  });
  Number* const output =
      static_cast<Number*>(p.output) + static_cast<int64_t>(block_idx()) * kHidden;
#pragma unroll
  for (int i = 0; i < kThreadChannels; ++i) {
    const int c = thread_idx() + i * kBlockThreads;
    if (c >= kHidden) continue;
    const float weight = read_number<Number>(p.norm.weight, c);
    const float bias = read_number<Number>(p.norm.bias, c);
    const float normed = round_to<Number>(normalise(convolved[i], moments, weight, bias));
    output[c] = to_number<Number>(silu(normed));
  }
}

}  // namespace megakernel::conformer
