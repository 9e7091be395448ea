// Monotonic alignment search: the best way through an item's lattice, by dynamic programming (Kim
// et al., Glow-TTS, NeurIPS 2020, algorithm 1).
//
//   sum[i, j] = max(sum[i, j - 1], sum[i - 1, j - 1]) + score[i, j]
//
// A lane has two rows and their sums in registers. Lanes go a step of four columns after each
// other, and pass the sums of their last row on to the next lane, by a shuffle, as soon as they
// have them; warps, each with a strip of rows, follow each other likewise. Another warp copies the
// strip's scores meanwhile. Of a cell only its direction is kept, one bit. Only columns from which
// the end can still be reached are looked at.
#pragma once

#include "edge.cuh"
#include "trace.cuh"

namespace megakernel::align {

// Scores of a strip, a tile of columns: a lane's are moved by a step to the left of those of the
// lane before, since it needs them later.
template <class E>
struct alignas(kLine) Stage {
  E cells[kWords][kStrip][kWord];
};

// Scores on the way from the warp that copies a strip's to the one that sums them up.
struct StageGates {
  Mbarrier full[kMostStages], empty[kMostStages];
  Mbarrier begun;  // opens once, when the first tile is summed up
};

struct alignas(kLine) Shared {
  Ring rings[kMostWarps + 1];
  RingGates gates[kMostWarps + 1];
  StageGates stages[kMostWarps];
  alignas(16) float nothing[kTile];  // minus infinity: the row above where none is needed
  unsigned number;
};

// Before anybody uses them, a warp that sums up makes the gates of its strip's scores and of the
// ring that leads to it; all such warps fill `nothing`. One thread of a warp makes the gates: at
// different addresses threads would have to wait for each other, and for longer.
DEVICE void prepare(const Search& p, int place, Shared& shared) {
  for (int i = thread_idx(); i < kTile; i += 32 * p.warps) shared.nothing[i] = -INFINITY;
  if (lane_idx() > 0) return;
  StageGates& stages = shared.stages[place];
  RingGates& ring = shared.gates[place];
  mbarrier_init(stages.begun, 1);
  for (int stage = 0; stage < p.stages; ++stage) {
    mbarrier_init(stages.full[stage], 32);
    mbarrier_init(stages.empty[stage], 32);
  }
  for (int slot = 0; slot < kSlots; ++slot) {
    mbarrier_init(ring.full[slot], 1);
    mbarrier_init(ring.empty[slot], 1);
  }
  mbarrier_fence_init();
}

// A lane's scores of a word's step, turned so that the lanes of a warp find them in different
// banks.
template <class E>
DEVICE E* cells(Stage<E>& stage, int word, int lane, int row, int step) {
  constexpr int kBankRows = 128 / (kWord * sizeof(E));  // rows that fill the banks
  return stage.cells[word][32 * row + lane] + kStep * (step ^ lane / kBankRows % kSteps);
}

DEVICE void unpack(const float* cells, float (&scores)[kStep]) {
  const float4 v = *reinterpret_cast<const float4*>(cells);
  scores[0] = v.x, scores[1] = v.y, scores[2] = v.z, scores[3] = v.w;
}
template <class E>
DEVICE void unpack(const E* cells, float (&scores)[kStep]) {
  struct alignas(8) Four {
    E of[kStep];
  };
  const Four v = *reinterpret_cast<const Four*>(cells);
#pragma unroll
  for (int c = 0; c < kStep; ++c) scores[c] = to_float(v.of[c]);
}

// A strip's scores, which a warp copies: eight lanes a row, four rows at once.
template <class E>
struct Scores {
  static constexpr int kAtOnce = 32 / kSteps;
  const E *first, *end;  // the strip's first row and column; behind the last cell in memory
  int64_t stride;
  int step = lane_idx() % kSteps, owner = lane_idx() / kSteps;  // where this lane begins

  // Asks for a tile. Unaligned rows begin on any four bytes. Of columns and rows that the item has
  // not, whatever lies there is copied: no path goes through them.
  template <bool kAligned>
  DEVICE void copy(Stage<E>& stage, int tile) const {
#pragma unroll 1
    for (int w = 0; w < kWords; ++w) {
      const int word = kWords * tile + w;
      const E* last = first + (kStrip - 1) * stride + kWord * (word + 1);
      // Where rows are shorter, a lane's, moved to the left, begin before the first cell.
      const bool whole = stride >= kStep / kRows && last <= end;
      whole ? copy_word<kAligned, true>(stage, w, word)
            : copy_word<kAligned, false>(stage, w, word);
    }
  }

  // Nothing outside the memory of all scores, unless all of the word is inside.
  template <bool kAligned, bool kWhole>
  DEVICE void copy_word(Stage<E>& stage, int to_word, int word) const {
    constexpr int kPiece = kAligned ? kStep * sizeof(E) : 4;
    constexpr int kMany = kPiece / sizeof(E);  // cells
#pragma unroll kWhole ? kRows : 1
    for (int row = 0; row < kRows; ++row) {
      const E* from =
          first + (kRows * owner + row) * stride + kWord * word + kStep * (step - owner);
#pragma unroll kWhole ? 32 / kAtOnce : 1
      for (int more = 0; more < 32; more += kAtOnce) {
        E* to = cells(stage, to_word, owner + more, row, step);
#pragma unroll
        for (int c = 0; c < kStep; c += kMany) {
          const bool inside = kWhole || (first <= from && from + c < end);
          const int64_t many = kWhole ? kMany : min(end - from - c, int64_t{kMany});
          copy_async_zero_fill<kPiece>(to + c, inside ? from + c : first,
                                       inside ? many * sizeof(E) : 0);
        }
        from += kAtOnce * (kRows * stride - kStep);
      }
    }
  }
};

// One lane's rows.
struct Sums {
  float row[kRows] = {-INFINITY, -INFINITY};
  // The row above's next step, but for the first lane.
  float above[kStep] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  float before;                // what the row above was a column ago
  uint32_t moved[kRows] = {};  // the last columns, from the highest bit on: what came from above

  // A step; `entering` is above the first lane's rows. Returns the sums of the lane's last row.
  // What is no number counts as minus infinity. With `kNumbers` it is taken for granted that there
  // is none: a sum that is none stays so to its row's end, and so tells.
  template <bool kNumbers>
  DEVICE float4 advance(const float (&entering)[kStep], const float (&scores)[kRows][kStep]) {
    float below[kStep], now[kStep];
#pragma unroll
    for (int c = 0; c < kStep; ++c) now[c] = lane_idx() == 0 ? entering[c] : above[c];
#pragma unroll
    for (int c = 0; c < kStep; ++c) {
      const float from[kRows] = {c == 0 ? before : now[c - 1], row[0]};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        moved[r] = shift_in_less_than(moved[r], row[r], from[r]);
        row[r] = kNumbers
                     ? max_propagate_nan(row[r], from[r]) + scores[r][c]
                     : max_ignore_nan(max_ignore_nan(row[r], from[r]) + scores[r][c], -INFINITY);
      }
      below[c] = row[kRows - 1];
      above[c] = shuffle_up(below[c]);  // at once, as it takes a while
    }
    before = now[kStep - 1];
    return {below[0], below[1], below[2], below[3]};
  }
  DEVICE bool are_numbers() const { return row[0] == row[0] && row[1] == row[1]; }
};

// What a lane needs for a step.
struct Feed {
  float scores[kRows][kStep], entering[kStep];

  template <class E>
  DEVICE void read(Stage<E>& stage, const float* edge, int step) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      unpack(cells(stage, step / kSteps, lane_idx(), r, step % kSteps), scores[r]);
    }
    unpack(edge + kStep * step, entering);
  }
};

// Where the sums of a lane's last row go. The last lane is 31 steps behind: its last step of a tile
// is the first of a later one.
struct Rooms {
  float* of[2];
  bool wanted[2];
};

// A word of directions for each of a lane's rows.
struct Moves {
  uint32_t of[kRows];
};

// A tile of columns, whose scores are in this stage, as Sums::advance.
template <bool kNumbers, class E>
DEVICE void advance(Sums& sums, Stage<E>& stage, const float* edge, const Rooms& rooms,
                    Moves (&moves)[kWords]) {
  constexpr int kAll = kWords * kSteps;
  constexpr int kAhead = 2;  // steps whose scores are on their way
  Feed feeds[kAhead];
#pragma unroll
  for (int step = 0; step < kAhead; ++step) feeds[step].read(stage, edge, step);
#pragma unroll
  for (int step = 0; step < kAll; ++step) {
    const Feed now = feeds[step % kAhead];
    const int next = step + 1;
    // Before anything is stored, which reading would wait for.
    if (step + kAhead < kAll) feeds[step % kAhead].read(stage, edge, step + kAhead);
    const float4 below = sums.advance<kNumbers>(now.entering, now.scores);
    const int which = next / kAll;
    if (rooms.wanted[which]) {
      *reinterpret_cast<float4*>(rooms.of[which] + next % kAll * kStep) = below;
    }
    if (next % kSteps == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) moves[step / kSteps].of[r] = sums.moved[r];
    }
  }
}

// Columns that a strip looks at, in tiles from its first row's diagonal on.
DEVICE int tiles_of(const Lattice& of, int strip) {
  const int end = min(of.columns, of.columns - of.rows + kStrip * (strip + 1));
  return (end - kStrip * strip + kTile - 1) / kTile;
}

// The scores of a strip.
template <class E>
DEVICE Scores<E> scores_of(const Search& p, int item, int strip) {
  const E* begin = static_cast<const E*>(p.scores) + item * p.item_stride;
  const int64_t cells =
      (p.items - 1 - item) * p.item_stride + (p.rows - 1) * p.row_stride + p.columns;
  return {begin + kStrip * strip * (p.row_stride + 1), begin + cells, p.row_stride};
}

// A warp copies a strip's scores: as many tiles as there is room for, then as many as are wanted.
// It asks for the first ones before anybody may use a gate or knows the item's lengths, unless
// those of the strip above would come later for it.
template <bool kAligned, bool kAlone, class E>
DEVICE void supply(const Search& p, int item, const Extent& extent, int strip, Shared& shared,
                   Stage<E>* stages) {
  const Scores<E> scores = scores_of<E>(p, item, strip);
  const int place = strip % p.warps;
  StageGates& gates = shared.stages[place];
  const bool at_once = !kAlone || place == 0;
  if (!at_once) {
    sync_all_threads();
    if (strip >= lattice(p, item, extent).strips) return;
    await(Wait{shared.stages[place - 1].begun, 0});
  }
  int stage = 0, all = p.stages;
  unsigned round = 0;
  for (int tile = 0; tile < all; ++tile) {
    if (round > 0) await(Wait{gates.empty[stage], round - 1});
    scores.template copy<kAligned>(stages[stage], tile);
    if (at_once && tile == 0) sync_all_threads();
    mbarrier_arrive_on_copies(gates.full[stage]);
    if (++stage == p.stages) {
      const Lattice of = lattice(p, item, extent);
      if (strip < of.strips) all = tiles_of(of, strip) + kLag;
      stage = 0, ++round;
    }
  }
  copy_async_wait_all();
}

// A warp goes through a strip.
template <bool kAlone, class E>
DEVICE void sweep(const Search& p, const Lattice& of, int strip, Shared& shared, Stage<E>* stages,
                  Window& window) {
  const int place = strip % p.warps, me = lane_idx();
  const int tiles = tiles_of(of, strip), all = tiles + kLag;
  const bool first = strip == 0, last = strip == of.strips - 1;
  const auto edge = [&](int below) {
    const int64_t which =
        static_cast<int64_t>(of.item) * (p.chain - 1) + strip / p.warps - 1 + below;
    return p.edges + which * p.tiles * kTile;
  };
  Inlet<kAlone> inlet = {shared.rings[place], shared.gates[place], place == 0 ? edge(0) : nullptr,
                         first ? 0 : tiles_of(of, strip - 1)};
  Outlet<kAlone> outlet = {shared.rings[place + 1], shared.gates[place + 1],
                           place == p.warps - 1 ? edge(1) : nullptr, last ? 0 : tiles};
  StageGates& gates = shared.stages[place];
  Sums sums;
  sums.before = first && me == 0 ? 0.0f : -INFINITY;
  // A lane's words are moved by its columns' delay, so that those of a word's columns are together.
  const int delay = kStep * me, all_words = kWords * tiles * kStrip;
  uint32_t* words = (kAlone ? window.words[kBefore] : directions(p, of.item, strip)) + kRows * me;
  int at = -(delay / kWord + 1) * kStrip;
  uint32_t before[kRows] = {};
  constexpr int kEarlier = kStrip / kTile;  // tiles of the strip above before this one's first
  for (int tile = 0; tile < min(kEarlier, inlet.tiles); ++tile) {
    await(inlet.coming(tile, Wait{gates.full[0], 0}));
    if (me == 0) sums.before = inlet.values(tile)[kTile - 1];
    inlet.give_back(tile);
  }
  int stage = 0;
  unsigned round = 0;
  for (int tile = 0; tile < all; ++tile) {
    const Wait scored{gates.full[stage], round};
    const int above = tile + kEarlier, below = tile - kLag;
    await(scored, inlet.coming(above, scored), outlet.room(below + 1, scored));
    // Only the first lane looks at the strip above.
    const float* edge = me == 0 && inlet.has(above) ? inlet.values(above) : shared.nothing;
    const Rooms rooms = {{outlet.values(below), outlet.values(below + 1)},
                         {outlet.puts(below), outlet.puts(below + 1)}};
    const Sums start = sums;
    Moves moves[kWords];
    advance<true>(sums, stages[stage], edge, rooms, moves);
    if (!warp_all(sums.are_numbers())) {
      sums = start;
      advance<false>(sums, stages[stage], edge, rooms, moves);
    }
    mbarrier_arrive(gates.empty[stage]);
    if (++stage == p.stages) stage = 0, ++round;
    mbarrier_arrive_if(tile == 0 && me == 0, gates.begun);
    inlet.give_back(above);
    outlet.send(below);
#pragma unroll
    for (int w = 0; w < kWords; ++w, at += kStrip) {
      uint32_t out[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        out[r] = funnel_shift_left(before[r], moves[w].of[r], delay % kWord);
        before[r] = moves[w].of[r];
      }
      if (static_cast<unsigned>(at) < static_cast<unsigned>(all_words)) {
        *reinterpret_cast<uint2*>(words + at) = {out[0], out[1]};
      }
    }
  }
}

// Blocks of an item follow each other, so each must have begun before those that wait for it do.
DEVICE int number_of_block(const Search& p, Shared& shared) {
  if (p.chain == 1) return block_idx();
  if (thread_idx() == 0) shared.number = atomic_increment(p.ticket) + 1;  // it begins as -1
  sync_all_threads();
  return static_cast<int>(shared.number);
}

// Whether all other blocks of the item have ended; their directions are seen then.
template <bool kAlone>
DEVICE bool is_last(const Search& p, int item, Shared& shared) {
  sync_all_threads();
  if (kAlone || p.chain == 1) return true;
  if (thread_idx() == 0) {
    thread_fence();
    shared.number = atomic_increment(p.done + item) + 1;
    thread_fence();
  }
  sync_all_threads();
  return static_cast<int>(shared.number) == p.chain - 1;
}

// A block: a strip two warps, of which the second copies; the item's last one to end traces the way
// back. `kAlone`: an item's only block, which has its directions in shared memory.
template <class E, bool kAligned, bool kAlone>
DEVICE void search(const Search& p, Shared& all_shared, unsigned char* all_room) {
  trigger_dependent_grids();
  Shared& shared = opaque_reference(all_shared);
  unsigned char* room = &opaque_reference(*all_room);
  const int me = uniform_warp_idx();
  const int number = kAlone ? block_idx() : number_of_block(p, shared), item = number / p.chain;
  const int place = me % p.warps, strip = number % p.chain * p.warps + place;
  Way& way = *reinterpret_cast<Way*>(room);
  Stage<E>* stages =
      reinterpret_cast<Stage<E>*>(room + (kAlone ? sizeof(Way) : 0)) + place * p.stages;
  const bool supplies = me >= p.warps;
  const Extent extent(p, item);  // asked for before there are gates
  if (supplies) supply<kAligned, kAlone>(p, item, extent, strip, shared, stages);
  if (!supplies) prepare(p, place, shared);
  if (!supplies && kAlone) clear_before(way.windows[place]);
  if (!supplies) sync_all_threads();
  const Lattice of = lattice(p, item, extent);
  if (!supplies && strip < of.strips) {
    sweep<kAlone>(p, of, strip, shared, stages, way.windows[place]);
  }
  if (!is_last<kAlone>(p, item, shared)) return;
  int* durations = p.durations + static_cast<int64_t>(item) * p.rows;
  for (int i = of.rows + thread_idx(); i < p.rows; i += 64 * p.warps) durations[i] = 0;
  if constexpr (kAlone) {
    trace_alone(of, me, way, durations);
  } else {
    trace(p, of, me, way, durations);
  }
}

}  // namespace megakernel::align
