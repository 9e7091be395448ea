// Which tile a product runs with.
#pragma once

#include "projection.cuh"

namespace megakernel::codec {

// Warps that share K. A property of the layer, so that the number of rows does not change the sums:
// as many as find work in a single frame.
inline int ways(const Product& p) {
  const int steps = p.taps * p.in.channels / 32, tiles = p.in.rate * p.columns / 512;
  const int wanted = tiles < 200 ? 8 : tiles < 300 ? 4 : 2;
  return steps >= 2 * wanted ? wanted : steps >= 8 ? 4 : 2;
}

template <class T>
int blocks(const Product& p) {
  return (p.rows + T::rows - 1) / T::rows * (p.columns / T::columns);
}

// About how many microseconds a tile takes, from what an H200 took for all of them: launch and
// ending of each wave of blocks, and what a multiprocessor gets through its first-level cache.
template <class T>
double cost(const Product& p, int processors) {
  const int steps = p.taps * p.in.channels / 32, count = blocks<T>(p);
  const int waves = (count + T::resident * processors - 1) / (T::resident * processors);
  const int each = (count + processors - 1) / processors;
  return waves * (1.2 + 0.7e-3 * T::rows * T::columns) +
         each * 0.04 * steps / T::ways * (T::tall * T::planes + T::wide);
}

template <int Tall, int Wide>
struct Size {};

// Calls `run(tile, blocks)` with the cheapest tile.
template <int Ways, int Planes, class Run>
void with_tile(const Product& p, int processors, Run run) {
  const auto each = [&](auto act) {
    const auto offer = [&]<int Tall, int Wide>(Size<Tall, Wide>) {
      if (p.columns % (8 * Wide) == 0) act(Tile<Tall, Wide, Ways, Planes>());
    };
    offer(Size<2, 1>()), offer(Size<2, 2>()), offer(Size<2, 4>()), offer(Size<4, 4>());
    if constexpr (Planes == 1) offer(Size<8, 4>());
    if constexpr (Ways == 8 && Planes == 2)
      offer(Size<1, 1>()), offer(Size<1, 2>()), offer(Size<1, 4>());
  };
  double least = 1e30;
  each([&]<class T>(T) { least = std::min(least, cost<T>(p, processors)); });
  bool done = false;
  each([&]<class T>(T) {
    if (done || cost<T>(p, processors) > least) return;
    done = true;
    run(T(), blocks<T>(p));
  });
}

template <int Planes, class Run>
void with_tile(const Product& p, int processors, Run run) {
  switch (ways(p)) {
    case 2:
      return with_tile<2, Planes>(p, processors, run);
    case 4:
      return with_tile<4, Planes>(p, processors, run);
    default:
      return with_tile<8, Planes>(p, processors, run);
  }
}

template <class Run>
void with_tile(const Product& p, int processors, Run run) {
  p.in.planes == 1 ? with_tile<1>(p, processors, run) : with_tile<2>(p, processors, run);
}

}  // namespace megakernel::codec
