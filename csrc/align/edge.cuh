// Transfer of the sums of a strip's last row to the strip below, one tile at a time.
//
// Within a block the sums pass through a ring in shared memory, guarded by mbarriers. Between
// blocks they pass through global memory, where a value is its own ready flag: it differs from
// kNotReady.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::align {

// A tile's stage in the ring, and how many tiles used the stage before.
DEVICE unsigned edge_stage(int tile) { return static_cast<unsigned>(tile) % kEdgeStages; }
DEVICE unsigned edge_use(int tile) { return static_cast<unsigned>(tile) / kEdgeStages; }

struct EdgeRing {
  alignas(16) float values[kEdgeStages][kTileColumns];
};

// `full` is signalled by the last lane of the warp above, `empty` by the first lane of the warp
// below.
struct EdgeBarriers {
  Mbarrier full[kEdgeStages], empty[kEdgeStages];
};

// A completed phase of a barrier that a warp waits for; phases are counted from 0.
struct BarrierWait {
  const Mbarrier& barrier;
  unsigned phase;

  DEVICE bool is_done() const { return mbarrier_try_wait(barrier, phase & 1); }
};

// Waits for all; one branch for all of them.
template <class... Waits>
DEVICE void wait_for_all(const Waits&... waits) {
  while (!warp_all((waits.is_done() & ...))) spin_pause();
}

// Reads the sums of the row above a strip.
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

  // The wait for a tile; `otherwise` if there is nothing to wait for. A tile in global memory is
  // loaded here. All lanes call this for the tiles in order.
  DEVICE BarrierWait acquire(int tile, const BarrierWait& otherwise) {
    if (!has(tile)) return otherwise;
    if (is_within_block()) return {barriers.full[edge_stage(tile)], edge_use(tile)};
    load_tile(tile);
    return otherwise;
  }
  DEVICE void release(int tile) {
    mbarrier_arrive_if(has(tile) && is_within_block() && lane_idx() == 0,
                       barriers.empty[edge_stage(tile)]);
  }

 private:
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
  static_assert(kTileColumns == 64, "A lane loads two columns of a tile.");
  DEVICE static uint2 load(const uint32_t* from) {
    return {load_relaxed(from), load_relaxed(from + 32)};
  }
};

// Writes the sums of a strip's last row.
template <bool kSharedDirections>
struct EdgeWriter {
  EdgeRing& ring;
  EdgeBarriers& barriers;
  uint32_t* edge;  // null within a block
  int num_tiles;   // that the strip below reads; 0 for the last strip

  DEVICE bool is_within_block() const { return kSharedDirections || edge == nullptr; }
  DEVICE bool has(int tile) const {
    return static_cast<unsigned>(tile) < static_cast<unsigned>(num_tiles);
  }
  DEVICE float* values(int tile) const { return ring.values[edge_stage(tile)]; }
  // The wait for a free stage; `otherwise` if there is nothing to wait for.
  DEVICE BarrierWait acquire(int tile, const BarrierWait& otherwise) {
    if (!is_within_block() || tile < kEdgeStages || !has(tile)) return otherwise;
    return {barriers.empty[edge_stage(tile)], edge_use(tile) - 1};
  }
  // Whether this lane stores a tile's sums into the ring.
  DEVICE bool stores(int tile) const { return lane_idx() == 31 && has(tile); }
  // Passes on a complete tile.
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
