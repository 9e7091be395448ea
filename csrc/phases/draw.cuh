// Logits -> a code: penalty, minimum length, mask, temperature, top-k, top-p, and the argmax of
// score + Gumbel noise over what is kept, which is an exact draw from the scores' softmax. The
// noise comes from Philox4x32-10 at the counter (id / 4, codebook, frame, 0) under the stream's
// seed, word id % 4: the reference's own numbers.
#pragma once

#include "../memory.cuh"
#include "../params.cuh"

namespace megakernel {

constexpr int kMostIds = 3072;

struct Draw {
  float score[kMostIds];
  int histogram[256];
  int bin, above;
  float value[kWarps];
  int id[kWarps];
};

constexpr int kMinFrames = 2;  // the release never lets the first two draws end the speech

// Rises with the value, also below zero.
DEVICE uint32_t ordered(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
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

// Sum over the block, in a fixed order; every thread gets it.
DEVICE float block_sum(float value, Draw& shared) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  block_sync();
  if (thread() % 32 == 0) shared.value[thread() / 32] = value;
  block_sync();
  float total = 0;
  for (int w = 0; w < kWarps; ++w) total += shared.value[w];
  return total;
}

// The largest (value, smallest id among equals) of the block; every thread gets the id.
DEVICE int block_argmax(float value, int id, Draw& shared) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = shuffle_xor(value, mask);
    const int other_id = shuffle_xor(id, mask);
    if (other > value || (other == value && other_id < id)) value = other, id = other_id;
  }
  block_sync();
  if (thread() % 32 == 0) shared.value[thread() / 32] = value, shared.id[thread() / 32] = id;
  block_sync();
  for (int w = 0; w < kWarps; ++w) {
    const float other = shared.value[w];
    if (other > value || (other == value && shared.id[w] < id)) value = other, id = shared.id[w];
  }
  return id;
}

// The scores of a column's ids; each thread looks at four neighbours at a time.
template <int Ids>
struct Scores {
  float* of;  // [ids], in shared memory

  template <class Act>
  DEVICE void each(Act act) const {
#pragma unroll 1
    for (int first = 4 * thread(); first < Ids; first += 4 * kThreads) {
#pragma unroll
      for (int id = first; id < first + 4; ++id) act(id, of[id]);
    }
  }
};

// The k-th largest score, found a byte of its ordered bits at a time; ties with it stay in.
template <int Ids>
DEVICE uint32_t kth_largest(const Scores<Ids>& scores, int k, Draw& shared) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    block_sync();
    shared.histogram[thread()] = 0;
    block_sync();
    scores.each([&](int, float score) {
      const uint32_t key = ordered(score);
      if ((key & mask) == prefix) add_in_block(&shared.histogram[key >> shift & 255], 1);
    });
    block_sync();
    if (thread() == 0) {
      int above = 0, bin = 255;
      while (bin > 0 && above + shared.histogram[bin] < k) above += shared.histogram[bin--];
      shared.bin = bin;
      shared.above = above;
    }
    block_sync();
    prefix |= static_cast<uint32_t>(shared.bin) << shift;
    mask |= 255u << shift;
    k -= shared.above;
  }
  return prefix;
}

// Keeps the likeliest ids whose predecessors do not add up to `top_p` yet.
template <int Ids>
DEVICE void keep_top_p(const Scores<Ids>& scores, float top_p, Draw& shared) {
  float peak = -INFINITY, mass = 0;
  int best = Ids;
  scores.each([&](int id, float score) {
    if (score > peak) peak = score, best = id;
  });
  best = block_argmax(peak, best, shared);
  peak = -INFINITY;
  scores.each([&](int id, float score) { peak = id == best ? score : peak; });
  peak = block_sum(isfinite(peak) ? peak : 0.0f, shared);
  scores.each([&](int, float score) { mass += expf(score - peak); });
  mass = block_sum(mass, shared);
  // The lowest bits above which there is less than top_p: bisected, since sums only fall.
  uint32_t low = 0, high = ordered(peak);
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    float above = 0;
    scores.each(
        [&](int, float score) { above += ordered(score) > middle ? expf(score - peak) : 0; });
    if (block_sum(above, shared) / mass < top_p)
      high = middle;
    else
      low = middle + 1;
  }
  scores.each([&](int, float& score) {
    if (ordered(score) < low) score = -INFINITY;
  });
}

// The id, or `Ids` where no score is finite.
template <int Ids>
DEVICE int draw(const Scores<Ids>& scores, const Rule& rule, const Stream& stream, int codebook,
                Draw& shared) {
  const bool greedy = rule.temperature == 0;
  if (!greedy) {
    scores.each([&](int, float& score) { score /= rule.temperature; });
    if (rule.top_k > 0 && rule.top_k < Ids) {
      const uint32_t border = kth_largest(scores, rule.top_k, shared);
      scores.each([&](int, float& score) {
        if (ordered(score) < border) score = -INFINITY;
      });
    }
    if (rule.top_p < 1) keep_top_p(scores, rule.top_p, shared);
#pragma unroll 1
    for (int block = thread(); 4 * block < Ids; block += kThreads) {
      uint32_t words[4] = {static_cast<uint32_t>(block), static_cast<uint32_t>(codebook),
                           stream.first_frame + stream.frames, 0};
      philox(words, stream.seed[0], stream.seed[1]);
#pragma unroll
      for (int w = 0; w < 4; ++w) scores.of[4 * block + w] += gumbel(words[w]);
    }
  }
  float value = -INFINITY;
  int best = Ids;
  scores.each([&](int id, float score) {
    if (score > value) value = score, best = id;
  });
  return block_argmax(value, best, shared);
}

// Code 0. The end of speech is one of its ids.
template <class M>
DEVICE int draw_first(const Params& p, const Stream& stream, int c, Draw& shared) {
  const Scores<M::vocab> scores{shared.score};
  uint8_t* seen = p.seen + static_cast<size_t>(stream.slot) * M::vocab;
  scores.each([&](int id, float& score) {
    score = load_shared_by_blocks(p.logits + static_cast<size_t>(c) * M::vocab + id);
    if (seen[id]) score = score < 0 ? score * stream.penalty : score / stream.penalty;
    const bool allowed = id < M::codes || (id == p.eos && stream.frames >= kMinFrames);
    if (!allowed) score = -INFINITY;
  });
  const int code = draw(scores, stream.talker, stream, 0, shared);
  if (thread() == 0 && code < M::vocab) seen[code] = 1;
  return code;
}

// Codes 1 to 15.
template <class M>
DEVICE int draw_other(const Params& p, const Stream& stream, int c, int codebook, Draw& shared) {
  const Scores<M::codes> scores{shared.score};
  scores.each([&](int id, float& score) {
    score = load_shared_by_blocks(p.logits + static_cast<size_t>(c) * M::vocab + id);
  });
  return draw(scores, stream.predictor, stream, codebook, shared);
}

}  // namespace megakernel
