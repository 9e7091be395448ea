// How blocks hand each other values without a barrier: every word carries a tag, so that the value
// itself says that it has arrived. A reader looks at the very words that it needs until all of them
// carry the tag of this use.
//
// A buffer is used once a layer, by all columns of a pass, and counts its uses from 0 to 2 and
// around; words begin as ones, whose tag 3 is no use's. It needs no second copy: who writes use
// n + 1 has read, through others, something of every block that reads use n, since every block
// contributes to queries, keys and values, and to gate and up, and only after it has read all that
// comes before. Ordinary memory (keys and values) is fenced by its writer at the end of a pass.
#pragma once

#include "memory.cuh"
#include "params.cuh"

namespace megakernel {

// How often, modulo 3, the columns of a buffer were used; two bits a column.
class EpochTags {
 public:
  DEVICE uint32_t of(int column) const { return uses_ >> 2 * column & 3; }

  // Of the columns from one on.
  DEVICE EpochTags from(int column) const {
    EpochTags tags;
    tags.uses_ = uses_ >> 2 * column;
    return tags;
  }

  DEVICE void advance(int columns) {
    const uint32_t next = uses_ + (0x55555555u >> 2 * (kMaxColumns - columns));
    const uint32_t full = next & next >> 1 & 0x55555555u;
    uses_ = next & ~(3 * full);
  }

 private:
  static constexpr int kMaxColumns = 16;
  static_assert(kMaxPrefillColumns <= kMaxColumns);

  uint32_t uses_ = 0;
};

// A float gives its two lowest bits.
DEVICE uint32_t tag_value(float value, uint32_t tag) { return (as_bits(value) & ~3u) | tag; }
DEVICE bool has_tag(uint32_t word, uint32_t tag) { return (word & 3) == tag; }
DEVICE bool has_tag(uint4 v, uint32_t tag) {
  return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 3) == 0;
}
DEVICE float untag(uint32_t word) { return as_float(word & ~3u); }
DEVICE float4 untag(uint4 v) { return {untag(v.x), untag(v.y), untag(v.z), untag(v.w)}; }

// A pair of halves has none to give. But activations are below 2^64: made 2^64 times smaller, the
// highest bit of their exponent is free. Products take them as they are, and scale their sums.
constexpr uint32_t kPairTagMask = 0x40004000u;
constexpr float kPairScale = 0x1p-64f, kPairUnscale = 0x1p64f;

DEVICE uint32_t pair_tag_bits(uint32_t tag) { return (tag & 1) << 14 | (tag & 2) << 29; }
DEVICE uint32_t tag_pair(float first, float second, uint32_t tag) {
  return (pack_bf16(first * kPairScale, second * kPairScale) & ~kPairTagMask) | pair_tag_bits(tag);
}
DEVICE bool pairs_have_tag(uint4 v, uint32_t tag) {
  const uint32_t wanted = pair_tag_bits(tag);
  return (((v.x ^ wanted) | (v.y ^ wanted) | (v.z ^ wanted) | (v.w ^ wanted)) & kPairTagMask) == 0;
}
DEVICE uint4 untag_pairs(uint4 v) {
  return {v.x & ~kPairTagMask, v.y & ~kPairTagMask, v.z & ~kPairTagMask, v.w & ~kPairTagMask};
}
DEVICE bool fits_in_pair(float value) { return fabsf(value) < kPairUnscale; }

// A value in halves: the nearest one, then, in the precise build, that of what it has left.
template <class Act>
DEVICE void for_each_split(Act act) {
  act(0);
  if constexpr (kNumSplits > 1) act(1);
}
DEVICE float split_remainder(float value, int split) {
  return split == 0 ? value : value - to_float(to_bf16(value));
}

// Where words of the residual and of activations lie, for which all blocks wait. They ask for them
// again and again, for those of one line of the cache one after another, also while somebody writes
// there. So those of one stream lie apart: eight neighbours, which a block makes or two, are the
// first of so many places, of which those of a second column are the next.
template <int Count, int MaxColumns, int Interleave>
struct ExchangeLayout {
  static constexpr int kRunLength = 8;
  static constexpr int interleave = MaxColumns == 1 ? Interleave : 1;
  static_assert(Count % kRunLength == 0 && interleave <= kBufferColumns);

  DEVICE static int index(int column, int value) {
    return distance(column, value - value % kRunLength) + value % kRunLength;
  }
  // From a word to one so many columns further, and so many words, which are whole eights.
  DEVICE static constexpr int distance(int columns, int values) {
    return columns * (interleave > 1 ? kRunLength : Count) + values * interleave;
  }
};

// Of a float each, and of pairs of halves.
template <int Width, int MaxColumns>
using FloatExchangeLayout = ExchangeLayout<Width, MaxColumns, 2>;
template <int Width, int MaxColumns>
using PairExchangeLayout = ExchangeLayout<kNumSplits * Width / 2, MaxColumns, 4>;

enum Phase : int {
  kQkv,
  kAttention,
  kAttentionCombine,
  kOut,
  kGateUp,
  kDown,
  kHead,
  kSample,
  kInputProjection,
  kNumPhases
};

// Every now and then of a wait: since when it lasts, or 0 once it was in vain.
DEVICE_NOINLINE uint64_t check_timeout_or_abort(const Params& p, Phase phase, int& timed_out,
                                                uint64_t start_ns) {
  const uint64_t now = global_time_ns();
  if (start_ns == 0) start_ns = now;
  const bool alone = load_relaxed(p.abort_flag) != 1;
  if (alone && now - start_ns <= p.timeout_ns) return start_ns;
  if (alone) {
    store_relaxed(p.abort_flag, 1);
    p.failure[1] = block_idx();
    p.failure[2] = phase;
    store_host_flag(p.failure, 1);
  }
  timed_out = 1;
  return 0;
}

// How long a thread waits for a phase: `gave_up`, in shared memory, is set where that was in vain.
// The thread goes on with what it has; the block leaves at the phase's end, when all see it.
class SpinTimeout {
 public:
  DEVICE SpinTimeout(const Params& p, Phase phase, int& timed_out)
      : p_(p), phase_(phase), gave_up_(timed_out) {}

  // Whether to look again.
  DEVICE bool keep_waiting() {
    spin_pause();
    if (++num_polls_ % 256 != 0 && p_.timeout_ns > 0) return true;
    start_ns_ = check_timeout_or_abort(p_, phase_, gave_up_, start_ns_);
    return start_ns_ != 0;
  }

 private:
  const Params& p_;
  Phase phase_;
  int& gave_up_;
  unsigned num_polls_ = 0;
  uint64_t start_ns_ = 0;
};

DEVICE uint4 wait_for_values(const uint32_t* at, uint32_t tag, SpinTimeout timeout) {
  const uint4* words = reinterpret_cast<const uint4*>(at);
  uint4 v = load_relaxed(words);
  while (!warp_all(has_tag(v, tag))) {
    if (!warp_all(timeout.keep_waiting())) break;
    v = load_relaxed(words);
  }
  return v;
}

DEVICE uint32_t wait_for_value(const uint32_t* at, uint32_t tag, int shift, SpinTimeout timeout) {
  uint32_t word = load_relaxed(at);
  while (!warp_all((word >> shift & 3) == tag)) {
    if (!warp_all(timeout.keep_waiting())) break;
    word = load_relaxed(at);
  }
  return word;
}

// Fills v[i] with the words at(i), for the bits i of `missing`, once ready(i, v[i]). All are under
// way together; those that have not come are asked for again.
template <int N, class At, class Ready>
DEVICE void wait_for_vectors(uint4 (&v)[N], uint32_t missing, At at, Ready ready,
                             SpinTimeout timeout) {
  static_assert(N <= 32);
  bool again = !warp_all(missing == 0);
  while (again) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      load_relaxed_if(missing >> i & 1, reinterpret_cast<const uint4*>(at(i)), v[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) missing &= ~(static_cast<uint32_t>(ready(i, v[i])) << i);
    again = !warp_all(missing == 0) && warp_all(timeout.keep_waiting());
  }
}

}  // namespace megakernel
