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
  Gate full[kSlots], empty[kSlots];
};

DEVICE void await(const Gate& gate, unsigned opening) {
  while (!in_all_lanes(gate_open(gate, opening & 1))) pause();
}

// The upper end. In global memory a sum says itself that it is there: it is not kMissing.
struct Inlet {
  Ring& ring;
  RingGates& gates;
  const uint32_t* edge;  // null within a block
  int tiles;             // that come
  uint32_t ahead = kMissing;

  // Waits for a tile; tiles are taken in order, by all lanes.
  DEVICE const float* take(int tile) {
    float* values = ring.values[slot(tile)];
    if (edge == nullptr) {
      await(gates.full[slot(tile)], opening(tile));
      return values;
    }
    const uint32_t* from = edge + kTile * tile + lane();
    uint32_t word = ahead;
    while (!in_all_lanes(word != kMissing)) {
      pause();
      word = load_word(from);
    }
    values[lane()] = as_float(word);
    ahead = tile + 1 < tiles ? load_word(from + kTile) : kMissing;
    warp_sync();
    return values;
  }
  DEVICE void give_back(int tile) {
    if (edge == nullptr && lane() == 0) gate_arrive(gates.empty[slot(tile)]);
  }
};

// The lower end.
struct Outlet {
  Ring& ring;
  RingGates& gates;
  uint32_t* edge;  // null within a block
  int tiles;       // that are wanted

  // Waits until there is room for a tile.
  DEVICE void reserve(int tile) {
    if (edge == nullptr && kSlots <= tile && tile < tiles) {
      await(gates.empty[slot(tile)], opening(tile) - 1);
    }
  }
  // Whether this lane puts a tile's sums into the ring.
  DEVICE bool puts(int tile) const { return lane() == 31 && 0 <= tile && tile < tiles; }
  // A tile is whole.
  DEVICE void send(int tile) {
    if (tile < 0 || tile >= tiles) return;
    if (edge == nullptr) {
      if (lane() == 31) gate_arrive(gates.full[slot(tile)]);
      return;
    }
    warp_sync();
    store_word(edge + kTile * tile + lane(), as_bits(ring.values[slot(tile)][lane()]));
  }
};

}  // namespace megakernel::align
