// Logits -> a code: penalty, minimum length, mask, temperature, top-k, top-p, and the best of score
// + Gumbel noise over what is kept, which is an exact draw from the scores' softmax. The noise
// comes from Philox4x32-10 at the counter (id / 4, codebook, frame, 0) under the stream's seed,
// word id % 4: the reference's own numbers. A thread has four neighbouring ids of every 1,024.
#pragma once

#include "../exchange.cuh"

namespace megakernel {

constexpr int kMinFrames = 2;  // the release never lets the first two draws end the speech

// An id that may be drawn; `value` is its score with noise.
struct alignas(16) Candidate {
  float value = -INFINITY, score = -INFINITY;
  unsigned id;
};

// Where the block's warps meet, two places in turn.
struct SampleSharedMemory {
  Candidate best[2][kNumWarps];
  float value[2][kNumWarps];
  unsigned count[2][kNumWarps];
};

// Rises with the value, also below zero.
DEVICE uint32_t ordered(float value) {
  const uint32_t bits = as_bits(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

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

DEVICE float gumbel(uint32_t word) {
  const float uniform = (static_cast<float>(word >> 9) + 0.5f) * 1.1920928955078125e-07f;
  return -logf(-logf(uniform));
}

// x / divisor as a division rounds it, for |x| from 1e-32 on, by what a first quotient leaves of x
// (Markstein 1990). The division of the language has a branch of its own, again and again.
class ExactDivisor {
 public:
  DEVICE explicit ExactDivisor(float value) : value_(value), inverse_(1 / value) {}

  DEVICE float divide(float x) const {
    const float ratio = x * inverse_;
    const float left = fmaf(-ratio, value_, x);
    return isfinite(ratio) ? fmaf(left, inverse_, ratio) : ratio;
  }

 private:
  float value_, inverse_;
};

struct Counts {
  int of[3];
};

// What the threads of a block find together; each result goes to every thread.
class BlockReduction {
 public:
  DEVICE explicit BlockReduction(SampleSharedMemory& shared) : shared_(shared) {}

  // Three counts, of at most 384 a warp.
  DEVICE Counts count(const int (&mine)[3]) {
    unsigned (&of)[kNumWarps] = shared_.count[buffer_];
    const unsigned in_warp = warp_add(mine[0] | mine[1] << 10 | mine[2] << 20);
    if (lane_idx() == 0) of[warp_idx()] = in_warp;
    sync();
    Counts total = {};
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) {
      total.of[0] += of[w] & 1023;
      total.of[1] += of[w] >> 10 & 1023;
      total.of[2] += of[w] >> 20;
    }
    return total;
  }

  // In a fixed order.
  DEVICE float sum(float mine) {
    float (&of)[kNumWarps] = shared_.value[buffer_];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) mine += shuffle_xor(mine, mask);
    if (lane_idx() == 0) of[warp_idx()] = mine;
    sync();
    float total = 0;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) total += of[w];
    return total;
  }

  // The one of the largest value, of the smallest id among equals.
  DEVICE Candidate best(Candidate mine) {
    Candidate(&of)[kNumWarps] = shared_.best[buffer_];
    const uint32_t key = ordered(mine.value), highest = warp_max(key);
    const unsigned id = warp_min(key == highest ? mine.id : ~0u);
    if (key == highest && mine.id == id) of[warp_idx()] = mine;
    sync();
    Candidate found[kNumWarps];
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) found[w] = of[w];
#pragma unroll
    for (int apart = 1; apart < kNumWarps; apart *= 2) {
#pragma unroll
      for (int w = 0; w < kNumWarps; w += 2 * apart) {
        const Candidate one = found[w], other = found[w + apart];
        const bool equal = other.value == one.value, sooner = other.id < one.id;
        const bool better = (other.value > one.value) | (equal & sooner);
        found[w] = {better ? other.value : one.value, better ? other.score : one.score,
                    better ? other.id : one.id};
      }
    }
    return found[0];
  }

 private:
  DEVICE void sync() {
    sync_compute_threads();
    buffer_ ^= 1;
  }

  SampleSharedMemory& shared_;
  int buffer_ = 0;
};

// A thread's scores of `Ids` ids.
template <int Ids>
struct Scores {
  static constexpr int kFours = (Ids + 4 * kNumThreads - 1) / (4 * kNumThreads);
  float of[kFours][4];

  DEVICE static int id(int four, int i) { return 4 * (thread_idx() + four * kNumThreads) + i; }

  template <class Act>
  DEVICE void each(Act act) {
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
#pragma unroll
      for (int i = 0; i < 4; ++i) act(id(four, i), of[four][i]);
    }
  }

  DEVICE void keep_from(uint32_t threshold) {
    each([&](int, float& score) {
      if (ordered(score) < threshold) score = -INFINITY;
    });
  }
};

// A border that the k largest scores reach, and ties with the k-th; found two bits at a time.
template <int Ids>
DEVICE uint32_t kth_largest(Scores<Ids>& scores, int k, BlockReduction& reduction) {
  uint32_t threshold = 0;
#pragma unroll 1
  for (int shift = 30; shift >= 0; shift -= 2) {
    int reached[3] = {};
    scores.each([&](int, float score) {
      const uint32_t key = ordered(score);
#pragma unroll
      for (uint32_t i = 0; i < 3; ++i) reached[i] += key >= (threshold | (i + 1) << shift);
    });
    const Counts all = reduction.count(reached);
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) bits = all.of[i] >= k ? i + 1 : bits;
    threshold |= bits << shift;
    if (warp_all(bits > 0 && all.of[bits - 1] == k)) break;
  }
  return threshold;
}

// The best by value(index, score) among the scores above a border; of the id `Ids` where there is
// none.
template <int Ids, class Value>
DEVICE Candidate best_of(Scores<Ids>& scores, float threshold, Value value,
                         BlockReduction& reduction) {
  Candidate mine;
  mine.id = Ids;
  int index = 0;
  scores.each([&](int id, float score) {
    const float v = value(index++, score);
    if (score > threshold && v > mine.value) mine = {v, score, static_cast<unsigned>(id)};
  });
  return reduction.best(mine);
}

// The best with noise among the k largest scores, and ties with the k-th. The best of all is looked
// at first: if k scores are larger than its own, it is none of them, and whoever has no larger
// score is none either.
template <int Ids>
DEVICE int sample_top_k(int k, Scores<Ids>& scores, const Scores<Ids>& noise,
                        BlockReduction& reduction) {
  float threshold = -INFINITY;
  while (true) {
    const Candidate best = best_of(
        scores, threshold, [&](int i, float score) { return score + noise.of[i / 4][i % 4]; },
        reduction);
    if (warp_all(best.id == Ids || k >= Ids)) return best.id;
    int larger[3] = {};
    scores.each([&](int, float score) { larger[0] += score > best.score; });
    if (warp_all(reduction.count(larger).of[0] < k)) return best.id;
    threshold = best.score;
  }
}

// The lowest border above which there is less than `top_p` of the mass.
template <int Ids>
DEVICE uint32_t top_p_border(Scores<Ids>& scores, float top_p, BlockReduction& reduction) {
  const float peak =
      best_of(scores, -INFINITY, [](int, float score) { return score; }, reduction).score;
  float mine = 0;
  scores.each([&](int, float score) { mine += expf(score - peak); });
  const float mass = reduction.sum(mine);
  uint32_t low = 0, high = ordered(peak);
#pragma unroll 1
  while (warp_all(low < high)) {
    const uint32_t middle = low + (high - low) / 2;
    float above = 0;
    scores.each(
        [&](int, float score) { above += ordered(score) > middle ? expf(score - peak) : 0; });
    if (reduction.sum(above) / mass < top_p)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// What a draw adds to its scores; it needs nothing of them, so it is made while they are awaited.
template <int Ids>
DEVICE void make_noise(Scores<Ids>& noise, const Stream& stream, int codebook) {
#pragma unroll
  for (int four = 0; four < Scores<Ids>::kFours; ++four) {
    uint32_t words[4] = {static_cast<uint32_t>(thread_idx() + four * kNumThreads),
                         static_cast<uint32_t>(codebook),
                         stream.noise_frame_offset + stream.num_frames, 0};
    philox(words, stream.seed[0], stream.seed[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) noise.of[four][i] = gumbel(words[i]);
  }
}

template <int Ids>
DEVICE void load_logits(const Params& p, const uint32_t* logits, uint32_t tag, int& timed_out,
                        Scores<Ids>& scores) {
  constexpr int kFours = Scores<Ids>::kFours;
  uint4 v[kFours] = {};
  uint32_t there = 0;
#pragma unroll
  for (int four = 0; four < kFours; ++four) there |= (Scores<Ids>::id(four, 0) < Ids) << four;
  wait_for_vectors<FloatValues>(
      v, there, [&](int four) { return logits + Scores<Ids>::id(four, 0); },
      [&](int) { return tag; }, SpinTimeout(p, kHead, timed_out));
#pragma unroll
  for (int four = 0; four < kFours; ++four) {
    const uint32_t words[4] = {v[four].x, v[four].y, v[four].z, v[four].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores.of[four][i] = there >> four & 1 ? untag(words[i]) : -INFINITY;
    }
  }
}

// The id, or `Ids` where no score is finite.
template <int Ids>
DEVICE int sample(Scores<Ids>& scores, Scores<Ids>& noise, const SamplingParams& params,
                  ExactDivisor temperature, BlockReduction& reduction) {
  if (warp_all(params.temperature == 0)) {
    return best_of(scores, -INFINITY, [](int, float score) { return score; }, reduction).id;
  }
  scores.each([&](int, float& score) { score = temperature.divide(score); });
  int k = params.top_k > 0 ? params.top_k : Ids;
  if (warp_all(params.top_p < 1)) {
    if (warp_all(k < Ids)) scores.keep_from(kth_largest(scores, k, reduction));
    scores.keep_from(top_p_border(scores, params.top_p, reduction));
    k = Ids;
  }
  return sample_top_k(k, scores, noise, reduction);
}

// Code 0 of a column. The end of speech is one of its ids.
template <class M>
DEVICE int sample_code0(const Params& p, const Stream& stream, const uint32_t* logits, uint32_t tag,
                        int& timed_out, BlockReduction& reduction) {
  Scores<M::vocab_size> scores, noise;
  uint8_t* seen = p.seen_codes + static_cast<size_t>(stream.slot) * M::vocab_size;
  uint32_t penalised = 0;
  noise.each(
      [&](int id, float&) { penalised = penalised << 1 | (id < M::vocab_size && seen[id]); });
  make_noise(noise, stream, 0);
  const SamplingParams params = stream.talker;
  const ExactDivisor penalty(stream.repetition_penalty), temperature(params.temperature);
  load_logits(p, logits, tag, timed_out, scores);
  int bit = 4 * Scores<M::vocab_size>::kFours;
  scores.each([&](int id, float& score) {
    const float less = score < 0 ? score * stream.repetition_penalty : penalty.divide(score);
    if (penalised >> --bit & 1) score = less;
    const bool allowed = id < M::num_codes || (id == p.eos_id && stream.num_frames >= kMinFrames);
    if (!allowed) score = -INFINITY;
  });
  const int code = sample(scores, noise, params, temperature, reduction);
  if (thread_idx() == 0 && code < M::vocab_size) seen[code] = 1;
  return code;
}

// Codes 1 to 15.
template <class M>
DEVICE int sample_group_code(const Params& p, const Stream& stream, int codebook,
                             const uint32_t* logits, uint32_t tag, int& timed_out,
                             BlockReduction& reduction) {
  Scores<M::num_codes> scores, noise;
  make_noise(noise, stream, codebook);
  const SamplingParams params = stream.predictor;
  const ExactDivisor temperature(params.temperature);
  load_logits(p, logits, tag, timed_out, scores);
  return sample(scores, noise, params, temperature, reduction);
}

}  // namespace megakernel
