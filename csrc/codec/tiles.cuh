// Which tile a product runs with.
#pragma once

#include "product.cuh"

namespace megakernel::codec {

// Warps that share K: a property of the layer, so that the number of rows does not change the sums.
inline int ways(const Product& p) {
  const int steps = p.taps * p.in.channels / 32;
  return p.in.rate <= 32 || steps >= 48 ? 8 : 2;
}

template <class T>
int blocks(const Product& p) {
  return (p.rows + T::rows - 1) / T::rows * (p.columns / T::columns);
}

// Calls `run(tile, blocks)` with the largest tile that gives most multiprocessors something to do.
template <int Ways, int Planes, class Run>
void with_tile(const Product& p, int processors, Run run) {
  bool done = false;
  const auto offer = [&]<int Tall, int Wide>() {
    using T = Tile<Tall, Wide, Ways, Planes>;
    const bool smallest = Tall == 1 && Wide == 1;
    if (done || p.columns % T::columns != 0) return;
    if (!smallest && 3 * blocks<T>(p) < 2 * processors) return;
    if (Tall > 1 && 2 * p.rows <= T::rows) return;
    done = true;
    run(T(), blocks<T>(p));
  };
  if constexpr (Planes == 1) offer.template operator()<4, 4>();
  offer.template operator()<2, 4>();
  offer.template operator()<1, 4>();
  offer.template operator()<1, 2>();
  offer.template operator()<1, 1>();
}

template <class Run>
void with_tile(const Product& p, int processors, Run run) {
  const bool many = ways(p) == 8;
  if (p.in.planes == 1) {
    many ? with_tile<8, 1>(p, processors, run) : with_tile<2, 1>(p, processors, run);
  } else {
    many ? with_tile<8, 2>(p, processors, run) : with_tile<2, 2>(p, processors, run);
  }
}

}  // namespace megakernel::codec
