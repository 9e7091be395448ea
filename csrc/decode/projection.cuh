// Matrix times activations: the one operation that the weights stream through.
//
// A warp takes every eighth tile of K. It brings its activations into shared memory in the matrix
// instruction's order, its weights pass by, and the block adds its warps' sums in their order: so a
// column's sums are the same bits for any number of columns and blocks.
#pragma once

#include "../exchange.cuh"
#include "../phase_timer.cuh"
#include "../weights.cuh"

namespace megakernel {

// Sums of the warps side by side, [unit][warp][row][column]. There are two sets, used in turn, so
// that one meeting of the block is enough: who is fast fills the other set.
template <int Most>
struct alignas(16) Sums {
  static constexpr int wide = kRoom<Most> * kHalves;  // columns, of all halves
  static constexpr int tiles = (wide + 7) / 8;        // as wide as the matrix instruction
  float of[kMostUnits][kWarps][kUnit * wide];
  float squares[kRoom<Most>][kWarps];  // of the activations, where a norm wants them
  int gave_up;
};

// Activations of a column for a step: lane 4 column + t of a warp has elements 8t to 8t + 7. Second
// halves are columns of their own, behind the others.
template <int Most>
struct alignas(16) Fragments {
  uint4 of[kMostSteps<Most>][kWarps][4 * kRoom<Most>];
};

template <int Most>
struct Attention;  // see attend.cuh
struct Nearby;     // see near.cuh

// What a lane of a product reads and writes, found out once.
template <class R, int Most>
class OwnPlaces {
 public:
  static constexpr int tiles = Sums<Most>::tiles;

  DEVICE OwnPlaces(const R& ring, const Fragments<Most> (&fragments)[kHalves],
                   Sums<Most> (&sums)[2])
      : weights_(ring.of[0][0][thread()]),
        activations_(fragments[lane() / kLanes % kHalves].of[0][warp()][lane() % kLanes]),
        others_(fragments[(kOther + lane()) / kLanes].of[0][warp()][(kOther + lane()) % kLanes]),
        sums_(reinterpret_cast<float2&>(
            sums[0].of[0][warp()][lane() / 4 * kColumnsWide + 2 * pair()])),
        keeps_(held(lane() % 4 < kColumnsWide / 2)) {}

  // Of a step of a slot, and of a step and a tile.
  DEVICE uint4 weights(int slot, int step) const {
    return *(weights_ + (slot * R::slot + step) * kThreads);
  }
  DEVICE uint4 activations(int step, int tile) const {
    return *((tile == 0 ? activations_ : others_) + step * kWarps * kLanes);
  }
  // Of a unit and a tile, in one set of sums or the other; whether the lane is one of those that
  // have any.
  DEVICE float2& sum(int turn, int unit, int tile) const {
    constexpr int kSet = sizeof(Sums<Most>) / sizeof(float2),
                  kOfUnit = kWarps * kUnit * kColumnsWide / 2;
    return *(sums_ + (turn * kSet + unit * kOfUnit + tile * 4));
  }
  DEVICE bool keeps() const { return tiles > 1 || keeps_ != 0; }

 private:
  static constexpr int kColumnsWide = Sums<Most>::wide;
  static constexpr int kLanes = 4 * kRoom<Most>;   // that have activations of their own
  static constexpr int kOther = 32 * (tiles - 1);  // the first of the last tile
  static_assert(tiles <= 2 && (tiles == 1 || kColumnsWide == 16));

  // Of columns; lanes beyond the last read that, for nothing.
  DEVICE static int pair() { return min(lane() % 4, kColumnsWide / 2 - 1); }

  Held<const uint4> weights_, activations_, others_;
  Held<float2> sums_;
  int keeps_;
};

// Everything that a thread carries from phase to phase, of at most `Most` streams.
template <class R, int Most>
struct Flow {
  static constexpr int most = Most;
  const Params& p;
  OwnPlaces<R, Most> own;
  Sums<Most> (&sums)[2];
  Fragments<Most> (&fragments)[kHalves];
  Attention<Most>& attention;  // where the fragments are
  Nearby* nearby;              // of each warp that attends
  Held<R> ring;
  PhaseTimer watch;
  const Share* shares;           // of the network's matrices, by phase
  typename R::Place place;       // in the ring
  Tags tags;                     // of what a layer makes
  int passing = 0, widened = 0;  // columns of a pass of several streams: at most 2^widened
  int turn = 0;                  // which of `sums` comes next

  // Of a pass of at most N columns; of one stream it has as many.
  template <int N>
  DEVICE int columns() const {
    return Most == 1 ? N : passing;
  }
  template <int N>
  DEVICE int wide() const {
    static_assert(Most > 1 || N <= 2);
    return Most == 1 ? N - 1 : widened;
  }

  DEVICE int& gave_up() { return sums[turn].gave_up; }
};

// The activations' steps times the slots from `place` on, of which some are known to be full, into
// a set of sums, or added to what is there; returns the next place. The matrix instruction's rows
// are a unit's rows twice, with the lower and the upper half of their tile's K.
template <int Most, class R>
SHARED_CODE typename R::Place multiply_units(const Params& p, Phase phase, Held<R> ring,
                                             typename R::Place place, int full,
                                             OwnPlaces<R, Most> own, int turn, int& gave_up,
                                             int units, int steps, bool add) {
  units = uniform(units), steps = uniform(steps);
  Weights<R> weights(*ring, place, uniform(full));
  const Patience patience(p, phase, gave_up);
  int step = 0;
  do {
    constexpr int kTiles = OwnPlaces<R, Most>::tiles;
    uint4 a[R::slot][kTiles];
#pragma unroll
    for (int s = 0; s < R::slot; ++s) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) a[s][t] = own.activations(step + s, t);
    }
    int u = 0;
    do {
      float low[kTiles][2][4] = {}, high[kTiles][2][4] = {};
      const int slot = weights.next(patience);
#pragma unroll
      for (int s = 0; s < R::slot; ++s) {
        const uint4 w = own.weights(slot, s);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply(low[t][s % 2], w, {a[s][t].x, a[s][t].y});
          multiply(high[t][s % 2], w, {a[s][t].z, a[s][t].w});
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        float2& sum = own.sum(turn, u, t);
        float2 total = (step > 0 || add) && own.keeps() ? sum : float2{0, 0};
        total.x += low[t][0][0] + low[t][1][0] + (high[t][0][2] + high[t][1][2]);
        total.y += low[t][0][1] + low[t][1][1] + (high[t][0][3] + high[t][1][3]);
        if (own.keeps()) sum = total;
      }
      weights.done();  // not sooner: the sum has needed all of the slot
    } while (++u < units);
    step += R::slot;
  } while (step < steps);
  return weights.place();
}

// Small models do not fill the last step.
template <class Matrix, int Most>
DEVICE void clear_padding(Fragments<Most> (&fragments)[kHalves]) {
  static_assert(Matrix::template chunks<Most> == 1);
  constexpr int kLast = Matrix::steps - 1;
  if (kLast * kStep + warp() * kTile < Matrix::k) return;
#pragma unroll
  for (auto& half : fragments) {
    for (int i = lane(); i < 4 * kRoom<Most>; i += 32) half.of[kLast][warp()][i] = {0, 0, 0, 0};
  }
}

// One of a product's results: a unit's row of a column, the sum of the warps' sums at `at`.
struct Result {
  int unit, column, row, at;
  float before;  // what was seen before the sum was there
};

// The i-th of a unit's count: so many units, each of 2^wide columns.
template <int Wide>
DEVICE Result result_of(int i, int first, int count, int wide) {
  const int row = i % kUnit, column = i / kUnit & ((1 << wide) - 1);
  const int unit = min(i / kUnit >> wide, count - 1);
  return {first + unit, column, row, unit * kWarps * kUnit * Wide + row * Wide + column, 0};
}

struct Nothing {
  DEVICE float operator()(const Share&, const Result&) const { return 0; }
};

// For each unit of the block, and each of 2^wide columns of at most N and row of it, `take(result,
// sum, sums, there)`, by all lanes: where it is not `there`, the sum is none. `fetch(first step,
// sums)` brings the activations; `look(share, result)` is asked before. False once anybody has
// given up.
template <class Matrix, int N, class F, class Fetch, class Take, class Look = Nothing>
DEVICE bool product(F& flow, Phase phase, Fetch fetch, Take take, Look look = {}) {
  const Share share = flow.shares[phase];
  const int units = uniform(share.count);
#pragma unroll 1
  for (int done = 0; done < units; done += kMostUnits) {
    const int count = min(kMostUnits, units - done), turn = flow.turn;
    auto& sums = kept(flow.sums[turn]);
    flow.turn ^= 1;
    if (done > 0) {
      const int column = min(lane(), kRoom<F::most> - 1);
      sums.squares[column][warp()] = flow.sums[flow.turn].squares[column][warp()];
    }
    // What a lane will take is found out while it waits for words, and not once all wait for it.
    constexpr int kWide = std::remove_reference_t<decltype(sums)>::wide;
    const int wide = flow.template wide<N>(), columns = flow.template columns<N>();
    const int items = count * kUnit << wide, begin = 32 * warp_number();
    auto result = [&](int i) {
      Result r = result_of<kWide>(i, share.first + done, count, wide);
      r.before = look(share, r);
      return r;
    };
    Result r = result(begin + lane());
    r = {held(r.unit), held(r.column), held(r.row), held(r.at), r.before};
    constexpr int kChunk = Matrix::template chunk<F::most>,
                  kChunks = Matrix::template chunks<F::most>;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      // Now, and not once the words are there.
      const int full = kRoomy ? uniform(flow.ring->count_full(flow.place)) : 0;
      if (done == 0 || kChunks > 1) {
        warp_sync();
        fetch(chunk * kChunk, sums);
        if constexpr (Matrix::k % kStep != 0) clear_padding<Matrix>(flow.fragments);
        warp_sync();
        flow.watch.lap(phase, kWait);
      }
      flow.place = multiply_units(flow.p, phase, flow.ring, flow.place, full, flow.own, turn,
                                  sums.gave_up, count, kChunk, chunk > 0);
    }
    flow.watch.lap(phase, kMultiply);
    block_sync();
    const bool fine = sums.gave_up == 0;
#pragma unroll 1
    for (int first = begin; first < items;) {  // whole warps
      const float* at = &sums.of[0][0][0] + r.at;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kHalves * kWarps; ++i) {
        sum += at[i / kWarps * kRoom<F::most> + i % kWarps * kUnit * kWide];
      }
      const bool there = fine && first + lane() < items && r.column < columns;
      take(r, sum, sums, there);
      first += kThreads;
      if (first < items) r = result(first + lane());
    }
    if (!in_all_lanes(fine)) return false;
    flow.watch.lap(phase, kSum);
  }
  return true;
}

// act(unit, column, row) of the block's units, by the lanes that take them as a product's results.
template <int N, class F, class Act>
DEVICE void each_result(F& flow, int units, Act act) {
  const int wide = flow.template wide<N>();
#pragma unroll 1
  for (int done = 0; done < units; done += kMostUnits) {
    const int count = min(kMostUnits, units - done), items = count * kUnit << wide;
#pragma unroll 1
    for (int first = 32 * warp_number(); first < items; first += kThreads) {  // whole warps
      const Result r = result_of<0>(first + lane(), done, count, wide);
      if (first + lane() < items) act(r.unit, r.column, r.row);
    }
  }
  warp_sync();
}

}  // namespace megakernel
