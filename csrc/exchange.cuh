// Exchange of activations between thread blocks without grid-wide barriers.
//
// Every exchanged value has 32 bits: two of epoch tag, 30 of data. A producer stores it with one
// relaxed store. A consumer polls the values that it needs until all of them carry the tag of the
// current use. There is no flag, fence or barrier.
//
// A buffer of ExchangeBuffers has a single copy. One use is one pass of a layer (of a head, of a
// sample) by all columns. Use n has the tag n mod 3; tag 3 marks a value that was never written.
//
// Why two bits of tag suffice. U(n) is use n of a buffer.
//
//  1. One producer. Every value of a buffer has one writer per use, and its phase is the same in
//     every use. All thread blocks execute the same sequence of phases.
//  2. Dependence. A thread block stores a row of a phase only after it has read all inputs of the
//     phase: a row is a sum over all of K, an attention item needs its queries, keys and values.
//     So down(l) depends on all rows of gate_up(l), gate_up(l) on all rows of out(l), out(l) on all
//     attention items of layer l, these together on all rows of qkv(l), and qkv(l) on all rows of
//     down(l - 1).
//  3. Every thread block has rows of qkv and of gate_up. The grid is at most `max_blocks` of
//     shapes.cuh, and RowGroupRange distributes row groups evenly.
//  4. U(n) is not overwritten before it is read. A thread block that reads U(n) stores rows of the
//     reading phase afterwards. After a wait at the end of a pass it stores rows of qkv in the next
//     pass. A writer of U(n + 1) depends on these rows by 2.
//  5. A reader of U(n) finds U(n - 1) complete. Before the reading phase of layer l + 1 the thread
//     block has computed rows of qkv(l + 1), see 3, and thus read all rows of down(l). By 2 every
//     value of every buffer of layer l was written before. Two buffers have values that some uses
//     do not write: attention_partials and softmax_stats have values per span. Such a value keeps
//     the tag 3 if the number of spans of a column does not decrease within a launch. It never
//     decreases in a generation launch. The host begins a new prefill launch where it would, and
//     for every wide prefill batch.
//  6. By 4 and 5 a reader of U(n) finds a value of U(n - 1) or of U(n), or one never written. Their
//     tags differ. U(n - 3) and U(n + 3), which have the same tag as U(n), cannot be there.
//  7. Wide kernels. All columns have the same tag. mlp_normed and attention_normed are written with
//     the rows of the residual, and take the residual's place as input of qkv, gate_up and head.
//     One thread block per column reads the residual and writes the column's scale, before it
//     computes rows of the next phase. A thread block with rows of this phase reads the scales of
//     all columns before it stores the rows; one without rows reads none. The next use of the
//     scales depends on all rows of the phase, those of the head through the sampled codes. So 2 to
//     4 hold for residual and scales. The predictor's pass 0, which has no head, therefore
//     exchanges no result: nothing would depend on the reads of its scales. Pass 1 begins with an
//     input of its own. A thread block stores rows and scales of it after it has computed its rows
//     of down or, without such rows, of gate_up, which by 2 depend on all reads of scales in pass
//     0. predictor_input is read by all thread blocks with rows of the input projection, which
//     store these rows afterwards.
//  8. Wide prefill batches. An attention item writes the key and the value of its column to the KV
//     cache, and then stores their cache_tags if a later prompt tile of the same prompt is in the
//     batch. An item of that tile waits for these tags before it reads the cache, and stores its
//     results afterwards: 2 to 5 hold for them. No item waits for itself: a thread block computes
//     its items in the order of columns, stores the tags of an item before it waits for others,
//     and waits only for items of earlier columns. The first item in this order that has not ended
//     therefore does not wait. The warp that writes a key or a value has a warp barrier and a fence
//     before the tag. The reader loads tags with acquire semantics, and reads after a block
//     barrier.
//  9. Launches. The host sets all bits of the workspace before a launch, on the same CUDA stream.
//     Every launch counts its uses from 0. So no value of an earlier launch has a tag of a use.
// 10. Timeouts. A thread that has timed out continues with the values that it has; its thread block
//     leaves at the next projection. The abort flag makes the other thread blocks time out as well,
//     and `failure` marks the launch as failed for the host.
//
// Tags modulo 2 would separate U(n) from U(n - 1). The third tag lets a test detect U(n + 1) and
// U(n - 2): the emulator counts polls that find them (`observe_epoch`), under random schedules, in
// tests/kernels/test_exchange.py and, for wide kernels, tests/backends/test_wide.py.
//
// Keys and values are ordinary memory. Their writer fences them at the end of a pass, before it
// stores values that thread blocks of a later pass depend on. Within a pass, point 8 orders them.
#pragma once

#include "memory.cuh"
#include "params.cuh"

namespace megakernel {

// --- epoch tags ---

constexpr uint32_t kTagMask = 3;
constexpr uint32_t kNumTags = 3;  // tags of uses are 0, 1 and 2
static_assert(kNumTags < kTagMask + 1, "one tag must be left for values that were never written");

// The tags of a buffer's current use: two bits per column.
class EpochTags {
 public:
  // The tag of a column.
  DEVICE uint32_t of(int column) const { return kIsWide ? tags_ : tags_ >> 2 * column & kTagMask; }

  // The tags of the columns from `column` on.
  DEVICE EpochTags from(int column) const {
    EpochTags epoch_tags;
    epoch_tags.tags_ = tags_ >> 2 * column;
    return epoch_tags;
  }

  // Advances the tags of the first `num_columns` columns to the next use.
  DEVICE void advance(int num_columns) {
    if constexpr (kIsWide) {  // all columns have the same tag
      tags_ = tags_ == kNumTags - 1 ? 0 : tags_ + 1;
      return;
    }
    const uint32_t next = tags_ + (0x55555555u >> 2 * (kNumTaggedColumns - num_columns));
    const uint32_t overflow = next & next >> 1 & 0x55555555u;  // columns with tag 3
    tags_ = next & ~(3 * overflow);
  }

 private:
  static constexpr int kNumTaggedColumns = 16;
  static_assert(kIsWide || (kMaxPrefillColumns <= kNumTaggedColumns &&
                            kBufferColumns <= kNumTaggedColumns),
                "two bits per column must fit into 32 bits");

  uint32_t tags_ = 0;
};

// --- flagged values ---

// A float32 whose two lowest bits are the tag.
DEVICE uint32_t tag_value(float value, uint32_t tag) { return (as_bits(value) & ~kTagMask) | tag; }
DEVICE bool has_tag(uint32_t v, uint32_t tag) { return (v & kTagMask) == tag; }
DEVICE bool has_tag(uint4 v, uint32_t tag) {
  return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & kTagMask) == 0;
}
DEVICE float untag(uint32_t v) { return as_float(v & ~kTagMask); }
DEVICE float4 untag(uint4 v) { return {untag(v.x), untag(v.y), untag(v.z), untag(v.w)}; }

// A pair of bf16 whose highest exponent bits are the tag. Activations are below 2^64; scaled by
// 2^-64, they leave this bit free. A projection multiplies the scaled values and unscales its sums.
constexpr uint32_t kPairTagMask = 0x40004000u;
constexpr float kPairScale = 0x1p-64f, kPairUnscale = 0x1p64f;

// The tag in the place where a pair carries it.
DEVICE uint32_t pair_tag_bits(uint32_t tag) { return (tag & 1) << 14 | (tag & 2) << 29; }
DEVICE uint32_t tag_pair(float first, float second, uint32_t tag) {
  return (pack_bf16(first * kPairScale, second * kPairScale) & ~kPairTagMask) | pair_tag_bits(tag);
}
DEVICE bool pairs_have_tag(uint4 v, uint32_t tag) {
  const uint32_t bits = pair_tag_bits(tag);
  return (((v.x ^ bits) | (v.y ^ bits) | (v.z ^ bits) | (v.w ^ bits)) & kPairTagMask) == 0;
}
DEVICE uint4 untag_pairs(uint4 v) {
  return {v.x & ~kPairTagMask, v.y & ~kPairTagMask, v.z & ~kPairTagMask, v.w & ~kPairTagMask};
}
// Whether a value can be exchanged in a pair; NaN cannot.
DEVICE bool fits_in_pair(float value) { return fabsf(value) < kPairUnscale; }

// The two encodings of exchanged values, as template arguments of `wait_for_vectors`.
struct FloatValues {
  DEVICE static bool have_tag(uint4 v, uint32_t tag) { return has_tag(v, tag); }
  DEVICE static uint32_t tag_of(uint32_t v) { return v & kTagMask; }
};
struct PairValues {
  DEVICE static bool have_tag(uint4 v, uint32_t tag) { return pairs_have_tag(v, tag); }
  DEVICE static uint32_t tag_of(uint32_t v) { return (v >> 14 & 1) | (v >> 29 & 2); }
};

// --- layouts ---

// Positions of values that all thread blocks read, [columns, Count]. Polls of one 128-byte cache
// line are served one after another, and delay its stores. With one stream, runs of eight values
// are therefore spread over `Interleave` times the space. One or two thread blocks write a run. A
// second column fills the next runs.
template <int Count, int MaxColumns, int Interleave>
struct ExchangeLayout {
  static constexpr int kRunLength = 8;
  static constexpr int interleave = MaxColumns == 1 ? Interleave : 1;
  static_assert(Count % kRunLength == 0, "a column must consist of whole runs");
  static_assert(interleave <= kBufferColumns, "spread columns must fit into the buffer");

  // The position of a value of a column.
  DEVICE static int index(int column, int value) {
    return distance(column, value - value % kRunLength) + value % kRunLength;
  }
  // The distance between two values that are `columns` columns and `values` values, a multiple of
  // a run, apart.
  DEVICE static constexpr int distance(int columns, int values) {
    return columns * (interleave > 1 ? kRunLength : Count) + values * interleave;
  }
};

// Positions of bf16 values [columns, Width] in pairs, in the operand order of the matrix
// instruction: [steps, warps, column tiles, 8 columns, 16 pairs]. A warp reads 512
// consecutive bytes at a time.
template <int MaxColumns>
struct OperandLayout {
  static constexpr int num_column_tiles = MaxColumns / 8;

  // The position of a pair of a column.
  DEVICE static int index(int column, int pair) {
    return ((pair / (kTileK / 2)) * num_column_tiles + column / 8) * (8 * kTileK / 2) +
           column % 8 * (kTileK / 2) + pair % (kTileK / 2);
  }
};

// [columns, Width] float values, and [columns, splits, Width] bf16 values in pairs.
template <int Width, int MaxColumns>
using FloatExchangeLayout = ExchangeLayout<Width, MaxColumns, 2>;
template <int Width, int MaxColumns>
using PairExchangeLayout =
    std::conditional_t<kIsWide, OperandLayout<MaxColumns>,
                       ExchangeLayout<kNumSplits * Width / 2, MaxColumns, 4>>;

// --- waiting ---

// The phases. A timeout names the phase that writes the awaited values, or the one whose weights
// are awaited. PhaseTimer adds the same wait to the phase that waits.
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

// Returns the time at which the wait began. Returns 0 and sets `timed_out` after the timeout, or
// if another thread block has aborted.
DEVICE_NOINLINE uint64_t check_timeout_or_abort(const Params& p, Phase phase, int& timed_out,
                                                uint64_t start_ns) {
  const uint64_t now = global_time_ns();
  if (start_ns == 0) start_ns = now;
  const bool first = load_relaxed(p.abort_flag) != 1;
  if (first && now - start_ns <= p.timeout_ns) return start_ns;
  if (first) {
    store_relaxed(p.abort_flag, 1);
    // A single store: if two waits expire together, the record is that of one of them.
    store_host_flag(p.failure, 1 + phase + kNumPhases * block_idx());
  }
  timed_out = 1;
  return 0;
}

// The timeout of one wait. When it expires, `timed_out` in shared memory is set and the thread
// continues. The thread block leaves at the end of the projection, or of the next one.
class SpinTimeout {
 public:
  DEVICE SpinTimeout(const Params& p, Phase phase, int& timed_out)
      : p_(p), phase_(phase), timed_out_(timed_out) {}

  // Returns whether to poll again. Checks the clock and the abort flag at every 256th poll.
  DEVICE bool keep_waiting() {
    spin_pause();
    if (++num_polls_ % 256 != 0 && p_.timeout_ns > 0) return true;
    start_ns_ = check_timeout_or_abort(p_, phase_, timed_out_, start_ns_);
    return start_ns_ != 0;
  }

 private:
  const Params& p_;
  Phase phase_;
  int& timed_out_;
  unsigned num_polls_ = 0;
  uint64_t start_ns_ = 0;
};

// Waits for four float values per lane.
DEVICE uint4 wait_for_values(const uint32_t* values, uint32_t tag, SpinTimeout timeout) {
  const uint4* at = reinterpret_cast<const uint4*>(values);
  uint4 v = load_relaxed(at);
  while (!warp_all(has_tag(v, tag))) {
    observe_epoch<FloatValues>(v, tag);
    if (!warp_all(timeout.keep_waiting())) break;
    v = load_relaxed(at);
  }
  return v;
}

// Waits for one value per lane, whose tag begins at bit `shift`.
DEVICE uint32_t wait_for_value(const uint32_t* at, uint32_t tag, int shift, SpinTimeout timeout) {
  uint32_t v = load_relaxed(at);
  while (!warp_all((v >> shift & kTagMask) == tag)) {
    observe_tag(v >> shift & kTagMask, tag);
    if (!warp_all(timeout.keep_waiting())) break;
    v = load_relaxed(at);
  }
  return v;
}

// Waits for v[i], four values at address(i) with tag(i), for every bit i of `missing`. All loads
// are in flight together. Loads whose values have not arrived are repeated.
template <class Values, int N, class Address, class Tag>
DEVICE void wait_for_vectors(uint4 (&v)[N], uint32_t missing, Address address, Tag tag,
                             SpinTimeout timeout) {
  static_assert(N <= 32, "`missing` has one bit per vector");
  bool repeat = !warp_all(missing == 0);
  while (repeat) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      load_relaxed_if(missing >> i & 1, reinterpret_cast<const uint4*>(address(i)), v[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (missing >> i & 1) observe_epoch<Values>(v[i], tag(i));
      missing &= ~(static_cast<uint32_t>(Values::have_tag(v[i], tag(i))) << i);
    }
    repeat = !warp_all(missing == 0) && warp_all(timeout.keep_waiting());
  }
}

// The same for values v[i] that have been loaded, perhaps before they had arrived.
template <class Values, int N, class Address>
DEVICE void wait_for_loaded_vectors(uint4 (&v)[N], uint32_t missing, Address address, uint32_t tag,
                                    SpinTimeout timeout) {
  static_assert(N <= 32, "`missing` has one bit per vector");
  while (true) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (missing >> i & 1) observe_epoch<Values>(v[i], tag);
      missing &= ~(static_cast<uint32_t>(Values::have_tag(v[i], tag)) << i);
    }
    if (warp_all(missing == 0) || !warp_all(timeout.keep_waiting())) break;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      load_relaxed_if(missing >> i & 1, reinterpret_cast<const uint4*>(address(i)), v[i]);
    }
  }
}

}  // namespace megakernel
