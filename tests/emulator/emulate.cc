// The kernel as a library of the host, for the tests.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/decode/frame.cuh"
#include "../../csrc/decode/prefill.cuh"
#include "../../csrc/decode/prefill_launch.cuh"
#include "../../csrc/workspace.cuh"

using namespace megakernel;
using M = MEGAKERNEL_MODEL;

extern "C" int workspace_words() {
  return static_cast<int>(megakernel::workspace_words(shape_of<M>()));
}

extern "C" void lay_out(Params* p, uint32_t* workspace) { lay_out(*p, shape_of<M>(), workspace); }

extern "C" int logits_at(int network) {
  const LogitsOffsets at = logits_at(shape_of<M>());
  return static_cast<int>(network == 0 ? at.talker : at.predictor);
}

template <int MaxColumns, class Act>
static void run(const Params& p, int blocks, int late, Act act) {
  memset(p.talker.exchange.qkv, 0xFF, sizeof(uint32_t) * workspace_words());  // the first of them
  std::vector<SharedMemory<M, MaxColumns>> shared(blocks);
  launch(blocks, kNumThreads + 32, late, [&] { act(p, shared[block_idx()]); });
}

extern "C" void emulate_generate(const Params* p, int blocks, int late) {
  const auto frames = [](const Params& p, auto& s) { generate_frames<M>(p, s); };
  p->num_streams == 1 ? run<1>(*p, blocks, late, frames)
                      : run<kMaxStreams>(*p, blocks, late, frames);
}

extern "C" void emulate_prefill(Params* p, int blocks, int late) {
  const auto prompts = [](const Params& p, auto& s) { prefill_prompts<M>(p, s); };
  for_each_run(*p, p->prefill_batches, p->num_prefill_batches, [&](PrefillSize size) {
    if (size == kFew) run<1>(*p, blocks, late, prompts);
    if (size == kSome) run<kMaxStreams>(*p, blocks, late, prompts);
    if (size == kMany) run<kMaxPrefillColumns>(*p, blocks, late, prompts);
  });
}

// numbers[i] / divisor, in their place, as a draw divides.
extern "C" void divide(float* numbers, int count, float divisor) {
  const ExactDivisor by(divisor);
  for (int i = 0; i < count; ++i) numbers[i] = by.divide(numbers[i]);
}

extern "C" int params_bytes() { return sizeof(Params); }

// The numbers of the model's `Shape`, one after another.
extern "C" int shape(int i) {
  const Shape s = shape_of<M>();
  const int rest[] = {s.num_codes, s.stage_steps,      kMaxRowGroups,
                      kMaxStreams, kMaxPrefillColumns, kKvWidth};
  return i < 4 ? s.talker[i] : i < 8 ? s.predictor[i - 4] : rest[i - 8];
}
