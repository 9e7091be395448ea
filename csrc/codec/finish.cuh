// What follows a product's sums, two neighbouring columns at a time.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::codec {

// sin^2 without a branch: the angle is brought to half a turn of its period, pi, which has three
// parts here; then sine's series.
DEVICE float sin_squared(float angle) {
  const float turns = rintf(angle * 0.318309886f);
  float x = fmaf(turns, -3.140625f, angle);
  x = fmaf(turns, -9.67621803e-4f, x);
  x = fmaf(turns, -3.17865094e-8f, x);
  const float square = x * x;
  float series = -2.50521084e-8f;
  series = fmaf(series, square, 2.75573192e-6f);
  series = fmaf(series, square, -1.98412698e-4f);
  series = fmaf(series, square, 8.33333333e-3f);
  series = fmaf(series, square, -1.66666667e-1f);
  const float sine = fmaf(series * square, x, x);
  return min(sine * sine, 1.0f);
}

DEVICE float snake(float v, const Column& c) { return fmaf(sin_squared(v * c.alpha), c.beta, v); }
DEVICE float gelu(float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678f)); }
DEVICE float silu(float v) { return v / (1.0f + expf(-v)); }

// What the first plane rounds off goes into the second.
DEVICE void put(f16* at, const Rows& out, float low, float high) {
  const uint32_t bits = pack_f16(low, high);
  *reinterpret_cast<uint32_t*>(at) = bits;
  if (out.planes == 1) return;
  const float2 kept = unpack_f16(bits);
  *reinterpret_cast<uint32_t*>(at + out.channels) = pack_f16(low - kept.x, high - kept.y);
}
DEVICE void put(f16* at, const Rows& out, float value) {
  *at = to_f16(value);
  if (out.planes == 2) at[out.channels] = to_f16(value - to_float(*at));
}
DEVICE f16* row_of(const Rows& rows, long long row) {
  return rows.now + row * rows.planes * rows.channels;
}

// Turned queries; keys and values into the stream's memory.
DEVICE void put_turned(const Product& p, int row, int n, float low, float high, float2 turn) {
  const int wide = p.columns / 3;
  if (n < 2 * wide) {
    const float turned = fmaf(low, turn.x, -(high * turn.y));
    high = fmaf(high, turn.x, low * turn.y);
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

// Columns n and n + 1, of any rows.
struct Ending {
  const Product& p;
  int n;
  Column one, two;
  f16* out;         // in the output's first row
  long long width;  // of what is the output of one row

  DEVICE Ending(const Product& p, int n) : p(p), n(n), one(p.column[n]), two(p.column[n + 1]) {
    const int c = p.finish == kGate ? n / 2 : n, row = c / max(p.out.channels, 1);
    out = row_of(p.out, row) + (c - row * p.out.channels);
    width = static_cast<long long>(p.finish == kGate ? p.columns / 2 : p.columns) * p.out.planes;
  }

  // The residual there, or the turn.
  DEVICE float2 before(int row) const {
    if (p.finish == kTurn) return p.turns[row * (p.head / 2) + n % p.head / 2];
    if (p.residual == nullptr) return {0, 0};
    const long long at = static_cast<long long>(row) * p.columns + n;
    return *reinterpret_cast<const float2*>(p.residual + at);
  }

  template <Finish What>
  DEVICE void finish(int row, float2 sum, float2 before) const {
    float low = fmaf(sum.x, one.scale, one.bias), high = fmaf(sum.y, two.scale, two.bias);
    if constexpr (What == kTurn) return put_turned(p, row, n, low, high, before);
    low += before.x;
    high += before.y;
    if (p.sum != nullptr) {
      const long long at = static_cast<long long>(row) * p.columns + n;
      *reinterpret_cast<float2*>(p.sum + at) = {low, high};
    }
    f16* at = out + row * width;
    if constexpr (What == kWave) {
      if (n == 0) put_sample(p, row, low + high);
    } else if constexpr (What == kGate) {
      put(at, p.out, silu(low) * high);
    } else if constexpr (What == kSnake) {
      put(at, p.out, snake(low, one), snake(high, two));
    } else if constexpr (What == kGelu) {
      put(at, p.out, gelu(low), gelu(high));
    } else {
      put(at, p.out, low, high);
    }
  }
};

template <Finish Value>
struct Kind {
  static constexpr Finish value = Value;
};

// Calls `run` with what follows, known to the compiler.
template <class Run>
DEVICE void with_finish(Finish finish, Run run) {
  switch (finish) {
    case kPlain:
      return run(Kind<kPlain>());
    case kSnake:
      return run(Kind<kSnake>());
    case kGelu:
      return run(Kind<kGelu>());
    case kGate:
      return run(Kind<kGate>());
    case kTurn:
      return run(Kind<kTurn>());
    case kWave:
      return run(Kind<kWave>());
  }
}

}  // namespace megakernel::codec
