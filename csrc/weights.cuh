// The order of the weights in global memory: a thread block's rows of all matrices are consecutive,
// in the order of use. `weight_packing.py` writes this order.
//
// A matrix [rows, K] is divided into row groups of 8 rows, which are distributed over the thread
// blocks. A thread block processes kMaxRowGroups of its row groups at a time. Their order is
// [ring stages of K, row groups, steps of the stage]. One step of a row group is 8 rows by 32
// elements of K per warp: the 16 bytes of lane 4 g + t are row g, elements 8 t to 8 t + 7, with the
// two middle pairs exchanged. This is the operand order of the matrix instruction.
#pragma once

#include "exchange.cuh"

namespace megakernel {

static_assert(kRowGroupSize * kTileK * sizeof(bf16) == 32 * sizeof(uint4),
              "a warp loads a step of a row group with 16 bytes per lane");

// --- row groups ---

// The row groups of a matrix that a thread block owns.
struct RowGroupRange {
  int first, count;

  // The first row group of thread block `block`; the first blocks have one more than the last ones.
  DEVICE static int begin(int num_row_groups, int block) {
    return block * (num_row_groups / num_blocks()) + min(block, num_row_groups % num_blocks());
  }
  // The row groups of this thread block.
  DEVICE static RowGroupRange of_block(int num_row_groups) {
    const int first = begin(num_row_groups, block_idx());
    return {first, begin(num_row_groups, block_idx() + 1) - first};
  }
};

// --- ranges of weights ---

// Consecutive weights of this thread block, [steps, kNumThreads] vectors of 16 bytes.
struct WeightRange {
  const uint4* next;
  int num_steps;
  int max_copies_in_flight;  // ring stages that are copied at a time
};

// More copies delay the exchanged values that other thread blocks wait for. Fewer do not keep up
// with wide matrices.
template <int Width>
constexpr int kMaxCopiesInFlight = Width > 1024 ? 2 : 1;

// Steps of a matrix that belong to the thread blocks before `block`.
template <class Shape>
DEVICE int steps_before(int block) {
  return RowGroupRange::begin(Shape::num_row_groups, block) * Shape::num_steps;
}

// Steps of a layer that belong to the thread blocks before `block`.
template <class S>
DEVICE int layer_steps_before(int block) {
  return steps_before<typename S::Qkv>(block) + steps_before<typename S::Out>(block) +
         steps_before<typename S::GateUp>(block) + steps_before<typename S::Down>(block);
}

// Steps `begin` to `end` - 1 of `weights`, whose matrices read inputs of `Width` elements.
template <int Width>
DEVICE WeightRange weight_range(const uint4* weights, int begin, int end) {
  return {weights + static_cast<size_t>(begin) * kNumThreads, end - begin,
          kMaxCopiesInFlight<Width>};
}

// This thread block's rows of a head.
template <class Shape>
DEVICE WeightRange head_weights(const uint4* weights) {
  return weight_range<Shape::k>(weights, steps_before<Shape>(block_idx()),
                                steps_before<Shape>(block_idx() + 1));
}

// This thread block's rows of all layers.
template <class S>
DEVICE WeightRange stack_weights(const Network& n) {
  const int layers = n.num_layers;
  return weight_range<S::hidden_size>(n.weights, layers * layer_steps_before<S>(block_idx()),
                                      layers * layer_steps_before<S>(block_idx() + 1));
}

// This thread block's rows of the input projection, if there is one, and of the predictor's layers.
template <class M>
DEVICE WeightRange predictor_weights(const Network& n) {
  WeightRange range = stack_weights<typename M::Predictor>(n);
  if constexpr (M::has_input_projection) {
    const int before = steps_before<typename M::InputProjection>(block_idx());
    range.next += static_cast<size_t>(before) * kNumThreads;
    range.num_steps += steps_before<typename M::InputProjection>(block_idx() + 1) - before;
  }
  return range;
}

// Positions of the predictor's first pass. With one stream the pass has positions 0 and 1: neither
// needs a code of the predictor.
template <int MaxColumns>
constexpr int kFirstPassPositions = MaxColumns == 1 ? 2 : 1;

// Ranges of a frame: the talker, its head, then for each predictor pass the layers and a head.
template <int MaxColumns>
constexpr int kNumFrameRanges = 2 + 2 * (kNumCodeGroups + 1 - kFirstPassPositions<MaxColumns>);

// This thread block's weights of range `range_idx` of a frame.
template <class M, int MaxColumns>
DEVICE WeightRange frame_weights(const Params& p, int range_idx) {
  constexpr size_t kHeadSize = static_cast<size_t>(M::PredictorHead::num_row_groups) *
                               M::PredictorHead::num_steps * kNumThreads;
  if (range_idx == 0) return stack_weights<typename M::Talker>(p.talker);
  if (range_idx == 1) return head_weights<typename M::TalkerHead>(p.talker_head);
  if (range_idx % 2 == 0) return predictor_weights<M>(p.predictor);
  const int head = range_idx / 2 - 3 + kFirstPassPositions<MaxColumns>;
  if (head < 0) return {nullptr, 0, 1};  // a pass of position 0 alone has no head
  return head_weights<typename M::PredictorHead>(p.predictor_heads + head * kHeadSize);
}

}  // namespace megakernel
