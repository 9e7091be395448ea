// The shared memory of a thread block, from the first frame of a launch to the last: structs of
// fixed size, and the weight ring in the remaining space.
#pragma once

#include "layers.cuh"
#include "sample.cuh"

namespace megakernel {

// A stream's state. Each warp keeps its own copy and updates it from the sampled codes.
struct StreamState {
  bool active;              // more frames of the stream follow in this launch
  bool starts_from_prompt;  // its hidden state comes from the prefill
  int num_frames;
  uint16_t codes[kNumCodeGroups];  // of the last frame
};

// Whether the frame after the current one has its text vector.
DEVICE bool has_next_text(const StreamParams& s) {
  return s.num_frames + 1 <= s.num_text_vectors || s.text_complete;
}

// For at most `MaxColumns` streams: the fewer, the more stages of weights.
template <class M, int MaxColumns>
struct SharedMemory {
  static constexpr int kMaxHiddenSize = M::Talker::hidden_size > M::Predictor::hidden_size
                                            ? M::Talker::hidden_size
                                            : M::Predictor::hidden_size;
  struct Fixed {
    union {
      ActivationFragments<MaxColumns> fragments[kNumSplits];
      AttentionSharedMemory<MaxColumns> attention;
    };
    ShortAttentionSharedMemory short_attention[MaxColumns == 1 ? kNumWarps : 1];
    ResidualRows<MaxColumns> residual;
    NormWeight<kMaxHiddenSize> norm;
    PartialSums<MaxColumns> sums[2];
    SampleSharedMemory sample;
    StreamParams streams[MaxColumns];
    int num_published[MaxColumns];  // frames of this launch
    StreamState stream_states[kNumWarps][MaxColumns];
    Column columns[kNumWarps][kColumnCapacity<MaxColumns>];
    RowGroupRange talker_row_groups[kNumPhases], predictor_row_groups[kNumPhases];
    Network talker, predictor;  // copies of the arguments, which would otherwise occupy registers
    PhaseTimes phase_times;
  };
  static constexpr int kStageBytes = M::stage_steps * kNumThreads * 16 + 2 * sizeof(Mbarrier);
  static constexpr int kNumStages =
      (kSharedMemoryBytes - static_cast<int>(sizeof(Fixed)) - 16) / kStageBytes;
  static_assert(kNumStages >= 2, "the shared memory must hold two stages of weights");

  Ring<M::stage_steps, kNumStages> ring;
  Fixed fixed;
};

}  // namespace megakernel
