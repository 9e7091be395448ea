// What a block keeps in shared memory, from the first frame of a launch to the last.
#pragma once

#include "layers.cuh"
#include "sample.cuh"

namespace megakernel {

// What every warp knows of a stream: each keeps its own copy, from what it hears.
struct StreamState {
  bool active;              // whether it makes the next frame of this launch
  bool starts_from_prompt;  // whether its hidden state comes from the prompt
  int num_frames;
  uint16_t codes[kNumCodeGroups];  // of the last frame
};

// Of at most so many streams: the fewer, the more room for weights.
template <class M, int MaxColumns>
struct SharedMemory {
  static constexpr int kHidden = M::Talker::hidden_size > M::Predictor::hidden_size
                                     ? M::Talker::hidden_size
                                     : M::Predictor::hidden_size;
  struct Fixed {
    union {
      ActivationFragments<MaxColumns> fragments[kNumSplits];
      AttentionSharedMemory<MaxColumns> attention;
    };
    ShortAttentionSharedMemory short_attention[MaxColumns == 1 ? kNumWarps : 1];  // see near.cuh
    ResidualRows<MaxColumns> residual_rows;
    NormWeight<kHidden> norm;
    PartialSums<MaxColumns> sums[2];
    SampleSharedMemory sample;
    Stream streams[MaxColumns];
    int num_made[MaxColumns];  // frames of this launch
    StreamState stream_states[kNumWarps][MaxColumns];
    Column columns[kNumWarps][kColumnCapacity<MaxColumns>];
    RowGroupRange talker_row_groups[kNumPhases], predictor_row_groups[kNumPhases];
    Network talker, predictor;  // here, so that no register keeps what is seldom wanted
    PhaseTimes phase_times;
  };
  static constexpr int kStageBytes = M::stage_steps * kNumThreads * 16 + 2 * sizeof(Mbarrier);
  static constexpr int kNumStages =
      (kSharedMemoryBytes - static_cast<int>(sizeof(Fixed)) - 16) / kStageBytes;
  static_assert(kNumStages >= 2, "the model does not fit the shared memory");

  Ring<M::stage_steps, kNumStages> ring;
  Fixed fixed;
};

}  // namespace megakernel
