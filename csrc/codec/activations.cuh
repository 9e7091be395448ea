// Access to activation rows: addresses of a row and its history, and stores to one or two planes.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::codec {

// Address of a row and of the rows before it. The row `back` rows earlier begins at
// `current - back * width` if `back <= rows_since_start`, else at `history - back * width`.
struct RowAddress {
  const f16* current;
  const f16* history;
  int rows_since_start;  // rows of the same stream before this one in the call
};

// The address of a row of `input` [rows, planes, channels].
DEVICE RowAddress row_address(const Activations& input, const Frame* frames, int row) {
  const Frame& frame = frames[row / input.rows_per_frame];
  const int rows_since_start = row - frame.first_frame * input.rows_per_frame;
  const int width = input.num_planes * input.num_channels;
  return {input.data + static_cast<long long>(row) * width,
          input.history + frame.slot * input.history_stride +
              (input.history_rows + rows_since_start) * width,
          rows_since_start};
}

// Rounds eight adjacent channels.
DEVICE uint4 round_eight_activations(const float (&v)[8]) {
  return {pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7])};
}

// Stores channels `channel` and `channel + 1` of a row of `output` [rows, planes, channels]. The
// second plane receives the rounding errors.
DEVICE void store_activations(const Activations& output, long long row, int channel, float low,
                              float high) {
  f16* at = output.data + row * output.num_planes * output.num_channels + channel;
  const uint32_t rounded_bits = pack_f16(low, high);
  *reinterpret_cast<uint32_t*>(at) = rounded_bits;
  if (output.num_planes == 1) return;
  const float2 rounded = unpack_f16(rounded_bits);
  *reinterpret_cast<uint32_t*>(at + output.num_channels) =
      pack_f16(low - rounded.x, high - rounded.y);
}
// The same for one channel.
DEVICE void store_activations(const Activations& output, long long row, int channel, float value) {
  f16* at = output.data + row * output.num_planes * output.num_channels + channel;
  *at = to_f16(value);
  if (output.num_planes == 2) at[output.num_channels] = to_f16(value - to_float(*at));
}
// The same for eight adjacent channels at `to`, the first a multiple of eight. The second plane is
// `plane_size` channels further on; 0: there is none.
DEVICE void store_eight_activations(f16* to, int plane_size, const float (&v)[8]) {
  uint32_t rounded[4], errors[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rounded[i] = pack_f16(v[2 * i], v[2 * i + 1]);
    const float2 pair = unpack_f16(rounded[i]);
    errors[i] = pack_f16(v[2 * i] - pair.x, v[2 * i + 1] - pair.y);
  }
  *reinterpret_cast<uint4*>(to) = {rounded[0], rounded[1], rounded[2], rounded[3]};
  if (plane_size == 0) return;
  *reinterpret_cast<uint4*>(to + plane_size) = {errors[0], errors[1], errors[2], errors[3]};
}

// --- tiled activations ---

constexpr int kTiledPlaneSize = kTileRows * kStepChannels;  // in elements

// The rows of F adjacent frames are interleaved: first the first row of each of them. So all rows
// of a tile have their predecessors at the same distance, F rows before. F is 1 if kTileRows
// divides the rows of a frame.
DEVICE int interleaved_frames(int rows_per_frame) {
  const int power_of_two = rows_per_frame & -rows_per_frame;  // the largest factor
  return kTileRows / min(kTileRows, power_of_two);
}
// The place of a row among the tiled rows.
DEVICE int tiled_row(const Activations& x, int row) {
  const int num_frames = interleaved_frames(x.rows_per_frame);
  const int frame = row / x.rows_per_frame, row_of_frame = row % x.rows_per_frame;
  return (frame - frame % num_frames) * x.rows_per_frame + row_of_frame * num_frames +
         frame % num_frames;
}
// The place of a channel of a tiled row, in elements. Its rounding error is kTiledPlaneSize
// elements further on.
DEVICE long long tiled_offset(const Activations& x, int tiled_row, int channel) {
  const int t = channel % kStepChannels / 8, instruction = channel % 8 / 4;
  const long long step =
      static_cast<long long>(tiled_row / kTileRows) * (x.num_channels / kStepChannels) +
      channel / kStepChannels;
  return step * x.num_planes * kTiledPlaneSize +
         ((2 * instruction + t / 2) * kTileRows + tiled_row % kTileRows) * 8 + t % 2 * 4 +
         channel % 4;
}
constexpr int kTiledInstruction = 2 * kTileRows * 8;  // from instruction 0 to 1, in elements

// Stores eight adjacent channels of a tiled row, the first a multiple of eight.
DEVICE void store_eight_tiled_activations(const Activations& output, int tiled_row, int channel,
                                          const float (&v)[8]) {
  f16* to = output.data + tiled_offset(output, tiled_row, channel);
#pragma unroll
  for (int i = 0; i < 8; i += 4, to += kTiledInstruction) {
    const uint2 rounded = {pack_f16(v[i], v[i + 1]), pack_f16(v[i + 2], v[i + 3])};
    *reinterpret_cast<uint2*>(to) = rounded;
    if (output.num_planes == 1) continue;
    const float2 a = unpack_f16(rounded.x), b = unpack_f16(rounded.y);
    *reinterpret_cast<uint2*>(to + kTiledPlaneSize) = {pack_f16(v[i] - a.x, v[i + 1] - a.y),
                                                       pack_f16(v[i + 2] - b.x, v[i + 3] - b.y)};
  }
}
// Stores channels `channel` and `channel + 1` of a row that may be tiled.
DEVICE void store_maybe_tiled_activations(const Activations& output, int row, int channel,
                                          float low, float high) {
  if (!output.is_tiled) return store_activations(output, row, channel, low, high);
  f16* to = output.data + tiled_offset(output, tiled_row(output, row), channel);
  const uint32_t rounded_bits = pack_f16(low, high);
  *reinterpret_cast<uint32_t*>(to) = rounded_bits;
  if (output.num_planes == 1) return;
  const float2 rounded = unpack_f16(rounded_bits);
  *reinterpret_cast<uint32_t*>(to + kTiledPlaneSize) = pack_f16(low - rounded.x, high - rounded.y);
}
// Loads eight adjacent channels of a plane of a row that may be tiled, the first a multiple of
// eight.
DEVICE uint4 load_eight_maybe_tiled_activations(const Activations& x, int row, int plane,
                                                int channel) {
  if (!x.is_tiled) {
    const long long at = static_cast<long long>(row) * x.num_planes + plane;
    return *reinterpret_cast<const uint4*>(x.data + at * x.num_channels + channel);
  }
  const f16* from = x.data + tiled_offset(x, tiled_row(x, row), channel) + plane * kTiledPlaneSize;
  const uint2 low = *reinterpret_cast<const uint2*>(from);
  const uint2 high = *reinterpret_cast<const uint2*>(from + kTiledInstruction);
  return {low.x, low.y, high.x, high.y};
}

}  // namespace megakernel::codec
