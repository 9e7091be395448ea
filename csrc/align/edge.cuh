// The sums of a strip's last row, on their way to the warp that has the strip below: through shared
// memory within a block, through global memory between blocks, a tile at a time.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

struct Ring {
  alignas(16) float values[kSlots][kTile];
};

struct RingGates {
  Gate full[kSlots], empty[kSlots];
};

DEVICE void await(const Gate& gate, int opening) {
  while (!gate_open(gate, opening & 1)) pause();
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
    float* values = ring.values[tile % kSlots];
    if (edge == nullptr) {
      await(gates.full[tile % kSlots], tile / kSlots);
      return values;
    }
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
  DEVICE void give_back(int tile) {
    if (edge == nullptr) gate_arrive(gates.empty[tile % kSlots]);
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
      await(gates.empty[tile % kSlots], tile / kSlots - 1);
    }
  }
  // Where the last lane puts a tile's sums; null if nobody wants them, and for other lanes.
  DEVICE float* room(int tile) const {
    return lane() == 31 && 0 <= tile && tile < tiles ? ring.values[tile % kSlots] : nullptr;
  }
  // A tile is whole.
  DEVICE void send(int tile) {
    if (tile < 0 || tile >= tiles) return;
    if (edge == nullptr) return gate_arrive(gates.full[tile % kSlots]);
    warp_sync();
    store_word(edge + kTile * tile + lane(), as_bits(ring.values[tile % kSlots][lane()]));
  }
};

}  // namespace megakernel::align
