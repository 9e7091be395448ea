// The codec's kernels as a host library for the tests; blocks run one after another.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/codec/arguments.cuh"
#include "../../csrc/codec/attention.cuh"
#include "../../csrc/codec/depthwise.cuh"
#include "../../csrc/codec/embed.cuh"
#include "../../csrc/codec/state_update.cuh"
#include "../../csrc/codec/tiles.cuh"

using namespace megakernel;
using namespace megakernel::codec;

template <class Act>
static void run(int num_blocks, int num_threads, Act act) {
  for (int b = 0; b < num_blocks; ++b) launch(1, num_threads, 0, act, b);
}

extern "C" void codec_embed(Addresses tensors, Numbers numbers) {
  const EmbedParams p = embed_params(tensors, numbers);
  static Frame shared;
  run(p.num_frames, kBlockThreads, [&] { embed(p, shared); });
}

extern "C" void codec_project(Addresses tensors, Numbers numbers, double eps, int num_sms) {
  const ProjectionParams p = projection_params(tensors, numbers, eps);
  with_tile(p, num_sms, [&]<class T>(T, int num_blocks) {
    static ProjectionShared<T> shared;
    run(num_blocks, kBlockThreads, [&] { project<T>(p, shared); });
  });
}

template <int kHeadDim>
static void run_attention(const AttentionParams& p) {
  static AttentionShared<kHeadDim> shared;
  run(p.num_frames * p.num_heads, 32 * kAttentionWarps, [&] { attend<kHeadDim>(p, shared); });
}

extern "C" void codec_attend(Addresses tensors, Numbers numbers) {
  const AttentionParams p = attention_params(tensors, numbers);
  p.head_dim == 16   ? run_attention<16>(p)
  : p.head_dim == 32 ? run_attention<32>(p)
                     : run_attention<64>(p);
}

extern "C" void codec_depthwise(Addresses tensors, Numbers numbers, double eps) {
  const DepthwiseParams p = depthwise_params(tensors, numbers, eps);
  static DepthwiseShared shared;
  run(p.num_rows, kBlockThreads, [&] { depthwise(p, shared); });
}

extern "C" void codec_update_state(Addresses tensors, Numbers numbers, int layers) {
  const StateUpdateParams p = state_update_params(tensors, numbers, layers);
  run(p.num_frames * p.num_layers, kBlockThreads, [&] { update_state(p); });
}
