// The codec's kernels as a library of the host, for the tests: block after block.
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
static void run(int blocks, int threads, Act act) {
  for (int b = 0; b < blocks; ++b) launch(1, threads, 0, act, b);
}

extern "C" void codec_embed(Addresses tensors, Numbers numbers) {
  const Embed p = embed_of(tensors, numbers);
  static Frame shared;
  run(p.count, kBlockThreads, [&] { embed(p, shared); });
}

extern "C" void codec_product(Addresses tensors, Numbers numbers, double eps, int processors) {
  const Product p = product_of(tensors, numbers, eps);
  with_tile(p, processors, [&]<class T>(T, int blocks) {
    static Sums<T> shared;
    run(blocks, kBlockThreads, [&] { product<T>(p, shared); });
  });
}

template <int Head>
static void run_attend(const Attend& p) {
  static AttendShared<Head> shared;
  run(p.count * p.heads, 32 * kAttendWarps, [&] { attend<Head>(p, shared); });
}

extern "C" void codec_attend(Addresses tensors, Numbers numbers) {
  const Attend p = attend_of(tensors, numbers);
  p.head == 16 ? run_attend<16>(p) : p.head == 32 ? run_attend<32>(p) : run_attend<64>(p);
}

extern "C" void codec_depthwise(Addresses tensors, Numbers numbers, double eps) {
  const Depthwise p = depthwise_of(tensors, numbers, eps);
  static DepthwiseShared shared;
  run(p.rows, kBlockThreads, [&] { depthwise(p, shared); });
}

extern "C" void codec_remember(Addresses tensors, Numbers numbers, int layers) {
  const Remember p = remember_of(tensors, numbers, layers);
  run(p.count * p.layers, kBlockThreads, [&] { remember(p); });
}
