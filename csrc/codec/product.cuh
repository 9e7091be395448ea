// Rows times weights: every convolution of the codec and every product of its transformer.
//
// K is the taps' channels, 32 a step. A lane loads eight neighbouring channels of a row at once and
// feeds them to two matrix instructions; weights are packed for that order, so that nothing passes
// through shared memory but the sums. Warps share K among them in ranges that depend on K alone and
// are added in their order: a row's bits do not depend on the rows beside it.
#pragma once

#include "../memory.cuh"
#include "finish.cuh"
#include "params.cuh"

namespace megakernel::codec {

// A warp has 8 `Tall` rows and 8 `Wide` columns; `Ways` warps share K, the others have other rows.
template <int Tall, int Wide, int Ways, int Planes>
struct Tile {
  static constexpr int tall = Tall, wide = Wide, ways = Ways, planes = Planes;
  static constexpr int beside = kBlockThreads / 32 / Ways;  // warps that have other rows
  static constexpr int rows = 8 * Tall * beside;            // of a block
  static constexpr int columns = 8 * Wide;                  // of a block
  static constexpr int padded = columns + 8;  // keeps sums of neighbouring rows in other banks
  // Blocks of a multiprocessor: two small ones hide each other's beginnings and ends.
  static constexpr int resident = Tall == 2 && Wide <= 2 ? 2 : 1;
  // Steps are fetched in groups, some groups in turn: what registers allow. A warp has few counters
  // of loads under way and waits for all that share one, so that many steps go in two groups. With
  // more rows there are few steps, each a group.
  static constexpr int registers = 4 * (Tall * Planes + Wide);
  static constexpr int fitting = (Tall == 1 ? 128 : resident == 2 ? 64 : 96) / registers;
  static constexpr int turns = Tall == 1 || fitting < 2 ? 2 : fitting;
  static constexpr int group = Tall == 1 ? fitting / 2 : 1;
};

template <class T>
struct alignas(16) Sums {
  float of[T::ways][T::rows][T::padded];
  float squares[T::ways][T::rows];
};

// Where a row of a tile is found, and its taps before it.
struct Place {
  const f16* now;
  const f16* past;
  int since;  // rows since the stream's first
};

DEVICE Place place(const Rows& in, const Frame* frames, int row) {
  const Frame& frame = frames[row / in.rate];
  const int since = row - frame.first * in.rate;
  const int width = in.planes * in.channels;
  return {in.now + static_cast<long long>(row) * width,
          in.past + frame.slot * in.stride + (in.depth + since) * width, since};
}

// A step's place in K: the row's tap, and its channels.
struct Step {
  int back;     // rows before the row
  int channel;  // first of 32

  DEVICE Step(const Product& p, int step) {
    const int whole = p.in.channels / 32;
    back = (p.taps - 1 - step / whole) * p.dilation;
    channel = step % whole * 32;
  }
  DEVICE void next(const Product& p) {
    channel += 32;
    if (channel == p.in.channels) channel = 0, back -= p.dilation;
  }
};

DEVICE float squares(uint4 v) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = unpack_f16(pairs[i]);
    sum = fmaf(f.x, f.x, fmaf(f.y, f.y, sum));
  }
  return sum;
}

// A warp's part of the block's sums.
template <class T>
struct Warp {
  const Product& p;
  static constexpr int kPairs = (T::tall + 1) / 2;  // of eight rows: the instruction takes sixteen
  Place places[T::tall];
  const uint4* weights;
  float sums[kPairs][T::wide][4] = {};
  float square[T::tall] = {};
  uint4 a[T::turns][T::group][T::planes][T::tall];
  uint4 w[T::turns][T::group][T::wide];

  DEVICE Warp(const Product& p, int row, int column, int steps) : p(p) {
#pragma unroll
    for (int i = 0; i < T::tall; ++i) {
      const int mine = min(row + 8 * i + lane() / 4, p.rows - 1);
      places[i] = place(p.in, p.frames, mine);
      places[i].now += 8 * (lane() % 4);
      places[i].past += 8 * (lane() % 4);
    }
    weights = p.weights + static_cast<long long>(column / 8) * steps * 32 + lane();
  }

  DEVICE void load_weights(int turn, int step, int end, int steps) {
#pragma unroll
    for (int d = 0; d < T::group; ++d) {
      if (step + d >= end) continue;
#pragma unroll
      for (int j = 0; j < T::wide; ++j) {
        const uint4* from = weights + (static_cast<long long>(j) * steps + step + d) * 32;
        w[turn][d][j] = T::beside > 1 ? *from : load_constant(from);
      }
    }
  }

  DEVICE void load_rows(int turn, int step, int end, Step& at) {
    const int width = T::planes * p.in.channels;
#pragma unroll
    for (int d = 0; d < T::group; ++d) {
      if (step + d >= end) continue;
#pragma unroll
      for (int i = 0; i < T::tall; ++i) {
        const f16* from = places[i].since >= at.back ? places[i].now : places[i].past;
        from += at.channel - at.back * width;
#pragma unroll
        for (int plane = 0; plane < T::planes; ++plane) {
          a[turn][d][plane][i] = *reinterpret_cast<const uint4*>(from + plane * p.in.channels);
        }
      }
      at.next(p);
    }
  }

  DEVICE void multiply_step(const uint4 (&a)[T::planes][T::tall], const uint4 (&w)[T::wide]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int plane = 0; plane < T::planes; ++plane) {
        const uint4 low = a[plane][2 * i];
        const uint4 high = T::tall > 1 ? a[plane][2 * i + (T::tall > 1)] : uint4{};
#pragma unroll
        for (int j = 0; j < T::wide; ++j) {
          multiply_f16(sums[i][j], {low.x, high.x, low.y, high.y}, {w[j].x, w[j].y});
          multiply_f16(sums[i][j], {low.z, high.z, low.w, high.w}, {w[j].z, w[j].w});
        }
      }
    }
    if constexpr (T::planes == 2) {  // what is normed has two
      if (p.norm == 0) return;
#pragma unroll
      for (int i = 0; i < T::tall; ++i) square[i] += squares(a[0][i]);
    }
  }

  // The first weights, which are there before the rows are.
  DEVICE void begin(int first, int end, int steps) {
#pragma unroll
    for (int turn = 0; turn < T::turns; ++turn)
      load_weights(turn, first + turn * T::group, end, steps);
  }

  // Its range of K.
  DEVICE void run(int first, int end, int steps) {
    Step at(p, first);
#pragma unroll
    for (int turn = 0; turn < T::turns; ++turn) load_rows(turn, first + turn * T::group, end, at);
#pragma unroll 1
    for (int s = first; s < end; s += T::turns * T::group) {
#pragma unroll
      for (int turn = 0; turn < T::turns; ++turn) {
        const int now = s + turn * T::group, next = now + T::turns * T::group;
#pragma unroll
        for (int d = 0; d < T::group; ++d) {
          if (now + d < end) multiply_step(a[turn][d], w[turn][d]);
        }
        load_weights(turn, next, end, steps);
        load_rows(turn, next, end, at);
      }
    }
  }

  DEVICE void store(Sums<T>& shared, int way, int row) {
    const int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int i = 0; i < T::tall; ++i) {
#pragma unroll
      for (int j = 0; j < T::wide; ++j) {
        const float* from = sums[i / 2][j] + i % 2 * 2;
        float* to = &shared.of[way][row + 8 * i + g][8 * j + 2 * t];
        *reinterpret_cast<float2*>(to) = {from[0], from[1]};
      }
      if (p.norm == 0) continue;
      float sum = square[i];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      if (t == 0) shared.squares[way][row + 8 * i + g] = sum;
    }
  }
};

// Of all warps, in their order.
template <class T>
DEVICE float2 total(const Sums<T>& sums, const Product& p, int row, int n) {
  float2 sum = {0, 0};
#pragma unroll
  for (int w = 0; w < T::ways; ++w) {
    const float2 part = *reinterpret_cast<const float2*>(&sums.of[w][row][n]);
    sum.x += part.x;
    sum.y += part.y;
  }
  if (T::planes == 1 || p.norm == 0) return sum;  // what is normed has two
  float square = 0;
#pragma unroll
  for (int w = 0; w < T::ways; ++w) square += sums.squares[w][row];
  const float factor = rsqrtf(square / p.norm + p.eps);
  return {sum.x * factor, sum.y * factor};
}

template <class T>
DEVICE void product(const Product& p, Sums<T>& shared) {
  launch_next();
  const int steps = p.taps * p.in.channels / 32;
  const int across = p.columns / T::columns;
  const int column = block() % across * T::columns, row = block() / across * T::rows;
  const int way = warp() % T::ways, beside = warp() / T::ways * 8 * T::tall;
  const int first = steps * way / T::ways, end = steps * (way + 1) / T::ways;

  // A thread will finish the same two columns of several rows, some at a time.
  constexpr int kPairs = T::columns / 2, kApart = kBlockThreads / kPairs;
  constexpr int kRows = T::rows / kApart, kEarly = kRows < 1 ? 1 : kRows < 4 ? kRows : 4;
  const int n = thread() % kPairs * 2, begin = thread() / kPairs;
  const int rows = min(T::rows, p.rows - row);
  float2 before[kEarly];
  const Ending ending(p, column + n);
  {
    Warp<T> mine(p, row + beside, column, steps);
    mine.begin(first, end, steps);
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      if (begin + i * kApart < rows) before[i] = ending.before(row + begin + i * kApart);
    }
    mine.run(first, end, steps);
    mine.store(shared, way, beside);
  }
  all_sync();
  with_finish(p.finish, [&]<class K>(K) {
#pragma unroll 1
    for (int r = begin; r < rows; r += kEarly * kApart) {
      float2 next[kEarly];  // what the next rows need is on its way meanwhile
#pragma unroll
      for (int i = 0; i < kEarly; ++i) {
        const int later = r + (kEarly + i) * kApart;
        if (kRows > kEarly && later < rows) next[i] = ending.before(row + later);
      }
#pragma unroll
      for (int i = 0; i < kEarly; ++i) {
        const int now = r + i * kApart;
        if (now < rows) {
          ending.template finish<K::value>(row + now, total(shared, p, now, n), before[i]);
        }
        before[i] = next[i];
      }
    }
  });
}

}  // namespace megakernel::codec
