// Monotonic alignment search: the best way through an item's lattice, by dynamic programming (Kim
// et al., Glow-TTS, NeurIPS 2020, algorithm 1).
//
//   sum[i, j] = max(sum[i, j - 1], sum[i - 1, j - 1]) + score[i, j]
//
// A lane has two rows and their sums in registers. Lanes go a step of four columns after each
// other, so that a lane gets the row above its own by a shuffle when it needs it; warps, each with
// a strip of rows, follow each other likewise. Of a cell only its direction is kept, one bit. Only
// columns from which the end can still be reached are looked at.
#pragma once

#include "edge.cuh"
#include "trace.cuh"

namespace megakernel::align {

// Scores of a strip, a tile of columns: a lane's are moved by a step to the left of those of the
// lane before, since it needs them later.
template <class E>
struct alignas(16) Tile {
  E cells[kStrip][kTile];
};

struct Shared {
  Ring rings[kMostWarps + 1];
  RingGates gates[kMostWarps + 1];
  Gate loaded[kMostWarps][kMostStages];
  alignas(16) float nothing[kTile];  // minus infinity: the row above where none is needed
  unsigned number;
};

// Before anybody uses it. Every gate counts the lanes of a warp.
DEVICE void prepare(Shared& shared, int warps) {
  if (thread() < kTile) shared.nothing[thread()] = -INFINITY;
  for (int i = thread(); i < (kMostWarps + 1) * kSlots; i += 32 * warps) {
    gate_init(shared.gates[i / kSlots].full[i % kSlots], 32);
    gate_init(shared.gates[i / kSlots].empty[i % kSlots], 32);
  }
  for (int i = thread(); i < kMostWarps * kMostStages; i += 32 * warps) {
    gate_init(shared.loaded[i / kMostStages][i % kMostStages], 32);
  }
  gates_ready();
}

// A lane's scores of a step, turned so that the lanes of a warp find them in different banks.
template <class E>
DEVICE E* cells(Tile<E>& tile, int lane, int row, int step) {
  constexpr int kBankRows = 128 / sizeof(tile.cells[0]);  // rows that fill the banks
  return tile.cells[32 * row + lane] + kStep * (step ^ lane / kBankRows % kSteps);
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

// A strip's scores, counted from its first row and column.
template <class E>
struct Scores {
  const E* first;
  int64_t stride;
  int rows, columns;  // that there are

  // Asks for a tile. Unaligned rows begin on any four bytes; cells that there are not become zero.
  template <bool kAligned>
  DEVICE void copy(Tile<E>& tile, int index, Gate& loaded) const {
    const bool whole =
        rows >= kStrip && index >= kLag && kTile * (index + 1) <= columns;  // of every lane
    whole ? copy_cells<kAligned, true>(tile, index) : copy_cells<kAligned, false>(tile, index);
    arrive_with_copies(loaded);
  }

  // Eight lanes a row.
  template <bool kAligned, bool kWhole>
  DEVICE void copy_cells(Tile<E>& tile, int index) const {
    constexpr int kPiece = kAligned ? kStep * sizeof(E) : 4;
    constexpr int kMany = kPiece / sizeof(E);                 // cells
    const int step = lane() % kSteps, one = lane() / kSteps;  // of the rows that are copied at once
    constexpr int kAtOnce = 32 / kSteps;
#pragma unroll
    for (int u = 0; u < kStrip / kAtOnce; ++u) {
      const int owner = kAtOnce * u % 32 + one, row = kAtOnce * u / 32;
      const int column = kTile * index + kStep * (step - owner);
      const bool there = kWhole || (column >= 0 && kRows * owner + row < rows);
      const E* from = first + (kRows * owner + row) * stride + column;
      E* to = cells(tile, owner, row, step);
#pragma unroll
      for (int c = 0; c < kStep; c += kMany) {
        const int many = there ? min(max(columns - column - c, 0), kMany) : 0;
        const int bytes = kWhole ? kPiece : many * static_cast<int>(sizeof(E));
        copy_or_zero<kPiece>(to + c, bytes > 0 ? from + c : first, bytes);
      }
    }
  }
};

// One lane's rows.
struct Sums {
  float row[kRows] = {-INFINITY, -INFINITY};
  float below[kStep] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};  // the last row's last step
  float before;  // what the row above was a column ago

  // A step of columns; notes in `moved` which sums come from the row above. What is no number
  // counts as minus infinity.
  DEVICE void advance(const float (&above)[kStep], const float (&scores)[kRows][kStep], int step,
                      uint32_t (&moved)[kRows]) {
#pragma unroll
    for (int c = 0; c < kStep; ++c) {
      const float from[kRows] = {c == 0 ? before : above[c - 1], row[0]};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row[r] < from[r]) moved[r] |= 1u << (kStep * step + c);
        row[r] = larger(larger(row[r], from[r]) + scores[r][c], -INFINITY);
      }
      below[c] = row[kRows - 1];
    }
    before = above[kStep - 1];
  }
};

// Columns that a strip looks at, in tiles from its first row's diagonal on.
DEVICE int tiles_of(const Lattice& of, int strip) {
  const int end = min(of.columns, of.columns - of.rows + kStrip * (strip + 1));
  return (end - kStrip * strip + kTile - 1) / kTile;
}

// A warp goes through its strip.
template <class E, bool kAligned>
DEVICE void sweep(const Search& p, const Lattice& of, int strip, Shared& shared, Tile<E>* stage) {
  const int begin = kStrip * strip, place = warp(), me = lane();
  const E* item = static_cast<const E*>(p.scores) + of.item * p.item_stride;
  const Scores<E> scores = {item + begin * p.row_stride + begin, p.row_stride, of.rows - begin,
                            of.columns - begin};
  const int tiles = tiles_of(of, strip), all = tiles + kLag;
  const bool first = strip == 0, last = strip == of.strips - 1;
  const auto edge = [&](int below) {
    const int64_t which =
        static_cast<int64_t>(of.item) * (p.chain - 1) + strip / p.warps - 1 + below;
    return p.edges + which * p.tiles * kTile;
  };
  Inlet inlet = {shared.rings[place], shared.gates[place], place == 0 ? edge(0) : nullptr,
                 first ? 0 : tiles_of(of, strip - 1)};
  Outlet outlet = {shared.rings[place + 1], shared.gates[place + 1],
                   place == p.warps - 1 ? edge(1) : nullptr, last ? 0 : tiles};
  Gate* loaded = shared.loaded[place];
  for (int i = 0; i < p.stages - 1 && i < all; ++i) {
    scores.template copy<kAligned>(stage[i], i, loaded[i]);
  }

  Sums sums;
  sums.before = first && me == 0 ? 0.0f : -INFINITY;
  constexpr int kAhead = kStrip / kTile;  // tiles of the strip above before this one's first
  if (!first) {
    for (int tile = 0; tile < kAhead; ++tile) {
      const float corner = inlet.take(tile)[kTile - 1];
      if (me == 0) sums.before = corner;
      inlet.give_back(tile);
    }
  }
  uint32_t* direction =
      p.direction + (static_cast<int64_t>(of.item) * p.strips + strip) * (p.tiles + kLag) * kStrip;
  int now = 0, opening = 0;  // the stage of this tile, and how often it was filled before
  for (int tile = 0; tile < all; ++tile) {
    warp_sync();  // all have read the tile before
    const int next = tile + p.stages - 1, free = now == 0 ? p.stages - 1 : now - 1;
    if (next < all) scores.template copy<kAligned>(stage[free], next, loaded[free]);
    const int above_tile = tile + kAhead;
    const bool fed = tile < tiles && above_tile < inlet.tiles;
    const float* edge_sums = fed ? inlet.take(above_tile) : shared.nothing;
    outlet.reserve(tile - kLag + 1);
    // The last lane is 31 steps behind: its last step of this tile is the first of a later one.
    float* const rooms[] = {outlet.room(tile - kLag), outlet.room(tile - kLag + 1)};
    await(loaded[now], opening);
    uint32_t moved[kRows] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float above[kStep], score[kRows][kStep];
      float entering[kStep];
      unpack(edge_sums + kStep * step, entering);
#pragma unroll
      for (int c = 0; c < kStep; ++c) {
        above[c] = shuffle_up(sums.below[c]);
        if (me == 0) above[c] = entering[c];
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) unpack(cells(stage[now], me, r, step), score[r]);
      sums.advance(above, score, step, moved);
      if (float* room = rooms[(step + 1) / kSteps]) {
        *reinterpret_cast<float4*>(room + (step + 1) % kSteps * kStep) = {
            sums.below[0], sums.below[1], sums.below[2], sums.below[3]};
      }
    }
    *reinterpret_cast<uint2*>(direction + tile * kStrip + kRows * me) = {moved[0], moved[1]};
    if (fed) inlet.give_back(above_tile);
    outlet.send(tile - kLag);
    if (++now == p.stages) now = 0, ++opening;
  }
}

// Blocks of an item follow each other, so each must have begun before those that wait for it do.
DEVICE int number_of_block(const Search& p, Shared& shared) {
  if (p.chain == 1) return block();
  if (thread() == 0) shared.number = count_up(p.ticket) + 1;  // it begins as -1
  all_sync();
  return static_cast<int>(shared.number);
}

// Whether all other blocks of the item have ended; their directions are seen then.
DEVICE bool is_last(const Search& p, int item, Shared& shared) {
  all_sync();
  if (p.chain == 1) return true;
  if (thread() == 0) {
    fence();
    shared.number = count_up(p.done + item) + 1;
    fence();
  }
  all_sync();
  return static_cast<int>(shared.number) == p.chain - 1;
}

// A block: a strip a warp; the item's last one to end traces the way back.
template <class E, bool kAligned>
DEVICE void search(const Search& p, Shared& shared, void* room) {
  launch_next();
  prepare(shared, p.warps);
  const int number = number_of_block(p, shared);
  all_sync();
  const Lattice of = lattice(p, number / p.chain);
  const int strip = number % p.chain * p.warps + warp();
  Tile<E>* stages = static_cast<Tile<E>*>(room) + warp() * p.stages;
  if (strip < of.strips) sweep<E, kAligned>(p, of, strip, shared, stages);
  if (!is_last(p, of.item, shared)) return;
  int* durations = p.durations + static_cast<int64_t>(of.item) * p.rows;
  for (int i = of.rows + thread(); i < p.rows; i += 32 * p.warps) durations[i] = 0;
  if (warp() == 0) trace(p, of, *static_cast<Windows*>(room), durations);
}

}  // namespace megakernel::align
