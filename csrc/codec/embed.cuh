// Embeds codes and computes the rope table of the call.
//
//   output[f]  = sum over g of codebooks[g, codes[f, g]]
//   rope[f, i] = cos and sin of position[f] * inverse_frequencies[i]
//
// One block per frame.
#pragma once

#include "activations.cuh"

namespace megakernel::codec {

// --- static asserts ---

static_assert(kFrameInts <= kBlockThreads, "a thread copies at most one integer of a frame");
static_assert(kNumCodebooks <= kBlockThreads, "a thread loads at most one code");

// --- shared memory ---

// The `Frame` of the block.

// --- warp roles ---

// All warps do the same. A thread copies an integer of the frame, then loads a code, then has pairs
// of adjacent channels and pairs of the rope table.

// --- body ---

// The embedding kernel. Reads requests [frames], codebooks [kNumCodebooks, codebook_size,
// channels]. Writes frames [frames], output [frames, planes, channels], rope [frames, head_dim /
// 2].
DEVICE void embed(const EmbedParams& p, Frame& shared) {
  const int row = block_idx(), num_channels = p.output.num_channels;
  if (thread_idx() < kFrameInts) {
    const int value = reinterpret_cast<const int*>(p.requests + row)[thread_idx()];
    reinterpret_cast<int*>(p.frames + row)[thread_idx()] = value;
    reinterpret_cast<int*>(&shared)[thread_idx()] = value;
  }
  sync_all_threads();
  if (thread_idx() < kNumCodebooks) {
    const int* codes = shared.pending_address == nullptr ? shared.codes : shared.pending_address;
    shared.codes[thread_idx()] = min(max(codes[thread_idx()], 0), p.codebook_size - 1);
  }
  sync_all_threads();
  for (int c = 2 * thread_idx(); c < num_channels; c += 2 * kBlockThreads) {
    float low = 0, high = 0;
#pragma unroll
    for (int g = 0; g < kNumCodebooks; ++g) {
      const long long entry = static_cast<long long>(g) * p.codebook_size + shared.codes[g];
      const float2 term = *reinterpret_cast<const float2*>(p.codebooks + entry * num_channels + c);
      low += term.x;
      high += term.y;
    }
    store_activations(p.output, row, c, low, high);
  }
  for (int i = thread_idx(); i < p.half_head_dim; i += kBlockThreads) {
    const float angle = static_cast<float>(shared.position) * p.inverse_frequencies[i];
    p.rope[row * p.half_head_dim + i] = {cosf(angle), sinf(angle)};
  }
}

}  // namespace megakernel::codec
