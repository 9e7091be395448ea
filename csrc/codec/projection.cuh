// Rows times weights: every convolution of the codec and every product of its transformer.
//
// K is the taps' channels, 32 a step. A lane loads eight neighbouring channels of a row at once and
// feeds them to two matrix instructions; weights are packed for that order, so that nothing passes
// through shared memory but the sums. Warps share K among them in ranges that depend on K alone and
// are added in their order: a row's bits do not depend on the rows beside it.
#pragma once

#include "../memory.cuh"
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
  // Blocks of a multiprocessor: where there is little to fetch, two hide each other's beginnings
  // and ends.
  static constexpr int resident = Tall <= 2 && Wide <= 2 && Planes == 1 ? 2 : 1;
  // Steps that are fetched together, two groups in turn: what registers allow. (A ring of single
  // steps would not do: a warp has few counters of loads under way, and waits for all that share
  // one.)
  static constexpr int registers = 8 * (Tall * Planes + Wide);
  static constexpr int fitting = (resident == 2 ? 64 : 128) / registers;
  static constexpr int group = fitting < 1 ? 1 : fitting;
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
    sum += f.x * f.x + f.y * f.y;
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
  float sums[T::planes][kPairs][T::wide][4] = {};
  float square[T::tall] = {};
  uint4 a[2][T::group][T::planes][T::tall];
  uint4 w[2][T::group][T::wide];

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

  DEVICE void load_weights(int half, int step, int end, int steps) {
#pragma unroll
    for (int d = 0; d < T::group; ++d) {
      if (step + d >= end) continue;
#pragma unroll
      for (int j = 0; j < T::wide; ++j) {
        const uint4* from = weights + (static_cast<long long>(j) * steps + step + d) * 32;
        w[half][d][j] = T::beside > 1 ? *from : load_constant(from);
      }
    }
  }

  DEVICE void load_rows(int half, int step, int end, Step& at) {
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
          a[half][d][plane][i] = *reinterpret_cast<const uint4*>(from + plane * p.in.channels);
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
          multiply_f16(sums[plane][i][j], {low.x, high.x, low.y, high.y}, {w[j].x, w[j].y});
          multiply_f16(sums[plane][i][j], {low.z, high.z, low.w, high.w}, {w[j].z, w[j].w});
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
    for (int half = 0; half < 2; ++half) load_weights(half, first + half * T::group, end, steps);
  }

  // Its range of K.
  DEVICE void run(int first, int end, int steps) {
    Step at(p, first);
#pragma unroll
    for (int half = 0; half < 2; ++half) load_rows(half, first + half * T::group, end, at);
#pragma unroll 1
    for (int s = first; s < end; s += 2 * T::group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int now = s + half * T::group, next = now + 2 * T::group;
#pragma unroll
        for (int d = 0; d < T::group; ++d) {
          if (now + d < end) multiply_step(a[half][d], w[half][d]);
        }
        load_weights(half, next, end, steps);
        load_rows(half, next, end, at);
      }
    }
  }

  DEVICE void store(Sums<T>& shared, int way, int row) {
    const int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int i = 0; i < T::tall; ++i) {
#pragma unroll
      for (int j = 0; j < T::wide; ++j) {
        float2 sum = {sums[0][i / 2][j][i % 2 * 2], sums[0][i / 2][j][i % 2 * 2 + 1]};
        if constexpr (T::planes == 2) {
          sum.x += sums[1][i / 2][j][i % 2 * 2];
          sum.y += sums[1][i / 2][j][i % 2 * 2 + 1];
        }
        float* to = &shared.of[way][row + 8 * i + g][8 * j + 2 * t];
        *reinterpret_cast<float2*>(to) = sum;
      }
      if (p.norm == 0) continue;
      float sum = square[i];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      if (t == 0) shared.squares[way][row + 8 * i + g] = sum;
    }
  }
};

DEVICE float snake(float v, const Column& c) {
  const float s = sinf(v * c.alpha);
  return v + s * s * c.beta;
}
DEVICE float gelu(float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678f)); }
DEVICE float silu(float v) { return v / (1.0f + expf(-v)); }

// What the first plane rounds off goes into the second.
DEVICE void put(const Rows& out, long long row, int channel, float low, float high) {
  f16* at = out.now + row * out.planes * out.channels + channel;
  const uint32_t bits = pack_f16(low, high);
  *reinterpret_cast<uint32_t*>(at) = bits;
  if (out.planes == 1) return;
  const float2 kept = unpack_f16(bits);
  *reinterpret_cast<uint32_t*>(at + out.channels) = pack_f16(low - kept.x, high - kept.y);
}
DEVICE void put(const Rows& out, long long row, int channel, float value) {
  f16* at = out.now + row * out.planes * out.channels + channel;
  *at = to_f16(value);
  if (out.planes == 2) at[out.channels] = to_f16(value - to_float(*at));
}

// Turned queries; keys and values into the stream's memory.
DEVICE void put_turned(const Product& p, int row, int n, float low, float high, float2 turn) {
  const int wide = p.columns / 3;
  if (n < 2 * wide) {
    const float turned = low * turn.x - high * turn.y;
    high = high * turn.x + low * turn.y;
    low = turned;
  }
  const Frame& frame = p.frames[row];
  float* at = p.queries + static_cast<long long>(row) * wide + n;
  if (n >= wide) {
    const int which = n / wide - 1, place = which * p.ring + frame.position % p.ring;
    at = p.memory + frame.slot * p.memory_stride + static_cast<long long>(place) * wide + n % wide;
  }
  *reinterpret_cast<float2*>(at) = {low, high};
}

DEVICE void put_sample(const Product& p, int row, float v) {
  if (!isfinite(v)) {
    p.broken[row / p.in.rate] = 1;
    v = 0;
  }
  p.pcm[row] = static_cast<short>(rintf(32767.0f * min(max(v, -1.0f), 1.0f)));
}

// Columns n and n + 1 of a row; `before` is the residual there, or the turn.
DEVICE void finish(const Product& p, int row, int n, float2 sum, Column one, Column two,
                   float2 before) {
  float low = sum.x * one.scale + one.bias;
  float high = sum.y * two.scale + two.bias;
  if (p.finish == kTurn) return put_turned(p, row, n, low, high, before);
  if (p.residual != nullptr) {
    low += before.x;
    high += before.y;
  }
  if (p.sum != nullptr) {
    const long long at = static_cast<long long>(row) * p.columns + n;
    *reinterpret_cast<float2*>(p.sum + at) = {low, high};
  }
  if (p.finish == kWave) {
    if (n == 0) put_sample(p, row, low + high);
    return;
  }
  if (p.finish == kGate) return put(p.out, row, n / 2, silu(low) * high);
  if (p.finish == kSnake) low = snake(low, one), high = snake(high, two);
  if (p.finish == kGelu) low = gelu(low), high = gelu(high);
  const int beside = p.columns / p.out.channels, which = n / p.out.channels;
  put(p.out, static_cast<long long>(row) * beside + which, n - which * p.out.channels, low, high);
}

DEVICE float2 load_before(const Product& p, int row, int n) {
  if (p.finish == kTurn) return p.turns[row * (p.head / 2) + n % p.head / 2];
  if (p.residual == nullptr) return {0, 0};
  return *reinterpret_cast<const float2*>(p.residual + static_cast<long long>(row) * p.columns + n);
}

template <class T>
DEVICE void product(const Product& p, Sums<T>& shared) {
  launch_next();
  const int steps = p.taps * p.in.channels / 32;
  const int across = p.columns / T::columns;
  const int column = block() % across * T::columns, row = block() / across * T::rows;
  const int way = warp() % T::ways, beside = warp() / T::ways * 8 * T::tall;
  const int first = steps * way / T::ways, end = steps * (way + 1) / T::ways;

  // A thread will finish the same two columns of several rows.
  constexpr int kPairs = T::columns / 2, kApart = kBlockThreads / kPairs;
  constexpr int kRows = T::rows / kApart, kEarly = kRows < 1 ? 1 : kRows < 4 ? kRows : 4;
  const int n = column + thread() % kPairs * 2, begin = thread() / kPairs;
  const int rows = min(T::rows, p.rows - row);
  float2 before[kEarly];
  const Column one = p.column[n], two = p.column[n + 1];
  {
    Warp<T> mine(p, row + beside, column, steps);
    mine.begin(first, end, steps);
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      if (begin + i * kApart < rows) before[i] = load_before(p, row + begin + i * kApart, n);
    }
    mine.run(first, end, steps);
    mine.store(shared, way, beside);
  }
  all_sync();
  const auto finish_row = [&](int r, float2 before) {
    float2 sum = {0, 0};
    float square = 0;
#pragma unroll
    for (int w = 0; w < T::ways; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(&shared.of[w][r][n - column]);
      sum.x += part.x;
      sum.y += part.y;
      if (p.norm > 0) square += shared.squares[w][r];
    }
    if (p.norm > 0) {
      const float factor = rsqrtf(square / p.norm + p.eps);
      sum = {sum.x * factor, sum.y * factor};
    }
    finish(p, row + r, n, sum, one, two, before);
  };
  // Some rows at a time; what the next ones need is on its way meanwhile.
#pragma unroll 1
  for (int r = begin; r < rows; r += kEarly * kApart) {
    float2 next[kEarly];
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      const int later = r + (kEarly + i) * kApart;
      if (kRows > kEarly && later < rows) next[i] = load_before(p, row + later, n);
    }
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      if (r + i * kApart < rows) finish_row(r + i * kApart, before[i]);
    }
#pragma unroll
    for (int i = 0; i < kEarly; ++i) before[i] = next[i];
  }
}

}  // namespace megakernel::codec
