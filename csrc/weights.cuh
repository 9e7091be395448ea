// The weights as each block reads them: one stream, in the order of use, that a warp of its own
// copies into a ring of shared memory. Weights depend on nothing that other blocks make, so it runs
// ahead of those who multiply as far as there is room.
//
// Of a matrix, a block has consecutive units, and takes kMostUnits at a time; of these, for each
// slot of steps, unit after unit. A step of a unit is 8 rows by 32 of K a warp: the 16 bytes of
// lane 4g + t are row g, elements 8t to 8t + 7, of which the middle two pairs are exchanged: the
// matrix instruction's own order.
#pragma once

#include "exchange.cuh"

namespace megakernel {

// The units of a matrix that a block has.
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

// Consecutive steps of the block, and how many slots of them are on their way at a time: more would
// stand in the way of the words that others wait for, fewer would not keep up with wide matrices.
struct WeightSegment {
  const uint4* next;
  int num_steps, max_copies_in_flight;
};

template <int Width>
constexpr int kMaxCopiesInFlight = Width > 1024 ? 2 : 1;

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

// The predictor's layers; where the talker is wider, each block's part of the projection comes
// first.
template <class M>
DEVICE WeightSegment predictor_segment(const Network& n) {
  WeightSegment s = stack_segment<typename M::Predictor>(n);
  if constexpr (M::has_input_projection) {
    const int before = steps_before<typename M::InputProjection>(block_idx());
    s.next += static_cast<size_t>(before) * kNumThreads;
    s.num_steps += steps_before<typename M::InputProjection>(block_idx() + 1) - before;
  }
  return s;
}

// Positions of the predictor's first pass: of one stream, both that need no code of the pass
// before.
template <int MaxColumns>
constexpr int kFirstPassPositions = MaxColumns == 1 ? 2 : 1;
// The parts of a frame: talker, head, then the predictor once a pass, with a head where it has one.
template <int MaxColumns>
constexpr int kNumFrameSegments = 2 + 2 * (kNumCodeGroups + 1 - kFirstPassPositions<MaxColumns>);

template <class M, int MaxColumns>
DEVICE WeightSegment frame_segment(const Params& p, int segment_idx) {
  constexpr size_t kHead = static_cast<size_t>(M::PredictorHead::num_row_groups) *
                           M::PredictorHead::num_steps * kNumThreads;
  if (segment_idx == 0) return stack_segment<typename M::Talker>(p.talker);
  if (segment_idx == 1) return head_segment<typename M::TalkerHead>(p.talker_head);
  if (segment_idx % 2 == 0) return predictor_segment<M>(p.predictor);
  const int head = segment_idx / 2 - 3 + kFirstPassPositions<MaxColumns>;
  if (head < 0) return {nullptr, 0, 1};  // position 0 alone has none
  return head_segment<typename M::PredictorHead>(p.predictor_heads + head * kHead);
}

// `Depth` slots of `Slot` steps, each with a gate that opens when it is full, and one for empty.
template <int StageSteps, int NumStages>
struct Ring {
  static constexpr int stage_steps = StageSteps;
  static constexpr int bytes = StageSteps * kNumThreads * 16;
  static constexpr int low_stages = NumStages > 2 ? 2 : 1;  // full ones, or on their way
  uint4 stages[NumStages][StageSteps][kNumThreads];
  Mbarrier full[NumStages], empty[NumStages];
  int stop;  // whether those who multiply have left

  DEVICE void init() {
    for (int i = thread_idx(); i < NumStages; i += kNumThreads) {
      mbarrier_init(full[i], 32);
      mbarrier_init(empty[i], kNumThreads);
    }
    mbarrier_fence_init();
    if (thread_idx() == 0) stop = 0;
  }

  // A place in the ring, and how often one has come around.
  struct Cursor {
    int stage = 0;
    uint32_t round = 0;

    DEVICE void advance() {
      if (++stage == NumStages) stage = 0, round ^= 1;
    }
  };

  // Whether so few slots before a place are in use that somebody may soon wait for the next one.
  DEVICE bool is_nearly_empty(Cursor cursor) const {
    const int at = cursor.stage + NumStages - 1 - low_stages;
    const bool around = at >= NumStages;  // filled in this round, else in the one before
    const Mbarrier& gate = empty[around ? at - NumStages : at];
    return warp_all(mbarrier_test_wait(gate, cursor.round ^ 1 ^ around));
  }

  // How many slots from a place on are full by now: each lane looks at a gate of its own.
  DEVICE int count_full_stages(Cursor cursor) const {
    constexpr int kMaxStages = NumStages < 32 ? NumStages : 32;
    const int at = cursor.stage + min(lane_idx(), kMaxStages - 1);
    const bool around = at >= NumStages;
    const bool open = mbarrier_test_wait(full[around ? at - NumStages : at], cursor.round ^ around);
    const unsigned seen = warp_ballot(open && lane_idx() < kMaxStages);
    warp_barrier();  // what a lane has seen to be there, all see
    return count_trailing_zeros(~static_cast<uint64_t>(seen));
  }
};

// The copying warp's whole work: segments part(i) from `first` on, until there are no more of them
// or the others have left. One that `hurries` has two slots under way while the ring runs dry.
template <bool kCanHurry, class R, class GetSegment>
DEVICE void copy_weights(R& ring, int first, int num_segments, GetSegment get_segment) {
  typename R::Cursor cursor, oldest;  // of those on their way
  int num_in_flight = 0;
  auto wait_until_in_flight = [&](int max_in_flight) {
    for (; num_in_flight > max_in_flight; --num_in_flight, oldest.advance()) {
      while (!warp_all(mbarrier_try_wait(ring.full[oldest.stage], oldest.round))) spin_pause();
    }
  };
  bool running = true;
  const uint64_t policy = l2_evict_first_policy();
#pragma unroll 1
  for (int i = first; i < num_segments && running; ++i) {
    WeightSegment s = get_segment(i);
#pragma unroll 1
    for (; s.num_steps > 0; s.num_steps -= R::stage_steps, s.next += R::stage_steps * kNumThreads) {
      while (running && !warp_all(mbarrier_try_wait(ring.empty[cursor.stage], cursor.round ^ 1))) {
        spin_pause();
        running = warp_all(*static_cast<volatile int*>(&ring.stop) == 0);
      }
      if (!running) break;
      mbarrier_expect_copy(ring.full[cursor.stage], R::bytes);
      const bool hurries = kCanHurry && ring.is_nearly_empty(cursor);
      wait_until_in_flight((hurries ? 2 : s.max_copies_in_flight) -
                           1);  // from here to the copy every cycle counts
      copy_async(ring.stages[cursor.stage], s.next, R::bytes, ring.full[cursor.stage], policy);
      cursor.advance();
      ++num_in_flight;
    }
  }
  wait_until_in_flight(0);  // before the block may end
}

// What those who multiply see of it: slot after slot.
template <class R>
class RingConsumer {
 public:
  // `full`: slots that are known to be full, of which nothing is asked: that takes long.
  DEVICE RingConsumer(R& ring, typename R::Cursor cursor, int num_full)
      : ring_(ring), cursor_(cursor), num_full_(num_full) {}

  DEVICE typename R::Cursor cursor() const { return cursor_; }

  // Waits for the next slot; returns which it is.
  DEVICE int wait_for_stage(SpinTimeout timeout) {
    if (num_full_ == 0) {
      while (!warp_all(mbarrier_try_wait(ring_.full[cursor_.stage], cursor_.round))) {
        if (!warp_all(timeout.keep_waiting())) break;
      }
      num_full_ = 1;
    }
    return cursor_.stage;
  }

  // This thread has made use of the slot. That it had asked for what is there would not be enough:
  // copies do not wait for loads that are under way.
  DEVICE void release_stage() {
    mbarrier_arrive(ring_.empty[cursor_.stage]);
    cursor_.advance();
    --num_full_;
  }

 private:
  R& ring_;
  typename R::Cursor cursor_;
  int num_full_;
};

}  // namespace megakernel
