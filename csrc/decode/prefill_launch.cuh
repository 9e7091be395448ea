// Which passes of prompts go in one launch.
#pragma once

#include "../params.cuh"

namespace megakernel {

// Of passes: each has a kernel of its own. The fewer columns, the more room for weights.
enum Size : int { kFew, kSome, kMany };

constexpr Size size_of(int columns) {
  return columns <= kRoom<1> ? kFew : columns <= kColumns ? kSome : kMany;
}

// For each run of neighbouring passes of one size: has `p` name them, and calls launch(size).
// `passes` are those of `p`, on the host.
template <class Launch>
void each_run(Params& p, const Pass* passes, int count, Launch launch) {
  for (int done = 0; done < count; done += p.num_passes) {
    const Size size = size_of(passes[done].columns);
    int end = done + 1;
    while (end < count && size_of(passes[end].columns) == size) ++end;
    p.num_passes = end - done;
    launch(size);
    p.passes += p.num_passes;
  }
}

}  // namespace megakernel
