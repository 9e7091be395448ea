// The alignment's kernels as a library of the host, for the tests.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/align/lengths.cuh"
#include "../../csrc/align/path.cuh"
#include "../../csrc/align/search.cuh"

using namespace megakernel;
using namespace megakernel::align;

template <class E, bool kAligned, bool kAlone>
static void run(const Search& p, int late) {
  const int blocks = p.items * p.chain;
  std::vector<Shared> shared(blocks);
  const size_t stages = p.warps * p.stages * sizeof(Stage<E>);
  const size_t room = kAlone ? sizeof(Way) + stages : std::max(stages, sizeof(Way));
  struct alignas(kLine) Line {
    unsigned char of[kLine];
  };
  Line garbage;
  std::fill_n(garbage.of, kLine, 0xFF);
  std::vector<std::vector<Line>> rooms(blocks, std::vector<Line>(room / kLine, garbage));
  launch(blocks, 64 * p.warps, late, [&] {
    auto* begin = reinterpret_cast<unsigned char*>(rooms[block_idx()].data());
    search<E, kAligned, kAlone>(p, shared[block_idx()], begin);
  });
}

template <class E>
static void run(const Search& p, bool aligned, int late) {
  if (is_alone(p)) {
    aligned ? run<E, true, true>(p, late) : run<E, false, true>(p, late);
  } else {
    aligned ? run<E, true, false>(p, late) : run<E, false, false>(p, late);
  }
}

// Scores of 0: float, 1: bfloat16, 2: half precision.
extern "C" void align_search(Search* p, int type, int aligned, int warps, int late) {
  cut_work(*p, warps);
  std::vector<uint32_t> workspace(lay_out(*p, nullptr).words, kMissing);
  lay_out(*p, workspace.data());
  if (type == 0) run<float>(*p, aligned, late);
  if (type == 1) run<bf16>(*p, aligned, late);
  if (type == 2) run<f16>(*p, aligned, late);
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
