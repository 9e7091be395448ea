// Selection of the tile of a projection.
#pragma once

#include "projection.cuh"

namespace megakernel::codec {

// Warps that split K: as many as have work for a single frame. A property of the layer, so that the
// number of rows does not change the order of the sums.
inline int num_k_splits(const ProjectionParams& p) {
  const int num_steps = p.num_taps * p.input.num_channels / 32;
  const int num_tiles = p.input.rows_per_frame * p.num_columns / 512;
  const int wanted = num_tiles < 200 ? 8 : num_tiles < 300 ? 4 : 2;
  return num_steps >= 2 * wanted ? wanted : num_steps >= 8 ? 4 : 2;
}

template <class T>
int num_blocks(const ProjectionParams& p) {
  return (p.num_rows + T::kRows - 1) / T::kRows * (p.num_columns / T::kColumns);
}

// Estimated time in microseconds, fitted to an H200: launch and tail of every wave of blocks, and
// the loads of a multiprocessor through its first-level cache.
template <class T>
double estimate_us(const ProjectionParams& p, int num_sms) {
  const int num_steps = p.num_taps * p.input.num_channels / 32, count = num_blocks<T>(p);
  const int num_waves = (count + T::kBlocksPerSm * num_sms - 1) / (T::kBlocksPerSm * num_sms);
  const int blocks_per_sm = (count + num_sms - 1) / num_sms;
  return num_waves * (1.2 + 0.7e-3 * T::kRows * T::kColumns) +
         blocks_per_sm * 0.04 * num_steps / T::kKSplits *
             (T::kRowGroups * T::kPlanes + T::kColumnGroups);
}

template <int RowGroups, int ColumnGroups>
struct TileSize {};

// Calls `run(tile, num_blocks)` with the fastest tile by estimate.
template <int KSplits, int Planes, class Run>
void with_tile(const ProjectionParams& p, int num_sms, Run run) {
  const auto for_each_tile = [&](auto act) {
    const auto offer = [&]<int RowGroups, int ColumnGroups>(TileSize<RowGroups, ColumnGroups>) {
      if (p.num_columns % (8 * ColumnGroups) == 0) {
        act(Tile<RowGroups, ColumnGroups, KSplits, Planes>());
      }
    };
    offer(TileSize<2, 1>()), offer(TileSize<2, 2>());
    offer(TileSize<2, 4>()), offer(TileSize<4, 4>());
    if constexpr (Planes == 1) offer(TileSize<8, 4>());
    if constexpr (KSplits == 8 && Planes == 2) {
      offer(TileSize<1, 1>()), offer(TileSize<1, 2>()), offer(TileSize<1, 4>());
    }
  };
  double least_us = 1e30;
  for_each_tile([&]<class T>(T) { least_us = std::min(least_us, estimate_us<T>(p, num_sms)); });
  bool done = false;
  for_each_tile([&]<class T>(T) {
    if (done || estimate_us<T>(p, num_sms) > least_us) return;
    done = true;
    run(T(), num_blocks<T>(p));
  });
}

template <int Planes, class Run>
void with_tile(const ProjectionParams& p, int num_sms, Run run) {
  switch (num_k_splits(p)) {
    case 2:
      return with_tile<2, Planes>(p, num_sms, run);
    case 4:
      return with_tile<4, Planes>(p, num_sms, run);
    default:
      return with_tile<8, Planes>(p, num_sms, run);
  }
}

template <class Run>
void with_tile(const ProjectionParams& p, int num_sms, Run run) {
  p.input.num_planes == 1 ? with_tile<1>(p, num_sms, run) : with_tile<2>(p, num_sms, run);
}

}  // namespace megakernel::codec
