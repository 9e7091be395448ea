// The shared memory of a thread block, from the first frame of a launch to the last: structs of
// fixed size, and the weight ring in the remaining space.
#pragma once

#include "layers.cuh"
#include "sample.cuh"
#include "wide_layers.cuh"

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

// Stages of weights that fit beside structs of `fixed_bytes`.
template <class M>
constexpr int num_ring_stages(int fixed_bytes) {
  constexpr int kStageBytes = M::stage_steps * kNumThreads * 16 + 2 * sizeof(Mbarrier);
  return (kSharedMemoryBytes - fixed_bytes - 16) / kStageBytes;
}

// For at most `MaxColumns` streams: the fewer, the more stages of weights.
template <class M, int MaxColumns>
struct NarrowSharedMemory {
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
  static constexpr int kNumStages = num_ring_stages<M>(sizeof(Fixed));
  static_assert(kNumStages >= 2, "the shared memory must hold two stages of weights");
  using R = Ring<M::stage_steps, kNumStages>;
  using Context = PhaseContext<R, MaxColumns>;

  R ring;
  Fixed fixed;

  // The state of a compute thread at the beginning of a launch.
  DEVICE Context make_context(const Params& p) {
    return {p,
            ProjectionAddresses<R, MaxColumns>(ring, fixed.fragments, fixed.sums),
            fixed.sums,
            fixed.fragments,
            fixed.attention,
            fixed.short_attention,
            PinnedAddress<R>(ring),
            PhaseTimer(fixed.phase_times)};
  }
};

// For the streams of a wide kernel.
template <class M, int MaxColumns>
struct WideSharedMemory {
  struct Fixed {
    WideSums<MaxColumns> sums;
    union {
      ActivationFragments<kQueryColumns> fragments[kNumSplits];
      WideAttentionSharedMemory<MaxColumns> attention;
    };
    ShortAttentionSharedMemory short_attention[kNumWarps];
    ResidualRows<MaxColumns> residual;
    SampleSharedMemory sample;
    StreamParams streams[MaxColumns];
    int num_published[MaxColumns];
    StreamState stream_states[1][MaxColumns];
    Column columns[1][MaxColumns];
    RowGroupRange talker_row_groups[kNumPhases], predictor_row_groups[kNumPhases];
    Network talker, predictor;
    PhaseTimes phase_times;
  };
  static constexpr int kNumStages = num_ring_stages<M>(sizeof(Fixed));
  static_assert(kNumStages >= 3, "a warp multiplies two stages while a third one is copied");
  using R = Ring<M::stage_steps, kNumStages>;
  using Context = WidePhaseContext<R, MaxColumns>;

  R ring;
  Fixed fixed;

  // The state of a compute thread at the beginning of a launch.
  DEVICE Context make_context(const Params& p) {
    return {p,
            fixed.sums,
            fixed.fragments,
            fixed.attention,
            fixed.short_attention,
            fixed.residual,
            PinnedAddress<R>(ring),
            PhaseTimer(fixed.phase_times)};
  }
};

template <class M, int MaxColumns>
using SharedMemory =
    std::conditional_t<kIsWide, WideSharedMemory<M, MaxColumns>, NarrowSharedMemory<M, MaxColumns>>;

}  // namespace megakernel
