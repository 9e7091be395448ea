// The order of the weights in global memory: each thread block reads its part of all matrices as
// consecutive memory, in the order of use. `weight_packing.py` writes this order.
//
// A matrix [rows, K] is divided into row groups of 8 rows, which are distributed over the thread
// blocks. A thread block takes kMaxRowGroups of its row groups at a time; of these it reads, for
// each ring stage of K steps, one row group after the other. One step of a row group is 8 rows by
// 32 elements of K per warp: the 16 bytes of lane 4 g + t are row g, elements 8 t to 8 t + 7, with
// the two middle pairs exchanged. This is the operand order of the matrix instruction.
#pragma once

#include "exchange.cuh"

namespace megakernel {

// The row groups of a matrix that a thread block owns.
struct RowGroupRange {
  int first, count;

  DEVICE static int begin(int num_row_groups, int block) {
    return block * (num_row_groups / num_blocks()) + min(block, num_row_groups % num_blocks());
  }
  DEVICE static RowGroupRange of_block(int num_row_groups) {
    const int first = begin(num_row_groups, block_idx());
    return {first, begin(num_row_groups, block_idx() + 1) - first};
  }
};

// Consecutive weights of this thread block, with the number of ring stages that are copied at a
// time. More copies would delay the exchanged values that other thread blocks wait for; fewer would
// not keep up with wide matrices.
struct WeightSegment {
  const uint4* next;
  int num_steps, max_copies_in_flight;
};

template <int Width>
constexpr int kMaxCopiesInFlight = Width > 1024 ? 2 : 1;

// Steps of a matrix, or of a layer, that belong to the thread blocks before `block`.
template <class Matrix>
DEVICE int steps_before(int block) {
  return RowGroupRange::begin(Matrix::num_row_groups, block) * Matrix::num_steps;
}

template <class S>
DEVICE int layer_steps_before(int block) {
  return steps_before<typename S::Qkv>(block) + steps_before<typename S::Out>(block) +
         steps_before<typename S::GateUp>(block) + steps_before<typename S::Down>(block);
}

template <int Width>
DEVICE WeightSegment weight_segment(const uint4* weights, int begin, int end) {
  return {weights + static_cast<size_t>(begin) * kNumThreads, end - begin,
          kMaxCopiesInFlight<Width>};
}

template <class Matrix>
DEVICE WeightSegment head_segment(const uint4* weights) {
  return weight_segment<Matrix::k>(weights, steps_before<Matrix>(block_idx()),
                                   steps_before<Matrix>(block_idx() + 1));
}

template <class S>
DEVICE WeightSegment stack_segment(const Network& n) {
  const int layers = n.num_layers;
  return weight_segment<S::hidden_size>(n.weights, layers * layer_steps_before<S>(block_idx()),
                                        layers * layer_steps_before<S>(block_idx() + 1));
}

// The predictor's layers, after each thread block's part of the input projection if there is one.
template <class M>
DEVICE WeightSegment predictor_segment(const Network& n) {
  WeightSegment segment = stack_segment<typename M::Predictor>(n);
  if constexpr (M::has_input_projection) {
    const int before = steps_before<typename M::InputProjection>(block_idx());
    segment.next += static_cast<size_t>(before) * kNumThreads;
    segment.num_steps += steps_before<typename M::InputProjection>(block_idx() + 1) - before;
  }
  return segment;
}

// Positions of the predictor's first pass. With one stream, positions 0 and 1 go together, since
// neither needs a code of the predictor.
template <int MaxColumns>
constexpr int kFirstPassPositions = MaxColumns == 1 ? 2 : 1;

// Segments of a frame: the talker, its head, then for each predictor pass the layers and a head.
template <int MaxColumns>
constexpr int kNumFrameSegments = 2 + 2 * (kNumCodeGroups + 1 - kFirstPassPositions<MaxColumns>);

template <class M, int MaxColumns>
DEVICE WeightSegment frame_segment(const Params& p, int segment_idx) {
  constexpr size_t kHeadSize = static_cast<size_t>(M::PredictorHead::num_row_groups) *
                               M::PredictorHead::num_steps * kNumThreads;
  if (segment_idx == 0) return stack_segment<typename M::Talker>(p.talker);
  if (segment_idx == 1) return head_segment<typename M::TalkerHead>(p.talker_head);
  if (segment_idx % 2 == 0) return predictor_segment<M>(p.predictor);
  const int head = segment_idx / 2 - 3 + kFirstPassPositions<MaxColumns>;
  if (head < 0) return {nullptr, 0, 1};  // a pass of position 0 alone has no head
  return head_segment<typename M::PredictorHead>(p.predictor_heads + head * kHeadSize);
}

}  // namespace megakernel
