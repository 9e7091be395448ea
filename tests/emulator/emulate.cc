// The kernel as a library of the host, for the tests.
#define MEGAKERNEL_EMULATOR
#include "../../csrc/frame.cu"

using namespace megakernel;
using M = MEGAKERNEL_MODEL;

template <class Act>
static void run(const Params& p, int blocks, Act act) {
  std::vector<Shared<M>> shared(blocks);
  launch(blocks, kThreads, [&] {
    Generation<M> generation(p, shared[block()]);
    act(generation);
  });
}

extern "C" void emulate_generate(const Params* p, int blocks) {
  run(*p, blocks, [](auto& g) { g.frames(); });
}

extern "C" void emulate_prefill(const Params* p, int blocks) {
  run(*p, blocks, [](auto& g) { g.prompt(); });
}

extern "C" int sizes(int which) {
  const int all[] = {sizeof(Params), sizeof(Stream), sizeof(Layer), sizeof(Network),
                     sizeof(Published)};
  return all[which];
}
