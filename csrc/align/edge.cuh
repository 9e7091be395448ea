// The sums of a strip's last row, on their way to the warp that has the strip below: through shared
// memory within a block, through global memory between blocks, a tile at a time.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

// A tile's place in a ring, and how often it was used before.
DEVICE unsigned slot(int tile) { return static_cast<unsigned>(tile) % kSlots; }
DEVICE unsigned opening(int tile) { return static_cast<unsigned>(tile) / kSlots; }

struct Ring {
  alignas(16) float values[kSlots][kTile];
};

// Only the last lane of a warp fills the ring to the next, only the first one of that empties it.
struct RingGates {
  Mbarrier full[kSlots], empty[kSlots];
};

// What is waited for: one of a gate's openings, counted from 0.
struct Wait {
  const Mbarrier& gate;
  unsigned opening;

  DEVICE bool over() const { return mbarrier_try_wait(gate, opening & 1); }
};

// All are asked at once.
template <class... Waits>
DEVICE void await(const Waits&... waits) {
  while (!warp_all((waits.over() & ...))) spin_pause();
}

// The upper end. In global memory a sum says itself that it is there: it is not kMissing.
template <bool kAlone>
struct Inlet {
  Ring& ring;
  RingGates& gates;
  const uint32_t* edge;  // null within a block
  int tiles;             // that come
  uint2 ahead = {kMissing, kMissing};

  DEVICE bool is_within() const { return kAlone || edge == nullptr; }
  DEVICE bool has(int tile) const { return tile < tiles; }
  DEVICE const float* values(int tile) const { return ring.values[slot(tile)]; }

  // What a tile's coming is to be waited for by; `otherwise` if by nothing. Tiles are taken in
  // order, by all lanes.
  DEVICE Wait coming(int tile, const Wait& otherwise) {
    if (!has(tile)) return otherwise;
    if (is_within()) return {gates.full[slot(tile)], opening(tile)};
    bring(tile);
    return otherwise;
  }
  DEVICE void give_back(int tile) {
    mbarrier_arrive_if(has(tile) && is_within() && lane_idx() == 0, gates.empty[slot(tile)]);
  }

 private:
  DEVICE void bring(int tile) {
    float* values = ring.values[slot(tile)];
    const uint32_t* from = edge + kTile * tile + lane_idx();
    uint2 words = ahead;
    while (!warp_all(words.x != kMissing && words.y != kMissing)) {
      spin_pause();
      words = load(from);
    }
    values[lane_idx()] = as_float(words.x), values[lane_idx() + 32] = as_float(words.y);
    ahead = has(tile + 1) ? load(from + kTile) : uint2{kMissing, kMissing};
    sync_warp();
  }
  static_assert(kTile == 64);
  DEVICE static uint2 load(const uint32_t* from) {
    return {load_relaxed(from), load_relaxed(from + 32)};
  }
};

// The lower end.
template <bool kAlone>
struct Outlet {
  Ring& ring;
  RingGates& gates;
  uint32_t* edge;  // null within a block
  int tiles;       // that are wanted

  DEVICE bool is_within() const { return kAlone || edge == nullptr; }
  DEVICE bool wants(int tile) const {
    return static_cast<unsigned>(tile) < static_cast<unsigned>(tiles);
  }
  DEVICE float* values(int tile) const { return ring.values[slot(tile)]; }
  // What room for a tile is to be waited for by.
  DEVICE Wait room(int tile, const Wait& otherwise) {
    if (!is_within() || tile < kSlots || !wants(tile)) return otherwise;
    return {gates.empty[slot(tile)], opening(tile) - 1};
  }
  // Whether this lane puts a tile's sums into the ring.
  DEVICE bool puts(int tile) const { return lane_idx() == 31 && wants(tile); }
  // A tile is whole.
  DEVICE void send(int tile) {
    if (is_within()) return mbarrier_arrive_if(puts(tile), gates.full[slot(tile)]);
    if (!wants(tile)) return;
    sync_warp();
    for (int i = lane_idx(); i < kTile; i += 32) {
      store_relaxed(edge + kTile * tile + i, as_bits(values(tile)[i]));
    }
  }
};

}  // namespace megakernel::align
