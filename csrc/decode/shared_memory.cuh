// What a block keeps in shared memory, from the first frame of a launch to the last.
#pragma once

#include "layers.cuh"
#include "sample.cuh"

namespace megakernel {

// What every warp knows of a stream: each keeps its own copy, from what it hears.
struct Standing {
  bool goes;   // whether it makes the next frame of this launch
  bool fresh;  // whether its hidden state comes from the prompt
  int frames;
  uint16_t codes[kGroups];  // of the last frame
};

// Of at most so many streams: the fewer, the more room for weights.
template <class M, int Most>
struct Shared {
  static constexpr int kHidden =
      M::Talker::hidden > M::Predictor::hidden ? M::Talker::hidden : M::Predictor::hidden;
  struct Fixed {
    union {
      Fragments<Most> fragments[kHalves];
      Attention<Most> attention;
    };
    Nearby nearby[Most == 1 ? kWarps : 1];  // see near.cuh
    OwnRows<Most> own;
    NormVector<kHidden> norm;
    Sums<Most> sums[2];
    Draw draw;
    Stream streams[Most];
    int made[Most];  // frames of this launch
    Standing standings[kWarps][Most];
    Column columns[kWarps][kRoom<Most>];
    Share talker_shares[kPhases], predictor_shares[kPhases];
    Network talker, predictor;  // here, so that no register keeps what is seldom wanted
    Times times;
  };
  static constexpr int kSlot = M::slot * kThreads * 16 + 2 * sizeof(Gate);
  static constexpr int kDepth = (kSharedBytes - static_cast<int>(sizeof(Fixed)) - 16) / kSlot;
  static_assert(kDepth >= 2, "the model does not fit the shared memory");

  Ring<M::slot, kDepth> ring;
  Fixed fixed;
};

}  // namespace megakernel
