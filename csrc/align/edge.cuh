// Transfer of the sums of a strip's last row to the strip below, one tile at a time.
//
// Within a block the sums are written to a ring in shared memory, with mbarriers. Between blocks
// they are written to global memory, where a value is its own ready flag: it differs from
// kNotReady.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

// --- shared memory ---

// A tile's stage in the ring, and how many tiles used the stage before.
DEVICE unsigned edge_stage(int tile) { return static_cast<unsigned>(tile) % kEdgeStages; }
DEVICE unsigned edge_use(int tile) { return static_cast<unsigned>(tile) / kEdgeStages; }

// Sums of a row, [stages, columns of a tile].
struct EdgeRing {
  alignas(16) float values[kEdgeStages][kTileColumns];
};

// The last lane of the warp above arrives at `full`, the first lane of the warp below at `empty`.
struct EdgeBarriers {
  Mbarrier full[kEdgeStages], empty[kEdgeStages];
};

// --- waits ---

// A completion of a barrier that a warp waits for; completions are counted from 0.
struct BarrierWait {
  const Mbarrier& barrier;
  unsigned completion;

  DEVICE bool is_done() const { return mbarrier_try_wait(barrier, completion & 1); }
};

// Waits for all, with one branch.
template <class... Waits>
DEVICE void wait_for_all(const Waits&... waits) {
  while (!warp_all((waits.is_done() & ...))) spin_pause();
}

// --- the two ends of an edge ---

// Reads the sums of the row above a strip, [tiles, columns of a tile].
template <bool kSharedDirections>
struct EdgeReader {
  EdgeRing& ring;
  EdgeBarriers& barriers;
  const uint32_t* edge;  // null within a block
  int num_tiles;         // of the strip above; 0 for the first strip
  uint2 prefetched = {kNotReady, kNotReady};

  DEVICE bool is_within_block() const { return kSharedDirections || edge == nullptr; }
  DEVICE bool has(int tile) const { return tile < num_tiles; }
  DEVICE const float* values(int tile) const { return ring.values[edge_stage(tile)]; }

  // The wait for a tile; `otherwise` if there is no wait. A tile in global memory is loaded here.
  // All lanes call this for the tiles in order.
  DEVICE BarrierWait acquire(int tile, const BarrierWait& otherwise) {
    if (!has(tile)) return otherwise;
    if (is_within_block()) return {barriers.full[edge_stage(tile)], edge_use(tile)};
    load_tile(tile);
    return otherwise;
  }
  // Releases the tile's stage for the strip above.
  DEVICE void release(int tile) {
    mbarrier_arrive_if(has(tile) && is_within_block() && lane_idx() == 0,
                       barriers.empty[edge_stage(tile)]);
  }

 private:
  // Waits for a tile in global memory and copies it to the ring.
  DEVICE void load_tile(int tile) {
    float* values = ring.values[edge_stage(tile)];
    const uint32_t* from = edge + kTileColumns * tile + lane_idx();
    uint2 sums = prefetched;
    while (!warp_all(sums.x != kNotReady && sums.y != kNotReady)) {
      spin_pause();
      sums = load(from);
    }
    values[lane_idx()] = as_float(sums.x), values[lane_idx() + 32] = as_float(sums.y);
    prefetched = has(tile + 1) ? load(from + kTileColumns) : uint2{kNotReady, kNotReady};
    sync_warp();
  }
  static_assert(kTileColumns == 64, "a lane loads two columns of a tile");
  // Loads the lane's two columns of a tile.
  DEVICE static uint2 load(const uint32_t* from) {
    return {load_relaxed(from), load_relaxed(from + 32)};
  }
};

// Writes the sums of a strip's last row, [tiles, columns of a tile].
template <bool kSharedDirections>
struct EdgeWriter {
  EdgeRing& ring;
  EdgeBarriers& barriers;
  uint32_t* edge;  // null within a block
  int num_tiles;   // that the strip below reads; 0 for the last strip

  // As in EdgeReader; `tile` may be negative.
  DEVICE bool is_within_block() const { return kSharedDirections || edge == nullptr; }
  DEVICE bool has(int tile) const {
    return static_cast<unsigned>(tile) < static_cast<unsigned>(num_tiles);
  }
  DEVICE float* values(int tile) const { return ring.values[edge_stage(tile)]; }
  // The wait for an empty stage; `otherwise` if there is no wait.
  DEVICE BarrierWait acquire(int tile, const BarrierWait& otherwise) {
    if (!is_within_block() || tile < kEdgeStages || !has(tile)) return otherwise;
    return {barriers.empty[edge_stage(tile)], edge_use(tile) - 1};
  }
  // Whether this lane stores a tile's sums into the ring.
  DEVICE bool stores(int tile) const { return lane_idx() == 31 && has(tile); }
  // Releases a complete tile to the strip below.
  DEVICE void publish(int tile) {
    if (is_within_block()) {
      return mbarrier_arrive_if(stores(tile), barriers.full[edge_stage(tile)]);
    }
    if (!has(tile)) return;
    sync_warp();
    for (int i = lane_idx(); i < kTileColumns; i += 32) {
      store_relaxed(edge + kTileColumns * tile + i, as_bits(values(tile)[i]));
    }
  }
};

}  // namespace megakernel::align
