// The subsampling between its matrix products: the strided convolution of a stage, and the frames
// after the last one.
//
//   y(f, b, c) = bias_c + sum over i, j < 3 of weights(i, j, c) * x(2 f + i - 1, 2 b + j - 2, c)
//
// x(-1) is the last frame of the chunk before. A stage's input is zero before the recording and
// after its end; but for mel frames, a ReLU precedes the convolution.
#pragma once

#include "streams.cuh"

namespace megakernel::conformer {

// --- static asserts ---

static_assert(kNumStages == 3, "an encoder frame has eight mel frames");

// --- shared memory ---

// None.

// --- warp roles ---

// All warps do the same. A thread has a vector of channels of a position, which is a frame and a
// bin; adjacent threads have adjacent vectors.

// --- body ---

// What a thread has of [rows, num_bins, vectors of channels], where a stream has adjacent rows.
struct Position {
  int row, bin, vector;

  // That of this thread, which may be behind the last row.
  DEVICE Position(int num_bins, int num_vectors) {
    const int item = block_idx() * kBlockThreads + thread_idx();
    vector = item % num_vectors;
    bin = item / num_vectors % num_bins;
    row = item / num_vectors / num_bins;
  }
};

// A vector of what a matrix product returned, after a ReLU; zeros outside of the recording.
template <class Number>
DEVICE void load_activated(const void* input, int64_t index, bool is_inside,
                           float (&values)[kVectorSize<Number>]) {
  unpack(static_cast<const uint4*>(input)[index], values);
#pragma unroll
  for (float& value : values) value = is_inside ? max(value, 0.0f) : 0.0f;
}

// The inputs of a stage's convolution. kOfMels: the first stage, whose input has one channel.
template <class Number, bool kOfMels>
class StageInput {
 public:
  static constexpr int kSize = kVectorSize<Number>;

  // The input of a stream's chunk, for a vector of its channels.
  DEVICE StageInput(const SubsampleParams& p, int stream, int vector)
      : p_(p),
        frames_(p.streams, stream, p.stage),
        vector_(vector),
        num_vectors_(p.num_channels / kSize) {
    const Streams& streams = p.streams;
    num_frames_ = streams.chunk_size << (kNumStages - p.stage);
    first_row_ = static_cast<int64_t>(stream) * num_frames_;
    Number* const last = static_cast<Number*>(p.last);
    source_ = last + streams.sources[stream] * p.slot_stride;
    target_ = last + streams.targets[stream] * p.slot_stride;
  }

  // Whether the frame is the last one of the chunk, which the target slot keeps.
  DEVICE bool is_last(int frame) const { return frame == num_frames_ - 1; }

  // The thread's channels at a frame of the chunk, or -1, and a bin.
  DEVICE void load(int frame, int bin, float (&values)[kSize]) const {
    if (bin < 0 || bin >= p_.num_bins) {
#pragma unroll
      for (float& value : values) value = 0;
      return;
    }
    const void* const input = frame < 0 ? source_ : p_.input;
    const int64_t at = (frame < 0 ? 0 : (first_row_ + frame) * p_.num_bins) + bin;
    const bool is_inside = frame < 0 || (frame >= frames_.begin && frame < frames_.end);
    if constexpr (kOfMels) {
      const float mel = is_inside ? read_number<Number>(input, at) : 0.0f;
#pragma unroll
      for (float& value : values) value = mel;
    } else {
      load_activated<Number>(input, at * num_vectors_ + vector_, is_inside, values);
    }
  }

  // Writes what `load` returned for the last frame.
  DEVICE void keep(int bin, const float (&values)[kSize]) const {
    if (bin < 0 || bin >= p_.num_bins) return;
    if constexpr (kOfMels) {
      if (vector_ == 0) target_[bin] = to_number<Number>(values[0]);
    } else {
      reinterpret_cast<uint4*>(target_)[bin * num_vectors_ + vector_] = pack(values);
    }
  }

 private:
  const SubsampleParams& p_;
  const StageFrames frames_;
  const int vector_, num_vectors_;
  int num_frames_;
  int64_t first_row_;
  const Number* source_;
  Number* target_;
};

// The kernel of the end. Reads input [num_rows, num_bins, num_channels]; writes output
// [num_rows, num_channels, num_bins] and the frames of the target slots.
template <class Number>
DEVICE void flatten(const FlattenParams& p) {
  trigger_dependent_grids();
  wait_for_prerequisite_grids();
  constexpr int kSize = kVectorSize<Number>;
  const Position at(p.num_bins, p.num_channels / kSize);
  if (at.row >= p.num_rows) return;
  const Streams& streams = p.streams;
  const int stream = at.row / streams.chunk_size, frame = at.row % streams.chunk_size;
  const StageFrames frames(streams, stream, kNumStages);
  const int64_t index =
      (static_cast<int64_t>(at.row) * p.num_bins + at.bin) * (p.num_channels / kSize) + at.vector;
  float values[kSize];
  load_activated<Number>(p.input, index, frame >= frames.begin && frame < frames.end, values);
  Number* const output = static_cast<Number*>(p.output) +
                         static_cast<int64_t>(at.row) * p.num_channels * p.num_bins + at.bin;
#pragma unroll
  for (int c = 0; c < kSize; ++c) {
    output[(at.vector * kSize + c) * p.num_bins] = to_number<Number>(values[c]);
  }
  if (frame == 0 && at.bin == 0 && at.vector == 0) {
    p.num_frames[streams.targets[stream]] =
        p.num_frames[streams.sources[stream]] + streams.chunk_size;
  }
}

// The kernel of a stage. Reads input [rows, num_bins, channels] and the source's last frame;
// writes output [num_rows, num_bins / 2 + 1, num_channels] and the target's last frame.
template <class Number, bool kOfMels>
DEVICE void subsample(const SubsampleParams& p) {
  trigger_dependent_grids();
  wait_for_prerequisite_grids();
  constexpr int kSize = kVectorSize<Number>;
  const int num_vectors = p.num_channels / kSize, num_outputs = p.num_bins / 2 + 1;
  const Position at(num_outputs, num_vectors);
  if (at.row >= p.num_rows) return;
  const int stream_rows = p.streams.chunk_size << (kNumStages - 1 - p.stage);
  const int first_frame = 2 * (at.row % stream_rows) - 1, first_bin = 2 * at.bin - 2;
  const StageInput<Number, kOfMels> input(p, at.row / stream_rows, at.vector);
  const uint4* const weights = static_cast<const uint4*>(p.weights) + at.vector;
  float sums[kSize] = {};
#pragma unroll 1  // all taps at a time would need more registers than two thread blocks have
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      float values[kSize], weight[kSize];
      input.load(first_frame + i, first_bin + j, values);
      unpack(weights[(3 * i + j) * num_vectors], weight);
#pragma unroll
      for (int c = 0; c < kSize; ++c) sums[c] += weight[c] * values[c];
      // The bins of an output that no other one has.
      if (j > 0 && input.is_last(first_frame + i)) input.keep(first_bin + j, values);
    }
  }
  if (p.bias) {
    float bias[kSize];
    unpack(static_cast<const uint4*>(p.bias)[at.vector], bias);
#pragma unroll
    for (int c = 0; c < kSize; ++c) sums[c] += bias[c];
  }
  const int64_t index = (static_cast<int64_t>(at.row) * num_outputs + at.bin) * num_vectors;
  static_cast<uint4*>(p.output)[index + at.vector] = pack(sums);
}

}  // namespace megakernel::conformer
