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
struct Share {
  int first, count;

  DEVICE static int begin(int units, int block) {
    return block * (units / blocks()) + min(block, units % blocks());
  }
  DEVICE static Share of(int units) {
    const int first = begin(units, block());
    return {first, begin(units, block() + 1) - first};
  }
};

// Consecutive steps of the block, and how many slots of them are on their way at a time: more would
// stand in the way of the words that others wait for, fewer would not keep up with wide matrices.
struct Segment {
  const uint4* at;
  int steps, under_way;
};

template <int Width>
constexpr int kUnderWay = Width > 1024 ? 2 : 1;

template <class Matrix>
DEVICE int steps_before(int block) {
  return Share::begin(Matrix::units, block) * Matrix::steps;
}

template <class S>
DEVICE int layer_before(int block) {
  return steps_before<typename S::Qkv>(block) + steps_before<typename S::Out>(block) +
         steps_before<typename S::GateUp>(block) + steps_before<typename S::Down>(block);
}

template <int Width>
DEVICE Segment segment(const uint4* weights, int begin, int end) {
  return {weights + static_cast<size_t>(begin) * kThreads, end - begin, kUnderWay<Width>};
}

template <class Matrix>
DEVICE Segment head_segment(const uint4* weights) {
  return segment<Matrix::k>(weights, steps_before<Matrix>(block()),
                            steps_before<Matrix>(block() + 1));
}

template <class S>
DEVICE Segment stack_segment(const Network& n) {
  const int layers = n.num_layers;
  return segment<S::hidden>(n.weights, layers * layer_before<S>(block()),
                            layers * layer_before<S>(block() + 1));
}

// The predictor's layers; where the talker is wider, each block's part of the projection comes
// first.
template <class M>
DEVICE Segment predictor_segment(const Network& n) {
  Segment s = stack_segment<typename M::Predictor>(n);
  if constexpr (M::projected) {
    const int before = steps_before<typename M::Project>(block());
    s.at += static_cast<size_t>(before) * kThreads;
    s.steps += steps_before<typename M::Project>(block() + 1) - before;
  }
  return s;
}

// Positions of the predictor's first pass: of one stream, both that need no code of the pass
// before.
template <int Most>
constexpr int kFirstPass = Most == 1 ? 2 : 1;
// The parts of a frame: talker, head, then the predictor once a pass, with a head where it has one.
template <int Most>
constexpr int kFrameParts = 2 + 2 * (kGroups + 1 - kFirstPass<Most>);

template <class M, int Most>
DEVICE Segment frame_segment(const Params& p, int part) {
  constexpr size_t kHead =
      static_cast<size_t>(M::PredictorHead::units) * M::PredictorHead::steps * kThreads;
  if (part == 0) return stack_segment<typename M::Talker>(p.talker);
  if (part == 1) return head_segment<typename M::TalkerHead>(p.talker_head);
  if (part % 2 == 0) return predictor_segment<M>(p.predictor);
  const int head = part / 2 - 3 + kFirstPass<Most>;
  if (head < 0) return {nullptr, 0, 1};  // position 0 alone has none
  return head_segment<typename M::PredictorHead>(p.predictor_heads + head * kHead);
}

// `Depth` slots of `Slot` steps, each with a gate that opens when it is full, and one for empty.
template <int Slot, int Depth>
struct Ring {
  static constexpr int slot = Slot;
  static constexpr int bytes = Slot * kThreads * 16;
  static constexpr int few = Depth > 2 ? 2 : 1;  // full ones, or on their way
  uint4 of[Depth][Slot][kThreads];
  Gate full[Depth], empty[Depth];
  int stop;  // whether those who multiply have left

  DEVICE void init() {
    for (int i = thread(); i < Depth; i += kThreads) {
      gate_init(full[i], 32);
      gate_init(empty[i], kThreads);
    }
    gates_ready();
    if (thread() == 0) stop = 0;
  }

  // A place in the ring, and how often one has come around.
  struct Place {
    int slot = 0;
    uint32_t round = 0;

    DEVICE void advance() {
      if (++slot == Depth) slot = 0, round ^= 1;
    }
  };

  // Whether so few slots before a place are in use that somebody may soon wait for the next one.
  DEVICE bool runs_dry(Place place) const {
    const int at = place.slot + Depth - 1 - few;
    const bool around = at >= Depth;  // filled in this round, else in the one before
    const Gate& gate = empty[around ? at - Depth : at];
    return in_all_lanes(gate_open_by_now(gate, place.round ^ 1 ^ around));
  }

  // How many slots from a place on are full by now: each lane looks at a gate of its own.
  DEVICE int count_full(Place place) const {
    constexpr int kMost = Depth < 32 ? Depth : 32;
    const int at = place.slot + min(lane(), kMost - 1);
    const bool around = at >= Depth;
    const bool open = gate_open_by_now(full[around ? at - Depth : at], place.round ^ around);
    const unsigned seen = lanes_of(open && lane() < kMost);
    warp_meet();  // what a lane has seen to be there, all see
    return zeros_below(~static_cast<uint64_t>(seen));
  }
};

// The copying warp's whole work: segments part(i) from `first` on, until there are no more of them
// or the others have left. One that `hurries` has two slots under way while the ring runs dry.
template <bool Hurries, class R, class Part>
DEVICE void fetch_weights(R& ring, int first, int parts, Part part) {
  typename R::Place place, oldest;  // of those on their way
  int flying = 0;
  auto land = [&](int most) {
    for (; flying > most; --flying, oldest.advance()) {
      while (!in_all_lanes(gate_open(ring.full[oldest.slot], oldest.round))) pause();
    }
  };
  bool going = true;
  const uint64_t once = read_once();
#pragma unroll 1
  for (int i = first; i < parts && going; ++i) {
    Segment s = part(i);
#pragma unroll 1
    for (; s.steps > 0; s.steps -= R::slot, s.at += R::slot * kThreads) {
      while (going && !in_all_lanes(gate_open(ring.empty[place.slot], place.round ^ 1))) {
        pause();
        going = in_all_lanes(*static_cast<volatile int*>(&ring.stop) == 0);
      }
      if (!going) break;
      expect_copy(ring.full[place.slot], R::bytes);
      const bool hurries = Hurries && ring.runs_dry(place);
      land((hurries ? 2 : s.under_way) - 1);  // from here to the copy every cycle counts
      copy_async(ring.of[place.slot], s.at, R::bytes, ring.full[place.slot], once);
      place.advance();
      ++flying;
    }
  }
  land(0);  // before the block may end
}

// What those who multiply see of it: slot after slot.
template <class R>
class Weights {
 public:
  // `full`: slots that are known to be full, of which nothing is asked: that takes long.
  DEVICE Weights(R& ring, typename R::Place place, int full)
      : ring_(ring), place_(place), full_(full) {}

  DEVICE typename R::Place place() const { return place_; }

  // Waits for the next slot; returns which it is.
  DEVICE int next(Patience patience) {
    if (full_ == 0) {
      while (!in_all_lanes(gate_open(ring_.full[place_.slot], place_.round))) {
        if (!in_all_lanes(patience.lasts())) break;
      }
      full_ = 1;
    }
    return place_.slot;
  }

  // This thread has made use of the slot. That it had asked for what is there would not be enough:
  // copies do not wait for loads that are under way.
  DEVICE void done() {
    gate_arrive(ring_.empty[place_.slot]);
    place_.advance();
    --full_;
  }

 private:
  R& ring_;
  typename R::Place place_;
  int full_;
};

}  // namespace megakernel
