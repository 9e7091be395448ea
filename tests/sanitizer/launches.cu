// Launches each kernel of a small model under compute-sanitizer: one stream, several streams, and
// prefill batches of every size. With MEGAKERNEL_WIDE_STREAMS it has the wide kernels only, for the
// launches `several` and `prompts`. Prints nothing unless a launch fails.
#define MEGAKERNEL_MODEL ModelTinyWide  // its talker is wider, so there is an input projection
#include "../../bench/random_params.cuh"

using namespace megakernel;
using M = KernelModel;

constexpr int kBlocks = 8;  // fewer than a GPU takes: the tools need time for each
constexpr int kLayers = 2, kFrames = 2, kPositions = 256;
constexpr int kPrompt = 140;            // attention takes two spans
constexpr int kResident = kPrompt + 1;  // the first layer's keys and values stay in the L2 cache
constexpr uint64_t kTimeoutNs = 60'000'000'000;  // the tools are slow

static void launch_generate(Params& p, int num_streams) {
  set_streams(p, num_streams, kPrompt, kPositions);
  launch_kernel(generate_kernel(num_streams), p, kBlocks);
  finish_launches(p);
  for (int c = 0; c < num_streams; ++c) {
    if (p.num_published[c] == kFrames) continue;
    fprintf(stderr, "Stream %d of %d has %u frames of %d.\n", c, num_streams, p.num_published[c],
            kFrames);
    exit(1);
  }
}

#ifndef MEGAKERNEL_WIDE_STREAMS
// Batches of every size; the second and the fourth continue the slot of the one before.
static void launch_prompts(Params& p) {
  const int counts[] = {kMaxPrefillColumns, kMaxStreams, 2, 1};
  std::vector<PrefillBatch> batches;
  int num_columns = 0;
  for (int i = 0; i < 4; ++i) {
    batches.push_back(prefill_batch(i / 2, kPrompt + num_columns, num_columns, counts[i], true));
    num_columns += counts[i];
  }
  p.prompt_vectors = random_bf16(num_columns * M::Talker::hidden_size, kWeightRange);
  p.prefill_batches = device_copy(batches);
  launch_prefill(p, batches, kBlocks, [&] { finish_launches(p); });
}
#elif MEGAKERNEL_WIDE_STREAMS >= 32  // a narrower program has no kernel for prompts
// Two prompts share a batch; with 64 columns each has two prompt tiles, side by side. The second
// prompt ends before its last tile would be full, and the first one ends in a batch of its own.
static void launch_prompts(Params& p) {
  constexpr int kColumnsOfOne = kWidePrefillColumns / 2, kRest = 3;
  WidePrefillBatch batches[2] = {};
  const auto add_columns = [](WidePrefillBatch& batch, int slot, int position, int count,
                              bool ends) {
    const int first = batch.num_columns;
    batch.num_columns += count;
    for (int c = 0; c < count; ++c) {
      const int tile = c / kPromptTileSize * kPromptTileSize;
      batch.columns[first + c] = {slot, position + c, first + tile, tile + kPromptTileSize < count,
                                  ends && c == count - 1};
    }
  };
  add_columns(batches[0], 0, kPrompt, kColumnsOfOne, false);
  add_columns(batches[0], 1, kPrompt, kColumnsOfOne - kRest, true);
  batches[1].first_row = batches[0].num_columns;
  add_columns(batches[1], 0, kPrompt + kColumnsOfOne, kRest, true);
  p.prompt_vectors = random_bf16(kWidePrefillColumns * M::Talker::hidden_size, kWeightRange);
  for (const WidePrefillBatch& batch : batches) {
    p.wide_prefill_batch = device_copy(std::vector{batch});
    launch_kernel({prefill_wide, kSharedBytes<kWideStreams>}, p, kBlocks);
    finish_launches(p);
  }
}
#endif

int main(int num_arguments, char** arguments) {
  Params p = random_params<M>(
      {kLayers, kLayers, kMaxStreams, kPositions, kFrames, kBlocks, kResident, kTimeoutNs});
  const char* launch = num_arguments == 2 ? arguments[1] : "";
  if (strcmp(launch, "several") == 0) {
    launch_generate(p, kMaxStreams);
#if !defined(MEGAKERNEL_WIDE_STREAMS) || MEGAKERNEL_WIDE_STREAMS >= 32
  } else if (strcmp(launch, "prompts") == 0) {
    launch_prompts(p);
#endif
#ifndef MEGAKERNEL_WIDE_STREAMS
  } else if (strcmp(launch, "one") == 0) {
    launch_generate(p, 1);
#endif
  } else {
    fprintf(stderr, "Name a launch: one, several or prompts.\n");
    return 1;
  }
  return 0;
}
