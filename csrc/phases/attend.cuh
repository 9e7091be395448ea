// Attention: head norms, rotary embedding, the new keys and values into their slot, and
//   sum_p softmax(q k_p / sqrt(128)) v_p
// over spans of `kSpan` positions. An item is a column, a pair of query heads that shares keys and
// values, and a span; the next phase puts a column's spans together.
#pragma once

#include "../memory.cuh"
#include "../params.cuh"

namespace megakernel {

// Where a column stands in its network.
struct Column {
  int slot;
  int position;
  int first;    // the first column of the same slot in this launch: those between come before it
  bool append;  // whether its keys and values are kept
};

struct Attention {
  float mix[kWarps][2][kHeadDim];
  float peak[kWarps][2], sum[kWarps][2];
};

// Four channels of a head, 4 lane to 4 lane + 3.
struct Quad {
  float of[4];
};

DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

DEVICE float rounded(float value) { return to_float(to_bf16(value)); }

DEVICE Quad load_raw(const float* at) {
  Quad q;
#pragma unroll
  for (int i = 0; i < 4; ++i) q.of[i] = rounded(load_shared_by_blocks(at + thread() % 32 * 4 + i));
  return q;
}

DEVICE Quad load_kept(const bf16* at) {
  Quad q;
#pragma unroll
  for (int i = 0; i < 4; ++i) q.of[i] = to_float(at[thread() % 32 * 4 + i]);
  return q;
}

DEVICE void keep(bf16* at, const Quad& q) {
#pragma unroll
  for (int i = 0; i < 4; ++i) at[thread() % 32 * 4 + i] = to_bf16(q.of[i]);
}

DEVICE float dot(const Quad& a, const Quad& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += a.of[i] * b.of[i];
  return warp_sum(sum);
}

// The head norm, then the turn: channel i goes with channel i + 64, which lane + 16 holds.
DEVICE Quad normed_and_turned(Quad q, const bf16* weight, int position, const Network& n) {
  const int lane = thread() % 32;
  const float scale = rsqrtf(dot(q, q) / kHeadDim + n.eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    q.of[i] = rounded(rounded(q.of[i] * scale) * to_float(weight[4 * lane + i]));
  }
  Quad turned;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float partner = shuffle_xor(q.of[i], 16);
    const float2 turn = n.turns[position * (kHeadDim / 2) + (4 * lane + i) % (kHeadDim / 2)];
    turned.of[i] = rounded(q.of[i] * turn.x + (lane < 16 ? -partner : partner) * turn.y);
  }
  return turned;
}

template <class S>
DEVICE void attend_item(const Params& p, const Network& n, int layer, const Column* columns,
                        Attention& shared, int c, int head, int span) {
  const Column& column = columns[c];
  const Layer& weights = n.layers[layer];
  const size_t slot = (static_cast<size_t>(layer) * n.slots + column.slot) * S::kv_heads + head;
  bf16* keys = n.keys + slot * n.positions * kHeadDim;
  bf16* values = n.values + slot * n.positions * kHeadDim;
  const int warp = thread() / 32, lane = thread() % 32;
  const int base = columns[column.first].position;

  Quad query[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float* raw = p.qkv + static_cast<size_t>(c) * S::qkv + (2 * head + j) * kHeadDim;
    query[j] = normed_and_turned(load_raw(raw), weights.query_norm, column.position, n);
  }

  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  Quad mix[2] = {};
  const int end = min(column.position + 1, (span + 1) * kSpan);
#pragma unroll 1
  for (int at = span * kSpan + warp; at < end; at += kWarps) {
    Quad key, value;
    if (at < base) {
      key = load_kept(keys + static_cast<size_t>(at) * kHeadDim);
      value = load_kept(values + static_cast<size_t>(at) * kHeadDim);
    } else {  // of this launch: not yet in the slot
      const float* raw = p.qkv + static_cast<size_t>(column.first + at - base) * S::qkv +
                         S::queries + head * kHeadDim;
      key = normed_and_turned(load_raw(raw), weights.key_norm, at, n);
      value = load_raw(raw + S::keys);
      if (at == column.position && column.append) {
        keep(keys + static_cast<size_t>(at) * kHeadDim, key);
        keep(values + static_cast<size_t>(at) * kHeadDim, value);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float score = dot(query[j], key) * 0.08838834764831845f;  // 1 / sqrt(128)
      const float higher = fmaxf(peak[j], score);
      const float fade = expf(peak[j] - higher), share = expf(score - higher);
      sum[j] = sum[j] * fade + share;
#pragma unroll
      for (int i = 0; i < 4; ++i) mix[j].of[i] = mix[j].of[i] * fade + share * value.of[i];
      peak[j] = higher;
    }
  }

  block_sync();  // the last item's sums were read
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.mix[warp][j][4 * lane + i] = mix[j].of[i];
    if (lane == 0) {
      shared.peak[warp][j] = peak[j];
      shared.sum[warp][j] = sum[j];
    }
  }
  block_sync();
  const int j = thread() / kHeadDim, channel = thread() % kHeadDim;
  float top = -INFINITY, total = 0, mixed = 0;
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.peak[w][j]);
  for (int w = 0; w < kWarps; ++w) {
    const float fade = expf(shared.peak[w][j] - top);
    total += shared.sum[w][j] * fade;
    mixed += shared.mix[w][j][channel] * fade;
  }
  const size_t out = (static_cast<size_t>(c) * kMaxSpans + span) * S::heads + 2 * head + j;
  p.attended[out * kHeadDim + channel] = mixed;
  if (channel == 0) {
    p.weight[2 * out] = top;
    p.weight[2 * out + 1] = total;
  }
}

template <class S>
DEVICE void attend(const Params& p, const Network& n, int layer, const Column* columns,
                   Attention& shared) {
  int item = block();
#pragma unroll 1
  for (int c = 0; c < p.columns; ++c) {
    const int items = (columns[c].position / kSpan + 1) * S::kv_heads;
#pragma unroll 1
    for (; item < items; item += blocks()) {
      attend_item<S>(p, n, layer, columns, shared, c, item % S::kv_heads, item / S::kv_heads);
    }
    item -= items;
  }
}

// One channel of what a column's attention gave, its spans together.
template <class S>
DEVICE float attended(const Params& p, const Column& column, int c, int k) {
  const int head = k / kHeadDim, channel = k % kHeadDim, spans = column.position / kSpan + 1;
  float top = -INFINITY, total = 0, mixed = 0;
#pragma unroll 1
  for (int span = 0; span < spans; ++span) {
    const size_t at = (static_cast<size_t>(c) * kMaxSpans + span) * S::heads + head;
    top = fmaxf(top, load_shared_by_blocks(p.weight + 2 * at));
  }
#pragma unroll 1
  for (int span = 0; span < spans; ++span) {
    const size_t at = (static_cast<size_t>(c) * kMaxSpans + span) * S::heads + head;
    const float fade = expf(load_shared_by_blocks(p.weight + 2 * at) - top);
    total += load_shared_by_blocks(p.weight + 2 * at + 1) * fade;
    mixed += load_shared_by_blocks(p.attended + at * kHeadDim + channel) * fade;
  }
  return mixed / total;
}

}  // namespace megakernel
