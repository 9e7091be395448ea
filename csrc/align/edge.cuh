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
  while (!gate_open(gate, opening & 1)) pause();
}
DEVICE void await(const Gates& gates, int gate, unsigned opening) {
  while (!gates.open(gate, opening)) pause();
}

// The upper end. In global memory a sum says itself that it is there: it is not kMissing.
struct Inlet {
  Ring& ring;
  Gates full, empty;
  const uint32_t* edge;  // null within a block
  int tiles;             // that come
  uint32_t ahead = kMissing;

  DEVICE Inlet(Ring& ring, RingGates& gates, const uint32_t* edge, int tiles)
      : ring(ring), full(gates.full), empty(gates.empty), edge(edge), tiles(tiles) {}

  // Whether a tile will not be waited for, as far as shared memory tells.
  DEVICE bool has(int tile) const {
    return full.is_open(slot(tile), opening(tile)) | (edge != nullptr) | (tile >= tiles);
  }
  DEVICE void await(int tile) const {
    if (edge == nullptr && tile < tiles) align::await(full, slot(tile), opening(tile));
  }
  // Tiles are taken in order, by all lanes, after they were waited for.
  DEVICE const float* take(int tile) {
    float* values = ring.values[slot(tile)];
    if (edge == nullptr) return values;
    const uint32_t* from = edge + kTile * tile + lane();
    uint32_t word = ahead;
    while (word == kMissing) {
      pause();
      word = load_word(from);
    }
    values[lane()] = as_float(word);
    ahead = tile + 1 < tiles ? load_word(from + kTile) : kMissing;
    warp_sync();
    return values;
  }
  DEVICE void give_back(int tile) const {
    if (edge == nullptr && lane() == 0) empty.arrive(slot(tile));
  }
};

// The lower end.
struct Outlet {
  Ring& ring;
  Gates full, empty;
  uint32_t* edge;  // null within a block
  int tiles;       // that are wanted

  DEVICE Outlet(Ring& ring, RingGates& gates, uint32_t* edge, int tiles)
      : ring(ring), full(gates.full), empty(gates.empty), edge(edge), tiles(tiles) {}

  // Whether there is room for a tile.
  DEVICE bool has_room(int tile) const {
    return empty.is_open(slot(tile), opening(tile) - 1) | !may_wait(tile);
  }
  DEVICE void await_room(int tile) const {
    if (may_wait(tile)) align::await(empty, slot(tile), opening(tile) - 1);
  }
  DEVICE bool may_wait(int tile) const { return edge == nullptr && kSlots <= tile && tile < tiles; }
  // Whether this lane puts a tile's sums into the ring.
  DEVICE bool puts(int tile) const { return lane() == 31 && 0 <= tile && tile < tiles; }
  // A tile is whole.
  DEVICE void send(int tile) const {
    if (tile < 0 || tile >= tiles) return;
    if (edge == nullptr) {
      if (lane() == 31) full.arrive(slot(tile));
      return;
    }
    warp_sync();
    store_word(edge + kTile * tile + lane(), as_bits(ring.values[slot(tile)][lane()]));
  }
};

}  // namespace megakernel::align
