// Launches each kernel of a small model under compute-sanitizer: one stream, several streams, and
// prefill batches of every size. With MEGAKERNEL_WIDE_STREAMS it has the wide kernel only, for the
// launch `several`. Prints nothing unless a launch fails.
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
static void launch_prefill_batches(Params& p) {
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
#endif

int main(int num_arguments, char** arguments) {
  Params p = random_params<M>(
      {kLayers, kLayers, kMaxStreams, kPositions, kFrames, kBlocks, kResident, kTimeoutNs});
  const char* launch = num_arguments == 2 ? arguments[1] : "";
  if (strcmp(launch, "several") == 0) {
    launch_generate(p, kMaxStreams);
#ifndef MEGAKERNEL_WIDE_STREAMS
  } else if (strcmp(launch, "one") == 0) {
    launch_generate(p, 1);
  } else if (strcmp(launch, "prompts") == 0) {
    launch_prefill_batches(p);
#endif
  } else {
    fprintf(stderr, "Name a launch: one, several or prompts.\n");
    return 1;
  }
  return 0;
}
