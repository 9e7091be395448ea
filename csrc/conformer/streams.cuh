// Where the chunk of a stream lies within its recording, in frames of each stage.
#pragma once

#include "../numbers.cuh"
#include "params.cuh"

namespace megakernel::conformer {

// Frames of a stage's input in all; stage kNumStages are the encoder's frames.
DEVICE int64_t num_stage_frames(int64_t num_mels, int stage) {
  for (int i = 0; i < stage; ++i) num_mels = num_mels / 2 + 1;
  return num_mels;
}

// Frames of a chunk of a stage's input: those from `begin` to `end` are within the recording.
struct StageFrames {
  int begin, end;

  // Those of a stream's chunk.
  DEVICE StageFrames(const Streams& streams, int stream, int stage) {
    const int per_frame = 1 << (kNumStages - stage);
    const int64_t num_before = streams.num_frames[streams.sources[stream]] * per_frame;
    const int64_t first = num_before - (per_frame - 1);
    const int64_t num_chunk = streams.chunk_size * per_frame;
    const int64_t num_left = num_stage_frames(streams.lengths[stream], stage) - first;
    begin = first < 0 ? static_cast<int>(-first) : 0;
    end = static_cast<int>(max(min(num_left, num_chunk), int64_t(0)));
  }
};

}  // namespace megakernel::conformer
