// Which passes of prompts go in one launch.
#pragma once

#include "../params.cuh"

namespace megakernel {

// Of passes: each has a kernel of its own. The fewer columns, the more room for weights.
enum PrefillSize : int { kFew, kSome, kMany };

constexpr PrefillSize prefill_size(int columns) {
  return columns <= kColumnCapacity<1> ? kFew : columns <= kMaxStreams ? kSome : kMany;
}

// For each run of neighbouring passes of one size: has `p` name them, and calls launch(size).
// `passes` are those of `p`, on the host.
template <class Launch>
void for_each_run(Params& p, const PrefillBatch* prefill_batches, int count, Launch launch) {
  for (int done = 0; done < count; done += p.num_prefill_batches) {
    const PrefillSize size = prefill_size(prefill_batches[done].num_columns);
    int end = done + 1;
    while (end < count && prefill_size(prefill_batches[end].num_columns) == size) ++end;
    p.num_prefill_batches = end - done;
    launch(size);
    p.prefill_batches += p.num_prefill_batches;
  }
}

}  // namespace megakernel
