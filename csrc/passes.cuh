// Which passes of prompts go in one launch.
#pragma once

#include "params.cuh"

namespace megakernel {

// Passes of at most so many columns go by a kernel of their own, which has more room for weights.
constexpr int kFew = kRoom<1>;

// For each run of neighbouring passes that are all of few columns, or all of more: has `p` name
// them, and calls launch(whether they are few). `passes` are those of `p`, on the host.
template <class Launch>
void each_run(Params& p, const Pass* passes, int count, int hidden, Launch launch) {
  for (int done = 0; done < count; done += p.num_passes) {
    const bool few = passes[done].columns <= kFew;
    int columns = 0;
    p.num_passes = 0;
    for (int i = done; i < count && (passes[i].columns <= kFew) == few; ++i) {
      columns += passes[i].columns;
      ++p.num_passes;
    }
    launch(few);
    p.passes += p.num_passes;
    p.prompt += static_cast<size_t>(columns) * hidden;
  }
}

}  // namespace megakernel
