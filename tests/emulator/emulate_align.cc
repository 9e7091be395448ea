// The alignment's kernels as a library of the host, for the tests.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/align/lengths.cuh"
#include "../../csrc/align/path.cuh"
#include "../../csrc/align/search.cuh"

using namespace megakernel;
using namespace megakernel::align;

template <class E, bool kAligned>
static void run(const Search& p, int late) {
  const int blocks = p.items * p.chain;
  std::vector<Shared> shared(blocks);
  const size_t room = std::max(p.warps * p.stages * sizeof(Tile<E>), sizeof(Way));
  std::vector<std::vector<uint4>> rooms(blocks, std::vector<uint4>(room / 16));
  launch(blocks, 64 * p.warps, late,
         [&] { search<E, kAligned>(p, shared[block()], rooms[block()].data()); });
}

// Scores of 0: float, 1: bfloat16, 2: half precision.
extern "C" void align_search(Search* p, int type, int aligned, int warps, int late) {
  cut_work(*p, warps);
  std::vector<uint32_t> workspace(lay_out(*p, nullptr).words, kMissing);
  lay_out(*p, workspace.data());
  if (type == 0) aligned ? run<float, true>(*p, late) : run<float, false>(*p, late);
  if (type == 1) aligned ? run<bf16, true>(*p, late) : run<bf16, false>(*p, late);
  if (type == 2) aligned ? run<f16, true>(*p, late) : run<f16, false>(*p, late);
}

extern "C" void align_lengths(const Mask* p) {
  static unsigned counts[kMaskWarps];
  for (int b = 0; b < 2 * p->items; ++b) {
    launch(1, 32 * kMaskWarps, 0, [&] { measure(*p, counts); }, b);
  }
}

extern "C" void align_path(const Path* p) {
  static PathShared shared;
  for (int b = 0; b < p->items * ((p->rows + kPathRows - 1) / kPathRows); ++b) {
    launch(
        1, 32 * kPathWarps, 0,
        [&] {
          switch (p->bytes) {
            case 1:
              return path<uint8_t>(*p, shared);
            case 2:
              return path<uint16_t>(*p, shared);
            case 4:
              return path<uint32_t>(*p, shared);
            default:
              return path<uint64_t>(*p, shared);
          }
        },
        b);
  }
}

extern "C" int align_search_bytes() { return sizeof(Search); }
