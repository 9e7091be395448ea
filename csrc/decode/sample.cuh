// The phase `sample`: logits -> a code.
//
//   s = logits, after the repetition penalty, the minimum length and the mask (code 0 only)
//   s = s / temperature, masked by top-k and then top-p
//   code = argmax over the remaining ids of s + g,  g = -log(-log(u)),  u uniform in (0, 1)
// With the Gumbel noise g, the argmax is an exact sample of softmax(s). u is word id % 4 of
// Philox4x32-10 (Salmon et al., SC 2011) at the counter (id / 4, codebook, frame, 0) under the
// stream's seed, as in the reference backend.
#pragma once

#include "../exchange.cuh"

namespace megakernel {

constexpr int kMinFrames = 2;  // the released model never ends a stream with its first two frames

// --- static asserts ---

constexpr int kMaxCount = 31;   // of a thread
constexpr int kCountBits = 10;  // of a warp's count; three counts are packed into 32 bits
static_assert(32 * kMaxCount < 1 << kCountBits, "a warp's count must fit into its bits");
static_assert(3 * kCountBits <= 32, "three counts must fit into 32 bits");
static_assert((kNumWarps & (kNumWarps - 1)) == 0, "the warps' candidates are reduced in pairs");

// --- shared memory ---

// An id with its score, and the score with noise (`value`).
struct alignas(16) Candidate {
  float value = -INFINITY, score = -INFINITY;
  unsigned id;
};

// [buffers, warps]: a warp's results. Two buffers are used alternately, so that a reduction needs
// one barrier.
struct SampleSharedMemory {
  Candidate best[2][kNumWarps];
  float sum[2][kNumWarps];
  unsigned count[2][kNumWarps];
};

// --- warp roles ---

// All compute warps of one thread block sample for a stream. A thread has four consecutive ids of
// every 1024. The warps reduce through SampleSharedMemory, and every thread receives the result.

struct Counts {
  int values[3];
};

// Reductions over the compute threads.
class BlockReduction {
 public:
  DEVICE explicit BlockReduction(SampleSharedMemory& shared) : shared_(shared) {}

  // Sums three counts of at most kMaxCount per thread.
  DEVICE Counts count(const int (&counts)[3]) {
    constexpr unsigned kMask = (1 << kCountBits) - 1;
    unsigned (&warp_counts)[kNumWarps] = shared_.count[buffer_];
    const unsigned packed =
        warp_add(counts[0] | counts[1] << kCountBits | counts[2] << 2 * kCountBits);
    if (lane_idx() == 0) warp_counts[warp_idx()] = packed;
    sync();
    Counts total = {};
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) {
      total.values[0] += warp_counts[w] & kMask;
      total.values[1] += warp_counts[w] >> kCountBits & kMask;
      total.values[2] += warp_counts[w] >> 2 * kCountBits;
    }
    return total;
  }

  // Sums in a fixed order.
  DEVICE float sum(float value) {
    float (&warp_sums)[kNumWarps] = shared_.sum[buffer_];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    if (lane_idx() == 0) warp_sums[warp_idx()] = value;
    sync();
    float total = 0;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) total += warp_sums[w];
    return total;
  }

  // The candidate of the largest value; among equals, of the smallest id.
  DEVICE Candidate best(Candidate candidate) {
    Candidate(&warp_best)[kNumWarps] = shared_.best[buffer_];
    const uint32_t key = ordered(candidate.value), highest = warp_max(key);
    const unsigned id = warp_min(key == highest ? candidate.id : ~0u);
    if (key == highest && candidate.id == id) warp_best[warp_idx()] = candidate;
    sync();
    Candidate found[kNumWarps];
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) found[w] = warp_best[w];
#pragma unroll
    for (int stride = 1; stride < kNumWarps; stride *= 2) {
#pragma unroll
      for (int w = 0; w < kNumWarps; w += 2 * stride) {
        const Candidate a = found[w], b = found[w + stride];
        const bool equal = b.value == a.value, smaller_id = b.id < a.id;
        const bool better = (b.value > a.value) | (equal & smaller_id);
        found[w] = {better ? b.value : a.value, better ? b.score : a.score, better ? b.id : a.id};
      }
    }
    return found[0];
  }

 private:
  // Makes the warps' results visible, and changes to the other buffer.
  DEVICE void sync() {
    sync_compute_threads();
    buffer_ ^= 1;
  }

  SampleSharedMemory& shared_;
  int buffer_ = 0;
};

// --- body: scores ---

// A thread's scores of `NumIds` ids, [vectors, 4].
template <int NumIds>
struct Scores {
  static constexpr int kNumVectors = (NumIds + 4 * kNumThreads - 1) / (4 * kNumThreads);
  static_assert(4 * kNumVectors <= kMaxCount, "a thread counts its scores");
  float values[kNumVectors][4];

  // The id of a thread's score.
  DEVICE static int id(int vector, int i) { return 4 * (thread_idx() + vector * kNumThreads) + i; }

  // Calls act(id, score).
  template <class Act>
  DEVICE void for_each(Act act) {
#pragma unroll
    for (int vector = 0; vector < kNumVectors; ++vector) {
#pragma unroll
      for (int i = 0; i < 4; ++i) act(id(vector, i), values[vector][i]);
    }
  }

  // Masks the scores below a threshold of `ordered` scores.
  DEVICE void mask_below(uint32_t threshold) {
    for_each([&](int, float& score) {
      if (ordered(score) < threshold) score = -INFINITY;
    });
  }
};

// Waits for a stream's logits, float [NumIds], in exchange.logits. Scores beyond them are
// -infinity.
template <int NumIds>
DEVICE void load_logits(const Params& p, const uint32_t* logits, uint32_t tag, int& timed_out,
                        Scores<NumIds>& scores) {
  constexpr int kNumVectors = Scores<NumIds>::kNumVectors;
  uint4 v[kNumVectors] = {};
  uint32_t wanted = 0;
#pragma unroll
  for (int vector = 0; vector < kNumVectors; ++vector) {
    wanted |= (Scores<NumIds>::id(vector, 0) < NumIds) << vector;
  }
  wait_for_vectors<FloatValues>(
      v, wanted, [&](int vector) { return logits + Scores<NumIds>::id(vector, 0); },
      [&](int) { return tag; }, SpinTimeout(p, kHead, timed_out));
#pragma unroll
  for (int vector = 0; vector < kNumVectors; ++vector) {
    const uint32_t values[4] = {v[vector].x, v[vector].y, v[vector].z, v[vector].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores.values[vector][i] = wanted >> vector & 1 ? untag(values[i]) : -INFINITY;
    }
  }
}

// --- body: noise ---

// Philox4x32-10: replaces the counter `c` by four random words, under the key (k0, k1).
DEVICE void philox(uint32_t (&c)[4], uint32_t k0, uint32_t k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c[0]) * 0xD2511F53u;
    const uint64_t p1 = static_cast<uint64_t>(c[2]) * 0xCD9E8D57u;
    const uint32_t high0 = static_cast<uint32_t>(p0 >> 32), high1 = static_cast<uint32_t>(p1 >> 32);
    const uint32_t n0 = high1 ^ c[1] ^ k0, n2 = high0 ^ c[3] ^ k1;
    c[1] = static_cast<uint32_t>(p1);
    c[3] = static_cast<uint32_t>(p0);
    c[0] = n0;
    c[2] = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// Gumbel noise from 23 random bits.
DEVICE float gumbel(uint32_t bits) {
  const float uniform = (static_cast<float>(bits >> 9) + 0.5f) * 1.1920928955078125e-07f;
  return -logf(-logf(uniform));
}

// The noise of all ids, [NumIds] over the threads. It does not depend on the logits and is computed
// before the wait for them.
template <int NumIds>
DEVICE void make_noise(Scores<NumIds>& noise, const StreamParams& stream, int codebook) {
#pragma unroll
  for (int vector = 0; vector < Scores<NumIds>::kNumVectors; ++vector) {
    uint32_t bits[4] = {static_cast<uint32_t>(thread_idx() + vector * kNumThreads),
                        static_cast<uint32_t>(codebook),
                        stream.noise_frame_offset + stream.num_frames, 0};
    philox(bits, stream.seed[0], stream.seed[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) noise.values[vector][i] = gumbel(bits[i]);
  }
}

// --- body: top-k, top-p ---

// A threshold of `ordered` scores [NumIds]: the k largest scores, and ties with the k-th, are not
// below it. Each iteration finds two bits.
template <int NumIds>
DEVICE uint32_t top_k_threshold(Scores<NumIds>& scores, int k, BlockReduction& reduction) {
  uint32_t threshold = 0;
#pragma unroll 1
  for (int shift = 30; shift >= 0; shift -= 2) {
    int counts[3] = {};
    scores.for_each([&](int, float score) {
      const uint32_t key = ordered(score);
#pragma unroll
      for (uint32_t i = 0; i < 3; ++i) counts[i] += key >= (threshold | (i + 1) << shift);
    });
    const Counts total = reduction.count(counts);
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) bits = total.values[i] >= k ? i + 1 : bits;
    threshold |= bits << shift;
    if (warp_all(bits > 0 && total.values[bits - 1] == k)) break;
  }
  return threshold;
}

// The best candidate by value(index, score) among the scores [NumIds] above a threshold. Its id is
// NumIds if there is none.
template <int NumIds, class Value>
DEVICE Candidate best_candidate(Scores<NumIds>& scores, float threshold, Value value,
                                BlockReduction& reduction) {
  Candidate best;
  best.id = NumIds;
  int index = 0;
  scores.for_each([&](int id, float score) {
    const float v = value(index++, score);
    if (score > threshold && v > best.value) best = {v, score, static_cast<unsigned>(id)};
  });
  return reduction.best(best);
}

// The lowest threshold of `ordered` scores [NumIds] above which there is less than `top_p` of the
// mass.
template <int NumIds>
DEVICE uint32_t top_p_threshold(Scores<NumIds>& scores, float top_p, BlockReduction& reduction) {
  const float max_score =
      best_candidate(scores, -INFINITY, [](int, float score) { return score; }, reduction).score;
  float thread_mass = 0;
  scores.for_each([&](int, float score) { thread_mass += expf(score - max_score); });
  const float mass = reduction.sum(thread_mass);
  uint32_t low = 0, high = ordered(max_score);
#pragma unroll 1
  while (warp_all(low < high)) {
    const uint32_t middle = low + (high - low) / 2;
    float above = 0;
    scores.for_each(
        [&](int, float score) { above += ordered(score) > middle ? expf(score - max_score) : 0; });
    if (reduction.sum(above) / mass < top_p) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// --- body: sampling ---

// The best id with noise among the k largest scores [NumIds] and ties with the k-th. Tests the best
// id of all first. If k scores are larger than its score, this id is rejected, and so are all ids
// whose score is not larger.
template <int NumIds>
DEVICE int sample_top_k(int k, Scores<NumIds>& scores, const Scores<NumIds>& noise,
                        BlockReduction& reduction) {
  float threshold = -INFINITY;
  while (true) {
    const Candidate best = best_candidate(
        scores, threshold, [&](int i, float score) { return score + noise.values[i / 4][i % 4]; },
        reduction);
    if (warp_all(best.id == NumIds || k >= NumIds)) return best.id;
    int larger[3] = {};
    scores.for_each([&](int, float score) { larger[0] += score > best.score; });
    if (warp_all(reduction.count(larger).values[0] < k)) return best.id;
    threshold = best.score;
  }
}

// x / divisor, rounded as an IEEE division for |x| from 1e-32 on, by one correction of the first
// quotient (Markstein, IBM Journal of Research and Development, 1990). The division operator has a
// branch per use.
class ExactDivisor {
 public:
  DEVICE explicit ExactDivisor(float value) : value_(value), reciprocal_(1 / value) {}

  // x / divisor.
  DEVICE float divide(float x) const {
    const float quotient = x * reciprocal_;
    const float remainder = fmaf(-quotient, value_, x);
    return isfinite(quotient) ? fmaf(remainder, reciprocal_, quotient) : quotient;
  }

 private:
  float value_, reciprocal_;
};

// Samples from scores [NumIds] and noise [NumIds]. Returns the id; NumIds if no score is finite.
template <int NumIds>
DEVICE int sample(Scores<NumIds>& scores, Scores<NumIds>& noise, const NetworkSampling& params,
                  ExactDivisor temperature, BlockReduction& reduction) {
  if (warp_all(params.temperature == 0)) {
    return best_candidate(scores, -INFINITY, [](int, float score) { return score; }, reduction).id;
  }
  scores.for_each([&](int, float& score) { score = temperature.divide(score); });
  int k = params.top_k > 0 ? params.top_k : NumIds;
  if (warp_all(params.top_p < 1)) {
    if (warp_all(k < NumIds)) scores.mask_below(top_k_threshold(scores, k, reduction));
    scores.mask_below(top_p_threshold(scores, params.top_p, reduction));
    k = NumIds;
  }
  return sample_top_k(k, scores, noise, reduction);
}

// Samples code 0 from logits [vocab], with repetition penalty and minimum length; one id is the end
// of speech. Reads and updates seen_codes [slots, vocab].
template <class M>
DEVICE int sample_code0(const Params& p, const StreamParams& stream, const uint32_t* logits,
                        uint32_t tag, int& timed_out, BlockReduction& reduction) {
  Scores<M::vocab_size> scores, noise;
  uint8_t* seen = p.seen_codes + static_cast<size_t>(stream.slot) * M::vocab_size;
  uint32_t penalised = 0;  // one bit per id
  noise.for_each(
      [&](int id, float&) { penalised = penalised << 1 | (id < M::vocab_size && seen[id]); });
  make_noise(noise, stream, 0);
  const NetworkSampling params = stream.talker;
  const ExactDivisor penalty(stream.repetition_penalty), temperature(params.temperature);
  load_logits(p, logits, tag, timed_out, scores);
  int bit = 4 * Scores<M::vocab_size>::kNumVectors;
  scores.for_each([&](int id, float& score) {
    const float reduced = score < 0 ? score * stream.repetition_penalty : penalty.divide(score);
    if (penalised >> --bit & 1) score = reduced;
    const bool allowed = id < M::num_codes || (id == p.eos_id && stream.num_frames >= kMinFrames);
    if (!allowed) score = -INFINITY;
  });
  const int code = sample(scores, noise, params, temperature, reduction);
  if (thread_idx() == 0 && code < M::vocab_size) seen[code] = 1;
  return code;
}

// Samples code `codebook`, 1 to 15, from logits [codes].
template <class M>
DEVICE int sample_group_code(const Params& p, const StreamParams& stream, int codebook,
                             const uint32_t* logits, uint32_t tag, int& timed_out,
                             BlockReduction& reduction) {
  Scores<M::num_codes> scores, noise;
  make_noise(noise, stream, codebook);
  const NetworkSampling params = stream.predictor;
  const ExactDivisor temperature(params.temperature);
  load_logits(p, logits, tag, timed_out, scores);
  return sample(scores, noise, params, temperature, reduction);
}

}  // namespace megakernel
