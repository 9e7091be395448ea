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
class Tags {
 public:
  DEVICE uint32_t of(int column) const { return uses_ >> 2 * column & 3; }

  // Of the columns from one on.
  DEVICE Tags from(int column) const {
    Tags tags;
    tags.uses_ = uses_ >> 2 * column;
    return tags;
  }

  DEVICE void advance(int columns) {
    const uint32_t next = uses_ + (0x55555555u >> 2 * (kMost - columns));
    const uint32_t full = next & next >> 1 & 0x55555555u;
    uses_ = next & ~(3 * full);
  }

 private:
  static constexpr int kMost = 16;
  static_assert(kWide <= kMost);

  uint32_t uses_ = 0;
};

// A float gives its two lowest bits.
DEVICE uint32_t tagged(float value, uint32_t tag) { return (as_bits(value) & ~3u) | tag; }
DEVICE bool carries(uint32_t word, uint32_t tag) { return (word & 3) == tag; }
DEVICE bool carries(uint4 v, uint32_t tag) {
  return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 3) == 0;
}
DEVICE float untagged(uint32_t word) { return as_float(word & ~3u); }
DEVICE float4 untagged(uint4 v) {
  return {untagged(v.x), untagged(v.y), untagged(v.z), untagged(v.w)};
}

// A pair of halves has none to give. But activations are below 2^64: made 2^64 times smaller, the
// highest bit of their exponent is free. Products take them as they are, and scale their sums.
constexpr uint32_t kFreeBits = 0x40004000u;
constexpr float kShrink = 0x1p-64f, kGrow = 0x1p64f;

DEVICE uint32_t pair_tag(uint32_t tag) { return (tag & 1) << 14 | (tag & 2) << 29; }
DEVICE uint32_t tagged_pair(float first, float second, uint32_t tag) {
  return (pack(first * kShrink, second * kShrink) & ~kFreeBits) | pair_tag(tag);
}
DEVICE bool carries_pairs(uint4 v, uint32_t tag) {
  const uint32_t wanted = pair_tag(tag);
  return (((v.x ^ wanted) | (v.y ^ wanted) | (v.z ^ wanted) | (v.w ^ wanted)) & kFreeBits) == 0;
}
DEVICE uint4 untagged_pairs(uint4 v) {
  return {v.x & ~kFreeBits, v.y & ~kFreeBits, v.z & ~kFreeBits, v.w & ~kFreeBits};
}
DEVICE bool fits_pair(float value) { return fabsf(value) < kGrow; }

// A value in halves: the nearest one, then, in the precise build, that of what it has left.
template <class Act>
DEVICE void each_half(Act act) {
  act(0);
  if constexpr (kHalves > 1) act(1);
}
DEVICE float rest(float value, int half) {
  return half == 0 ? value : value - to_float(to_bf16(value));
}

// Where words of the residual and of activations lie, for which all blocks wait. They ask for them
// again and again, for those of one line of the cache one after another, also while somebody writes
// there. So those of one stream lie apart: eight neighbours, which a block makes or two, are the
// first of so many places, of which those of a second column are the next.
template <int Count, int Most, int Places>
struct Board {
  static constexpr int kTogether = 8;
  static constexpr int places = Most == 1 ? Places : 1;
  static_assert(Count % kTogether == 0 && places <= kPlaces);

  DEVICE static int at(int column, int word) {
    return further(column, word - word % kTogether) + word % kTogether;
  }
  // From a word to one so many columns further, and so many words, which are whole eights.
  DEVICE static constexpr int further(int columns, int words) {
    return columns * (places > 1 ? kTogether : Count) + words * places;
  }
};

// Of a float each, and of pairs of halves.
template <int Width, int Most>
using FloatBoard = Board<Width, Most, 2>;
template <int Width, int Most>
using PairBoard = Board<kHalves * Width / 2, Most, 4>;

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
  kPhases
};

// Every now and then of a wait: since when it lasts, or 0 once it was in vain.
DEVICE_CALL uint64_t wait_on(const Params& p, Phase phase, int& gave_up, uint64_t since) {
  const uint64_t now = nanoseconds();
  if (since == 0) since = now;
  const bool alone = load_word(p.given_up) != 1;
  if (alone && now - since <= p.patience) return since;
  if (alone) {
    store_word(p.given_up, 1);
    p.failure[1] = block();
    p.failure[2] = phase;
    publish(p.failure, 1);
  }
  gave_up = 1;
  return 0;
}

// How long a thread waits for a phase: `gave_up`, in shared memory, is set where that was in vain.
// The thread goes on with what it has; the block leaves at the phase's end, when all see it.
class Patience {
 public:
  DEVICE Patience(const Params& p, Phase phase, int& gave_up)
      : p_(p), phase_(phase), gave_up_(gave_up) {}

  // Whether to look again.
  DEVICE bool lasts() {
    pause();
    if (++looks_ % 256 != 0 && p_.patience > 0) return true;
    since_ = wait_on(p_, phase_, gave_up_, since_);
    return since_ != 0;
  }

 private:
  const Params& p_;
  Phase phase_;
  int& gave_up_;
  unsigned looks_ = 0;
  uint64_t since_ = 0;
};

DEVICE uint4 await_words(const uint32_t* at, uint32_t tag, Patience patience) {
  const uint4* words = reinterpret_cast<const uint4*>(at);
  uint4 v = load_words(words);
  while (!in_all_lanes(carries(v, tag))) {
    if (!in_all_lanes(patience.lasts())) break;
    v = load_words(words);
  }
  return v;
}

DEVICE uint32_t await_word(const uint32_t* at, uint32_t tag, int shift, Patience patience) {
  uint32_t word = load_word(at);
  while (!in_all_lanes((word >> shift & 3) == tag)) {
    if (!in_all_lanes(patience.lasts())) break;
    word = load_word(at);
  }
  return word;
}

// Fills v[i] with the words at(i), for the bits i of `missing`, once ready(i, v[i]). All are under
// way together; those that have not come are asked for again.
template <int N, class At, class Ready>
DEVICE void await(uint4 (&v)[N], uint32_t missing, At at, Ready ready, Patience patience) {
  static_assert(N <= 32);
  bool again = !in_all_lanes(missing == 0);
  while (again) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      load_words_if(missing >> i & 1, reinterpret_cast<const uint4*>(at(i)), v[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) missing &= ~(static_cast<uint32_t>(ready(i, v[i])) << i);
    again = !in_all_lanes(missing == 0) && in_all_lanes(patience.lasts());
  }
}

}  // namespace megakernel
