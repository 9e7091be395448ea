// The alignment kernels as a host library for the tests.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/align/lengths.cuh"
#include "../../csrc/align/path.cuh"
#include "../../csrc/align/search.cuh"

using namespace megakernel;
using namespace megakernel::align;

template <class Score, bool kAligned, bool kSharedDirections>
static void run(const SearchParams& p, int late) {
  const int blocks = p.num_items * p.blocks_per_item;
  std::vector<SearchShared> shared(blocks);
  const size_t stages = p.strips_per_block * p.num_stages * sizeof(ScoreTile<Score>);
  const size_t dynamic_shared_bytes =
      kSharedDirections ? sizeof(TraceShared) + stages : std::max(stages, sizeof(TraceShared));
  struct alignas(kLineBytes) Line {
    unsigned char of[kLineBytes];
  };
  Line garbage;
  std::fill_n(garbage.of, kLineBytes, 0xFF);
  std::vector<std::vector<Line>> dynamic_shared(
      blocks, std::vector<Line>(dynamic_shared_bytes / kLineBytes, garbage));
  launch(blocks, 64 * p.strips_per_block, late, [&] {
    auto* begin = reinterpret_cast<unsigned char*>(dynamic_shared[block_idx()].data());
    search<Score, kAligned, kSharedDirections>(p, shared[block_idx()], begin);
  });
}

template <class Score>
static void run(const SearchParams& p, bool aligned, int late) {
  if (has_shared_directions(p)) {
    aligned ? run<Score, true, true>(p, late) : run<Score, false, true>(p, late);
  } else {
    aligned ? run<Score, true, false>(p, late) : run<Score, false, false>(p, late);
  }
}

// Type of the scores: 0: float32, 1: bfloat16, 2: float16.
extern "C" void align_search(SearchParams* p, int type, int aligned, int strips_per_block,
                             int late) {
  partition_work(*p, strips_per_block);
  std::vector<uint32_t> workspace(lay_out_workspace(*p, nullptr).num_words, kNotReady);
  lay_out_workspace(*p, workspace.data());
  if (type == 0) run<float>(*p, aligned, late);
  if (type == 1) run<bf16>(*p, aligned, late);
  if (type == 2) run<f16>(*p, aligned, late);
}

extern "C" void align_lengths(const MaskParams* p) {
  static unsigned counts[kMaskWarps];
  for (int b = 0; b < 2 * p->num_items; ++b) {
    launch(1, 32 * kMaskWarps, 0, [&] { count_lengths(*p, counts); }, b);
  }
}

extern "C" void align_path(const PathParams* p) {
  static PathShared shared;
  for (int b = 0; b < p->num_items * ((p->num_rows + kPathRows - 1) / kPathRows); ++b) {
    launch(
        1, 32 * kPathWarps, 0,
        [&] {
          switch (p->element_bytes) {
            case 1:
              return write_path<uint8_t>(*p, shared);
            case 2:
              return write_path<uint16_t>(*p, shared);
            case 4:
              return write_path<uint32_t>(*p, shared);
            default:
              return write_path<uint64_t>(*p, shared);
          }
        },
        b);
  }
}

extern "C" int align_search_bytes() { return sizeof(SearchParams); }
