// Launches each kernel of a small model under compute-sanitizer: one stream, several streams, and
// prefill batches of every size. Prints nothing unless a launch fails.
#include "../../bench/random_params.cuh"

using namespace megakernel;
using M = ModelTinyWide;  // its talker is wider than its predictor, so there is an input projection

constexpr int kBlocks = 8;  // fewer than a GPU takes: the tools need time for each
constexpr int kLayers = 2, kFrames = 2, kPositions = 256;
constexpr int kPrompt = 140;            // attention takes two spans
constexpr int kResident = kPrompt + 1;  // the first layer's keys and values stay in the L2 cache
constexpr uint64_t kTimeoutNs = 60'000'000'000;  // the tools are slow

static void generate_frames(const Kernel& kernel, Params& p, int num_streams) {
  p.num_streams = num_streams;
  for (int c = 0; c < num_streams; ++c) p.streams[c] = stream_at(c, kPrompt, kPositions);
  launch_kernel<M>(kernel, p, kBlocks);
  finish_launches(p);
  for (int c = 0; c < num_streams; ++c) {
    if (p.num_published[c] == kFrames) continue;
    fprintf(stderr, "Stream %d of %d has %u frames of %d.\n", c, num_streams, p.num_published[c],
            kFrames);
    exit(1);
  }
}

// Batches of every size; the second and the fourth continue the slot of the one before.
static void prefill_batches(const Entry& entry, Params& p) {
  const int counts[] = {kMaxPrefillColumns, kMaxStreams, 2, 1};
  std::vector<PrefillBatch> batches;
  int num_columns = 0;
  for (int i = 0; i < 4; ++i) {
    batches.push_back(prefill_batch(i / 2, kPrompt + num_columns, num_columns, counts[i], true));
    num_columns += counts[i];
  }
  p.prompt_vectors = random_bf16(num_columns * M::Talker::hidden_size, kWeightRange);
  p.prefill_batches = device_copy(batches);
  for_each_run(p, batches.data(), 4, [&](PrefillSize size) {
    launch_kernel<M>(entry.prefill[size], p, kBlocks);
    finish_launches(p);
  });
}

int main(int num_arguments, char** arguments) {
  const Entry entry = entry_of<M>();
  Params p = random_params<M>(
      {kLayers, kLayers, kMaxStreams, kPositions, kFrames, kBlocks, kResident, kTimeoutNs});
  const char* launch = num_arguments == 2 ? arguments[1] : "";
  if (strcmp(launch, "one") == 0) {
    generate_frames(entry.generate_one, p, 1);
  } else if (strcmp(launch, "several") == 0) {
    generate_frames(entry.generate, p, kMaxStreams);
  } else if (strcmp(launch, "prompts") == 0) {
    prefill_batches(entry, p);
  } else {
    fprintf(stderr, "Name a launch: one, several or prompts.\n");
    return 1;
  }
  return 0;
}
