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
struct Draw {
  Candidate best[2][kWarps];
  float value[2][kWarps];
  unsigned count[2][kWarps];
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
class Divisor {
 public:
  DEVICE explicit Divisor(float value) : value_(value), inverse_(1 / value) {}

  DEVICE float under(float x) const {
    const float quotient = x * inverse_;
    const float left = fmaf(-quotient, value_, x);
    return isfinite(quotient) ? fmaf(left, inverse_, quotient) : quotient;
  }

 private:
  float value_, inverse_;
};

struct Counts {
  int of[3];
};

// What the threads of a block find together; each result goes to every thread.
class Meeting {
 public:
  DEVICE explicit Meeting(Draw& shared) : shared_(shared) {}

  // Three counts, of at most 384 a warp.
  DEVICE Counts count(const int (&mine)[3]) {
    unsigned (&of)[kWarps] = shared_.count[turn_];
    const unsigned in_warp = warp_add(mine[0] | mine[1] << 10 | mine[2] << 20);
    if (lane() == 0) of[warp()] = in_warp;
    meet();
    Counts total = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total.of[0] += of[w] & 1023;
      total.of[1] += of[w] >> 10 & 1023;
      total.of[2] += of[w] >> 20;
    }
    return total;
  }

  // In a fixed order.
  DEVICE float sum(float mine) {
    float (&of)[kWarps] = shared_.value[turn_];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) mine += shuffle_xor(mine, mask);
    if (lane() == 0) of[warp()] = mine;
    meet();
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of[w];
    return total;
  }

  // The one of the largest value, of the smallest id among equals.
  DEVICE Candidate best(Candidate mine) {
    Candidate(&of)[kWarps] = shared_.best[turn_];
    const uint32_t key = ordered(mine.value), highest = warp_max(key);
    const unsigned id = warp_min(key == highest ? mine.id : ~0u);
    if (key == highest && mine.id == id) of[warp()] = mine;
    meet();
    Candidate found[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) found[w] = of[w];
#pragma unroll
    for (int apart = 1; apart < kWarps; apart *= 2) {
#pragma unroll
      for (int w = 0; w < kWarps; w += 2 * apart) {
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
  DEVICE void meet() {
    block_sync();
    turn_ ^= 1;
  }

  Draw& shared_;
  int turn_ = 0;
};

// A thread's scores of `Ids` ids.
template <int Ids>
struct Scores {
  static constexpr int kFours = (Ids + 4 * kThreads - 1) / (4 * kThreads);
  float of[kFours][4];

  DEVICE static int id(int four, int i) { return 4 * (thread() + four * kThreads) + i; }

  template <class Act>
  DEVICE void each(Act act) {
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
#pragma unroll
      for (int i = 0; i < 4; ++i) act(id(four, i), of[four][i]);
    }
  }

  DEVICE void keep_from(uint32_t border) {
    each([&](int, float& score) {
      if (ordered(score) < border) score = -INFINITY;
    });
  }
};

// A border that the k largest scores reach, and ties with the k-th; found two bits at a time.
template <int Ids>
DEVICE uint32_t kth_largest(Scores<Ids>& scores, int k, Meeting& meeting) {
  uint32_t border = 0;
#pragma unroll 1
  for (int shift = 30; shift >= 0; shift -= 2) {
    int reached[3] = {};
    scores.each([&](int, float score) {
      const uint32_t key = ordered(score);
#pragma unroll
      for (uint32_t i = 0; i < 3; ++i) reached[i] += key >= (border | (i + 1) << shift);
    });
    const Counts all = meeting.count(reached);
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) bits = all.of[i] >= k ? i + 1 : bits;
    border |= bits << shift;
    if (in_all_lanes(bits > 0 && all.of[bits - 1] == k)) break;
  }
  return border;
}

// The best by value(index, score) among the scores above a border; of the id `Ids` where there is
// none.
template <int Ids, class Value>
DEVICE Candidate best_of(Scores<Ids>& scores, float border, Value value, Meeting& meeting) {
  Candidate mine;
  mine.id = Ids;
  int index = 0;
  scores.each([&](int id, float score) {
    const float v = value(index++, score);
    if (score > border && v > mine.value) mine = {v, score, static_cast<unsigned>(id)};
  });
  return meeting.best(mine);
}

// The best with noise among the k largest scores, and ties with the k-th. The best of all is looked
// at first: if k scores are larger than its own, it is none of them, and whoever has no larger
// score is none either.
template <int Ids>
DEVICE int draw_among(int k, Scores<Ids>& scores, const Scores<Ids>& noise, Meeting& meeting) {
  float border = -INFINITY;
  while (true) {
    const Candidate best = best_of(
        scores, border, [&](int i, float score) { return score + noise.of[i / 4][i % 4]; },
        meeting);
    if (in_all_lanes(best.id == Ids || k >= Ids)) return best.id;
    int larger[3] = {};
    scores.each([&](int, float score) { larger[0] += score > best.score; });
    if (in_all_lanes(meeting.count(larger).of[0] < k)) return best.id;
    border = best.score;
  }
}

// The lowest border above which there is less than `top_p` of the mass.
template <int Ids>
DEVICE uint32_t top_p_border(Scores<Ids>& scores, float top_p, Meeting& meeting) {
  const float peak =
      best_of(scores, -INFINITY, [](int, float score) { return score; }, meeting).score;
  float mine = 0;
  scores.each([&](int, float score) { mine += expf(score - peak); });
  const float mass = meeting.sum(mine);
  uint32_t low = 0, high = ordered(peak);
#pragma unroll 1
  while (in_all_lanes(low < high)) {
    const uint32_t middle = low + (high - low) / 2;
    float above = 0;
    scores.each(
        [&](int, float score) { above += ordered(score) > middle ? expf(score - peak) : 0; });
    if (meeting.sum(above) / mass < top_p)
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
    uint32_t words[4] = {static_cast<uint32_t>(thread() + four * kThreads),
                         static_cast<uint32_t>(codebook), stream.first_frame + stream.frames, 0};
    philox(words, stream.seed[0], stream.seed[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) noise.of[four][i] = gumbel(words[i]);
  }
}

template <int Ids>
DEVICE void await_scores(const Params& p, const uint32_t* logits, uint32_t tag, int& gave_up,
                         Scores<Ids>& scores) {
  constexpr int kFours = Scores<Ids>::kFours;
  uint4 v[kFours] = {};
  uint32_t there = 0;
#pragma unroll
  for (int four = 0; four < kFours; ++four) there |= (Scores<Ids>::id(four, 0) < Ids) << four;
  await(
      v, there, [&](int four) { return logits + Scores<Ids>::id(four, 0); },
      [&](int, uint4 words) { return carries(words, tag); }, Patience(p, kHead, gave_up));
#pragma unroll
  for (int four = 0; four < kFours; ++four) {
    const uint32_t words[4] = {v[four].x, v[four].y, v[four].z, v[four].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores.of[four][i] = there >> four & 1 ? untagged(words[i]) : -INFINITY;
    }
  }
}

// The id, or `Ids` where no score is finite.
template <int Ids>
DEVICE int draw(Scores<Ids>& scores, Scores<Ids>& noise, const Rule& rule, Divisor temperature,
                Meeting& meeting) {
  if (in_all_lanes(rule.temperature == 0)) {
    return best_of(scores, -INFINITY, [](int, float score) { return score; }, meeting).id;
  }
  scores.each([&](int, float& score) { score = temperature.under(score); });
  int k = rule.top_k > 0 ? rule.top_k : Ids;
  if (in_all_lanes(rule.top_p < 1)) {
    if (in_all_lanes(k < Ids)) scores.keep_from(kth_largest(scores, k, meeting));
    scores.keep_from(top_p_border(scores, rule.top_p, meeting));
    k = Ids;
  }
  return draw_among(k, scores, noise, meeting);
}

// Code 0 of a column. The end of speech is one of its ids.
template <class M>
DEVICE int draw_first(const Params& p, const Stream& stream, const uint32_t* logits, uint32_t tag,
                      int& gave_up, Meeting& meeting) {
  Scores<M::vocab> scores, noise;
  uint8_t* seen = p.seen + static_cast<size_t>(stream.slot) * M::vocab;
  uint32_t punished = 0;
  noise.each([&](int id, float&) { punished = punished << 1 | (id < M::vocab && seen[id]); });
  make_noise(noise, stream, 0);
  const Rule rule = stream.talker;
  const Divisor penalty(stream.penalty), temperature(rule.temperature);
  await_scores(p, logits, tag, gave_up, scores);
  int bit = 4 * Scores<M::vocab>::kFours;
  scores.each([&](int id, float& score) {
    const float less = score < 0 ? score * stream.penalty : penalty.under(score);
    if (punished >> --bit & 1) score = less;
    const bool allowed = id < M::codes || (id == p.eos && stream.frames >= kMinFrames);
    if (!allowed) score = -INFINITY;
  });
  const int code = draw(scores, noise, rule, temperature, meeting);
  if (thread() == 0 && code < M::vocab) seen[code] = 1;
  return code;
}

// Codes 1 to 15.
template <class M>
DEVICE int draw_other(const Params& p, const Stream& stream, int codebook, const uint32_t* logits,
                      uint32_t tag, int& gave_up, Meeting& meeting) {
  Scores<M::codes> scores, noise;
  make_noise(noise, stream, codebook);
  const Rule rule = stream.predictor;
  const Divisor temperature(rule.temperature);
  await_scores(p, logits, tag, gave_up, scores);
  return draw(scores, noise, rule, temperature, meeting);
}

}  // namespace megakernel
