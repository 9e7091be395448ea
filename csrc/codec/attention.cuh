// A frame's attention to the window that ends with it: a block a frame and head.
#pragma once

#include "projection.cuh"

namespace megakernel::codec {

constexpr int kAttendWarps = 4;
constexpr int kWarpKeys = kWindow / kAttendWarps;
static_assert(kWindow % kAttendWarps == 0);

template <int Head>
struct AttendShared {
  float mixed[kAttendWarps][Head];
  float most[kAttendWarps], total[kAttendWarps];
};

struct Eight {
  float of[8];
};

DEVICE Eight load_eight(const float* at) {
  const float4 a = reinterpret_cast<const float4*>(at)[0];
  const float4 b = reinterpret_cast<const float4*>(at)[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

// Head / 8 lanes share a key; a warp has every key of its quarter of the window at once.
template <int Head>
DEVICE void attend(const Attend& p, AttendShared<Head>& shared) {
  constexpr int kLanes = Head / 8, kAtOnce = 32 / kLanes;
  constexpr int kPasses = (kWarpKeys + kAtOnce - 1) / kAtOnce;
  launch_next();
  const int row = block() / p.heads, head = block() % p.heads, wide = p.heads * Head;
  const int channel = head * Head + lane() % kLanes * 8;
  const Frame& frame = p.frames[row];
  const float* keys = p.memory + frame.slot * p.memory_stride + channel;
  const float* values = keys + static_cast<long long>(p.ring) * wide;
  wait_for_previous();

  Eight key[kPasses], value[kPasses];
  bool seen[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int k = i * kAtOnce + lane() / kLanes;
    const int position = frame.position + 1 - kWindow + warp() * kWarpKeys + k;
    seen[i] = k < kWarpKeys && position >= 0;
    const int at = (seen[i] ? position : frame.position) % p.ring * wide;
    key[i] = load_eight(keys + at);
    value[i] = load_eight(values + at);
  }
  const Eight query = load_eight(p.queries + static_cast<long long>(row) * wide + channel);
  float score[kPasses], most = -1e30f;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    score[i] = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) score[i] += query.of[c] * key[i].of[c];
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) score[i] += shuffle_xor(score[i], mask);
    if (seen[i]) most = max(most, score[i]);
  }
#pragma unroll
  for (int mask = kLanes; mask < 32; mask *= 2) most = max(most, shuffle_xor(most, mask));
  float total = 0;
  Eight mixed = {};
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const float part = seen[i] ? expf(score[i] - most) : 0.0f;
    total += part;
#pragma unroll
    for (int c = 0; c < 8; ++c) mixed.of[c] += part * value[i].of[c];
  }
#pragma unroll
  for (int mask = kLanes; mask < 32; mask *= 2) {
    total += shuffle_xor(total, mask);
#pragma unroll
    for (int c = 0; c < 8; ++c) mixed.of[c] += shuffle_xor(mixed.of[c], mask);
  }
  if (lane() < kLanes) {
    for (int c = 0; c < 8; ++c) shared.mixed[warp()][8 * lane() + c] = mixed.of[c];
  }
  if (lane() == 0) shared.most[warp()] = most, shared.total[warp()] = total;
  all_sync();

  if (thread() >= Head / 2) return;
  for (int w = 0; w < kAttendWarps; ++w) most = max(most, shared.most[w]);
  float low = 0, high = 0, sum = 0;
  for (int w = 0; w < kAttendWarps; ++w) {
    const float factor = expf(shared.most[w] - most);
    sum += factor * shared.total[w];
    low += factor * shared.mixed[w][2 * thread()];
    high += factor * shared.mixed[w][2 * thread() + 1];
  }
  put(p.out, row, head * Head + 2 * thread(), low / sum, high / sum);
}

}  // namespace megakernel::codec
