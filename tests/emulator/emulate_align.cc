// The alignment kernels as a host library for the tests. The blocks of a search run concurrently.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/align/kernels.cuh"

using namespace megakernel;
using namespace megakernel::align;

// The host reads it as it reads the variable of a CUDA module.
extern "C" const AlignInfo align_info = make_align_info();

// Runs a search; block 0 starts after `late` turns of the other blocks. Shared memory begins with
// arbitrary values.
template <class Score, bool kAligned, bool kSharedDirections>
static void run_search(const SearchParams& p, int num_blocks, int shared_bytes, int late) {
  struct alignas(kLineBytes) Line {
    unsigned char bytes[kLineBytes];
  };
  Line arbitrary;
  std::fill_n(arbitrary.bytes, kLineBytes, 0xFF);
  std::vector<SearchSharedMemory> shared(num_blocks);
  std::vector<std::vector<Line>> dynamic_shared(
      num_blocks, std::vector<Line>(shared_bytes / kLineBytes, arbitrary));
  launch(num_blocks, 64 * p.strips_per_block, late, [&] {
    auto* begin = reinterpret_cast<unsigned char*>(dynamic_shared[block_idx()].data());
    search<Score, kAligned, kSharedDirections>(p, shared[block_idx()], begin);
  });
}

#define MEGAKERNEL_EMULATE_SEARCH(name, Score, kAligned, kSharedDirections)                 \
  extern "C" void name(const SearchParams* p, int num_blocks, int shared_bytes, int late) { \
    run_search<Score, kAligned, kSharedDirections>(*p, num_blocks, shared_bytes, late);     \
  }
MEGAKERNEL_ALIGN_SEARCHES(MEGAKERNEL_EMULATE_SEARCH)

#define MEGAKERNEL_EMULATE_PATH(name, Element)                                    \
  extern "C" void name(const PathParams* p, int num_blocks, int, int) {           \
    static PathSharedMemory shared;                                               \
    for (int b = 0; b < num_blocks; ++b) {                                        \
      launch(1, 32 * kPathWarps, 0, [&] { write_path<Element>(*p, shared); }, b); \
    }                                                                             \
  }
MEGAKERNEL_ALIGN_PATHS(MEGAKERNEL_EMULATE_PATH)

extern "C" void align_count_lengths(const MaskParams* p, int num_blocks, int, int) {
  static unsigned warp_counts[kMaskWarps];
  for (int b = 0; b < num_blocks; ++b) {
    launch(1, 32 * kMaskWarps, 0, [&] { count_lengths(*p, warp_counts); }, b);
  }
}
